"""The verdict on a batch, for every combination of what Kafka holds and what Spark wants to commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kafka_eos_source.commit.facts import Batch, Digests, Held
from kafka_eos_source.commit.verdict import Verdict, batch_verdict
from kafka_eos_source.errors import (
    CheckpointAheadError,
    CheckpointRolledBackError,
    ForeignQueryError,
    OffsetsMovedError,
    TokenMissingError,
)
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.identity import ONCE
from kafka_eos_source.protocol.token import Mark, Token

TP, OTHER, OUT = TopicPartition("in", 0), TopicPartition("in", 1), TopicPartition("out", 0)
#: Batch 5 read offsets 50 to 60 of each partition.
TOKEN = Token("app", "query", "run-1", 6, 5, "d5", "d6", 10)


def held(
    token: Token | None = TOKEN,
    committed: Mapping[TopicPartition, int] | None = None,
    mark: str | None = None,
) -> Held:
    """Returns the group after ``token``. ``mark`` replaces the metadata of the source partitions."""
    offsets = {TP: 60, OTHER: 60} if committed is None else committed
    if token is None:
        return Held("app", {tp: GroupOffset(tp, at, mark or "") for tp, at in offsets.items()})
    text = Mark.of(token).encode() if mark is None else mark
    found = {tp: GroupOffset(tp, at, text) for tp, at in offsets.items()}
    return Held.of("app", {**found, OUT: GroupOffset(OUT, 0, token.encode())})


def batch(batch_id: int, **fields: Any) -> Batch:
    base = Batch(
        application_id="app",
        query_id="query",
        run_id="run-2",
        batch_id=batch_id,
        start=Digests(f"d{batch_id}"),
        end=Digests(f"d{batch_id + 1}"),
        starts={TP: 10 * batch_id, OTHER: 10 * batch_id},
        ends={TP: 10 * (batch_id + 1), OTHER: 10 * (batch_id + 1)},
        comparable=True,
        promised=True,
    )
    return replace(base, **fields)


def replanned(batch_id: int, start: int, end: int, **fields: Any) -> Batch:
    """Returns a batch that Spark planned again after its checkpoint was restored from a copy."""
    return batch(
        batch_id,
        start=Digests("restored"),
        end=Digests(f"planned again {batch_id}"),
        starts={TP: start, OTHER: start},
        ends={TP: end, OTHER: end},
        **fields,
    )


def decide(batch: Batch, found: Held | None = None, **policies: str) -> Verdict:
    return batch_verdict(batch, held() if found is None else found, OUT, **policies)


def test_the_batch_that_starts_where_the_token_ends_is_written() -> None:
    assert decide(batch(6)) is Verdict.WRITE


def test_a_batch_of_opaque_sources_is_written_by_its_digest_alone() -> None:
    assert decide(batch(6, comparable=False, starts=None, ends={})) is Verdict.WRITE


def test_the_token_s_own_batch_is_skipped() -> None:
    assert decide(batch(5)) is Verdict.SKIP
    assert decide(batch(5, comparable=False, starts=None, ends={})) is Verdict.SKIP


def test_the_next_batch_number_alone_proves_nothing() -> None:
    """With a smaller maxOffsetsPerTrigger, a restored checkpoint reaches the same number at other offsets."""
    with pytest.raises(CheckpointRolledBackError, match=r"in-0 \[40, 61\)"):
        decide(replanned(6, 40, 61))


def test_an_opaque_source_that_is_planned_again_is_refused() -> None:
    """The file source counts its batches, so after a rollback one number stands for other files."""
    for batch_id in (5, 6):
        again = replanned(batch_id, 50, 60, comparable=False)
        with pytest.raises((CheckpointRolledBackError, CheckpointAheadError)):
            decide(again)


def test_batches_that_lie_below_the_committed_offsets_are_skipped() -> None:
    for end in (20, 40, 60):
        assert decide(replanned(end, end - 10, end)) is Verdict.SKIP


def test_a_restored_checkpoint_that_starts_at_the_committed_offsets_continues() -> None:
    assert decide(replanned(3, 60, 75)) is Verdict.WRITE


@pytest.mark.parametrize("batch_id", [3, 6, 99])
def test_a_partial_overlap_is_refused(batch_id: int) -> None:
    with pytest.raises(CheckpointRolledBackError, match="in the output already"):
        decide(replanned(batch_id, 50, 65))


def test_one_partition_below_and_one_above_is_refused() -> None:
    mixed = replace(replanned(4, 50, 60), ends={TP: 60, OTHER: 61})
    with pytest.raises(CheckpointRolledBackError, match=r"in-1 \[50, 61\)"):
        decide(mixed)


def test_a_gap_is_refused() -> None:
    with pytest.raises(CheckpointAheadError, match=r"in-0 at 60"):
        decide(batch(8))


def test_a_partition_that_kafka_has_not_seen_must_be_new_to_the_query_too() -> None:
    new = TopicPartition("in", 2)
    ends = {TP: 65, OTHER: 65, new: 5}
    assert decide(replace(replanned(4, 60, 65), ends=ends)) is Verdict.WRITE
    known = replace(replanned(4, 60, 65), ends=ends, starts={TP: 60, OTHER: 60, new: 1})
    with pytest.raises((CheckpointRolledBackError, CheckpointAheadError)):
        decide(known)


def test_a_jump_may_only_be_skipped() -> None:
    assert decide(replanned(3, 20, 60, jump=True)) is Verdict.SKIP
    with pytest.raises((CheckpointRolledBackError, CheckpointAheadError)):
        decide(replanned(3, 60, 65, jump=True))
    with pytest.raises((CheckpointRolledBackError, CheckpointAheadError)):
        decide(batch(6, jump=True))


def test_a_jump_of_one_source_does_not_hold_up_another_one() -> None:
    """The first source jumps to the committed offset; the second one is already there and reads on."""

    def mixed(starts: tuple[int, int], ends: tuple[int, int]) -> Batch:
        again = replanned(3, 0, 0, jump=True, jumped=frozenset({TP}))
        return replace(again, starts={TP: starts[0], OTHER: starts[1]}, ends={TP: ends[0], OTHER: ends[1]})

    assert decide(mixed((20, 60), (60, 75))) is Verdict.WRITE
    for starts, ends in (
        ((20, 50), (60, 75)),
        ((20, 61), (60, 75)),
        ((20, 60), (59, 75)),
        ((20, 60), (61, 75)),
    ):
        with pytest.raises((CheckpointRolledBackError, CheckpointAheadError)):
            decide(mixed(starts, ends))


def test_offsets_without_our_mark_were_moved_by_somebody_else() -> None:
    reset = held(committed={TP: 0, OTHER: 60}, mark="")
    with pytest.raises(OffsetsMovedError, match=r"in-0.*onMovedOffsets"):
        decide(batch(6), reset)
    assert decide(batch(6), reset, moved_offsets="overwrite") is Verdict.WRITE


def test_moved_offsets_never_prove_that_a_batch_is_in_kafka() -> None:
    ahead = held(committed={TP: 1000, OTHER: 1000}, mark="")
    with pytest.raises(CheckpointRolledBackError):
        decide(replanned(6, 60, 70), ahead, moved_offsets="overwrite")


def test_another_application_in_the_same_group_is_refused_whatever_the_policy() -> None:
    foreign = Token("rival", "other", "run", 9, 9, "", "x", 1)
    shared = held(mark=foreign.encode())
    for policy in ("fail", "adopt"):
        with pytest.raises(ForeignQueryError, match=r"application\.id='rival'"):
            decide(batch(6), shared, foreign_query=policy)
    by_mark = held(mark=Mark.of(foreign).encode())
    with pytest.raises(ForeignQueryError, match=r"kafka\.group\.id"):
        decide(batch(6), by_mark)


def test_a_lost_token_is_an_error_with_two_ways_out() -> None:
    empty = Held("app")
    for which in (batch(0), batch(6)):
        with pytest.raises(TokenMissingError):
            decide(which, empty)
    assert decide(batch(6), empty, missing_token="assume_committed") is Verdict.WRITE_TOKEN_ONLY
    assert decide(batch(6), empty, missing_token="assume_not_committed") is Verdict.WRITE


GENESIS = Token("app", "query", "run-1", 0, -1, "", "d0", 0)


def test_the_first_batch_starts_at_the_offsets_of_the_genesis_transaction() -> None:
    """The first entry of the offset log was lost, and `startingOffsets=latest` planned another start."""
    started = held(GENESIS, {TP: 0, OTHER: 0})
    assert decide(batch(0), started) is Verdict.WRITE
    with pytest.raises(CheckpointAheadError, match=r"in-0 \[7, 9\), .*; committed: in-0 at 0"):
        decide(batch(0, starts={TP: 7, OTHER: 7}, ends={TP: 9, OTHER: 9}), started)
    with pytest.raises(CheckpointRolledBackError):
        decide(batch(0, starts={TP: 0, OTHER: 0}), held(GENESIS, {TP: 7, OTHER: 7}))


def test_the_first_batch_is_not_compared_where_the_group_tells_nothing() -> None:
    started = held(GENESIS, {TP: 0, OTHER: 0})
    assert decide(batch(0, starts={TP: 7}, shared=frozenset({TP})), started) is Verdict.WRITE
    assert decide(batch(0, starts=None, ends={}, comparable=False), started) is Verdict.WRITE
    reset = held(GENESIS, {TP: 3, OTHER: 3}, mark="")
    assert decide(batch(0), reset, moved_offsets="overwrite") is Verdict.WRITE


def test_a_versioned_write_is_not_told_of_an_option_that_it_does_not_have() -> None:
    lost = held(None)
    with pytest.raises(TokenMissingError) as refused:
        decide(batch(3, versioned=True, starts=None, ends=None, comparable=False), lost)
    assert "'assume_committed'" not in refused.value.fix
    assert "version 3" in refused.value.fix


def test_no_token_before_the_genesis_token_is_no_loss() -> None:
    """This is also how the sink takes over a checkpoint of Spark's own sink, at any batch."""
    for batch_id in (0, 6):
        assert decide(batch(batch_id, promised=False), Held("app")) is Verdict.WRITE


def test_a_mark_without_a_token_proves_that_the_token_was_lost() -> None:
    with pytest.raises(TokenMissingError):
        decide(batch(6, promised=False), held(None, mark=Mark.of(TOKEN).encode()))


def test_a_token_older_than_the_marks_counts_as_lost() -> None:
    """The topic that carried the newest token was deleted, and a former anchor still carries an older one."""
    newer = Mark.of(replace(TOKEN, sequence=9)).encode()
    with pytest.raises(TokenMissingError):
        decide(batch(6), held(mark=newer))


def test_a_token_of_another_query_is_refused() -> None:
    with pytest.raises(ForeignQueryError, match="belongs to query query"):
        decide(batch(0, query_id="another"))


def test_adopting_goes_on_where_the_other_query_stopped_and_nowhere_else() -> None:
    there = replanned(0, 60, 70, query_id="another")
    assert decide(there, foreign_query="adopt") is Verdict.WRITE
    with pytest.raises(CheckpointRolledBackError, match="startingOffsets=group"):
        decide(replanned(0, 0, 10, query_id="another"), foreign_query="adopt")


def test_adopting_from_an_unknown_start_is_refused() -> None:
    """Spark's own source does not log where its first batch starts."""
    with pytest.raises(CheckpointRolledBackError, match="not known"):
        decide(replanned(0, 60, 70, query_id="another") and batch(0, query_id="another", starts=None),
               foreign_query="adopt")  # fmt: skip
    partly = replace(replanned(0, 60, 70, query_id="another"), starts={TP: 60})
    with pytest.raises(CheckpointRolledBackError, match="unknown"):
        decide(partly, foreign_query="adopt")


@pytest.mark.parametrize(
    ("version", "expected"),
    [(4, Verdict.SKIP), (5, Verdict.SKIP), (6, Verdict.WRITE), (9, Verdict.WRITE)],
)
def test_versions_of_batch_writes_only_grow(version: int, expected: Verdict) -> None:
    assert decide(Batch("app", "query", "", version, versioned=True)) is expected


def test_a_single_write_believes_its_own_token_only() -> None:
    write = Batch("app", f"{ONCE}a", "", 0, once=True)
    assert decide(write, Held("app")) is Verdict.WRITE
    for name, expected in (("a", Verdict.SKIP), ("b", Verdict.WRITE)):
        token = Token("app", f"{ONCE}{name}", "", 1, 0, "", "", 1)
        assert decide(write, held(token, {})) is expected
    with pytest.raises(ForeignQueryError):
        decide(write)


def test_a_single_write_never_replaces_the_token_of_a_stream_in_its_group() -> None:
    write = Batch("kafka-eos-batch-x", f"{ONCE}a", "", 0, once=True)
    with pytest.raises(ForeignQueryError):
        decide(write, replace(held(), application_id="kafka-eos-batch-x", token=None))


def test_tokens_of_format_1_are_compared_by_their_own_digest_and_number() -> None:
    old = replace(TOKEN, sequence=5, start_digest="a", end_digest="b", format=1)
    after = Held("app", held().offsets, old)
    after = replace(after, offsets={tp: replace(each, metadata=Mark.of(old).encode())
                                    for tp, each in after.offsets.items()})  # fmt: skip
    next_batch = batch(6, start=Digests("new", "b"), end=Digests("newer", "c"))
    assert decide(next_batch, after) is Verdict.WRITE
    assert decide(batch(5, start=Digests("x", "a"), end=Digests("new", "b")), after) is Verdict.SKIP
    with pytest.raises(CheckpointRolledBackError):
        decide(replanned(6, 50, 65), after)


def test_numbers_go_on_above_the_clock_when_the_token_was_lost() -> None:
    assert held().next_sequence() == 7
    assert Held("app").next_sequence() > 1_700_000_000_000
