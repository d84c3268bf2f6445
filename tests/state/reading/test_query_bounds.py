"""`StateQuery(at_least=…)` waits for a batch or input offsets, and never shows older state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafka_eos_source.errors import NotUpToBoundError, UnavailableError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state.reading import query, snapshot
from kafka_eos_source.state.reading import stores as cuts
from kafka_eos_source.state.reading.query import StateQuery
from kafka_eos_source.state.reading.stores import Changelog, Cut
from kafka_eos_source.state.vector.processor import AggregateProcessor
from tests.state.local_state import APP, STORE, Machine, rows_of

FLIGHTS = pa.schema([("origin", pa.string())])
KAFKA = {"kafka.bootstrap.servers": "127.0.0.1:1"}
INPUT, OTHER = TopicPartition("flights", 0), TopicPartition("flights", 1)


class Group:
    """Stands for the query's group: a list of what each look at it finds; the last one repeats."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *finds: Any) -> None:
        self.finds = list(finds)
        self.looks = 0
        monkeypatch.setattr(Changelog, "_cut", self._find)
        monkeypatch.setattr(cuts, "TopicAdmin", lambda _: _NoAdmin())

    def _find(self, *_: Any) -> Cut:
        self.looks += 1
        found = self.finds.pop(0) if len(self.finds) > 1 else self.finds[0]
        if isinstance(found, Exception):
            raise found
        made: Cut = found() if callable(found) else found
        return made


class _NoAdmin:
    def __enter__(self) -> _NoAdmin:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path, AggregateProcessor(FLIGHTS, ["origin"], {"n": agg.count()}), ["origin"])
    made.batch(0, rows_of(FLIGHTS, [("JFK",)]))
    made.commit()
    return made


def opened(machine: Machine, timeout_ms: int = 60_000, **more: Any) -> StateQuery:
    return StateQuery(APP, STORE, state_dir=machine.root, kafka=KAFKA, timeout_ms=timeout_ms, **more)


def test_a_query_waits_until_the_state_reflects_an_input_offset(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is committed while the query waits. Its changes are still pending in the databases."""

    def commit() -> Cut:
        machine.batch(1, rows_of(FLIGHTS, [("JFK",)]))
        machine.commit()
        return machine.cut({INPUT: 8})

    before = machine.cut({INPUT: 7})
    group = Group(monkeypatch, before, before, commit, lambda: machine.cut({INPUT: 8}))
    with opened(machine, at_least={INPUT: 7}) as state:
        assert (state.batch_id, state.get("JFK")) == (1, {"n": 2})
    assert group.looks >= 4


def test_a_bound_that_is_not_reached_in_time_is_an_error_that_names_the_partitions(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(monkeypatch, machine.cut({INPUT: 7}))
    with pytest.raises(NotUpToBoundError, match=r"flights-0 up to offset 7 \(exclusive\), but not offset 7"):
        opened(machine, 200, at_least={INPUT: 7})
    assert group.looks > 2, "it waits"
    with pytest.raises(NotUpToBoundError, match="no offset of flights-1, expected offset 0") as error:
        opened(machine, 50, at_least={INPUT: 6, OTHER: 0})
    assert "correct flights-1" in error.value.fix
    with pytest.raises(NotUpToBoundError, match="reflects batch 0; expected batch 1"):
        opened(machine, 50, at_least=1)
    assert error.value.condition == "KAFKA_EOS.STATE_NOT_UP_TO_BOUND"


def test_a_shard_without_input_of_a_partition_does_not_hold_the_answer_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one shard gets a row of the partition: the offsets of a batch hold for all of its shards."""
    machine.batch(1, rows_of(FLIGHTS, [("JFK",)]))
    machine.commit()
    Group(monkeypatch, machine.cut({INPUT: 3, OTHER: 1}))
    with opened(machine, at_least={INPUT: 2, OTHER: 0}) as state:
        assert {batch and batch.batch_id for batch in state.batches.values()} == {1}


def test_brokers_that_do_not_answer_are_an_error_of_their_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = UnavailableError("no broker answers")
    Group(monkeypatch, down)
    with pytest.raises(UnavailableError, match="no broker answers"):
        opened(machine, at_least={INPUT: 0})
    Group(monkeypatch, machine.cut({INPUT: 0}), down)
    with pytest.raises(NotUpToBoundError, match="not offset 0"):
        opened(machine, at_least={INPUT: 0})


def test_a_refresh_that_does_not_reach_its_bound_keeps_the_state(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Group(monkeypatch, lambda: machine.cut({INPUT: 7}))
    with opened(machine, 200) as state:
        with pytest.raises(NotUpToBoundError):
            state.refresh({INPUT: 7})
        assert state.get("JFK") == {"n": 1}
        scan = state.all()
        next(scan)
        state.refresh({INPUT: 6})
        assert list(scan) == [], "nothing was committed, so the scan goes on"


def test_databases_without_kafka_are_read_again_until_they_have_the_batch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: Iterator[int] = iter(range(100))
    of_folders = snapshot.of_folders

    def promote_on_the_third_look(*args: Any) -> Any:
        if next(looks) == 2:
            for shard in range(machine.shards):
                machine.promote(shard)
        return of_folders(*args)

    monkeypatch.setattr(query, "of_folders", promote_on_the_third_look)
    with StateQuery(state_dir=machine.root, at_least=0, timeout_ms=60_000) as state:
        assert state.get("JFK") == {"n": 1}
    assert next(looks) == 3


def test_the_wait_does_not_use_the_time_of_the_read(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that is behind after a long wait still gets the whole time to catch up."""
    given: list[float] = []
    of_folders = snapshot.of_folders

    def spy(found: Any, changelog: Any, deadline: Deadline) -> Any:
        given.append(deadline.remaining_seconds())
        return of_folders(found, changelog, deadline)

    def slow(_: Any, at_least: Any, deadline: Deadline) -> Cut:
        monkeypatch.setattr(Deadline, "expired", property(lambda self: self is deadline))
        return machine.cut({INPUT: 9})

    monkeypatch.setattr(query, "of_folders", spy)
    monkeypatch.setattr(Changelog, "cut_at_least", slow)
    monkeypatch.setattr(Changelog, "cut", lambda *_: machine.cut({INPUT: 9}))
    opened(machine, 60_000, at_least={INPUT: 8}).close()
    assert given[0] > 59
