"""Every hole that the chain of tokens closes stays closed, and every rule of the chain is needed.

Each rule is switched off and run against a schedule that must then fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from kafka_eos_source.commit import machine, ownership, report_checks, transaction, verdict
from kafka_eos_source.commit.verdict import Batch, Held, Verdict
from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.protocol.token import Token, newest
from tests.chain.holes import HOLES, play
from tests.chain.model import Violation, World
from tests.chain.product import TopicPartition
from tests.chain.query import OUTPUT, Query
from tests.chain.sinks import SYSTEMS

#: The outcome of each schedule: the error that refuses the query, or None if the query heals.
OUTCOMES = {
    "rolled_back_with_another_limit": None,
    "rolled_back_without_a_jump": None,
    "rolled_back_with_more_input": None,
    "rolled_back_with_more_input_and_no_jump": "CHECKPOINT_ROLLED_BACK",
    "recreated_source_after_the_read": "DATA_LOSS",
    "rolled_back_two_sources_on_one_partition": "CHECKPOINT_ROLLED_BACK",
    "rolled_back_opaque_source": "CHECKPOINT_ROLLED_BACK",
    "rolled_back_stateful": None,
    "moved_offsets": "OFFSETS_MOVED",
    "lost_token_of_the_first_batch": "TOKEN_MISSING",
    "recreated_source_during_a_replay": None,
    "recreated_source_while_rows_are_written": "CHECKPOINT_ROLLED_BACK",
    "recreated_output_during_a_commit": None,
    "adopted_without_fencing": "FOREIGN_QUERY",
    "prepared_sink_dropped_by_adoption": "FOREIGN_QUERY",
    "names_of_batch_writes_that_collide": None,
    "expired_start_of_an_adoption": "CHECKPOINT_ROLLED_BACK",
    "shared_group_behind_a_stale_coordinator": "FOREIGN_QUERY",
    "adopted_with_two_sources_on_one_partition": "CHECKPOINT_ROLLED_BACK",
    "rolled_back_one_source_of_two": None,
    "adopted_from_the_wrong_start": "CHECKPOINT_ROLLED_BACK",
    "killed_before_the_first_commit": None,
    "two_sinks_on_one_target": None,
    "adopted_after_a_recreated_source": "CHECKPOINT_ROLLED_BACK",
    "stale_token_for_the_owner": None,
    "stale_token_for_a_shard": None,
    "stale_token_for_prepared_sinks": None,
    "rival_while_a_first_shard_opens": None,
}


@pytest.mark.parametrize("name", HOLES)
def test_a_schedule_that_once_broke_the_chain_has_its_expected_outcome(name: str) -> None:
    world = play(HOLES[name])
    errors = [place.refused for place in world.places.values() if isinstance(place.refused, KafkaEosError)]
    wanted = OUTCOMES[name]
    if wanted is None:
        assert all("RESTART" in each.condition or "FENCED" in each.condition for each in errors), errors
    else:
        assert [each.condition for each in errors] == [f"KAFKA_EOS.{wanted}"]


def _by_number(batch: Batch, token: Token) -> bool:
    return batch.batch_id == token.batch_id + 1


def _same_number(batch: Batch, token: Token) -> bool:
    return batch.batch_id == token.batch_id


def _of_any_application(application_id: str, offsets: Any) -> Held:
    return Held(application_id, offsets, newest(offsets.values()))


@contextmanager
def _patched(*patches: tuple[object, str, object]) -> Iterator[None]:
    owner, name, value = patches[0]
    with patch.object(owner, name, value):
        if patches[1:]:
            with _patched(*patches[1:]):
                yield
        else:
            yield


def _nothing(*_: object, **__: object) -> None:
    return None


def _no_topics(*_: object, **__: object) -> set[str]:
    return set()


def _all_of_them(offsets: Any, _topics: Any) -> dict[Any, int]:
    return dict(offsets)


def _yes(*_: object, **__: object) -> bool:
    return True


def _no(*_: object, **__: object) -> bool:
    return False


def _write(*_: object, **__: object) -> Verdict:
    return Verdict.WRITE


def _skip(*_: object, **__: object) -> Verdict:
    return Verdict.SKIP


#: Rules of the chain, each with a way to break it and the schedule that reveals it.
MUTATIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "a batch continues by its number instead of its digest": (
        lambda: _patched((verdict, "continues", _by_number), (ownership, "continues", _by_number)),
        "rolled_back_without_a_jump",
    ),
    "a batch is the token's by its number instead of its digest": (
        lambda: _patched((verdict, "is_batch_of", _same_number)),
        "rolled_back_opaque_source",
    ),
    "offsets without a mark are trusted": (
        lambda: _patched((Held, "is_marked", _yes)),
        "moved_offsets",
    ),
    "starts need not be the committed offsets": (
        lambda: _patched((verdict, "_by_offsets", _write)),
        "rolled_back_without_a_jump",
    ),
    "ends need not be below the committed offsets": (
        lambda: _patched((verdict, "_by_offsets", _skip)),
        "rolled_back_with_more_input_and_no_jump",
    ),
    "the starts of an adoption are not compared": (
        lambda: _patched((verdict, "_check_adoption", _nothing)),
        "adopted_from_the_wrong_start",
    ),
    "the shards' sequence numbers are not compared": (
        lambda: _patched((machine, "check_shards", _nothing), (ownership, "shards_match", _yes)),
        "stale_token_for_a_shard",
    ),
    "there is no genesis token": (
        lambda: _patched((machine.Commit, "_needs_genesis", _no)),
        "killed_before_the_first_commit",
    ),
    "tokens of any application count": (
        lambda: _patched(
            (Held, "of", _of_any_application),
            (Held, "is_marked", _yes),
            (verdict, "_refuse_shared_group", _nothing),
        ),
        "adopted_without_fencing",
    ),
    "ids of source topics are not compared": (
        lambda: _patched((transaction.Transaction, "_check_topic_ids", _no_topics)),
        "recreated_source_after_the_read",
    ),
    "offsets of a recreated topic are committed": (
        lambda: _patched((transaction, "_without", _all_of_them)),
        "recreated_source_while_rows_are_written",
    ),
    "ids of output topics are not compared": (
        lambda: _patched((transaction.Transaction, "_check_topic_ids", _no_topics)),
        "recreated_output_during_a_commit",
    ),
    "the token is not read again before the commit": (
        lambda: _patched((transaction.Transaction, "_confirm", _nothing)),
        "stale_token_for_the_owner",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_model_detects_that_a_rule_of_the_chain_is_switched_off(mutation: str) -> None:
    broken, hole = MUTATIONS[mutation]
    with broken(), pytest.raises(Violation):
        play(HOLES[hole])


def test_every_listed_schedule_has_an_expected_outcome() -> None:
    assert set(OUTCOMES) == set(HOLES)
    assert report_checks.check_shards is machine.check_shards, "the mutation patches this function"


def test_an_outdated_token_does_not_decide_the_fate_of_sink_transactions() -> None:
    """The newest token is lost, as a newer mark shows, and a former anchor still carries an older token."""
    world = World()
    try:
        world.start(Query(sinks=(("one", "a"), ("two", "b"))))
        world.produce(number=2)
        world.batch("q")
        offsets = world.cluster.groups[world.places["q"].group]
        former, out = TopicPartition("west", 0), TopicPartition(OUTPUT, 0)
        offsets[former] = replace(offsets[out], tp=former)
        world.produce(number=2)
        assert world.batch("q", interruptions=[("sink_commit", world.kill)]) == "died"
        world.forget(world.places["q"].group, [out, TopicPartition("in", 0)])
        assert world.batch("q") == "refused"
        assert "TOKEN_MISSING" in str(world.places["q"].refused)
        assert all(system.prepared for system in SYSTEMS.values())
    finally:
        world.close()
