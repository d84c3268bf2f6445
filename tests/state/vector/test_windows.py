"""Vectorised event-time windows agree with plain Python, for late rows and for both emit modes."""

from __future__ import annotations

import datetime as dt
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from kafka_eos_source.errors import InvalidOptionError, InvalidRecordError
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import hopping, tumbling
from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.vector.processor import AggregateProcessor
from kafka_eos_source.state.vector.windows import Tumbling, milliseconds, times_ms
from tests.state.vector.vector_model import (
    BASE,
    SCHEMA,
    GroupModel,
    Row,
    Stream,
    as_partials,
    batch_of,
    emitted,
    inputs,
    ms,
    row_at,
    rows,
    sharded,
    split,
    windows,
)

KEYS = ["k"]
SOME = {
    "n": agg.count(),
    "sum": agg.sum("i"),
    "min": agg.min("f"),
    "mean": agg.avg("i"),
    "new": agg.last("s", by=("ts", "seq")),
    "old": agg.first("i", by=("ts", "seq")),
    "deviation": agg.stddev("i"),
    "distinct": agg.count_distinct("s", "b"),
    "set": agg.collect_set("s"),
    "about": agg.approx_count_distinct("i"),
    "median": agg.percentile_approx("d", 0.5),
}


#: Without what depends on the batches: the order of the values in sets, and the rounding of a deviation.
ORDERED = {name: each for name, each in SOME.items() if name not in ("deviation", "distinct", "set")}


@settings(max_examples=25)
@given(rows(), windows(), st.booleans(), st.data())
def test_the_output_of_every_batch_equals_that_of_the_model(
    some: list[Row], window: Tumbling, on_close: bool, data: st.DataObject
) -> None:
    shards = data.draw(st.integers(1, 2))
    emit = "on_close" if on_close else "on_update"
    processor = AggregateProcessor(SCHEMA, KEYS, SOME, window=window, emit=emit)
    stream, model = Stream(processor, shards), GroupModel(window, shards, emit, SOME)
    for batch in split(data.draw, some):
        own = sharded(batch, KEYS, shards)
        assert emitted(stream.run(inputs(data.draw, processor, own)), SOME) == model.run(own)
        assert stream.event_time_ms == model.event_time_ms
        # a closed window leaves nothing in the state except the description, which always exists
        assert [len(state.rows) - 1 for state in stream.states] == [len(windows_) for windows_ in model.open]
    assert stream.rows_left_out() == (model.late, model.no_time)


@settings(max_examples=25)
@given(rows(), windows(grace=False), st.data())
def test_within_grace_the_state_does_not_depend_on_batches(
    some: list[Row], window: Tumbling, data: st.DataObject
) -> None:
    ordered = AggregateProcessor(SCHEMA, KEYS, ORDERED, window=window)
    processor = AggregateProcessor(SCHEMA, KEYS, SOME, window=window)
    whole, parts, results = Stream(ordered), Stream(ordered), Stream(processor)
    whole.run([[batch_of(some)]])
    last: dict[Any, Any] = {}
    for batch in split(data.draw, some):
        tasks = split(data.draw, batch, 3)
        parts.run([as_partials(ordered, tasks)])
        last |= emitted(results.run([as_partials(processor, tasks)]), SOME)
    assert parts.states[0].rows == whole.states[0].rows
    # however often windows were revised, the last results cover all rows
    assert last == GroupModel(window, 1, "on_update", SOME).run([some])


def test_results_are_revised_within_grace_and_final_after_it() -> None:
    """The paper's example: page views per category in windows of five seconds, out of order."""
    window = tumbling("5s", on="ts", grace="10s")
    update = Stream(AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=window))
    close = Stream(AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=window, emit="on_close"))

    def run(*times: int) -> tuple[list[Any], list[Any]]:
        batch = batch_of([row_at("a", time) for time in times])
        return tuple(  # type: ignore[return-value]
            sorted((ms(row["window_start"]) - BASE, row["n"]) for row in stream.run([[batch]]))
            for stream in (update, close)
        )

    assert run(1000, 6000) == ([(0, 1), (5000, 1)], [])
    assert run(4999, 14_999) == ([(0, 2), (10_000, 1)], [])  # out of order, so the window is revised
    assert run(15_000) == ([(15_000, 1)], [(0, 2)])  # the watermark reaches end + grace
    assert run(0, 5000) == ([(5000, 2)], [])  # late for the first window, not for the second
    assert run(40_000) == ([(40_000, 1)], [(5000, 2), (10_000, 1), (15_000, 1)])
    assert update.metrics == close.metrics == {"late_rows": 1}
    assert [len(stream.states[0].rows) for stream in (update, close)] == [2, 2]


def test_a_window_changed_by_the_batch_that_closes_it_is_emitted_once() -> None:
    processor = AggregateProcessor(
        SCHEMA, ["k"], {"n": agg.count()}, window=tumbling("5s", on="ts"), emit="on_close"
    )
    stream = Stream(processor)
    assert stream.run([[batch_of([row_at("a", 1), row_at("b", 2)])]]) == []
    found = stream.run([[batch_of([row_at("a", 3), row_at("a", 5000)])]])
    assert sorted((row["k"], row["n"]) for row in found) == [("a", 2), ("b", 1)]
    assert len(stream.states[0].rows) == 2


def test_the_watermark_follows_the_rows_and_not_their_panes() -> None:
    processor = AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=tumbling("5s", on="ts"))
    for times in ((1, 4000), (4000, 1)):
        stream = Stream(processor)
        stream.run([as_partials(processor, [[row_at("a", time)] for time in times])])
        assert stream.event_time_ms == BASE + 4000


def test_windows_close_in_a_batch_without_rows() -> None:
    processor = AggregateProcessor(
        SCHEMA, ["k"], {"n": agg.count()}, window=tumbling("5s", on="ts"), emit="on_close"
    )
    stream = Stream(processor, 2)
    assert stream.run([[batch_of([row_at("a", 1)])], [batch_of([row_at("b", 9000)])]]) == []
    found = stream.run([[], []])
    assert [(row["k"], row["n"]) for row in found] == [("a", 1)]
    assert stream.run([[], []]) == []
    assert stream.event_time_ms == BASE + 9000


def test_a_window_that_opens_and_closes_in_one_batch_is_not_stored() -> None:
    processor = AggregateProcessor(
        SCHEMA, ["k"], {"n": agg.count()}, window=tumbling("5s", on="ts"), emit="on_close"
    )
    stream = Stream(processor)
    puts = []
    put_many = stream.states[0].put_many
    stream.states[0].put_many = lambda keys, values: (puts.append(len(keys)), put_many(keys, values))[1]  # type: ignore[method-assign]
    found = stream.run([[batch_of([row_at("a", 5000 * number) for number in range(10)])]])
    assert (len(found), puts) == (9, [1])


@pytest.mark.parametrize(
    ("type_", "per_ms"),
    [
        (pa.int64(), 1),
        (pa.timestamp("ms"), 1),
        (pa.timestamp("us", "UTC"), 1000),
        (pa.timestamp("ns", "UTC"), 10**6),
    ],
    ids=str,
)
def test_event_time_may_have_every_timestamp_type(type_: pa.DataType, per_ms: int) -> None:
    schema = pa.schema([("k", pa.string()), ("t", type_)])
    processor = AggregateProcessor(schema, ["k"], {"n": agg.count()}, window=tumbling("1s", on="t"))
    # a time before the epoch, in the last instant of its window: times are rounded down
    times = pa.array([-1, 999 * per_ms + (per_ms - 1)], pa.int64()).cast(type_)
    (out,) = processor.process(
        iter([pa.RecordBatch.from_arrays([pa.array(["a", "a"]), times], schema=schema)]),
        Stream(processor).states[0],
        context := BatchContext(0, 0, 1, True, 0),
    )
    assert out.column("window_start").cast(pa.int64()).to_pylist() == [-1000 * per_ms, 0]
    assert out.column("window_end").cast(pa.int64()).to_pylist() == [0, 1000 * per_ms]
    assert out.schema.field("window_end").type == type_
    assert context.seen_event_time_ms == 999


def test_event_time_may_be_in_seconds() -> None:
    assert times_ms(pa.array([-2, None, 3], pa.timestamp("s")))[0].tolist() == [-2000, 0, 3000]


def test_a_time_outside_the_supported_range_is_named() -> None:
    schema = pa.schema([("k", pa.string()), ("t", pa.int64())])
    processor = AggregateProcessor(schema, ["k"], {"n": agg.count()}, window=tumbling("1s", on="t"))
    for time in (1 << 62, -(1 << 63)):
        batch = pa.RecordBatch.from_pydict({"k": ["a"], "t": [time]})
        with pytest.raises(InvalidRecordError, match=rf"to {time} \(int64\); expected times from"):
            list(processor.partial([batch]))


def test_grace_and_emit_mode_may_change_but_windows_may_not() -> None:
    def described(window: Tumbling | None, emit: str = "on_update") -> bytes:
        processor = AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=window, emit=emit)
        return processor.description.to_json()

    first = described(tumbling("5s", on="ts"))
    assert described(tumbling("5s", on="ts", grace="1h"), "on_close") == first
    others = {described(tumbling("6s", on="ts")), described(hopping("5s", every="1s", on="ts")), first}
    others.add(described(tumbling("5s", on="ts", offset="1s")))
    others.add(described(None))
    assert len(others) == 5


def test_latest_in_a_window_is_ordered_by_event_time() -> None:
    processor = AggregateProcessor(SCHEMA, ["k"], {"s": agg.last("s")}, window=tumbling("5s", on="ts"))
    batches = [batch_of([{**row_at("a", time), "s": value}]) for time, value in ((3, "new"), (1, "old"))]
    stream = Stream(processor)
    assert [stream.run([[batch]])[0]["s"] for batch in batches] == ["new", "new"]


@given(st.integers(-(10**7), 10**7), windows())
def test_no_window_boundary_cuts_a_pane(time: int, window: Tumbling) -> None:
    (pane,) = window.panes(np.array([time])).tolist()
    _, starts = window.starts(np.array([pane]))
    places = GroupModel(window, 1, "on_update", SOME).places({"k": "a", "ts": time})
    assert sorted(starts.tolist()) == sorted(place[1] for place in places)
    assert all(start <= pane and pane + window.pane_ms <= start + window.size_ms for start in starts.tolist())


def test_durations_are_parsed() -> None:
    spans = {"90s": 90_000, "5 minutes": 300_000, "1 hour": 3_600_000, " 250 MS ": 250, "2 days": 172_800_000}
    assert {span: milliseconds("x", span) for span in spans} == spans
    assert milliseconds("x", "1 week") == 604_800_000
    assert milliseconds("x", dt.timedelta(minutes=1)) == 60_000
    for bad in ("", "soon", "5 parsecs", "-1s"):
        with pytest.raises(InvalidOptionError, match="expected a time"):
            milliseconds("x", bad)
    with pytest.raises(InvalidOptionError, match=r"grace is .* expected a time span of 0 ms or more"):
        tumbling("1s", on="t", grace=dt.timedelta(-1))
    with pytest.raises(InvalidOptionError, match="size is '0s'; expected a time span of 1 ms or more"):
        tumbling("0s", on="t")
    with pytest.raises(InvalidOptionError, match="windows of 1000 ms that begin every 2000 ms"):
        hopping("1s", every="2s", on="t")
