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

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.in_read.columns import ReadColumns
from kafka_eos_source.spark.pickled import from_option
from kafka_eos_source.state.model import ShardsBy
from kafka_eos_source.state.operator.task import Operator
from kafka_eos_source.state.options import StateOptions


@dataclass(frozen=True)
class OperatorInRead:
    """What the tasks of the source need to run an operator; travels as the option ``operator.in.read``.

    The options of the operator, which may contain passwords, are options of the source of their own.

    Attributes:
        columns: columns of the operator's input.
        schema: columns of its result.
        processor: the pickled `ShardProcessor` (`spark.pickled`).
        combines: whether the processor's ``partial`` combines the rows of a shard before they meet the state.
        record_keys: columns of the input that hold the record's key and must not be null; see `frames`.
        store: name of the store within the query.
        shards: number of shards, which is the number of partitions of each topic.
        parallelism: number of tasks that Spark runs at the same time.
    """

    columns: ReadColumns
    schema: StructType
    processor: str
    combines: bool
    record_keys: tuple[str, ...]
    store: str
    shards: int
    parallelism: int

    def to_json(self) -> str:
        """Returns the text of the option."""
        return json.dumps(
            {
                "columns": self.columns.to_json(),
                "schema": self.schema.jsonValue(),
                "processor": self.processor,
                "combines": self.combines,
                "record_keys": self.record_keys,
                "store": self.store,
                "shards": self.shards,
                "parallelism": self.parallelism,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, written: str) -> OperatorInRead:
        """Returns the operator that `to_json` wrote, without unpickling the processor.

        Raises:
            ValueError, TypeError, KeyError: if `to_json` did not write this.
        """
        fields: dict[str, Any] = json.loads(written)
        operator = cls(
            ReadColumns.from_json(fields["columns"]),
            StructType.fromJson(fields["schema"]),
            fields["processor"],
            bool(fields["combines"]),
            tuple(fields["record_keys"]),
            fields["store"],
            int(fields["shards"]),
            int(fields["parallelism"]),
        )
        _ = operator.columns.schema  # raises now if a column is unknown
        return operator

    def operator(self, options: StateOptions) -> Operator:
        """Returns the operator, with its own options."""
        return Operator(self._processor, self.store, self.shards, options, shards_by=ShardsBy.INPUT_PARTITION)

    def frames(self, batches: Iterable[pa.RecordBatch], shard: int) -> Iterator[pa.RecordBatch]:
        """Yields the operator's input for the records of one shard.

        Raises:
            InvalidRecordError: if a record has no key. Producers spread such records over all partitions, so
                several shards would hold a part of their state each.
        """
        frames = self._keyed(batches, shard)
        return self._processor.partial(frames) if self.combines else frames

    def _keyed(self, batches: Iterable[pa.RecordBatch], shard: int) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            frame = self.columns.frame(batch)
            for name in self.record_keys:
                missing = frame.column(name).null_count
                if missing:
                    raise InvalidRecordError(
                        f"{missing} of {frame.num_rows} records in partition {shard} of the input have no "
                        f"key; expected a key in each record, because the operator of store {self.store!r} "
                        f"groups by it (column {name!r}) with shards='partitions'.",
                        fix="start over with a number of shards and another store name, so that the rows are "
                        "shuffled by key; or send only records with a key.",
                    )
            yield frame

    @cached_property
    def _processor(self) -> Any:
        return from_option(self.processor)
