"""A query of the chain model: its options, its writer and its operator."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import BinaryType, StructType

import tests.chain.product as product
from kafka_eos_source.protocol.packing import CHANGELOG
from tests.chain.cluster import Cluster, Process, Record
from tests.chain.spark import (
    Checkpoint,
    EosSource,
    FileSource,
    Outside,
    RateSource,
    Settings,
    Source,
    SparkKafkaSource,
)
from tests.chain.state import SHARDS, StateWorld, count_rows

OUTPUT = "out"
#: Target of a copied query, if it writes elsewhere than the original.
COPIED = "copied"
_FRAME = StructType().add("key", BinaryType()).add("value", BinaryType())
_STATEFUL_FRAME = (
    StructType().add("key", BinaryType()).add("value", BinaryType()).add(CHANGELOG, BinaryType())
)
_ARROW = pa.schema([("key", pa.binary()), ("value", pa.binary())])
_STATEFUL_ARROW = pa.schema([*_ARROW, (CHANGELOG, pa.binary())])


@dataclass(frozen=True)
class Query:
    """The definition of a query.

    Attributes:
        name: name of its checkpoint.
        sources: ``eos:<topic>``, ``far:<topic>`` (the same source on another cluster), ``spark:<topic>``,
            ``files`` or ``rate``.
        application_id, group_id: the options; None means that the option is not set.
        topic: the option; the target of its records.
        region: id of its Kafka cluster; "" is the cluster of all other queries.
        stateful: whether it counts records by key in an operator with a changelog.
        store: name of the operator's state.
        operator_id: ``application.id`` of the operator, if it differs from that of the sink.
        distinct: whether it drops records that it has seen before, with Spark's own state
            (``dropDuplicates``).
        sinks: name and system of each external sink.
        tolerant: ``failOnDataLoss=false``.
        jumps: whether the source has ``onRolledBackCheckpoint=jump`` and the ``application.id`` that it
            needs.
    """

    name: str = "q"
    sources: tuple[str, ...] = ("eos:in",)
    application_id: str | None = "app"
    group_id: str | None = None
    topic: str = OUTPUT
    region: str = ""
    stateful: bool = False
    store: str = "counts"
    operator_id: str | None = None
    distinct: bool = False
    sinks: tuple[tuple[str, str], ...] = ()
    tolerant: bool = False
    jumps: bool = True

    @property
    def topics(self) -> list[str]:
        """The topics that its Kafka sources read."""
        return [each.partition(":")[2] for each in self.sources if ":" in each]

    @property
    def is_kafka_only(self) -> bool:
        return all(each.startswith("eos:") for each in self.sources)

    def names(self) -> dict[str, str]:
        stated = {"application.id": self.application_id, "kafka.group.id": self.group_id}
        return {name: value for name, value in stated.items() if value is not None}


def make_sources(
    query: Query,
    process: Process,
    far: Cluster | None,
    outside: Outside,
    checkpoint: Checkpoint,
    settings: Settings,
) -> list[Source]:
    """Returns the sources of a query; ``far`` is the other cluster, if there is one."""
    found: list[Source] = []
    for number, each in enumerate(query.sources):
        kind, _, topic = each.partition(":")
        log = checkpoint.folder / "sources" / str(number)
        if kind in ("eos", "far"):
            cluster = far if kind == "far" and far is not None else process.cluster
            names = {**query.names(), "onRolledBackCheckpoint": "jump"} if query.jumps else {}
            options = {"startingOffsets": "earliest", "failOnDataLoss": str(not query.tolerant).lower()}
            found.append(EosSource(cluster, process, topic, settings, outside, **options, **names))
        elif kind == "spark":
            found.append(SparkKafkaSource(process, topic, settings, log))
        elif kind == "files":
            found.append(FileSource(outside, process, settings, log))
        else:
            found.append(RateSource(outside, process, settings))
    return found


class QuerySink:
    """The `spark.Sink` that runs the real writer, in tasks and in the commit."""

    def __init__(
        self,
        query: Query,
        folder: Path,
        settings: Settings,
        state: StateWorld,
        process: Process,
        worker: Callable[[], int],
    ) -> None:
        foreign = {"onForeignQuery": "adopt"} if settings.adopt else {}
        self._query, self._state, self._process, self._worker = query, state, process, worker
        self._options = {
            **query.names(),
            **foreign,
            **settings.answers(),
            "topic": query.topic,
            "checkpointLocation": str(folder),
        }
        self._operator = {**query.names(), **foreign}
        if query.operator_id is not None:
            self._operator["application.id"] = query.operator_id
        if settings.missing_state is not None:
            self._operator["onMissingState"] = settings.missing_state
        if query.sinks:
            self._options["sinks"] = ",".join(name for name, _ in query.sinks)
            for name, system in query.sinks:
                self._options[f"sink.{name}.type"] = "tests.chain.sinks:ModelSink"
                self._options[f"sink.{name}.system"] = system

    def run(self, query_id: str, batch_id: int, run_id: str, rows: Sequence[tuple[int, Record]]) -> list[Any]:
        with self._in_worker():
            writer = self._writer()
            if not self._query.stateful:
                frames = [_frame([(_key(record), _tagged(n, record)) for n, record in rows])]
            else:
                frames = [self._shard(query_id, batch_id, run_id, rows, shard) for shard in range(SHARDS)]
            messages = []
            for number, frame in enumerate(frames):
                with product.task(query_id, str(batch_id), run_id, number):
                    messages.append(writer.write(iter(frame)))
            return messages

    def commit(self, messages: list[Any], batch_id: int) -> None:
        with self._in_worker():
            writer = self._writer()
            try:
                writer.commit(messages, batch_id)
            except Exception:
                writer.abort(messages, batch_id)
                raise

    def _in_worker(self) -> Any:
        return product.worker(self._process.workers.setdefault(self._worker(), product.worker_globals()))

    def _writer(self) -> Any:
        frame = _STATEFUL_FRAME if self._query.stateful else _FRAME
        return product.stream_writer(product.write_options(True, self._options), frame)

    def _shard(
        self, query_id: str, batch_id: int, run_id: str, rows: Sequence[tuple[int, Record]], shard: int
    ) -> list[pa.RecordBatch]:
        options = product.state_options(self._operator)
        store = self._query.store
        changelog = self._state.changelog(product.changelog_name(options.application(query_id), store))
        mine = [(_key(record), _tagged(n, record)) for n, record in rows if _shard_of(record) == shard]
        attempt = uuid.uuid4().hex
        task = product.shard_task(query_id, batch_id, run_id, attempt, store, changelog, options, shard)
        self._process.reach("shard")
        output, packets = count_rows(task, mine)
        keys = [key for key, _ in output] + [None] * len(packets)
        values = [value for _, value in output] + [None] * len(packets)
        changes = [None] * len(output) + packets
        arrays = [pa.array(each, pa.binary()) for each in (keys, values, changes)]
        return [pa.RecordBatch.from_arrays(arrays, schema=_STATEFUL_ARROW)]


def write_once(
    process: Process, staging: Path, series: str, topic: str, version: int, rows: Sequence[bytes]
) -> None:
    """One ``df.write`` with ``txnAppId`` and ``txnVersion``, as in ``foreachBatch``."""
    stated = {
        "txnAppId": series,
        "txnVersion": str(version),
        "topic": topic,
        "staging.location": str(staging),
    }
    options = product.write_options(False, stated)
    writer = product.batch_writer(options, _FRAME)
    with product.task("", "", "", 0):
        message = writer.write(iter(_frame([(b"row", row) for row in rows])))
    with product.worker(process.workers.setdefault(0, product.worker_globals())):
        writer.commit([message])


def _frame(rows: Sequence[tuple[bytes, bytes]]) -> list[pa.RecordBatch]:
    if not rows:
        return []
    columns = [pa.array(each, pa.binary()) for each in zip(*rows, strict=True)]
    return [pa.RecordBatch.from_arrays(columns, schema=_ARROW)]


def _key(record: Record) -> bytes:
    assert record.key is not None
    return record.key


def _tagged(source: int, record: Record) -> bytes:
    """Returns the effect of one record of one source. A record that two sources read has two effects."""
    assert record.value is not None
    return b"%d|%s" % (source, record.value)


def _shard_of(record: Record) -> int:
    return sum(_key(record)) % SHARDS
