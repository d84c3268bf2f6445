"""The loop with two stateful steps: counts per user and window, then how many windows have which count.

The first step emits each result with the one that it replaces (``emit="changes"``), and the second one takes
the replaced results back. A lost, doubled or wrong revision therefore stays in the output forever.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from integration.chaos.loop import Run
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import tumbling
from kafka_eos_source.state.encoding.layout import shards_of
from kafka_eos_source.state.operator.task import SHARD, Operator
from kafka_eos_source.state.options import parse_state
from kafka_eos_source.state.vector.processor import AggregateProcessor

WINDOWS, HISTOGRAM, SHARDS = "windows", "histogram", 2
WINDOW_MS, GRACE_MS, LIMIT_MS = 5_000, 30_000, 7_000

_EVENTS = pa.schema([("user", pa.binary()), ("time_ms", pa.int64())])
_WRITTEN = pa.schema([("key", pa.string()), ("value", pa.string()), (CHANGELOG, pa.binary())])


class Event(NamedTuple):
    """A record of the input: its key is the user, and its value is the event time as text."""

    user: str
    time_ms: int


class ChainedRun(Run):
    """A run with two stateful steps and a shuffle before each.

    Args:
        spec: a spec of `Run`. ``chained`` holds the operators' options. With ``held``, the first step emits
            each result at most once in `LIMIT_MS`.
    """

    def __init__(self, spec: Mapping[str, Any], stop: threading.Event) -> None:
        super().__init__(spec, stop)
        options = parse_state(spec["chained"])
        first = AggregateProcessor(
            _EVENTS,
            ["user"],
            {"events": agg.count()},
            window=tumbling(f"{WINDOW_MS}ms", on="time_ms", grace=f"{GRACE_MS}ms"),
            emit="changes",
            at_most_every=f"{LIMIT_MS}ms" if spec.get("held") else None,
        )
        second = AggregateProcessor(first.output, ["events"], {"windows": agg.count()}, removed="removed")
        self._first = Operator(first, WINDOWS, SHARDS, options)
        self._second = Operator(second, HISTOGRAM, SHARDS, options)
        self._written: StructType = from_arrow_schema(_WRITTEN)
        self._batch_id = -1

    def _batch(self, batch_id: int, start: Any, end: Any) -> None:
        self._batch_id = batch_id
        super()._batch(batch_id, start, end)

    def _tasks(self, start: Any, end: Any, read: list[pa.RecordBatch]) -> Iterator[Iterator[pa.RecordBatch]]:
        found = [batch for rows in super()._tasks(start, end, read) for batch in rows]
        users = pa.concat_arrays([pa.array([], pa.binary()), *(batch.column("key") for batch in found)])
        values = pa.concat_arrays([pa.array([], pa.binary()), *(batch.column("value") for batch in found)])
        times = values.cast(pa.string()).cast(pa.int64())
        changes: list[pa.RecordBatch] = []
        rows = pa.RecordBatch.from_arrays([users, times], schema=_EVENTS)
        for shard, own in enumerate(_by_shard(rows, "user")):
            self._enter_task(self._batch_id, shard)
            changes += self._first([own])
        shuffled = pa.Table.from_batches(changes, self._first.output).combine_chunks().to_batches()
        parts = _by_shard(shuffled[0], "events")
        for part in parts:
            yield self._counted(part)

    def _counted(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        for batch in self._second([rows]):
            values = pc.if_else(batch.column("removed"), "none", batch.column("windows").cast(pa.string()))
            key = batch.column("events").cast(pa.string())
            yield pa.RecordBatch.from_arrays([key, values, batch.column(CHANGELOG)], schema=_WRITTEN)


def _by_shard(rows: pa.RecordBatch, key: str) -> list[pa.RecordBatch]:
    """Returns the rows of each shard, placed by Spark's hash as in `operator.frame.by_shard`."""
    placed = shards_of([rows.column(key)], SHARDS)
    return [
        rows.filter(pa.array(placed == shard)).append_column(
            SHARD, pa.array(np.full(int((placed == shard).sum()), shard, np.int32))
        )
        for shard in range(SHARDS)
    ]


def expected(batches: Sequence[Sequence[Event]], *, held: bool) -> dict[str, list[str]]:
    """Returns what both steps must write for these micro-batches: the values of each key, in order.

    An independent model, which looks at one event at a time.
    """
    counts: list[dict[tuple[str, int], int]] = [{} for _ in range(SHARDS)]
    told: dict[tuple[str, int], int] = {}
    due: dict[tuple[str, int], int] = {}
    histogram: Counter[int] = Counter()
    written: defaultdict[str, list[str]] = defaultdict(list)
    stream_ms = -1
    for batch in batches:
        touched: set[int] = set()
        before, newest = Counter(histogram), stream_ms
        for shard, open_ in enumerate(counts):
            own = [event for event in batch if _shard_of(event.user) == shard]
            now = max([stream_ms, *(event.time_ms for event in own)])
            changed = set()
            for event in own:
                window = event.user, event.time_ms // WINDOW_MS * WINDOW_MS
                assert window[1] + WINDOW_MS + GRACE_MS > stream_ms, "no event is late"
                open_[window] = open_.get(window, 0) + 1
                changed.add(window)
                due.setdefault(window, now + LIMIT_MS if held else now)
            for window in list(open_):
                closes = window[1] + WINDOW_MS + GRACE_MS <= now
                if window in due and (closes or due[window] <= now):
                    if window in told:
                        histogram[told[window]] -= 1
                        touched.add(told[window])
                    told[window] = open_[window]
                    histogram[told[window]] += 1
                    touched.add(told[window])
                    del due[window]
                if closes:
                    del open_[window]
            newest = max(newest, now)
        stream_ms = newest
        for events in sorted(touched):
            if histogram[events] or before[events]:
                written[str(events)].append(str(histogram[events] or "none"))
    return dict(written)


def _shard_of(user: str) -> int:
    return int(shards_of([pa.array([user.encode()], pa.binary())], SHARDS)[0])
