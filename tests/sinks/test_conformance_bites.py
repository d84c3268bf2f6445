"""Tests of the conformance suite: sinks that break the contract fail the test that covers the violation."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import pyarrow as pa
import pytest

from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Outcome,
    Refused,
    RowRefusal,
    SinkTxn,
    Stage,
    StageContext,
    Staged,
)
from kafka_eos_source.sinks.memory import SYSTEMS, MemorySink
from kafka_eos_source.sinks.row_checks import IntegerRange, NotNull, RowRule
from kafka_eos_source.testing.kills import count_lines
from kafka_eos_source.testing.sinks import ROWS, SinkConformance, System


class ShowsRowsAtPrepare(MemorySink):
    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        super().prepare(txn, staged, deadline)
        return self.commit(txn, deadline)


class CommitsTwice(MemorySink):
    """Its commit is not idempotent: a repeated commit writes the rows again."""

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        if txn in self.memory.committed:
            again = replace(txn, attempt=SinkTxn.new_attempt())
            self.memory.committed[again] = self.memory.committed[txn]
        return super().commit(txn, deadline)


class DoesNotListPrepared(MemorySink):
    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        return []


class ListsOtherApplications(MemorySink):
    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        return sorted(self.memory.prepared)


class IgnoresClusters(MemorySink):
    """Its ids name application, sink and sequence only, as if there were one Kafka cluster."""

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        own = self.context
        return sorted(
            txn
            for txn in self.memory.prepared
            if (txn.application_id, txn.sink) == (own.application_id, own.name)
        )


class SharesIdsOfClusters(MemorySink):
    """Stores batches without the cluster in their ids."""

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        return super().prepare(replace(txn, cluster=""), staged, deadline)

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return super().commit(replace(txn, cluster=""), deadline)

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return super().abort(replace(txn, cluster=""), deadline)

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        own = (self.context.txn(txn.sequence, txn.attempt) for txn in self.memory.prepared)
        return sorted(txn for txn in own if replace(txn, cluster="") in self.memory.prepared)


class AbortsCommittedWork(MemorySink):
    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        self.memory.committed.pop(txn, None)
        return super().abort(txn, deadline)


class ReportsCommitOfUnknownIds(MemorySink):
    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        super().commit(txn, deadline)
        return OK


class DeletesPreparedBeforeCommit(MemorySink):
    """Loses the batch if it is killed between the first two steps of `commit`."""

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        rows = self.memory.prepared.pop(txn, None)
        if rows is not None:
            self.memory.committed[txn] = rows
        return OK if txn in self.memory.committed else Fatal("nothing")


class SharesIds(MemorySink):
    """Ignores the name of the sink in ids."""

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        return super().prepare(_shared(txn), staged, deadline)

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return super().commit(_shared(txn), deadline)

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return super().abort(_shared(txn), deadline)

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        own, name = self.context.application_id, self.context.name
        return [replace(txn, sink=name) for txn in self.memory.prepared if txn.application_id == own]


class ListsOtherSinks(MemorySink):
    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        return sorted(
            txn for txn in self.memory.prepared if txn.application_id == self.context.application_id
        )


class ComparesSequencesOnly(MemorySink):
    """Assumes that it committed every sequence number up to the newest one."""

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        if any(each.sequence >= txn.sequence for each in self.memory.committed):
            return OK
        return super().commit(txn, deadline)


class SkipsOldBatches(MemorySink):
    """Compares Spark's batch ids, which go back after a checkpoint was restored."""

    def stage(self, context: StageContext) -> Stage:
        self.batch_id = context.batch_id
        return super().stage(context)

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        newest = _NEWEST.setdefault(self.system, -1)
        if self.batch_id <= newest:
            return OK
        _NEWEST[self.system] = self.batch_id
        return super().commit(txn, deadline)


_NEWEST: dict[str, int] = {}


def _shared(txn: SinkTxn) -> SinkTxn:
    return replace(txn, sink="shared")


class LosesARow(MemorySink):
    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        outcome = super().prepare(txn, staged, deadline)
        if txn in self.memory.prepared:
            self.memory.prepared[txn] = self.memory.prepared[txn].slice(1)
        return outcome


class Picky(MemorySink):
    """Refuses rows without a name as a rule, and rows with the name "late" when it prepares them."""

    refuses_rows = True

    def row_rules(self, schema: pa.Schema, deadline: Deadline) -> Sequence[RowRule]:
        return (NotNull(column="name"),)

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        names = [each for batch in staged.batches() for each in batch["name"].to_pylist()]
        bad = self.chosen([number for number, each in enumerate(names) if each == "late"])
        if bad:
            return Refused({number: RowRefusal("too late", "name") for number in bad})
        return super().prepare(txn, staged, deadline)

    def chosen(self, bad: list[int]) -> list[int]:
        return bad


class RefusesOneRowAtATime(Picky):
    def chosen(self, bad: list[int]) -> list[int]:
        return bad[:1]


class DoesNotSayThatItRefusesRows(Picky):
    refuses_rows = False


class PreparesGoodRowsOfARefusedBatch(Picky):
    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        MemorySink.prepare(self, txn, staged, deadline)
        return super().prepare(txn, staged, deadline)


class HasARuleThatIsStricterThanItsTarget(Picky):
    def row_rules(self, schema: pa.Schema, deadline: Deadline) -> Sequence[RowRule]:
        return (NotNull(column="name"), IntegerRange(column="id", low=0, high=3))


def picky(sink: type[MemorySink] = Picky) -> System:
    name = uuid.uuid4().hex
    system = memory_of(name, sink)
    rows = ROWS.filter(ROWS["name"].is_valid())
    late = [{"id": 10, "name": None}, {"id": 11, "name": "late"}, {"id": 12, "name": "late"}]
    return replace(system, rows=rows, poison=pa.Table.from_pylist(late, ROWS.schema))


class TestPicky(SinkConformance):
    most_kills = 5
    depth = 2

    @pytest.fixture
    def system(self) -> System:
        return picky()


@pytest.mark.parametrize(
    "sink",
    [
        RefusesOneRowAtATime,
        DoesNotSayThatItRefusesRows,
        PreparesGoodRowsOfARefusedBatch,
        HasARuleThatIsStricterThanItsTarget,
    ],
)
def test_a_sink_that_refuses_rows_in_another_way_fails_the_conformance_test(sink: type[Picky]) -> None:
    with pytest.raises(AssertionError):
        SinkConformance().test_the_rows_that_the_system_refuses_are_named(picky(sink))


@pytest.mark.parametrize(
    ("sink", "test"),
    [
        (ShowsRowsAtPrepare, SinkConformance.test_prepared_rows_are_invisible_until_the_commit),
        (CommitsTwice, SinkConformance.test_every_order_of_calls),
        (DoesNotListPrepared, SinkConformance.test_every_order_of_calls),
        (ListsOtherApplications, SinkConformance.test_recover_lists_only_ids_of_its_own_query),
        (IgnoresClusters, SinkConformance.test_recover_lists_only_ids_of_its_own_query),
        (IgnoresClusters, SinkConformance.test_the_same_query_on_two_clusters_writes_to_one_target),
        (SharesIdsOfClusters, SinkConformance.test_the_same_query_on_two_clusters_writes_to_one_target),
        (AbortsCommittedWork, SinkConformance.test_every_order_of_calls),
        (AbortsCommittedWork, SinkConformance.test_a_zombie_prepares_after_the_commit),
        (ReportsCommitOfUnknownIds, SinkConformance.test_every_order_of_calls),
        (DeletesPreparedBeforeCommit, SinkConformance.test_killed_while_it_commits),
        (LosesARow, SinkConformance.test_every_value_arrives),
        (SharesIds, SinkConformance.test_two_sinks_of_one_query_are_independent),
        (ListsOtherSinks, SinkConformance.test_two_sinks_of_one_query_are_independent),
        (ReportsCommitOfUnknownIds, SinkConformance.test_commit_of_an_unknown_id_is_fatal),
        (ComparesSequencesOnly, SinkConformance.test_commit_of_an_unknown_id_is_fatal),
        (SkipsOldBatches, SinkConformance.test_repeated_batch_ids_lose_nothing),
    ],
    ids=lambda each: each.__name__,
)
def test_a_sink_that_violates_the_contract_fails_the_conformance_test(
    sink: type[MemorySink], test: Callable[[SinkConformance, System], None]
) -> None:
    with pytest.raises(AssertionError):
        test(SinkConformance(), memory_of(uuid.uuid4().hex, sink))


def memory_of(name: str, sink: type[MemorySink]) -> System:
    def visible() -> list[dict[str, object]]:
        table = SYSTEMS[name].visible() if name in SYSTEMS else None
        return [] if table is None else table.to_pylist()

    return System(sink=lambda: sink(name), visible=visible, in_process=True)


class NotOfThisProcess:
    """Aborts every process but its owner that destroys it, as a Kafka consumer does."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.cycle = self  # only the garbage collector can destroy it

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os.abort()


def test_a_killed_process_does_not_destroy_objects_of_the_test_process() -> None:
    gc.disable()
    try:
        NotOfThisProcess(os.getpid())
        assert count_lines(gc.collect, [__file__]) == 0
    finally:
        gc.enable()
