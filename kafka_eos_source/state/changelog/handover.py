"""A changelog read for what is in it, where no store is to be made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord


@dataclass
class Handover:
    """A `restore.RestorableStore` that hands on what it is given and keeps nothing.

    Attributes:
        take: called with the keys and values (null = deleted) of each chunk, in the order of the log.
    """

    take: Callable[[pa.BinaryArray, pa.BinaryArray], None]
    restoring: bool = False
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    batch: BatchRecord | None = None

    def next_offset(self, tp: TopicPartition) -> int | None:
        return self.offsets.get(tp)

    def last_batch(self) -> BatchRecord | None:
        return self.batch

    def restore_chunk(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        batch: BatchRecord | None = None,
        done: bool | None = None,
    ) -> None:
        if len(keys):
            self.take(keys, values)
        self.offsets.update(changelog_offsets)
        self.batch = batch or self.batch
        self.restoring = done is False
