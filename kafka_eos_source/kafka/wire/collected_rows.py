"""Rows that wait to be encoded, so that each partition gets large record batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from kafka_eos_source.kafka.kernel import Kernel
from kafka_eos_source.kafka.wire.batches import Encoder, SealedBatches
from kafka_eos_source.kafka.wire.rows import Groups, Rows

_COLUMNS = ("key", "value", "partition", "timestamp", "headers")


@dataclass
class _Topic:
    """Rows of one topic.

    Attributes:
        parts: their columns.
        partitions: partitions of the first ``counted`` parts; None if a row of these has no partition yet.
        counted: number of parts that ``partitions`` covers.
    """

    parts: list[Mapping[str, pa.Array]] = field(default_factory=list)
    partitions: set[int] | None = field(default_factory=set)
    counted: int = 0


class CollectedRows:
    """Rows by topic, in the order in which they came.

    Args:
        kernel: the C kernel.
        encoder: encodes the rows.
        largest_bytes: largest record, without compression.
        partitioner: one of `rows.PARTITIONERS`.

    Attributes:
        bytes: size of the rows.
        records: number of rows.
    """

    def __init__(self, kernel: Kernel, encoder: Encoder, largest_bytes: int, partitioner: str) -> None:
        self.bytes = self.records = 0
        self._kernel = kernel
        self._encoder = encoder
        self._largest_bytes = largest_bytes
        self._partitioner = partitioner
        self._topics: dict[str, _Topic] = {}

    def __iter__(self) -> Iterator[str]:
        """Yields the topics that have rows."""
        return iter(list(self._topics))

    def add(self, topic: str, columns: Mapping[str, pa.Array], size_bytes: int) -> None:
        """Takes rows of a topic: ``value``, and optionally other columns of `schema.STAGED_ARROW`."""
        self._topics.setdefault(topic, _Topic()).parts.append(columns)
        self.bytes += size_bytes
        self.records += len(columns["value"])

    def conflicts(self, topic: str, partitions: Collection[int]) -> set[int] | None:
        """Returns those of the partitions that have rows here, which must be encoded before later batches.

        Returns:
            None if rows have no partition yet: any row may belong to any partition.
        """
        found = self._topics.get(topic)
        if found is None:
            return set()
        for columns in found.parts[found.counted :]:
            given = columns.get("partition")
            if given is None or given.null_count:
                found.partitions = None
            elif found.partitions is not None:
                found.partitions.update(np.unique(given.to_numpy()).tolist())
        found.counted = len(found.parts)
        return None if found.partitions is None else found.partitions.intersection(partitions)

    def take(
        self, topic: str, partition_count: int, limit_bytes: int, only: set[int] | None = None
    ) -> SealedBatches:
        """Removes rows of a topic, and encodes them by partition and in order within each.

        Args:
            topic: the topic.
            partition_count: of the topic.
            limit_bytes: largest batch before compression.
            only: partitions whose rows to take; the others stay. None = all.

        Raises:
            InvalidRecordError: if a record is too large.
        """
        parts = self._topics.pop(topic).parts
        rows = Rows(parts)
        groups = rows.grouped(self._kernel, topic, partition_count, self._largest_bytes, self._partitioner)
        if only is not None:
            chosen = np.isin(groups.partitions, list(only))
            self._put_back(topic, parts, rows, groups.select(~chosen))
            groups = groups.select(chosen)
        self.records -= len(groups.order)
        if not self._topics:
            self.bytes = 0
        return self._encoder.seal(rows, groups, limit_bytes)

    def _put_back(self, topic: str, parts: list[Mapping[str, pa.Array]], rows: Rows, rest: Groups) -> None:
        """Keeps rows whose partitions are known; they are already grouped by partition."""
        if len(rest.order):
            order = pa.array(rows.numbers(rest.order))
            names = [name for name in _COLUMNS if any(name in part for part in parts)]
            kept = {name: _concatenated(name, parts).take(order) for name in names}
            self._topics[topic] = _Topic([kept], set(rest.partitions.tolist()), 1)


def _concatenated(name: str, parts: list[Mapping[str, pa.Array]]) -> pa.Array:
    """Returns one column of several parts; null where a part does not have it."""
    kind = next(part[name].type for part in parts if name in part)
    found = [part[name] if name in part else pa.nulls(len(part["value"]), kind) for part in parts]
    return found[0] if len(found) == 1 else pa.concat_arrays(found)
