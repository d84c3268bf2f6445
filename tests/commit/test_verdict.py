"""The verdict on a batch, for every combination of what Kafka holds and what Spark wants to commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kafka_eos_source.commit.verdict import Batch, Held, Verdict, batch_verdict
from kafka_eos_source.errors import (
    CheckpointAheadError,
    CheckpointRolledBackError,
    ForeignQueryError,
    GroupInUseError,
    InvalidOptionError,
    OffsetsMovedError,
    TokenMissingError,
)
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.identity import ONCE
from kafka_eos_source.protocol.token import ADOPTED, Mark, ShardProgress, Token, digest

TP, OTHER, OUT = TopicPartition("in", 0), TopicPartition("in", 1), TopicPartition("out", 0)
ADDED = TopicPartition("new", 0)
#: Batch 5 read offsets 50 to 60 of each partition.
TOKEN = Token("app", "query", "run-1", 6, 5, "d5", "d6", 10)


def group_after(
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
        start=f"d{batch_id}",
        end=f"d{batch_id + 1}",
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
        start="restored",
        end=f"planned again {batch_id}",
        starts={TP: start, OTHER: start},
        ends={TP: end, OTHER: end},
        **fields,
    )


def verdict_on(batch: Batch, found: Held | None = None, **policies: str) -> Verdict:
    return batch_verdict(batch, group_after() if found is None else found, OUT, **policies)


def test_the_batch_that_starts_where_the_token_ends_is_written() -> None:
    assert verdict_on(batch(6)) is Verdict.WRITE


def test_a_batch_of_opaque_sources_is_written_if_its_digest_follows_the_token() -> None:
    assert verdict_on(batch(6, comparable=False, starts=None, ends={})) is Verdict.WRITE


def test_the_batch_of_the_token_is_skipped() -> None:
    assert verdict_on(batch(5)) is Verdict.SKIP
    assert verdict_on(batch(5, comparable=False, starts=None, ends={})) is Verdict.SKIP


def test_a_batch_with_the_next_number_but_other_offsets_is_refused() -> None:
    """With a smaller maxOffsetsPerTrigger, a restored checkpoint reaches the same number at other offsets."""
    with pytest.raises(CheckpointRolledBackError, match=r"in-0 \[40, 61\)"):
        verdict_on(replanned(6, 40, 61))


def test_a_batch_of_an_opaque_source_that_was_planned_again_is_refused() -> None:
    """The file source counts its batches, so after a rollback one number stands for other files."""
    for batch_id in (5, 6):
        again = replanned(batch_id, 50, 60, comparable=False)
        with pytest.raises((CheckpointRolledBackError, CheckpointAheadError)):
            verdict_on(again)


def test_batches_below_the_committed_offsets_are_skipped() -> None:
    for end in (20, 40, 60):
        assert verdict_on(replanned(end, end - 10, end)) is Verdict.SKIP


def test_a_restored_checkpoint_that_starts_at_the_committed_offsets_continues() -> None:
    assert verdict_on(replanned(3, 60, 75)) is Verdict.WRITE


@pytest.mark.parametrize("batch_id", [3, 6, 99])
def test_a_batch_that_overlaps_the_committed_offsets_is_refused(batch_id: int) -> None:
    with pytest.raises(CheckpointRolledBackError, match="in the output already"):
        verdict_on(replanned(batch_id, 50, 65))


def test_a_batch_below_the_committed_offset_in_one_partition_and_above_in_another_is_refused() -> None:
    mixed = replace(replanned(4, 50, 60), ends={TP: 60, OTHER: 61})
    with pytest.raises(CheckpointRolledBackError, match=r"in-1 \[50, 61\)"):
        verdict_on(mixed)


def test_a_batch_that_starts_above_the_committed_offsets_is_refused() -> None:
    with pytest.raises(CheckpointAheadError, match=r"in-0 at 60"):
        verdict_on(batch(8))


def test_a_partition_without_a_committed_offset_must_be_new_to_the_query() -> None:
    new = TopicPartition("in", 2)
    ends = {TP: 65, OTHER: 65, new: 5}
    assert verdict_on(replace(replanned(4, 60, 65), ends=ends)) is Verdict.WRITE
    known = replace(replanned(4, 60, 65), ends=ends, starts={TP: 60, OTHER: 60, new: 1})
    with pytest.raises((CheckpointRolledBackError, CheckpointAheadError)):
        verdict_on(known)


def test_a_jump_is_skipped_or_refused_but_never_written() -> None:
    assert verdict_on(replanned(3, 20, 60, jump=True)) is Verdict.SKIP
    with pytest.raises((CheckpointRolledBackError, CheckpointAheadError)):
        verdict_on(replanned(3, 60, 65, jump=True))
    with pytest.raises((CheckpointRolledBackError, CheckpointAheadError)):
        verdict_on(batch(6, jump=True))


def test_a_jump_of_one_source_does_not_block_another_source() -> None:
    """The first source jumps to the committed offset; the second one is already there and reads on."""

    def mixed(starts: tuple[int, int], ends: tuple[int, int]) -> Batch:
        again = replanned(3, 0, 0, jump=True, jumped=frozenset({TP}))
        return replace(again, starts={TP: starts[0], OTHER: starts[1]}, ends={TP: ends[0], OTHER: ends[1]})

    assert verdict_on(mixed((20, 60), (60, 75))) is Verdict.WRITE
    for starts, ends in (
        ((20, 50), (60, 75)),
        ((20, 61), (60, 75)),
        ((20, 60), (59, 75)),
        ((20, 60), (61, 75)),
    ):
        with pytest.raises((CheckpointRolledBackError, CheckpointAheadError)):
            verdict_on(mixed(starts, ends))


def test_offsets_without_a_mark_were_committed_by_another_program() -> None:
    reset = group_after(committed={TP: 0, OTHER: 60}, mark="")
    with pytest.raises(OffsetsMovedError, match=r"in-0.*onMovedOffsets"):
        verdict_on(batch(6), reset)
    assert verdict_on(batch(6), reset, moved_offsets="overwrite:6") is Verdict.WRITE
    with pytest.raises(OffsetsMovedError):
        verdict_on(batch(6), reset, moved_offsets="overwrite:5")


def test_offsets_of_another_program_never_prove_that_kafka_holds_a_batch() -> None:
    ahead = group_after(committed={TP: 1000, OTHER: 1000}, mark="")
    with pytest.raises(CheckpointRolledBackError):
        verdict_on(replanned(6, 60, 70), ahead, moved_offsets="overwrite:6")


def test_another_application_in_the_same_group_is_refused_under_every_policy() -> None:
    foreign = Token("rival", "other", "run", 9, 9, "", "x", 1)
    shared = group_after(mark=foreign.encode())
    for policy in ("fail", "adopt"):
        with pytest.raises(ForeignQueryError, match=r"application\.id='rival'"):
            verdict_on(batch(6), shared, foreign_query=policy)
    by_mark = group_after(mark=Mark.of(foreign).encode())
    with pytest.raises(ForeignQueryError, match=r"kafka\.group\.id"):
        verdict_on(batch(6), by_mark)


def test_a_lost_token_is_an_error_with_two_fixes() -> None:
    empty = Held("app")
    for which in (batch(0), batch(6)):
        with pytest.raises(TokenMissingError):
            verdict_on(which, empty)
    assert verdict_on(batch(6), empty, missing_token="assume_committed:6") is Verdict.WRITE_TOKEN_ONLY
    assert verdict_on(batch(6), empty, missing_token="assume_not_committed:6") is Verdict.WRITE
    for about_another in ("assume_committed:5", "assume_not_committed:5", "assume_not_committed:16"):
        with pytest.raises(TokenMissingError, match="batch 6"):
            verdict_on(batch(6), empty, missing_token=about_another)


GENESIS = Token("app", "query", "run-1", 0, -1, "", "d0", 0)


def test_the_first_batch_starts_at_the_offsets_of_the_genesis_transaction() -> None:
    """The first entry of the offset log was lost, and `startingOffsets=latest` planned another start."""
    started = group_after(GENESIS, {TP: 0, OTHER: 0})
    assert verdict_on(batch(0), started) is Verdict.WRITE
    with pytest.raises(CheckpointAheadError, match=r"in-0 \[7, 9\), .*; committed: in-0 at 0"):
        verdict_on(batch(0, starts={TP: 7, OTHER: 7}, ends={TP: 9, OTHER: 9}), started)
    with pytest.raises(CheckpointRolledBackError):
        verdict_on(batch(0, starts={TP: 0, OTHER: 0}), group_after(GENESIS, {TP: 7, OTHER: 7}))


def test_the_first_batch_is_not_compared_with_a_group_without_source_offsets() -> None:
    started = group_after(GENESIS, {TP: 0, OTHER: 0})
    assert verdict_on(batch(0, starts={TP: 7}, shared=frozenset({TP})), started) is Verdict.WRITE
    assert verdict_on(batch(0, starts=None, ends={}, comparable=False), started) is Verdict.WRITE
    reset = group_after(GENESIS, {TP: 3, OTHER: 3}, mark="")
    assert verdict_on(batch(0), reset, moved_offsets="overwrite:0") is Verdict.WRITE


def test_the_error_of_a_versioned_batch_write_names_no_option_of_streams() -> None:
    lost = group_after(None)
    with pytest.raises(TokenMissingError) as refused:
        verdict_on(batch(3, versioned=True, starts=None, ends=None, comparable=False), lost)
    assert "'assume_committed'" not in refused.value.fix
    assert "version 3" in refused.value.fix


def test_a_missing_token_before_the_genesis_token_is_not_a_loss() -> None:
    """This is also how the sink takes over a checkpoint of Spark's own sink, at any batch."""
    for batch_id in (0, 6):
        assert verdict_on(batch(batch_id, promised=False), Held("app")) is Verdict.WRITE


def test_a_mark_without_a_token_proves_that_the_token_was_lost() -> None:
    with pytest.raises(TokenMissingError):
        verdict_on(batch(6, promised=False), group_after(None, mark=Mark.of(TOKEN).encode()))


def test_a_token_older_than_the_marks_counts_as_lost() -> None:
    """The topic that carried the newest token was deleted, and a former anchor still carries an older one."""
    newer = Mark.of(replace(TOKEN, sequence=9)).encode()
    with pytest.raises(TokenMissingError):
        verdict_on(batch(6), group_after(mark=newer))


def test_a_token_of_another_query_is_refused() -> None:
    with pytest.raises(ForeignQueryError, match="belongs to query query"):
        verdict_on(batch(0, query_id="another"))


def test_adoption_continues_only_where_the_other_query_stopped() -> None:
    there = replanned(0, 60, 70, query_id="another")
    assert verdict_on(there, foreign_query="adopt") is Verdict.WRITE
    with pytest.raises(CheckpointRolledBackError, match="startingOffsets=group"):
        verdict_on(replanned(0, 0, 10, query_id="another"), foreign_query="adopt")


@pytest.mark.parametrize("first", ["changelog", "source"])
def test_adoption_refuses_a_group_without_offsets_that_the_token_counts(first: str) -> None:
    """Somebody deleted the offset of a source partition. Brokers list a group's offsets in any order."""
    full, changelog = replace(TOKEN, partitions=3), TopicPartition("changelog", 0)
    of_shard = replace(TOKEN, partitions=-1, shard=ShardProgress("attempt", 1, None), shards=1)
    left = [
        GroupOffset(TP, 60, Mark.of(full).encode()),
        GroupOffset(OUT, 0, full.encode()),
        GroupOffset(changelog, 5, of_shard.encode()),
    ]
    ordered = reversed(left) if first == "changelog" else left
    held = Held.of("app", {each.tp: each for each in ordered})
    adopting = replace(replanned(0, 60, 70, query_id="another"), starts={TP: 60, OTHER: 0})
    with pytest.raises(CheckpointRolledBackError, match="lost offsets"):
        verdict_on(adopting, held, foreign_query="adopt")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"comparable": False}, "does not read Kafka or reads another cluster"),
        ({"starts": {}, "ends": {}}, "has no offset of any partition"),
        ({"starts": {ADDED: 0}, "ends": {ADDED: 5}}, "has no offset of any partition"),
        ({"target": "elsewhere:0123"}, "to topic 'out', and this query writes to topic 'elsewhere'"),
        ({"target": "out:4567"}, "wrote to other sinks outside Kafka"),
    ],
    ids=["other sources", "no source on the cluster", "only new partitions", "another topic", "other sinks"],
)
def test_an_adoption_that_offsets_cannot_prove_needs_a_persons_word(
    changed: Mapping[str, Any], reason: str
) -> None:
    after = group_after(replace(TOKEN, target="out:0123"))
    there = replace(replanned(0, 60, 70, query_id="another", target="out:0123"))
    assert verdict_on(there, after, foreign_query="adopt") is Verdict.WRITE
    wrong = replace(there, **changed)
    with pytest.raises(CheckpointRolledBackError, match=reason) as caught:
        verdict_on(wrong, after, foreign_query="adopt")
    assert "'adopt_unchecked:query'" in caught.value.fix
    with pytest.raises(ForeignQueryError):
        verdict_on(wrong, after, foreign_query="adopt_unchecked:a third query")
    assert verdict_on(wrong, after, foreign_query="adopt_unchecked:query") is Verdict.WRITE


def test_offsets_that_another_program_committed_prove_no_adoption() -> None:
    reset = group_after(committed={TP: 60, OTHER: 60}, mark="")
    there = replanned(0, 60, 70, query_id="another")
    with pytest.raises(CheckpointRolledBackError, match="another program has committed"):
        verdict_on(there, reset, foreign_query="adopt")


@pytest.mark.parametrize("target", ["elsewhere:0123", "out:4567", "*:0123"])
def test_offsets_decide_nothing_about_another_target(target: str) -> None:
    """A clone of the checkpoint wrote there. Digests still decide: they name the batch itself."""
    after = group_after(replace(TOKEN, target=target))
    for offsets in ((20, 40), (50, 60), (60, 75)):
        with pytest.raises((CheckpointRolledBackError, CheckpointAheadError), match=r"hat transaction wrote"):
            verdict_on(replanned(3, *offsets, target="out:0123"), after)
        assert verdict_on(replanned(3, *offsets, target=target), after) in (Verdict.SKIP, Verdict.WRITE)
    assert verdict_on(batch(5, target="out:0123"), after) is Verdict.SKIP
    assert verdict_on(batch(6, target="out:0123"), after) is Verdict.WRITE


def test_adoption_with_an_unknown_start_is_refused() -> None:
    """Spark's own source does not log where its first batch starts."""
    with pytest.raises(CheckpointRolledBackError, match="not known"):
        verdict_on(replanned(0, 60, 70, query_id="another") and batch(0, query_id="another", starts=None),
               foreign_query="adopt")  # fmt: skip
    partly = replace(replanned(0, 60, 70, query_id="another"), starts={TP: 60})
    with pytest.raises(CheckpointRolledBackError, match="unknown"):
        verdict_on(partly, foreign_query="adopt")


@pytest.mark.parametrize(
    ("version", "expected"),
    [(4, Verdict.SKIP), (5, Verdict.SKIP), (6, Verdict.WRITE), (9, Verdict.WRITE)],
)
def test_only_a_higher_version_of_a_batch_write_is_written(version: int, expected: Verdict) -> None:
    assert verdict_on(Batch("app", "query", "", version, versioned=True)) is expected


def test_a_batch_write_without_a_version_trusts_only_its_own_token() -> None:
    write = Batch("app", f"{ONCE}a", "", 0, once=True)
    assert verdict_on(write, Held("app")) is Verdict.WRITE
    for name, expected in (("a", Verdict.SKIP), ("b", Verdict.WRITE)):
        token = Token("app", f"{ONCE}{name}", "", 1, 0, "", "", 1)
        assert verdict_on(write, group_after(token, {})) is expected
    with pytest.raises(ForeignQueryError):
        verdict_on(write)


def test_a_batch_write_never_replaces_the_token_of_a_stream_in_its_group() -> None:
    write = Batch("kafka-eos-batch-x", f"{ONCE}a", "", 0, once=True)
    with pytest.raises(ForeignQueryError):
        verdict_on(write, replace(group_after(), application_id="kafka-eos-batch-x", token=None))


def test_sequence_numbers_continue_above_the_clock_after_the_token_was_lost() -> None:
    assert group_after().next_sequence() == 7
    assert Held("app").next_sequence() > 1_700_000_000_000


NEW = {"starts": {TP: 30, OTHER: 0}, "ends": {TP: 40, OTHER: 10}, "promised": False}


def test_a_new_query_starts_only_where_another_program_stopped_or_in_an_empty_group() -> None:
    new = batch(0, **NEW)
    assert verdict_on(new, Held("app")) is Verdict.WRITE
    assert verdict_on(new, group_after(None, {TP: 30})) is Verdict.WRITE
    for found in ({TP: 31}, {TP: 30, OUT: 0}):
        with pytest.raises(GroupInUseError, match="expected none"):
            verdict_on(new, group_after(None, found))
        assert verdict_on(new, group_after(None, found), moved_offsets="overwrite:0") is Verdict.WRITE


def test_offsets_of_another_program_are_named_after_a_person_answered_for_a_lost_token() -> None:
    found = group_after(None, {TP: 0})
    with pytest.raises(TokenMissingError):
        verdict_on(batch(6), found)
    with pytest.raises(OffsetsMovedError, match="in-0 at 0"):
        verdict_on(batch(6), found, missing_token="assume_not_committed:6")


def test_the_anchor_counts_too() -> None:
    found = group_after()
    moved = Held.of("app", {**found.offsets, TP: found.offsets[OUT], OUT: GroupOffset(OUT, 30, "")})
    moved = replace(moved, offsets={**moved.offsets, TP: replace(found.offsets[OUT], tp=TP, offset=60)})
    with pytest.raises(OffsetsMovedError, match="out-0 at 30"):
        verdict_on(batch(6), moved)


def test_after_at_least_once_the_token_never_goes_back() -> None:
    """What exactly_once has written is not written again, although at_least_once has written since."""
    assert verdict_on(batch(7, unproven=True)) is Verdict.WRITE_TOKEN_ONLY
    marked = group_after(replace(TOKEN, unproven_since=5))
    assert verdict_on(batch(5, unproven=True), marked) is Verdict.WRITE_TOKEN_ONLY, "it removes the mark"
    for old in (batch(3, unproven=True), batch(4, unproven=True), replanned(6, 20, 30, unproven=True)):
        with pytest.raises(CheckpointRolledBackError, match="batch 5, which Kafka holds"):
            verdict_on(old)


def test_a_query_that_was_handed_over_begins_at_the_target_of_the_former_one() -> None:
    handed = replace(TOKEN, run_id=ADOPTED, target="theirs:0", query_id="query")
    following = batch(6, target="theirs:0")
    assert verdict_on(following, group_after(handed)) is Verdict.WRITE
    with pytest.raises(CheckpointRolledBackError, match=r"wrote to topic 'theirs', and .* to topic 'ours'"):
        verdict_on(replace(following, target="ours:0"), group_after(handed))
    declared = replace(handed, target="")
    assert verdict_on(replace(following, target="ours:0"), group_after(declared)) is Verdict.WRITE


@pytest.mark.parametrize("before", [(), ("a",)])
def test_a_version_is_skipped_only_if_it_was_written_to_the_same_topics(before: tuple[str, ...]) -> None:
    """A write without rows has written to no topic."""
    held = group_after(replace(TOKEN, query_id="txnAppId:app", end_digest=digest(before)))
    series = Batch("app", "txnAppId:app", "", 5, versioned=True)
    for topics in ((), before):
        assert verdict_on(replace(series, topics=topics, end=digest(topics)), held) is Verdict.SKIP
    with pytest.raises(InvalidOptionError, match="not to the same topics: this write has rows for 'b'"):
        verdict_on(replace(series, topics=("b",), end=digest(("b",))), held)


# -- what offsets prove that somebody with the right Read on the group has committed (docs/security.md)


def forged(offset: int, **fields: Any) -> Held:
    """Returns the group with a made-up token, and with its marks on these offsets."""
    return group_after(replace(TOKEN, **fields), {TP: offset, OTHER: offset})


AHEAD = {"sequence": 7, "batch_id": 6, "end_digest": "made up"}
EARLIER = {"sequence": 5, "batch_id": 4, "start_digest": "d4", "end_digest": "d5"}


@pytest.mark.parametrize(
    ("found", "refused"),
    [
        (group_after(committed={TP: 1000, OTHER: 1000}, mark="made up"), OffsetsMovedError),
        (forged(1000, **AHEAD, query_id="made up"), ForeignQueryError),
        (forged(1000, **AHEAD, application_id="made up"), ForeignQueryError),
        (forged(1000, **AHEAD, target="made up"), CheckpointRolledBackError),
        (forged(65, **AHEAD), CheckpointRolledBackError),
        (forged(50, **EARLIER), CheckpointAheadError),
        (group_after(replace(TOKEN, **EARLIER), mark=Mark.of(TOKEN).encode()), TokenMissingError),
    ],
)
def test_forged_offsets_that_contradict_the_checkpoint_are_refused(
    found: Held, refused: type[Exception]
) -> None:
    with pytest.raises(refused):
        verdict_on(batch(6), found)


def test_marks_ahead_of_the_true_token_or_an_earlier_token_alone_change_nothing() -> None:
    """The batch that Kafka does not hold is written, and is the next one."""
    assert verdict_on(batch(6), group_after(committed={TP: 1000, OTHER: 1000})) is Verdict.WRITE
    assert verdict_on(batch(6), group_after(replace(TOKEN, **EARLIER))) is Verdict.WRITE


def test_whoever_may_commit_offsets_in_the_group_may_skip_a_batch_or_repeat_one() -> None:
    """Nothing but the offsets shows which batches Kafka holds, and these look like those of the query.

    So Read on the group equals Write on the output. The offsets are ahead with a token of the query; or they
    are those from before a batch that Kafka holds and Spark has not logged.
    """
    assert verdict_on(batch(6), forged(1000, **AHEAD)) is Verdict.SKIP
    assert verdict_on(batch(5), forged(50, **EARLIER)) is Verdict.WRITE
