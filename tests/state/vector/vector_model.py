"""A reference for the vectorised processors: plain Python that handles one row at a time."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa

from kafka_eos_source.state.model import BatchContext, ShardProcessor
from kafka_eos_source.state.vector import Aggregate, AggregateProcessor, count, latest, max_, mean, min_, sum_

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
    "n": count(),
    "n_i": count("i"),
    "sum_i": sum_("i"),
    "sum_big": sum_("big"),
    "sum_f": sum_("f"),
    "sum_d": sum_("d"),
    "mean_i": mean("i"),
    "mean_d": mean("d"),
    "min_f": min_("f"),
    "max_f": max_("f"),
    "min_s": min_("s"),
    "max_b": max_("b"),
    "max_d": max_("d"),
    "new_s": latest("s", by="ts"),
    "new_i": latest("i", by=("ts", "seq")),
}


class DictState:
    """A `StateAccess` backed by a dict."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    def get(self, key: bytes) -> bytes | None:
        return self.rows.get(key)

    def put(self, key: bytes, value: bytes | None) -> None:
        assert key
        if value is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = value

    def delete(self, key: bytes) -> None:
        self.put(key, None)

    def delete_range(self, low: bytes, high: bytes | None) -> None:
        for key, _ in list(self.range(low, high)):
            del self.rows[key]

    def range(
        self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        keys = sorted(
            key for key in self.rows if (low is None or key >= low) and (high is None or key < high)
        )
        return iter([(key, self.rows[key]) for key in (reversed(keys) if reverse else keys)])

    def prefix_scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter([pair for pair in self.range() if pair[0].startswith(prefix)])

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        return pa.array([self.rows.get(key) for key in keys.to_pylist()], pa.binary())

    def put_many(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        assert not keys.null_count
        for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
            self.put(key, value)


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
    if aggregate.column is None:
        return len(some)
    values = [row[aggregate.column] for row in some if row[aggregate.column] is not None]
    type_ = schema.field(aggregate.column).type
    if aggregate.kind == "latest":
        known = [row for row in some if all(row[by] is not None for by in aggregate.by)]
        if not known:
            return None
        newest = max(range(len(known)), key=lambda at: (*(known[at][by] for by in aggregate.by), at))
        return known[newest][aggregate.column]
    of: dict[str, Callable[[], Any]] = {
        "count": lambda: len(values),
        "sum": lambda: _sum(values, type_),
        "mean": lambda: _mean(values, type_),
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
    states: list[DictState] = field(default_factory=list)
    event_time_ms: int | None = None
    event_time_limit_ms: int | None = None
    metrics: dict[str, int] = field(default_factory=dict)
    batch_id: int = 0

    def __post_init__(self) -> None:
        self.states = [DictState() for _ in range(self.shards)]

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
