"""A stateful operator in the tasks that read Kafka, with one shard for each partition of the topics.

If all records of a key are in one partition, as Kafka's producers arrange it by default, no shuffle has to
bring them together. Kafka Streams relies on the same when it groups by the key of a stream. The operator then
works where the records are read::

    read ─▶ shuffle ─▶ operator ─▶ sink        shards=<number>: two stages, rows go through the JVM twice
    read, operator ─▶ sink                      shards="partitions": one stage

Records of partition ``p``, of any of the topics, belong to shard ``p``. In each micro-batch every shard runs,
also those without records, because time alone may fire timers and close windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa
from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.in_read.step import StepInRead
from kafka_eos_source.model import ReadTask
from kafka_eos_source.protocol import packing
from kafka_eos_source.protocol.packing import BadRecordsOfTask
from kafka_eos_source.spark.arrow import fit
from kafka_eos_source.spark.pickled import from_bytes
from kafka_eos_source.state.model import ShardsBy
from kafka_eos_source.state.operator.task import Operator
from kafka_eos_source.state.options import StateOptions


@dataclass(frozen=True)
class OperatorInRead(StepInRead):
    """What the tasks of the source need to run an operator, except its options.

    Attributes:
        result: columns of its result.
        processor: the pickled `ShardProcessor`.
        combines: whether the processor's ``partial`` combines the rows of a shard before they meet the state.
        record_keys: columns of the input that hold the record's key and must not be null; see `run`.
        store: name of the store within the query.
        shards: number of shards, which is the number of partitions of each topic.
        parallelism: number of tasks that Spark runs at the same time.
        timezone: time zone of the session, in which processors see timestamps.
    """

    is_operator: ClassVar[bool] = True
    result: StructType
    processor: bytes = field(repr=False)
    combines: bool
    record_keys: tuple[str, ...]
    store: str
    shards: int
    parallelism: int
    timezone: str

    @property
    def what(self) -> str:
        return "runs a stateful operator"

    @property
    def schema(self) -> StructType:
        """Columns of the result."""
        return self.result

    def run(
        self,
        shard: int,
        batches: Iterable[pa.RecordBatch],
        options: StateOptions,
        task: ReadTask | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Runs the operator for one shard.

        Each shard has a processor of its own, as if it had a task of its own, because a processor may keep
        something in its attributes.

        Args:
            shard: number of the shard.
            batches: all records of the shard in this micro-batch, with the columns that the operator needs.
            options: options of the operator.
            task: the reading task of the shard; needed if bad records are set aside.

        Yields:
            Batches with the columns of `result`.

        Raises:
            InvalidRecordError: if a record has no key. Producers spread such records over all partitions, so
                several shards would hold a part of their state each.
            StateError: as `Operator.in_read`.
        """
        processor = from_bytes(self.processor)
        packets = packing.WaitingPackets()
        bad = BadRecordsOfTask(task) if task is not None else None
        frames = self._frames(batches, shard, packets, bad)

        def finish() -> None:
            """Adds a report if the shard skips its rows, or fails: nothing of the batch commits then."""
            if bad is not None and not bad.is_reported:
                packets.append(packing.column([bad.report()]))

        operator = Operator(processor, self.store, self.shards, options, shards_by=ShardsBy.INPUT_PARTITION)
        # Spark requires timestamps in UTC of a Python source
        schema = pa.schema([field.with_type(_in_zone(field.type, "UTC")) for field in operator.output])
        rows = processor.partial(frames) if self.combines else frames
        for batch in operator.in_read(shard, rows, packets, finish):
            yield fit(batch, schema, "the stateful operator returned")

    def _frames(
        self,
        batches: Iterable[pa.RecordBatch],
        shard: int,
        packets: packing.WaitingPackets,
        bad: BadRecordsOfTask | None,
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a shard, and appends the packets among them to ``packets``."""
        for batch in self.columns.frames(batches, bad=bad):
            frame, found = packing.split_packets(batch)
            packets.append(found)
            if not frame.num_rows:
                continue
            for name in self.record_keys:
                missing = frame.column(name).null_count
                if missing:
                    raise InvalidRecordError(
                        f"{missing} of {frame.num_rows} records in partition {shard} of the input have no "
                        f"key; expected a key in each record, because the operator of store {self.store!r} "
                        f"groups by it (column {name!r}) with shards='partitions'.",
                        fix="start over with a number of shards, so that the rows are shuffled by key, and "
                        "with a new application.id and a new checkpoint. To keep shards='partitions', start "
                        "over in the same way with a topic in which each record has a key.",
                    )
            schema = pa.schema(
                [field.with_type(_in_zone(field.type, self.timezone)) for field in frame.schema]
            )
            yield fit(frame, schema, "the source returned")


def _in_zone(type_: pa.DataType, zone: str) -> pa.DataType:
    """Returns the type with all time zones, also those of nested types, replaced by one."""
    if pa.types.is_timestamp(type_) and type_.tz is not None:
        return pa.timestamp(type_.unit, zone)
    if pa.types.is_list(type_):
        return pa.list_(type_.value_field.with_type(_in_zone(type_.value_type, zone)))
    if pa.types.is_map(type_):
        return pa.map_(_in_zone(type_.key_type, zone), _in_zone(type_.item_type, zone))
    if pa.types.is_struct(type_):
        fields = [type_.field(index) for index in range(type_.num_fields)]
        return pa.struct([field.with_type(_in_zone(field.type, zone)) for field in fields])
    return type_
