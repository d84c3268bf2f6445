"""Every row of the decision: what the token says against what Spark asks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_eos_source.commit.decide import ONCE, Batch, Verdict, decide
from kafka_eos_source.errors import (
    CheckpointAheadError,
    CheckpointRolledBackError,
    ForeignQueryError,
    TokenMissingError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.token import Token

TP = TopicPartition("in", 0)
TOKEN = Token("app", "query", "run-1", 5, 5, "d5", "d6", 10)


def batch(batch_id: int, **fields: object) -> Batch:
    base = Batch(
        application_id="app",
        query_id="query",
        run_id="run-2",
        batch_id=batch_id,
        start_digest=f"d{batch_id}",
        end_digest=f"d{batch_id + 1}",
        starts={TP: 10 * batch_id},
        ends={TP: 10 * (batch_id + 1)},
        comparable=True,
        first_batch=0,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


COMMITTED = {TP: 60}


def test_the_next_batch_is_written() -> None:
    assert decide(batch(6), TOKEN, COMMITTED) is Verdict.WRITE


def test_the_same_batch_is_skipped() -> None:
    assert decide(batch(5), TOKEN, COMMITTED) is Verdict.SKIP


def test_the_same_batch_of_sources_that_cannot_be_compared_is_skipped_by_its_digest() -> None:
    assert decide(batch(5, comparable=False, starts=None, ends={}), TOKEN, {}) is Verdict.SKIP


def test_batches_of_a_rolled_back_checkpoint_are_skipped_while_kafka_holds_all_of_them() -> None:
    for batch_id in (2, 3, 4):
        assert decide(batch(batch_id), TOKEN, COMMITTED) is Verdict.SKIP


def test_a_rolled_back_checkpoint_that_starts_where_kafka_stands_goes_on() -> None:
    again = batch(3, starts={TP: 60}, ends={TP: 75}, end_digest="other")
    assert decide(again, TOKEN, COMMITTED) is Verdict.WRITE


@pytest.mark.parametrize("batch_id", [3, 5])
def test_a_partial_overlap_is_refused(batch_id: int) -> None:
    overlap = batch(batch_id, starts={TP: 50}, ends={TP: 65}, end_digest="other")
    with pytest.raises(CheckpointRolledBackError, match="replays batch"):
        decide(overlap, TOKEN, COMMITTED)


def test_a_rolled_back_checkpoint_of_other_sources_cannot_be_judged() -> None:
    with pytest.raises(CheckpointRolledBackError):
        decide(batch(3, comparable=False), TOKEN, COMMITTED)


def test_a_gap_is_refused() -> None:
    with pytest.raises(CheckpointAheadError, match="batches 6 to 7 "):
        decide(batch(8), TOKEN, COMMITTED)


@pytest.mark.parametrize("first", [None, 6])
def test_no_token_before_the_first_commit_of_this_checkpoint_is_no_loss(first: int | None) -> None:
    """Also how a checkpoint of Spark's own sink is taken over, at whatever batch it stands."""
    assert decide(batch(6, first_batch=first), None, {}) is Verdict.WRITE


def test_no_token_later_is_an_error_with_two_ways_out() -> None:
    with pytest.raises(TokenMissingError):
        decide(batch(6), None, {})
    assert decide(batch(6), None, {}, missing_token="assume_committed") is Verdict.MARK
    assert decide(batch(6), None, {}, missing_token="assume_not_committed") is Verdict.WRITE


def test_a_token_of_another_query_is_refused() -> None:
    with pytest.raises(ForeignQueryError, match="belongs to query query"):
        decide(batch(0, query_id="another"), TOKEN, COMMITTED)


def test_adopting_goes_on_where_the_other_query_stopped_and_nowhere_else() -> None:
    there = batch(0, query_id="another", starts={TP: 60})
    assert decide(there, TOKEN, COMMITTED, foreign_query="adopt") is Verdict.WRITE
    elsewhere = batch(0, query_id="another", starts={TP: 0})
    with pytest.raises(CheckpointRolledBackError, match="startingOffsets=group"):
        decide(elsewhere, TOKEN, COMMITTED, foreign_query="adopt")


@pytest.mark.parametrize(
    ("version", "expected"),
    [(4, Verdict.SKIP), (5, Verdict.SKIP), (6, Verdict.WRITE), (9, Verdict.WRITE)],
)
def test_versions_of_batch_writes_only_grow(version: int, expected: Verdict) -> None:
    write = Batch("app", "query", "", version, versioned=True)
    assert decide(write, TOKEN, {}) is expected


def test_a_single_write_believes_its_own_token_only() -> None:
    write = Batch("app", f"{ONCE}a", "", 0, once=True)
    assert decide(write, None, {}) is Verdict.WRITE
    assert decide(write, Token("app", f"{ONCE}a", "", 0, 0, "", "", 1), {}) is Verdict.SKIP
    assert decide(write, Token("app", f"{ONCE}b", "", 0, 0, "", "", 1), {}) is Verdict.WRITE
    with pytest.raises(ForeignQueryError):
        decide(write, TOKEN, {})
