"""Measures what one writing task stages or sends, batch by batch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.model import TaskFigures
from kafka_eos_source.spark.schema import HEADERS, KEY, PARTITION, TOPIC, VALUE

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class TaskMeter:
    """The figures of one writing task while it runs.

    Attributes:
        highest: each topic with the highest partition that a row names; -1 if no row names one. The commit
            checks these before it begins the transaction.

    Args:
        topic: option ``topic``; None if the rows have a topic.
        clock: returns seconds.
    """

    def __init__(self, topic: str | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.highest: dict[str, int] = {}
        self._topic = topic
        self._clock = clock
        self._began = clock()
        self._staging = 0.0
        self._topics: dict[str, tuple[int, int]] = {}
        self._traceparent: str | None = None

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Encloses the work of staging or sending rows, as opposed to waiting for them."""
        began = self._clock()
        try:
            yield
        finally:
            self._staging += self._clock() - began

    def add(self, batch: pa.RecordBatch) -> dict[str, int]:
        """Counts the rows of a staged batch.

        Returns:
            Each topic of the batch with the highest partition in its rows; -1 if no row has one.
        """
        if self._traceparent is None and batch.num_rows:
            self._traceparent = _traceparent(batch)
        found = _by_topic(batch, self._topic)
        for name, (partition, records, size) in found.items():
            self.highest[name] = max(partition, self.highest.get(name, partition))
            before = self._topics.get(name, (0, 0))
            self._topics[name] = before[0] + records, before[1] + size
        return {name: partition for name, (partition, _, _) in found.items()}

    def figures(self) -> TaskFigures:
        """Returns the figures of the task up to now."""
        return TaskFigures(
            self._clock() - self._began, self._staging, dict(self._topics), self._traceparent or ""
        )


def _by_topic(batch: pa.RecordBatch, topic: str | None) -> dict[str, tuple[int, int, int]]:
    """Returns the highest partition, the number of rows, and the size of keys and values, per topic."""
    partition = (
        batch.column(PARTITION) if PARTITION in batch.schema.names else pa.nulls(batch.num_rows, pa.int32())
    )
    lengths = [pc.binary_length(batch.column(name)) for name in (KEY, VALUE) if name in batch.schema.names]
    if topic is not None:
        highest = pc.max(partition).as_py()
        size = sum(pc.sum(each).as_py() or 0 for each in lengths)
        return {topic: (-1 if highest is None else highest, batch.num_rows, size)}
    lengths = [pc.fill_null(each, 0) for each in lengths]
    sizes = lengths[0] if len(lengths) == 1 else pc.add(*lengths)
    table = pa.table({TOPIC: batch.column(TOPIC), "partition": pc.fill_null(partition, -1), "size": sizes})
    found = table.group_by(TOPIC).aggregate([("partition", "max"), ("size", "count"), ("size", "sum")])
    columns = (found[name].to_pylist() for name in ("partition_max", "size_count", "size_sum"))
    return dict(zip(found[TOPIC].to_pylist(), zip(*columns, strict=True), strict=True))


def _traceparent(batch: pa.RecordBatch) -> str:
    """Returns the header of the first record that names its trace (W3C Trace Context); "" if it has none."""
    headers = batch.column(HEADERS)[0].as_py() if HEADERS in batch.schema.names else None
    for each in headers or ():
        if each["key"] == "traceparent" and each["value"] is not None:
            text = each["value"].decode("ascii", "replace")
            return text if _TRACEPARENT.fullmatch(text) else ""
    return ""
