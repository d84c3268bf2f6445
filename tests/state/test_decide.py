"""How a shard reaches the state of its batch, for every combination of token, local state and Spark batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_eos_source.errors import ForeignQueryError
from kafka_eos_source.protocol.token import ShardProgress, Token
from kafka_eos_source.state.model import BatchRecord, PendingBatch, record_of
from kafka_eos_source.state.operator.shard import RequestedBatch, check_owner
from kafka_eos_source.state.operator.shard_store import Action, LocalState, shard_action

TOKEN = Token("app", "query", "run", 4, 4, "s", "e", 10, shard=ShardProgress("attempt-4", 1, 2))
FOUR = BatchRecord("query", 4, "attempt-4")
THREE = BatchRecord("query", 3, "attempt-3")
END = 100


def check(batch_id: int, *, foreign_query: str = "fail", query_id: str = "query") -> None:
    check_owner(RequestedBatch(query_id, batch_id), TOKEN, foreign_query=foreign_query)


@pytest.mark.parametrize("batch_id", [0, 3, 4, 5, 7])
def test_a_shard_uses_the_state_of_its_query_whatever_the_batch_id(batch_id: int) -> None:
    """After a checkpoint was restored, batch ids prove nothing; the commit compares transactions."""
    check(batch_id)


@pytest.mark.parametrize("batch_id", [0, 4, 5])
def test_the_state_of_another_query_is_adopted_only_with_the_option(batch_id: int) -> None:
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
def test_the_action_that_brings_local_state_to_the_token(local: LocalState, action: Action) -> None:
    assert shard_action(local, record_of(TOKEN), END) is action


def test_an_adopted_token_names_the_task_attempt_of_the_other_query() -> None:
    """The adopting query writes its own token; the state is still from the other query's task attempt."""
    adopted = replace(TOKEN, query_id="mine", batch_id=0)
    assert shard_action(LocalState(FOUR, END), record_of(adopted), END) is Action.READY
