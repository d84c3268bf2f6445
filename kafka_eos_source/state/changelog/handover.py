"""A changelog read for what is in it, where no store is to be made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord


@dataclass
class Handover:
    """A `restore.RestorableStore` that hands on what it is given and keeps nothing.

    Attributes:
        take: called with the keys and values (None = deleted) of each chunk, in the order of the log.
    """

    take: Callable[[Sequence[bytes], Sequence[bytes | None]], None]
    restoring: bool = False
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    batch: BatchRecord | None = None

    def next_offset(self, tp: TopicPartition) -> int | None:
        return self.offsets.get(tp)

    def last_batch(self) -> BatchRecord | None:
        return self.batch

    def restore_chunk(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        batch: BatchRecord | None = None,
        done: bool | None = None,
    ) -> None:
        if keys:
            self.take(keys, values)
        self.offsets.update(changelog_offsets)
        self.batch = batch or self.batch
        self.restoring = done is False
