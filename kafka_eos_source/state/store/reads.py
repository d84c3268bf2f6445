"""Reads that a store and its views have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.layout import upper_bound
from kafka_eos_source.state.model import BatchRecord
from kafka_eos_source.state.store.records import StoreMetadata
from kafka_eos_source.state.store.scans import Scan


class Reads(ABC):
    """What every store and view reads, in terms of `range` and of the metadata of the last commit."""

    @abstractmethod
    def range(self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False) -> Scan:
        """Returns the pairs as they are now, in key order.

        Args:
            low: smallest key; None = unbounded.
            high: end of the range (excluded); None = unbounded.
            reverse: from the last to the first pair.
        """

    def prefix_scan(self, prefix: bytes) -> Scan:
        """Returns the pairs whose key begins with ``prefix``, in key order."""
        return self.range(prefix, upper_bound(prefix))

    def all(self) -> Scan:
        """Returns all pairs in key order."""
        return self.range()

    @abstractmethod
    def _committed(self) -> StoreMetadata:
        """Returns the metadata of the last commit."""

    def next_offset(self, tp: TopicPartition) -> int | None:
        """Returns the changelog offset from which to continue; None if it is not recorded."""
        return self._committed().offsets.get(tp)

    def last_batch(self) -> BatchRecord | None:
        """Returns the micro-batch whose state the committed data is."""
        return self._committed().batch
