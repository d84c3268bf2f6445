"""What a restore writes to: a store, or a function that receives the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord


class RestoreTarget(Protocol):
    """The part of `TransactionalStateStore` that `restore.restore` uses."""

    @property
    def restoring(self) -> bool: ...
    @property
    def last_commit_ms(self) -> int:
        """Time of the last write to the data, ms since the epoch; 0 = not known."""

    def next_offset(self, tp: TopicPartition) -> int | None: ...
    def last_batch(self) -> BatchRecord | None: ...
    def restore_chunk(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        batch: BatchRecord | None = None,
        done: bool | None = None,
    ) -> None:
        """Writes a chunk or nothing. The last value of a repeated key counts; null deletes the key."""


@dataclass
class ForwardingTarget:
    """A `RestoreTarget` that passes each chunk on and stores nothing.

    Attributes:
        forward: called with the keys and values (null = deleted) of each chunk, in the order of the log.
    """

    forward: Callable[[pa.BinaryArray, pa.BinaryArray], None]
    restoring: bool = False
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    batch: BatchRecord | None = None
    last_commit_ms: int = 0

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
            self.forward(keys, values)
        self.offsets.update(changelog_offsets)
        self.batch = batch or self.batch
        self.restoring = done is False
