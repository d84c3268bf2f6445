"""Aggregates that keep many values of a group, or a sketch of them: limits, errors of estimates, types."""

from __future__ import annotations

import datetime as dt
import math
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kafka_eos_source.errors import AggregateLimitError, InvalidOptionError, InvalidSchemaError
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import session, tumbling
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding.binary import RowCodec, list_lengths
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.vector.aggregation import Aggregation
from kafka_eos_source.state.vector.processor import AggregateProcessor, decode_entries
from tests.state.vector.vector_model import SCHEMA, Stream, batch_of, row_at


@pytest.mark.parametrize("window", [None, tumbling("1h", on="ts"), session("1h", on="ts")])
@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        (
            agg.count_distinct("i"),
            r"'x' \(count_distinct\) would keep 4 distinct values of one group",
        ),
        (agg.collect_set("i"), r"'x' \(collect_set\) would keep 4 distinct values"),
        (agg.collect_list("s"), r"'x' \(collect_list\) would keep 4 values of one group; expected at most 3"),
    ],
)
def test_a_group_with_more_values_than_the_limit_fails_its_batch(
    aggregate: Aggregate, message: str, window: Any
) -> None:
    def rows(*numbers: int) -> pa.RecordBatch:
        return batch_of([{**row_at("a", number), "i": number, "s": "x"} for number in numbers])

    processor = AggregateProcessor(SCHEMA, ["k"], {"x": aggregate}, window=window, max_values=3)
    stream = Stream(processor)
    stream.run([[rows(1, 2)]])
    stream.run([[rows(3)]])
    before = dict(stream.states[0].rows)
    with pytest.raises(AggregateLimitError, match=message) as caught:
        stream.run([[rows(4)]])
    assert "set state.aggregate.max.values to at least 4" in caught.value.fix
    assert ("approx_count_distinct" in caught.value.fix) == (aggregate.kind == "count_distinct")
    assert stream.states[0].rows == before, "nothing was written"


@pytest.mark.parametrize("window", [None, tumbling("4s", on="ts", grace="1h")])
def test_arrays_are_held_back_replaced_and_decoded(window: Any) -> None:
    """The state then has the arrays twice: as values, and as the result that was emitted last."""
    aggregates = {
        "list": agg.collect_list("i"),
        "set": agg.collect_set("s"),
        "shares": agg.percentile_approx("i", [0.0, 1.0]),
    }
    processor = AggregateProcessor(
        SCHEMA, ["k"], aggregates, window=window, emit="changes", at_most_every="1s"
    )
    stream = Stream(processor)

    def run(time_ms: int, number: int | None) -> list[tuple[bool, Any]]:
        if window is None:
            stream.batch_id = time_ms
        row = {**row_at("a", time_ms), "i": number, "s": None if number is None else "x"}
        found = stream.run([[batch_of([row])]])
        return [(row["removed"], (row["list"], row["set"], row["shares"])) for row in found]

    first, second = ([1], ["x"], [1, 1]), ([1, 2], ["x"], [1, 2])
    assert run(0, 1) == []
    assert run(1500, None) == [(False, first)]
    assert run(1600, 2) == []
    assert run(3000, None) == [(True, first), (False, second)]
    description = Description.from_json(stream.states[0].rows[META_KEY])
    tables = decode_entries(description, stream.states[0].rows.items())
    (row,) = tables["aggregates" if window is None else "windows"].to_pylist()
    assert (row["list"], row["set"], row["shares"]) == second


def test_distinct_values_that_come_again_do_not_count_towards_the_limit() -> None:
    processor = AggregateProcessor(SCHEMA, ["k"], {"x": agg.count_distinct("i")}, max_values=2)
    stream = Stream(processor)
    for _ in range(3):
        rows = [{**row_at("a", 0), "i": number} for number in (1, 2, 1)]
        (found,) = stream.run([[batch_of(rows)]])
        assert found["x"] == 2


def _states(aggregate: Aggregate, parts: list[pa.Array]) -> tuple[Aggregation, list[pa.Array]]:
    """Aggregates parts of one group, and merges each into the state of those before it."""
    aggregation = Aggregation({"x": aggregate}, pa.schema([("v", parts[0].type)]))
    states: list[pa.Array] = []
    for part in parts:
        new = aggregation.aggregate_rows([pa.repeat(pa.scalar(1), len(part))], {"v": part}).states
        states = aggregation.settled(aggregation.combine(states, new) if states else new)
    return aggregation, states


@pytest.mark.parametrize("rsd", [0.3, 0.05, 0.01])
@pytest.mark.parametrize("distinct", [1, 30, 1000, 50_000])
def test_an_estimate_is_within_its_error(rsd: float, distinct: int) -> None:
    """The values are fixed, so the test cannot fail by chance; four standard deviations are allowed."""
    for values in (
        pa.array(np.arange(distinct) * 7919),
        pa.array(np.arange(distinct) / 3),
        pa.array([f"visitor-{number}" for number in range(distinct)]),
    ):
        half = distinct // 2
        aggregation, states = _states(
            agg.approx_count_distinct("v", rsd), [values[: half + 1], values[half:], values[:half], values]
        )
        (found,) = aggregation.finish(states)[0].to_pylist()
        assert abs(found - distinct) <= max(4 * rsd * distinct, 1)
        assert len(states[0][0].as_py()) <= 2 ** math.ceil(2 * math.log2(1.106 / rsd))


def test_a_wider_column_continues_the_estimate_of_a_narrower_one() -> None:
    narrow, wide = pa.array([1, 2, 3], pa.int8()), pa.array([1, 2, 3], pa.int64())
    assert (
        _states(agg.approx_count_distinct("v"), [narrow])[1]
        == _states(agg.approx_count_distinct("v"), [wide])[1]
    )


def _parts(order: str, count: int) -> list[np.ndarray[Any, Any]]:
    draw = np.random.default_rng(1)
    values = {
        "random": draw.permutation(count),
        "ascending": np.arange(count),
        "descending": np.arange(count)[::-1],
        "from both ends": np.stack([np.arange(count // 2), count - 1 - np.arange(count // 2)], 1).reshape(-1),
        "few values": draw.integers(0, 20, count),
        "skewed": np.floor(draw.exponential(count / 20, count)).astype(np.int64),
    }[order]
    cuts = np.sort(draw.integers(0, count, 40))
    return [part for part in np.split(values, cuts) if len(part)]


@pytest.mark.parametrize(
    "order", ["random", "ascending", "descending", "from both ends", "few values", "skewed"]
)
@pytest.mark.parametrize("accuracy", [10, 100, 1000])
def test_the_rank_of_a_percentile_differs_by_at_most_its_share(order: str, accuracy: int) -> None:
    """After merging parts of any size one after another, and after merging them all at once."""
    parts = _parts(order, 20_000)
    everything = np.sort(np.concatenate(parts))
    shares = [0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0]
    aggregate = agg.percentile_approx("v", shares, accuracy)
    aggregation, one_by_one = _states(aggregate, [pa.array(part) for part in parts])
    each = [_states(aggregate, [pa.array(part)])[1] for part in parts]
    together = [pa.concat_arrays(columns) for columns in zip(*each, strict=True)]
    at_once = aggregation.merge_states([pa.repeat(pa.scalar(1), len(parts))], together).states
    for states in (one_by_one, aggregation.settled(at_once)):
        (found,) = aggregation.finish(states)[0].to_pylist()
        for share, value in zip(shares, found, strict=True):
            rank = max(1, math.ceil(share * len(everything)))
            lowest = int(np.searchsorted(everything, value, "left")) + 1
            highest = int(np.searchsorted(everything, value, "right"))
            assert lowest <= highest, "the result is one of the values"
            off = max(0, lowest - rank, rank - highest)
            assert off <= math.ceil(len(everything) / accuracy)
        assert list_lengths(states[0])[0] <= 4 * accuracy + 2, "the state stays small"


def test_percentiles_of_few_distinct_values_are_exact() -> None:
    values = np.random.default_rng(2).integers(0, 100, 50_000)
    aggregation, states = _states(
        agg.percentile_approx("v", [0.1, 0.5, 0.99], accuracy=100),
        [pa.array(part) for part in np.array_split(values, 9)],
    )
    ordered = np.sort(values)
    assert aggregation.finish(states)[0].to_pylist() == [
        [int(ordered[math.ceil(share * len(values)) - 1]) for share in (0.1, 0.5, 0.99)]
    ]


def test_a_variance_keeps_its_digits_beside_a_large_mean() -> None:
    draw = random.Random(3)
    small = [draw.random() for _ in range(3000)]
    large = [pa.array([1e9 + value for value in small[at : at + 100]]) for at in range(0, 3000, 100)]
    aggregation, states = _states(agg.var_samp("v"), large)
    exact = [value.as_py() for part in large for value in part]
    mean = math.fsum(exact) / len(exact)
    wanted = math.fsum((value - mean) ** 2 for value in exact) / (len(exact) - 1)
    assert aggregation.finish(states)[0].to_pylist() == [pytest.approx(wanted, rel=1e-6)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: agg.sum(3), "sum has the argument 3; expected the name of a column"),
        (lambda: agg.last("a", by=[1]), "last has the argument 1"),
        (lambda: agg.count_distinct(), "names no column"),
        (lambda: agg.approx_count_distinct("a", rsd=0.5), "rsd=0.5; expected a number from 0.0022 to 0.39"),
        (lambda: agg.approx_count_distinct("a", rsd=True), "rsd=True"),
        (lambda: agg.percentile_approx("a", 1.5), "percentage=1.5; expected one or more numbers"),
        (lambda: agg.percentile_approx("a", []), r"percentage=\[\]"),
        (lambda: agg.percentile_approx("a", "0.5"), "percentage='0.5'"),
        (lambda: agg.percentile_approx("a", 0.5, accuracy=0), "accuracy=0; expected an integer from 1"),
    ],
)
def test_a_malformed_argument_is_refused_when_the_aggregate_is_declared(wrong: Any, message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        wrong()


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        (agg.stddev("s"), r"\(stddev_samp\) reads column 's' of type string; expected an integer, float"),
        (agg.bool_and("i"), r"\(bool_and\) reads column 'i' of type int32; expected a boolean"),
        (agg.percentile_approx("s", 0.5), r"\(percentile_approx\) reads column 's'.*date or timestamp"),
        (agg.collect_set("nothing"), r"reads column 'nothing', which the rows do not have"),
    ],
)
def test_a_column_of_the_wrong_type_is_refused_when_the_operator_is_declared(
    aggregate: Aggregate, message: str
) -> None:
    with pytest.raises(InvalidSchemaError, match=message):
        AggregateProcessor(SCHEMA, ["k"], {"x": aggregate})


@pytest.mark.parametrize(
    "declared",
    [
        agg.count(),
        agg.last("a", ignore_nulls=True, by=("b", "c")),
        agg.count_distinct("a", "b"),
        agg.percentile_approx("a", (0.5, 0.9), accuracy=7),
        agg.approx_count_distinct("a", rsd=0.1),
    ],
)
def test_a_declaration_survives_as_json(declared: Aggregate) -> None:
    assert Aggregate.from_json(declared.to_json()) == declared


def test_names_of_one_function_declare_the_same_aggregate() -> None:
    assert agg.mean("a") == agg.avg("a")
    assert agg.stddev("a") == agg.stddev_samp("a")
    assert agg.variance("a") == agg.var_samp("a")
    assert agg.count("*") == agg.count()


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (pa.int16(), [[1, -2], [], None, [3]]),
        (pa.string(), [["", "ä"], None, [], ["x"] * 3]),
        (pa.timestamp("us", "UTC"), [[dt.datetime(2024, 1, 2, tzinfo=dt.timezone.utc)], []]),
        (pa.bool_(), [[True, False], None]),
        (pa.float64(), []),
    ],
)
def test_arrays_are_stored_and_read_back(type_: pa.DataType, values: list[Any]) -> None:
    column = pa.array(values, pa.list_(type_))
    codec = RowCodec(pa.schema([("a", column.type), ("n", pa.int64()), ("b", column.type)]), lead=b"\1")
    numbers = pa.array(range(len(values)), pa.int64())
    for skipped in range(min(2, len(values)) + 1):
        columns = [column[skipped:], numbers[skipped:], column[skipped:]]
        assert codec.decode(codec.encode(columns)) == columns


def test_a_damaged_array_is_refused() -> None:
    codec = RowCodec(pa.schema([("a", pa.list_(pa.int64()))]))
    (value,) = codec.encode([pa.array([[1, 2]], pa.list_(pa.int64()))]).to_pylist()
    length = int.from_bytes(value[:4], "big")
    with pytest.raises(ValueError, match="shorter than its rows"):
        codec.decode(pa.array([(length - 8).to_bytes(4, "big") + value[4:-8]], pa.binary()))
