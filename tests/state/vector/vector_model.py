"""A reference for the vectorised processors: plain Python that handles one row at a time."""

from __future__ import annotations

import decimal
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa

from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.model import BatchContext, ShardProcessor
from kafka_eos_source.state.vector.processor import AggregateProcessor
from kafka_eos_source.state.vector.windows import Tumbling
from tests.state.store.model_state import ModelState

Row = dict[str, Any]

#: Event times begin here, ms since 1970.
BASE = 1_700_000_000_000

SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("j", pa.float64()),
        ("ts", pa.timestamp("us", "UTC")),
        ("seq", pa.int64()),
        ("i", pa.int32()),
        ("big", pa.int64()),
        ("f", pa.float64()),
        ("d", pa.decimal128(12, 3)),
        ("s", pa.string()),
        ("b", pa.bool_()),
    ]
)

AGGREGATES = {
    "n": agg.count(),
    "n_i": agg.count("i"),
    "sum_i": agg.sum("i"),
    "sum_big": agg.sum("big"),
    "sum_f": agg.sum("f"),
    "sum_d": agg.sum("d"),
    "mean_i": agg.avg("i"),
    "mean_d": agg.avg("d"),
    "min_f": agg.min("f"),
    "max_f": agg.max("f"),
    "min_s": agg.min("s"),
    "max_b": agg.max("b"),
    "max_d": agg.max("d"),
    "new_s": agg.last("s", by="ts"),
    "new_i": agg.last("i", by=("ts", "seq")),
}


@st.composite
def rows(draw: st.DrawFn, *, most: int = 24, seconds: int = 20) -> list[Row]:
    """Generates rows with few keys and few event times, so that they often collide."""
    some = st.fixed_dictionaries(
        {
            "k": st.sampled_from(["a", "a", "", None]),
            "j": st.sampled_from([0.0, -0.0, math.nan, 1.5]),
            "ts": st.integers(0, seconds * 2 + 1).map(lambda half: BASE + half * 500 if half else None),
            "i": st.none() | st.integers(-9, 9) | st.sampled_from([-(1 << 31), (1 << 31) - 1]),
            "big": st.none() | st.integers(-(1 << 58), 1 << 58),
            "f": st.none()
            | st.integers(-8, 8).map(lambda n: n / 4)
            | st.sampled_from([math.nan, math.inf, -0.0]),
            "d": st.none()
            | st.integers(-(10**12) + 1, 10**12 - 1).map(lambda n: decimal.Decimal(n).scaleb(-3)),
            "s": st.none() | st.sampled_from(["", "a", "b", "ä", "zz"]),
            "b": st.none() | st.booleans(),
        }
    )
    drawn = draw(st.lists(some, max_size=most))
    return [{**row, "seq": number} for number, row in enumerate(drawn)]


def row_at(key: str, time_ms: int) -> Row:
    """Returns a row with only a key and an event time after `BASE`."""
    return {**dict.fromkeys(SCHEMA.names), "k": key, "ts": BASE + time_ms, "seq": 0}


def batch_of(some: Sequence[Row], schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """Converts rows to Arrow; rows have times in ms, Arrow in µs."""
    columns = []
    for column in schema:
        values = [row[column.name] for row in some]
        if pa.types.is_timestamp(column.type):
            plain = pa.array([None if value is None else value * 1000 for value in values], pa.int64())
            columns.append(plain.cast(column.type))
        else:
            columns.append(pa.array(values, column.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def split(draw: st.DrawFn, some: Sequence[Row], most: int = 4) -> list[list[Row]]:
    """Splits rows into several parts, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(some)), max_size=most - 1)))
    ends = [0, *cuts, len(some)]
    return [list(some[start:end]) for start, end in pairwise(ends)]


def ms(value: Any) -> Any:
    """Converts a time of Arrow to ms."""
    return value if value is None or isinstance(value, int) else round(value.timestamp() * 1000)


def key_of(row: Row, keys: Sequence[str]) -> tuple[Any, ...]:
    """Returns the group that Spark puts a row into."""
    values = (row[key] for key in keys)
    return tuple(
        ("nan" if math.isnan(value) else value + 0.0) if isinstance(value, float) else value
        for value in values
    )


def same(value: Any) -> Any:
    """Makes a result comparable: NaN equals NaN, and -0.0 differs from 0.0."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else (value, math.copysign(1, value))
    return ms(value) if hasattr(value, "timestamp") else value


# ------------------------------------------------------------------ aggregates


def _order(value: Any) -> Any:
    if isinstance(value, float):
        return (math.isnan(value), value, math.copysign(1, value))
    return value.encode() if isinstance(value, str) else value


def _sum(values: list[Any], type_: pa.DataType) -> Any:
    if not values:
        return None
    if pa.types.is_decimal(type_):
        return sum(values, decimal.Decimal(0))
    return (
        math.fsum(values) if pa.types.is_floating(type_) and all(map(math.isfinite, values)) else sum(values)
    )


def _mean(values: list[Any], type_: pa.DataType) -> Any:
    if not values:
        return None
    if pa.types.is_decimal(type_):
        context = decimal.Context(prec=76, rounding=decimal.ROUND_HALF_UP)
        quotient = context.divide(sum(values, decimal.Decimal(0)), decimal.Decimal(len(values)))
        return quotient.quantize(decimal.Decimal(1).scaleb(-type_.scale - 4), context=context)
    return float(sum(values)) / len(values)


def aggregated(aggregate: Aggregate, some: Sequence[Row], schema: pa.Schema = SCHEMA) -> Any:
    """Computes an aggregate of rows in their order of arrival."""
    if not aggregate.inputs:
        return len(some)
    values = [row[aggregate.inputs[0]] for row in some if row[aggregate.inputs[0]] is not None]
    type_ = schema.field(aggregate.inputs[0]).type
    if aggregate.kind == "last":
        known = [row for row in some if all(row[by] is not None for by in aggregate.by)]
        if not known:
            return None
        newest = max(range(len(known)), key=lambda at: (*(known[at][by] for by in aggregate.by), at))
        return known[newest][aggregate.inputs[0]]
    of: dict[str, Callable[[], Any]] = {
        "count": lambda: len(values),
        "sum": lambda: _sum(values, type_),
        "avg": lambda: _mean(values, type_),
        "min": lambda: min(values, key=_order, default=None),
        "max": lambda: max(values, key=_order, default=None),
    }
    return of[aggregate.kind]()


def results(some: Sequence[Row], aggregates: dict[str, Aggregate] = AGGREGATES) -> tuple[Any, ...]:
    """Computes all aggregates of rows, in comparable form."""
    return tuple(same(aggregated(each, some)) for each in aggregates.values())


# ------------------------------------------------------------------ a stream of micro-batches


@dataclass
class Stream:
    """Runs a processor over micro-batches and shards as the operator does."""

    processor: Any
    shards: int = 1
    states: list[ModelState] = field(default_factory=list)
    event_time_ms: int | None = None
    event_time_limit_ms: int | None = None
    metrics: dict[str, int] = field(default_factory=dict)
    batch_id: int = 0

    def __post_init__(self) -> None:
        self.states = [ModelState() for _ in range(self.shards)]

    def run(self, shard_batches: Sequence[Iterable[pa.RecordBatch]]) -> list[Row]:
        """Runs one micro-batch over the rows of each shard; returns the emitted rows."""
        processor: ShardProcessor = self.processor
        emitted: list[Row] = []
        seen: list[int] = []
        for shard, batches in enumerate(shard_batches):
            context = BatchContext(
                self.batch_id,
                shard,
                self.shards,
                self.batch_id == 0,
                self.batch_id,
                self.event_time_ms,
                event_time_limit_ms=self.event_time_limit_ms,
            )
            for batch in processor.process(iter(batches), self.states[shard], context):
                assert batch.schema == processor.output
                batch.validate(full=True)
                emitted += batch.to_pylist()
            if context.seen_event_time_ms is not None:
                seen.append(context.seen_event_time_ms)
            for name, more in context.metrics.items():
                self.metrics[name] = self.metrics.get(name, 0) + more
        self.event_time_ms = max(
            [*seen, *([] if self.event_time_ms is None else [self.event_time_ms])], default=None
        )
        self.batch_id += 1
        return emitted

    def rows_left_out(self) -> tuple[int, int]:
        """Returns how many rows were counted as late and as without a time so far."""
        return self.metrics.get("late_rows", 0), self.metrics.get("null_time_rows", 0)


def sharded(some: Sequence[Row], keys: Sequence[str], shards: int) -> list[list[Row]]:
    """Returns the rows of each shard, in order."""
    found: list[list[Row]] = [[] for _ in range(shards)]
    for row in some:
        found[hash(repr(key_of(row, keys))) % shards].append(row)
    return found


def as_partials(processor: AggregateProcessor, parts: Sequence[Sequence[Row]]) -> list[pa.RecordBatch]:
    """Combines the rows of several input partitions, as the map side does."""
    return [out for part in parts for out in processor.partial([batch_of(part)])]


def inputs(
    draw: st.DrawFn, processor: AggregateProcessor, shard_rows: Sequence[Sequence[Row]]
) -> list[list[pa.RecordBatch]]:
    """Returns the input of each shard: its rows as they are, or combined by input partition."""
    return [
        as_partials(processor, split(draw, own, 3)) if draw(st.booleans()) else [batch_of(own)]
        for own in shard_rows
    ]


# ------------------------------------------------------------------ groups by key, or by key and window

Place = tuple[Any, ...]
#: For a key and window: the rows that a batch emitted, in order, each with its mark and its results.
Emitted = dict[Place, list[tuple[bool, Any]]]


def place_of(row: Row) -> Place:
    span = [ms(row[name]) for name in ("window_start", "window_end") if name in row]
    return (key_of(row, ["k"]), *span)


def emitted(found: list[Row], names: dict[str, Aggregate]) -> Emitted:
    by_place: defaultdict[Place, list[tuple[bool, Any]]] = defaultdict(list)
    for row in found:
        values = tuple(same(row[name]) for name in names)
        by_place[place_of(row)].append((row.get("removed", False), values))
    return dict(by_place)


@dataclass
class _Group:
    rows: list[Row] = field(default_factory=list)
    due_ms: int | None = None
    last: Any = None  # what was emitted last


@dataclass
class GroupModel:
    """Aggregates by key, or by key and tumbling or hopping window, one row at a time."""

    window: Tumbling | None
    shards: int
    emit: str
    aggregates: dict[str, Aggregate]
    limit_ms: int | None = None
    marks_removed: bool = False
    open: list[dict[Place, _Group]] = field(default_factory=list)
    event_time_ms: int | None = None
    batch_id: int = 0
    late: int = 0
    no_time: int = 0

    def __post_init__(self) -> None:
        self.open = [{} for _ in range(self.shards)]

    def places(self, row: Row) -> list[Place]:
        if self.window is None:
            return [(key_of(row, ["k"]),)]
        if row["ts"] is None:
            return []
        size, every, offset = self.window.size_ms, self.window.every_ms, self.window.offset_ms
        start = (row["ts"] - offset) // every * every + offset
        found = []
        while start + size > row["ts"]:
            found.append((key_of(row, ["k"]), start, start + size))
            start -= every
        return found

    def closed(self, place: Place, until_ms: int | None) -> bool:
        return (
            self.window is not None and until_ms is not None and place[2] + self.window.grace_ms <= until_ms
        )

    def run(self, batches: list[list[Row]]) -> Emitted:
        out: Emitted = {}
        newest = self.event_time_ms
        for groups, batch in zip(self.open, batches, strict=True):
            changed = set()
            own = self.event_time_ms
            for row in batch:
                if row["ts"] is not None:
                    own = row["ts"] if own is None else max(own, row["ts"])
                elif self.window is not None:
                    self.no_time += 1
                for place in self.places(row):
                    if self.closed(place, self.event_time_ms):
                        self.late += 1
                        continue
                    group = groups.setdefault(place, _Group())
                    if row.get("gone"):
                        group.rows.remove({**row, "gone": False})
                    else:
                        group.rows.append(row)
                    changed.add(place)
            now = self.batch_id if self.window is None else own
            for place, group in list(groups.items()):
                self.settle(groups, place, group, now, self.closed(place, own), place in changed, out)
            if own is not None:
                newest = own if newest is None else max(newest, own)
        self.event_time_ms, self.batch_id = newest, self.batch_id + 1
        return out

    def settle(
        self,
        groups: dict[Place, _Group],
        place: Place,
        group: _Group,
        now: int | None,
        closes: bool,
        changed: bool,
        out: Emitted,
    ) -> None:
        if self.limit_ms is None:
            emits = closes if self.emit == "on_close" else changed
        else:
            assert now is not None
            if changed and group.due_ms is None:
                group.due_ms = now + self.limit_ms
            emits = group.due_ms is not None and (closes or group.due_ms <= now)
        if emits:
            result = results(group.rows, self.aggregates) if group.rows else None
            pair = []
            if group.last is not None and self.emit == "changes":
                pair.append((True, group.last))
            elif group.last is not None and result is None and self.marks_removed:
                pair.append((True, (None,) * len(self.aggregates)))
            if result is not None:
                pair.append((False, result))
            if pair:
                out[place] = pair
            group.last, group.due_ms = result, None
        if closes or (not group.rows and group.last is None):
            del groups[place]


@st.composite
def windows(draw: st.DrawFn, *, grace: bool = True) -> Tumbling:
    size = draw(st.integers(1, 20)) * 500
    every = draw(st.just(size) | st.integers(1, size // 500).map(lambda steps: steps * 500))
    late = draw(st.integers(0, 20)) * 500 if grace else 10**9
    return Tumbling("ts", size, every, late, draw(st.integers(0, 3)) * 250)
