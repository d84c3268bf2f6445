"""The operator as Spark runs it: one ``mapInArrow`` task is one shard of one micro-batch."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import StateError
from kafka_eos_source.model import ShardReport
from kafka_eos_source.protocol.packet import CHANGELOG, pack
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.task import StreamingTask, running_task
from kafka_eos_source.spark.worker import task_begins
from kafka_eos_source.state.changelog.topic import ChangelogTopic, changelog_name, ensure
from kafka_eos_source.state.model import ShardProcessor, StoreIdentity
from kafka_eos_source.state.operator.announce import announce
from kafka_eos_source.state.operator.shard import Task, open_shard
from kafka_eos_source.state.operator.shard_action import Spark
from kafka_eos_source.state.options import StateOptions
from kafka_eos_source.state.packed_batches import PARCEL, SHARD, unpack
from kafka_eos_source.state.store.handle import StateHandle

_log = logging.getLogger(__name__)

#: Changelog topics that this process has looked at, and for which run of the query. A worker outlives a run,
#: and a topic may be made anew between two of them, with as many partitions.
_changelogs: dict[tuple[str, str, int], tuple[str, ChangelogTopic]] = {}


@dataclass(frozen=True)
class Operator:
    """A stateful operator of a query. Made on the driver, pickled to the tasks, called once in each.

    Attributes:
        processor: what is done with the rows and the state of a shard.
        store: its name within the query.
        shards: how many.
        options: checked.
        parcel: schema of the rows in parcels (`state.packed_batches`); None = rows come as they are.
    """

    processor: ShardProcessor
    store: str
    shards: int
    options: StateOptions
    parcel: pa.Schema | None = None

    @cached_property
    def output(self) -> pa.Schema:
        """Of the result: the processor's columns, all nullable, and that of the changes."""
        fields = [field.with_nullable(True) for field in self.processor.output]
        return pa.schema([*fields, pa.field(CHANGELOG, pa.binary())])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """All rows of the shard, in; its output rows and then the packets of its changes, out.

        Raises:
            StateError: the task is not the shard's, or not of a streaming query; else as `open_shard`.
        """
        task_begins()
        task = self._task()
        packets_before: list[pa.Array] = []
        rows = self._rows(batches, task.identity.shard, packets_before)
        with open_shard(task) as shard:
            if isinstance(shard, ShardReport):
                for _ in rows:  # so that a wrong partitioning is seen in a replay too
                    continue
                yield from self._packets(packets_before, shard, ())
                return
            changes: Iterable[pa.RecordBatch] = ()
            try:
                for output in self.processor.process(rows, StateHandle(shard.store), shard.context):
                    yield self._with_packet(output)
            except Exception as error:
                if not shard.may_be_in_kafka():
                    raise
                _log.warning("shard %s failed on a batch that Kafka may hold: %s", task.tp, error)
                report = shard.failed(f"{type(error).__name__}: {error}")
            else:
                failpoints.reach("state.after_process")
                report, changes = shard.keep()
        yield from self._packets(packets_before, report, changes)
        failpoints.reach("state.after_emit")

    def _packets(
        self, before: Iterable[pa.Array], report: ShardReport, changes: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Those of the operators before this one, and its own."""
        own = (pa.array([packet], pa.binary()) for packet in pack(report, changes))
        for packets in chain(before, own):
            *fields, _ = self.output
            nulls = [pa.nulls(len(packets), field.type) for field in fields]
            yield pa.RecordBatch.from_arrays([*nulls, packets], schema=self.output)

    def _with_packet(self, output: pa.RecordBatch) -> pa.RecordBatch:
        *fields, _ = self.output
        columns = [output.column(field.name).cast(field.type) for field in fields]
        packets = pa.nulls(output.num_rows, pa.binary())
        return pa.RecordBatch.from_arrays([*columns, packets], schema=self.output)

    def _task(self) -> Task:
        running = running_task()
        if running is None:
            raise StateError("a stateful operator was called outside a Spark task.")
        if not running.query_id or not running.batch_id:
            raise StateError(
                "a stateful operator ran outside a streaming query: no batch would commit its state.",
                fix="use it on a streaming DataFrame, and start it with writeStream.format('kafka-eos').",
            )
        shard = running.partition
        if shard >= self.shards:
            raise _misplaced(shard, self.shards)
        changelog = self._changelog(running)
        announce(running, changelog.name)
        return Task(
            spark=Spark(running.query_id, int(running.batch_id)),
            run_id=running.run_id,
            attempt=uuid.uuid4().hex,
            identity=StoreIdentity(
                application_id=self.options.application(running.query_id),
                store=self.store,
                shard=shard,
                shards=self.shards,
                changelog_topic=changelog.name,
                topic_id=changelog.topic_id,
                schema=self.processor.schema,
            ),
            changelog=changelog,
            options=self.options,
        )

    def _rows(
        self, batches: Iterable[pa.RecordBatch], shard: int, packets: list[pa.Array]
    ) -> Iterator[pa.RecordBatch]:
        """The shard's rows, without the columns that brought them here, which must say what the task is.

        Packets are put aside. Spark may merge or shift partitions (a union before the operator's rows reach
        the sink, adaptive execution): a key would meet another shard's state then.
        """
        for batch in batches:
            if not batch.num_rows:
                continue
            found = pc.min_max(batch.column(SHARD)).as_py()
            if found != {"min": shard, "max": shard}:
                raise _misplaced(shard, None)
            rows, found_packets = split_packets(batch)
            if len(found_packets):
                packets.append(found_packets)
            if self.parcel is not None:
                yield from unpack(rows.column(PARCEL), self.parcel)
            elif rows.num_rows:
                yield rows.drop_columns([SHARD])

    def _changelog(self, running: StreamingTask) -> ChangelogTopic:
        """Made or checked once in a process and run. That it is another one within a run, the sink sees."""
        name = changelog_name(self.options.application(running.query_id), self.store)
        key = (self.options.kafka.get("bootstrap.servers", ""), name, self.shards)
        run_id, found = _changelogs.get(key, ("", None))
        if found is None or run_id != running.run_id:
            found = look_at_changelog(self.options, name, self.shards)
            _changelogs[key] = (running.run_id, found)
        return found


def look_at_changelog(options: StateOptions, name: str, shards: int) -> ChangelogTopic:
    """Makes the changelog topic, or checks the one that is there. Raises: as `changelog.ensure`."""
    return ensure(
        options.kafka,
        name,
        shards,
        replication_factor=options.replication_factor,
        min_insync=options.min_insync_replicas,
        deadline=Deadline.after_ms(options.timeout_ms),
    )


def split_packets(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array]:
    """The rows of a frame, and the packets of an operator before this one."""
    if CHANGELOG not in batch.schema.names:
        return batch, pa.array([], pa.binary())
    packets = batch.column(CHANGELOG)
    rows = batch.drop_columns([CHANGELOG])
    return (
        rows if packets.null_count == len(packets) else rows.filter(packets.is_null())
    ), packets.drop_null()


def _misplaced(task: int, shards: int | None) -> StateError:
    return StateError(
        f"task {task} of a stateful operator is not the shard that its rows belong to"
        + ("." if shards is None else f": there are {shards} shards."),
        fix="do not put union() or coalesce() between the operator and the sink; if adaptive query execution "
        "is on for streaming queries, set spark.sql.adaptive.coalescePartitions.enabled=false.",
    )
