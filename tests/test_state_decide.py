"""How a shard reaches the state of its batch, for every combination of token, local state and Spark batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_eos_source.errors import ForeignQueryError, TokenMissingError
from kafka_eos_source.protocol.token import ShardProgress, Token
from kafka_eos_source.state.model import BatchRecord, PendingBatch
from kafka_eos_source.state.operator.shard_action import (
    Action,
    LocalState,
    RequestedBatch,
    check_owner,
    shard_action,
)

TOKEN = Token("app", "query", "run", 4, 4, "s", "e", 10, shard=ShardProgress("attempt-4", 1, 2))
FOUR = BatchRecord("query", 4, "attempt-4")
THREE = BatchRecord("query", 3, "attempt-3")
END = 100


def check(
    batch_id: int,
    token: Token | None = TOKEN,
    *,
    missing_state: str = "fail",
    foreign_query: str = "fail",
    query_id: str = "query",
) -> None:
    check_owner(
        RequestedBatch(query_id, batch_id), token, missing_state=missing_state, foreign_query=foreign_query
    )


@pytest.mark.parametrize("batch_id", [0, 3, 4, 5, 7])
def test_a_shard_works_on_its_own_querys_state_whatever_the_batch_number_is(batch_id: int) -> None:
    """After a checkpoint was restored, batch ids prove nothing; the commit compares transactions."""
    check(batch_id)


def test_the_first_batch_needs_no_token() -> None:
    check(0, None)


def test_a_later_batch_without_a_token_needs_a_person() -> None:
    with pytest.raises(TokenMissingError, match="Spark is at batch 3"):
        check(3, None)
    check(3, None, missing_state="changelog")


@pytest.mark.parametrize("batch_id", [0, 4, 5])
def test_another_querys_state_is_adopted_only_when_asked(batch_id: int) -> None:
    with pytest.raises(ForeignQueryError, match="query query"):
        check(batch_id, query_id="mine")
    check(batch_id, query_id="mine", foreign_query="adopt")


@pytest.mark.parametrize(
    ("local", "action"),
    [
        (LocalState(), Action.CATCH_UP),
        (LocalState(FOUR, END), Action.READY),
        (
            LocalState(
                FOUR, END, [PendingBatch(replace(FOUR, batch_id=5, task_attempt_id="attempt-5"), FOUR, 1)]
            ),
            Action.READY,
        ),
        (LocalState(THREE, 90, [PendingBatch(FOUR, THREE, 1)]), Action.PROMOTE),
        (LocalState(None, None, [PendingBatch(FOUR, None, 1)]), Action.PROMOTE),
        # the pending changes are of another task attempt at the same batch
        (
            LocalState(THREE, 90, [PendingBatch(replace(FOUR, task_attempt_id="loser"), THREE, 1)]),
            Action.CATCH_UP,
        ),
        # the pending changes apply to another state than the local one
        (
            LocalState(THREE, 90, [PendingBatch(FOUR, replace(THREE, task_attempt_id="other"), 1)]),
            Action.CATCH_UP,
        ),
        (LocalState(THREE, 90), Action.CATCH_UP),
        # the batch changed nothing in this shard
        (LocalState(THREE, END), Action.READY),
        (LocalState(replace(FOUR, task_attempt_id="loser"), 90), Action.CATCH_UP),
    ],
)
def test_how_the_local_state_reaches_the_token(local: LocalState, action: Action) -> None:
    assert shard_action(local, TOKEN, END) is action


def test_an_adopted_token_names_the_attempt_of_the_other_query() -> None:
    """The adopting query writes its own token; the state is still from the other query's task attempt."""
    adopted = replace(TOKEN, query_id="mine", batch_id=0)
    assert shard_action(LocalState(FOUR, END), adopted, END) is Action.READY


@pytest.mark.parametrize("local", [LocalState(), LocalState(FOUR, END)])
def test_without_a_token_the_changelog_is_read(local: LocalState) -> None:
    assert shard_action(local, None, 0) is Action.START
