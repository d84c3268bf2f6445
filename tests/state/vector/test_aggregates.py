"""Vectorised aggregates by key agree with plain Python, however the rows are split into batches."""

from __future__ import annotations

import decimal
import math
import pickle
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, StateError, StateFormatError
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import tumbling
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.vector.aggregation import accumulator
from kafka_eos_source.state.vector.processor import AggregateProcessor
from kafka_eos_source.state.vector.windows import no_time_column
from tests.state.store.model_state import ModelState
from tests.state.vector.vector_model import (
    AGGREGATES,
    SCHEMA,
    STEADY,
    UNSTEADY,
    Row,
    Stream,
    aggregated,
    as_partials,
    batch_of,
    found_in,
    key_of,
    results,
    rows,
    sharded,
    split,
)

KEYS = ["k", "j"]
EVERY = {**AGGREGATES, **STEADY, **UNSTEADY}
PROCESSOR = AggregateProcessor(SCHEMA, KEYS, EVERY)


@settings(max_examples=30)
@given(rows(), st.data())
def test_results_do_not_depend_on_how_rows_are_split_into_batches(
    some: list[Row], data: st.DataObject
) -> None:
    shards = data.draw(st.integers(1, 2))
    stream = Stream(PROCESSOR, shards)
    past: dict[tuple[Any, ...], list[Row]] = {}
    for batch in split(data.draw, some):
        changed = {key_of(row, KEYS) for row in batch}
        for row in batch:
            past.setdefault(key_of(row, KEYS), []).append(row)
        inputs = []
        for own in sharded(batch, KEYS, shards):
            parts = split(data.draw, own, 3)
            partial = data.draw(st.booleans())
            inputs.append(as_partials(PROCESSOR, parts) if partial else [batch_of(part) for part in parts])
        emitted = {key_of(row, KEYS): found_in(row, EVERY) for row in stream.run(inputs)}
        assert emitted.keys() == changed
        for key, found in emitted.items():
            wanted = results(past[key], EVERY)
            assert dict(zip(EVERY, found, strict=True)) == dict(zip(EVERY, wanted, strict=True))
    assert stream.metrics == {}


@settings(max_examples=15)
@given(rows(), st.data())
def test_the_state_does_not_depend_on_how_rows_are_split_into_batches(
    some: list[Row], data: st.DataObject
) -> None:
    processor = AggregateProcessor(SCHEMA, KEYS, {**AGGREGATES, **STEADY})
    whole, parts = Stream(processor), Stream(processor)
    whole.run([[batch_of(some)]])
    for batch in split(data.draw, some):
        parts.run([as_partials(processor, split(data.draw, batch, 3))])
    # both states hold a description, and the same bytes for the same rows
    assert parts.states[0].rows == whole.states[0].rows


def _one(processor: AggregateProcessor, *batches: pa.RecordBatch) -> list[Row]:
    return Stream(processor).run([batches])


def _values(type_: pa.DataType, *values: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([1] * len(values)), pa.array(values, type_)], names=["k", "v"]
    )


def _processor(type_: pa.DataType, **aggregates: Any) -> AggregateProcessor:
    return AggregateProcessor(pa.schema([("k", pa.int64()), ("v", type_)]), ["k"], aggregates)


@settings(max_examples=60)
@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=8), st.booleans())
def test_an_integer_sum_is_exact_or_raises(values: list[int], partial: bool) -> None:
    processor = _processor(pa.int64(), s=agg.sum("v"))
    batch = _values(pa.int64(), *values)
    batches = list(processor.partial([batch])) if partial and abs(sum(values)) < 1 << 62 else [batch]
    if -(1 << 63) <= sum(values) < 1 << 63:
        assert _one(processor, *batches) == [{"k": 1, "s": sum(values)}]
    else:
        with pytest.raises(StateError, match="sum of column 'v' does not fit int64"):
            _one(processor, *batches)


def test_an_integer_sum_that_overflows_over_several_batches_raises() -> None:
    processor = _processor(pa.int64(), s=agg.sum("v"))
    stream = Stream(processor)
    stream.run([[_values(pa.int64(), (1 << 63) - 1)]])
    with pytest.raises(StateError, match=r"sum of column 'v' does not fit int64.*cast 'v' to a decimal"):
        stream.run([[_values(pa.int64(), 1)]])
    stream.run([[_values(pa.int64(), -1)]])


def test_a_decimal_sum_is_exact_or_raises() -> None:
    wide = pa.decimal128(38, 2)
    processor = _processor(wide, s=agg.sum("v"))
    half = decimal.Decimal("5e35")
    assert _one(processor, _values(wide, half, -half, decimal.Decimal("0.01")))[0]["s"] == decimal.Decimal(
        "0.01"
    )
    with pytest.raises(StateError, match=r"sum of column 'v' does not fit decimal128\(38, 2\)"):
        _one(processor, _values(wide, half, half))
    stream = Stream(processor)
    stream.run([[_values(wide, half)]])
    with pytest.raises(StateError, match="does not fit"):
        stream.run([[_values(wide, half)]])
    narrow = _processor(pa.decimal128(10, 2), s=agg.sum("v"), m=agg.avg("v"))
    assert narrow.output.field("s").type == pa.decimal128(20, 2)
    assert narrow.output.field("m").type == pa.decimal128(14, 6)


@settings(max_examples=60)
@given(
    st.sampled_from([pa.decimal128(38, 38), pa.decimal128(38, 0), pa.decimal128(5, 5), pa.decimal128(30, 9)]),
    st.lists(st.integers(-(10**5) + 1, 10**5 - 1), min_size=1, max_size=7),
)
def test_decimal_means_round_half_up(type_: pa.DataType, digits: list[int]) -> None:
    values = [decimal.Decimal(number).scaleb(-type_.scale) for number in digits]
    processor = _processor(type_, m=agg.avg("v"))
    found = _one(processor, _values(type_, *values))[0]["m"]
    context = decimal.Context(prec=90, rounding=decimal.ROUND_HALF_UP)
    exact = context.divide(sum(values, decimal.Decimal(0)), decimal.Decimal(len(values)))
    scale = min(38, type_.scale + 4)
    assert found == exact.quantize(decimal.Decimal(1).scaleb(-scale), context=context)


def test_nan_and_zeros_are_treated_as_in_spark() -> None:
    processor = _processor(pa.float32(), lo=agg.min("v"), hi=agg.max("v"), s=agg.sum("v"), m=agg.avg("v"))
    (row,) = _one(processor, _values(pa.float32(), math.nan, 1.0, -0.0, 0.0))
    assert (row["lo"], math.copysign(1, row["lo"])) == (0.0, -1.0)
    assert all(math.isnan(row[name]) for name in ("hi", "s", "m"))
    (row,) = _one(processor, _values(pa.float32(), math.nan, None))
    assert math.isnan(row["lo"])
    (row,) = _one(processor, _values(pa.float32(), None))
    assert [row[name] for name in ("lo", "hi", "s", "m")] == [None] * 4


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (pa.bool_(), [True, False]),
        (pa.int8(), [-3, 5]),
        (pa.string(), ["b", "ab"]),
        (pa.binary(), [b"\xff", b"\x00"]),
        (pa.large_string(), ["b", "ab"]),
        (pa.decimal128(4, 1), [decimal.Decimal("1.5"), decimal.Decimal("-2")]),
        (pa.date32(), [3, 1]),
        (pa.timestamp("us"), [3, 1]),
        (pa.timestamp("ms", "UTC"), [3, 1]),
    ],
    ids=lambda value: str(value) if isinstance(value, pa.DataType) else "",
)
def test_min_max_and_latest_support_every_type(type_: pa.DataType, values: list[Any]) -> None:
    processor = _processor(type_, lo=agg.min("v"), hi=agg.max("v"), new=agg.last("v"))
    one, other = (pa.array([value], type_)[0].as_py() for value in values)
    stream = Stream(processor)
    batch = _values(type_, *values)
    assert stream.run([[batch.slice(0, 1)]]) == [{"k": 1, "lo": one, "hi": one, "new": one}]
    expected = {"k": 1, "lo": min(one, other), "hi": max(one, other), "new": other}
    assert stream.run([[batch.slice(1, 1)]]) == [expected]
    assert _one(processor, batch) == [expected]


def test_the_newest_row_counts_even_if_its_value_is_null() -> None:
    processor = AggregateProcessor(SCHEMA, ["k"], {"s": agg.last("s", by="ts"), "any": agg.last("s")})
    base = dict.fromkeys(SCHEMA.names)

    def row(ts: int | None, s: str | None) -> Row:
        return {**base, "k": "a", "ts": ts, "s": s}

    stream = Stream(processor)
    assert stream.run([[batch_of([row(None, "x")])]]) == [{"k": "a", "s": None, "any": "x"}]
    assert stream.run([[batch_of([row(5, "y"), row(3, "z")])]]) == [{"k": "a", "s": "y", "any": "z"}]
    assert stream.run([[batch_of([row(5, "tie")])]])[0]["s"] == "tie"
    assert stream.run([[batch_of([row(4, "old")])]])[0]["s"] == "tie"
    assert stream.run([[batch_of([row(6, None)])]])[0]["s"] is None


def test_latest_can_be_ordered_by_floats_strings_and_decimals() -> None:
    by = ("f", "s", "d")
    processor = AggregateProcessor(SCHEMA, ["k"], {"new": agg.last("seq", by=by)})
    some = [
        {**dict.fromkeys(SCHEMA.names), "k": "a", "seq": number, "f": f, "s": s, "d": decimal.Decimal(d)}
        for number, (f, s, d) in enumerate(
            [(1.0, "b", 1), (1.0, "a", 9), (-2.0, "z", 9), (1.0, "b", 2), (1.0, "b", 0)]
        )
    ]
    assert aggregated(agg.last("seq", by=by), some) == 3
    for order in (some, some[::-1]):
        stream = Stream(processor)
        assert [stream.run([[batch_of([row])]]) for row in order][-1] == [{"k": "a", "new": 3}]
        assert _one(processor, batch_of(order)) == [{"k": "a", "new": 3}]


def test_rows_may_have_more_columns_another_order_and_other_integer_types() -> None:
    processor = _processor(pa.int32(), s=agg.sum("v"))
    table = pa.table({"x": ["?"], "v": pa.array([7], pa.int64()), "k": pa.array([1], pa.int16())})
    assert _one(processor, *table.to_batches()) == [{"k": 1, "s": 7}]
    with pytest.raises(InvalidSchemaError, match="'v' is missing from the rows"):
        _one(processor, pa.RecordBatch.from_pydict({"k": [1]}))
    with pytest.raises(InvalidSchemaError, match="column 'v' has type string; expected int32"):
        _one(processor, pa.RecordBatch.from_pydict({"k": [1], "v": ["x"]}))


def test_an_aggregate_of_an_unsupported_type_is_refused_at_once() -> None:
    schema = pa.schema(
        [("k", pa.int64()), ("s", pa.string()), ("l", pa.list_(pa.int64())), ("n__count", pa.int64())]
    )

    def refused(match: str, **options: Any) -> None:
        with pytest.raises(InvalidSchemaError, match=match):
            AggregateProcessor(
                schema, options.pop("keys", ["k"]), options.pop("of", {"n": agg.count()}), **options
            )

    refused(r"'x' \(sum\) reads column 's' of type string; expected an integer", of={"x": agg.sum("s")})
    refused(r"\(avg\) reads column 's'", of={"x": agg.avg("s")})
    refused(r"'x' \(min\) reads column 'l' of type list<", of={"x": agg.min("l")})
    refused(r"'x' \(last\) reads column 'l' of type list<", of={"x": agg.last("s", by="l")})
    refused(r"'x' \(max\) reads column 'y', which the rows do not have", of={"x": agg.max("y")})
    refused("key column 'y'", keys=["y"])
    refused("no grouping column", keys=[])
    refused("no aggregate", of={})
    refused("two columns named 'k'", of={"k": agg.count()})
    refused("event-time column 'y' is not among", window=tumbling("1s", on="y"))
    refused("event-time column 's' has type string", window=tumbling("1s", on="s"))
    assert no_time_column("tss", ["category", "ts"]).fix == "use 'ts'."
    assert no_time_column("when", ["id", "x"]).fix == "use one of the columns id, x."
    with pytest.raises(InvalidSchemaError, match="same names as those of partial rows"):
        AggregateProcessor(
            pa.schema([("k", pa.int64()), ("n__count", pa.int64())]), ["k"], {"n": agg.count()}
        )
    with pytest.raises(
        InvalidOptionError,
        match="emit is 'on_close'; expected on_update or changes, because there is no window",
    ):
        AggregateProcessor(schema, ["k"], {"n": agg.count()}, emit="on_close")


def test_a_processor_is_pickled_without_its_compiled_parts() -> None:
    copy = pickle.loads(pickle.dumps(PROCESSOR))
    assert set(vars(copy)) == {
        "_schema",
        "_keys",
        "_aggregates",
        "_window",
        "_emit",
        "_removed",
        "_limit_ms",
        "_max_values",
    }
    assert copy.description == PROCESSOR.description
    assert copy.output == PROCESSOR.output


def test_the_description_covers_everything_the_state_depends_on() -> None:
    def described(keys: list[str], **aggregates: Any) -> bytes:
        return AggregateProcessor(SCHEMA, keys, aggregates).description.to_json()

    assert described(["k"], n=agg.count()) == described(["k"], n=agg.count())
    others = [
        described(["k"], n=agg.count()),
        described(["k", "i"], n=agg.count()),
        described(["k"], n=agg.count("i")),
        described(["k"], m=agg.count()),
        described(["k"], n=agg.sum("i")),
        described(["k"], n=agg.last("i", by="ts")),
        described(["k"], n=agg.last("i", by=("ts", "seq"))),
    ]
    assert len(set(others)) == len(others)


def test_the_store_contains_a_description_of_its_state() -> None:
    state = ModelState()
    context = BatchContext(0, 0, 1, True, 0)
    list(PROCESSOR.process(iter([]), state, context))
    assert state.rows == {META_KEY: PROCESSOR.description.to_json()}
    description = Description.from_json(state.rows[META_KEY])
    assert (description.kind, description.key.names) == ("aggregate", KEYS)
    assert context.seen_event_time_ms is None


def test_partial_results_of_many_batches_and_groups_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka_eos_source.state.vector.processor.PARTIAL_ROWS", 8)
    monkeypatch.setattr("kafka_eos_source.state.vector.arrays.CHUNK_ROWS", 3)
    monkeypatch.setattr("kafka_eos_source.state.vector.arrays.OUTPUT_ROWS", 4)
    processor = AggregateProcessor(pa.schema([("k", pa.int64())]), ["k"], {"n": agg.count()})
    batches = [pa.RecordBatch.from_pydict({"k": [number % 10, 10 + number % 3]}) for number in range(60)]
    parts = list(processor.partial(batches))
    assert len(parts) > 1
    expected = dict.fromkeys(range(10), 6) | {10: 20, 11: 20, 12: 20}
    for some in (batches, parts):
        out = list(processor.process(iter(some), ModelState(), BatchContext(0, 0, 1, True, 0)))
        assert max(batch.num_rows for batch in out) == 4
        assert {row["k"]: row["n"] for batch in out for row in batch.to_pylist()} == expected


def test_a_kind_of_a_later_version_is_not_taken_for_another_one() -> None:
    schema = pa.schema([("x", pa.float64())])
    with pytest.raises(StateFormatError, match=r"'product'.*does not know"):
        accumulator("a", Aggregate("product", ("x",)), schema)
