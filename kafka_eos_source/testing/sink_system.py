"""The system under test of the sink conformance tests, and how they stage rows and open sinks."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import (
    Ok,
    Outcome,
    SinkContext,
    SinkTxn,
    StageContext,
    Staged,
    TwoPhaseSink,
)
from kafka_eos_source.sinks.manifest import NotesFolder

_SECONDS = 60.0
#: The application.id and the name of the sink under test.
APPLICATION = SINK = "conformance"
#: Kafka's id of the cluster of the query under test.
CLUSTER_ID = "Conformance-Cluster_01"
#: The cluster of the same query in another region.
OTHER_CLUSTER_ID = "Conformance-Cluster_02"
#: Spark's batch id of the rows that tests stage. Sink transaction ids contain a sequence number instead.
BATCH = 3

#: The rows that a reader sees, as dicts, in any order.
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class System:
    """The outside system, and how a test reads it.

    Attributes:
        sink: returns a new, closed sink for this system, as a new process would create it.
        visible: returns the rows that a reader of the system sees, which must be committed rows only. If
            readers of the sink recognise batches by a manifest, these are the rows that such a reader sees.
        store: folder of the checkpoint, for sinks that keep prepared state there; each sink has its own
            folder in it.
        in_process: whether the system is the memory of this process; a kill is then an exception.
        rows: rows to write; None = `ROWS`. They need a unique column ``id``.
        digests: what `prepare` returned for each id, which the token in Kafka would hold.
    """

    sink: Callable[[], TwoPhaseSink]
    visible: Callable[[], Rows]
    store: str | None = None
    in_process: bool = False
    rows: pa.Table | None = None
    digests: dict[SinkTxn, str] = field(default_factory=dict)


ROWS = pa.table(
    {
        "id": pa.array(range(5), pa.int64()),
        "name": pa.array(["a", "", None, "quote ' \" \\ , ; \n tab\t", "žluťoučký 🐎"], pa.string()),
        "amount": pa.array([0.5, -1.25, None, 1e15, 0.0], pa.float64()),
    }
)


@dataclass
class Given:
    """`contract.Staged` over the rows that the test's tasks staged."""

    schema: pa.Schema
    rows: int
    receipts: list[Any]

    def batches(self) -> Iterator[pa.RecordBatch]:
        for receipt in self.receipts:
            yield from receipt


@dataclass
class _Parts:
    """`Stage` in memory, instead of the checkpoint's staging folder."""

    taken: list[pa.RecordBatch] = field(default_factory=list)

    def write(self, batch: pa.RecordBatch) -> None:
        self.taken.append(batch)

    def finish(self) -> list[pa.RecordBatch]:
        return self.taken

    def discard(self) -> None:
        self.taken = []


def new_txn(
    sequence: int = 7, application_id: str = APPLICATION, sink: str = SINK, cluster_id: str = CLUSTER_ID
) -> SinkTxn:
    """Returns a sink transaction id that was never used."""
    return SinkContext(sink, application_id, cluster_id).txn(sequence, SinkTxn.new_attempt())


def deadline() -> Deadline:
    """Returns a deadline that is far enough for any single call."""
    return Deadline.after_seconds(_SECONDS)


@contextmanager
def opened(
    system: System, application_id: str = APPLICATION, name: str = SINK, cluster_id: str = CLUSTER_ID
) -> Iterator[TwoPhaseSink]:
    """Opens a new sink, as a new process would."""
    sink = system.sink()
    store = None if system.store is None else NotesFolder(os.path.join(system.store, name))
    sink.open(SinkContext(name, application_id, cluster_id, store))
    _pass_digests(sink, system.digests)
    try:
        yield sink
    finally:
        sink.close()


def _pass_digests(sink: TwoPhaseSink, digests: dict[SinkTxn, str]) -> None:
    """Passes the digest that `prepare` returns to `commit`, as the driver does through the token in Kafka."""
    prepare, commit = sink.prepare, sink.commit

    def remembered(txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        outcome = prepare(txn, staged, deadline)
        if isinstance(outcome, Ok) and outcome.digest:
            digests[txn] = outcome.digest
        return outcome

    def vouched(txn: SinkTxn, deadline: Deadline) -> Outcome:
        return commit(txn if txn.digest else replace(txn, digest=digests.get(txn, "")), deadline)

    sink.prepare, sink.commit = remembered, vouched  # type: ignore[method-assign]


def stage(sink: TwoPhaseSink, rows: pa.Table, batch_id: int = BATCH, tasks: int = 2) -> Given:
    """Stages the rows with several tasks."""
    tokens = []
    size = -(-rows.num_rows // tasks)
    for start in range(0, rows.num_rows, size):
        to_parts = sink.stage(StageContext(batch_id, uuid.uuid4().hex, rows.schema, _Parts))
        for batch in rows.slice(start, size).to_batches():
            to_parts.write(batch)
        tokens.append(to_parts.finish())
    return Given(rows.schema, rows.num_rows, tokens)
