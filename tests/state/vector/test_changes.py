"""Aggregates emit what they replace, take rows back, and hold results back; plain Python agrees each time."""

from __future__ import annotations

import decimal
from collections import Counter
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, StateError, StateMismatchError
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import hopping, session, tumbling
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding.describe import META_KEY
from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.vector.processor import AggregateProcessor, decode_entries
from kafka_eos_source.state.vector.windows import Tumbling
from tests import ROOT
from tests.state.vector.vector_model import (
    BASE,
    SCHEMA,
    GroupModel,
    Place,
    Row,
    Stream,
    batch_of,
    emitted,
    inputs,
    ms,
    place_of,
    results,
    row_at,
    rows,
    same,
    sharded,
    split,
    windows,
)

KEYS = ["k"]
SIGNED = SCHEMA.append(pa.field("gone", pa.bool_()))
EXACT = {
    "n": agg.count(),
    "n_i": agg.count("i"),
    "sum_i": agg.sum("i"),
    "sum_big": agg.sum("big"),
    "sum_d": agg.sum("d"),
    "mean_i": agg.avg("i"),
    "mean_d": agg.avg("d"),
}


@st.composite
def signed_rows(draw: st.DrawFn) -> list[Row]:
    """Generates rows, some of which take an earlier one back."""
    found: list[Row] = []
    counted: list[Row] = []
    for row in draw(rows()):
        if counted and draw(st.booleans()):
            found.append({**counted.pop(draw(st.integers(0, len(counted) - 1))), "gone": True})
        else:
            found.append({**row, "gone": False})
            counted.append(found[-1])
    return found


def signed_batch(some: list[Row]) -> pa.RecordBatch:
    return batch_of(some, SIGNED)


def run_both(stream: Stream, model: GroupModel, some: list[Row], data: st.DataObject) -> None:
    """Runs the same micro-batches through a processor and the model, and compares every batch."""
    processor = stream.processor
    for batch in split(data.draw, some):
        own = sharded(batch, KEYS, model.shards)
        given_rows = [
            [
                out
                for part in split(data.draw, each, 3)
                for out in (processor.partial([signed_batch(part)]) if combine else [signed_batch(part)])
            ]
            for each in own
            for combine in [data.draw(st.booleans())]
        ]
        assert emitted(stream.run(given_rows), model.aggregates) == model.run(own)
        for state, groups in zip(stream.states, model.open, strict=True):
            held = sum(group.due_ms is not None for group in groups.values())
            assert len(state.rows) == 1 + len(groups) + held
            tables = decode_entries(processor.description, state.rows.items())
            table = tables["aggregates" if model.window is None else "windows"]
            newest = {place_of(row): tuple(same(row[name]) for name in EXACT) for row in table.to_pylist()}
            assert newest == {
                place: results(group.rows, EXACT) for place, group in groups.items() if group.rows
            }


@settings(max_examples=40)
@given(
    signed_rows(),
    st.none() | windows(),
    st.sampled_from(["on_update", "changes", "on_close"]),
    st.none() | st.integers(1, 6),
    st.data(),
)
def test_every_batch_emits_what_the_model_emits(
    some: list[Row], window: Tumbling | None, emit: str, limit: int | None, data: st.DataObject
) -> None:
    """Rows are taken back, windows close, results are held back: each batch equals the model's."""
    if emit == "on_close" and (window is None or limit is not None):
        emit = "changes"
    shards = data.draw(st.integers(1, 2))
    limit_ms = None if limit is None else limit if window is None else limit * 1000
    processor = AggregateProcessor(
        SIGNED,
        KEYS,
        EXACT,
        window=window,
        emit=emit,
        removed="gone",
        at_most_every=None if limit_ms is None else f"{limit_ms}ms",
    )
    model = GroupModel(window, shards, emit, EXACT, limit_ms, marks_removed=True)
    run_both(Stream(processor, shards), model, some, data)


@settings(max_examples=25)
@given(rows(), st.none() | windows() | st.just(session("2s", on="ts", grace="5s")), st.data())
def test_changes_keep_a_table_equal_to_the_newest_results(
    some: list[Row], window: Any, data: st.DataObject
) -> None:
    """Whoever removes the removed rows and adds the others has the result of every key, once."""
    aggregates = {"n": agg.count(), "max": agg.max("f"), "new": agg.last("s", by=("ts", "seq"))}
    streams = [
        Stream(AggregateProcessor(SCHEMA, KEYS, aggregates, window=window, emit=emit))
        for emit in ("changes", "on_update")
    ]
    table: Counter[Any] = Counter()
    newest: dict[Place, Any] = {}
    for batch in split(data.draw, some):
        changes, updates = (stream.run(inputs(data.draw, stream.processor, [batch])) for stream in streams)
        for row in changes:
            entry = (place_of(row), tuple(same(row[name]) for name in aggregates))
            assert not row["removed"] or table[entry] == 1, "only what was emitted is removed"
            table[entry] += -1 if row["removed"] else 1
        for row in updates:
            if row.get("removed"):
                del newest[place_of(row)]
            else:
                newest[place_of(row)] = tuple(same(row[name]) for name in aggregates)
        assert +table == Counter(newest.items())


@settings(max_examples=25)
@given(rows(), windows(), st.none() | st.integers(1, 6), st.data())
def test_a_second_aggregation_of_changes_equals_the_batch_result(
    some: list[Row], window: Tumbling, limit: int | None, data: st.DataObject
) -> None:
    """A histogram of window counts stays exact while late rows revise the windows."""
    held = None if limit is None else f"{limit}s"
    first = Stream(
        AggregateProcessor(
            SCHEMA, KEYS, {"n": agg.count()}, window=window, emit="changes", at_most_every=held
        )
    )
    second = Stream(
        AggregateProcessor(
            first.processor.output, ["n"], {"windows": agg.count(), "rows": agg.sum("n")}, removed="removed"
        )
    )
    histogram: dict[int, Any] = {}
    last: dict[Place, int] = {}
    for batch in split(data.draw, some):
        changes = first.run([[batch_of(batch)]])
        for row in changes:
            if not row["removed"]:
                last[place_of(row)] = row["n"]
        given_rows = [pa.RecordBatch.from_pylist(changes, first.processor.output)]
        if data.draw(st.booleans()):
            given_rows = list(second.processor.partial(given_rows))
        for row in second.run([given_rows]):
            if row["removed"]:
                del histogram[row["n"]]
            else:
                histogram[row["n"]] = (row["windows"], row["rows"])
        assert histogram == {n: (windows_, n * windows_) for n, windows_ in Counter(last.values()).items()}


@settings(max_examples=25)
@given(rows(), windows(), st.data())
def test_a_second_aggregation_may_have_windows_too(
    some: list[Row], window: Tumbling, data: st.DataObject
) -> None:
    """Counts per window become counts per longer window; with enough grace they equal one pass."""
    first = Stream(
        AggregateProcessor(
            SCHEMA, KEYS, {"n": agg.count()}, window=replace(window, grace_ms=10**9), emit="changes"
        )
    )
    longer = tumbling("20s", on="window_start", grace="1h")
    second = Stream(
        AggregateProcessor(
            first.processor.output, ["n"], {"windows": agg.count()}, window=longer, removed="removed"
        )
    )
    table: dict[Any, int] = {}
    for batch in split(data.draw, some):
        changes = first.run([[batch_of(batch)]])
        for row in second.run([[pa.RecordBatch.from_pylist(changes, first.processor.output)]]):
            place = row["n"], ms(row["window_start"])
            if row["removed"]:
                del table[place]
            else:
                table[place] = row["windows"]
    model = GroupModel(window, 1, "on_update", {"n": agg.count()})
    rows_of = Counter(place for row in some for place in model.places(row))
    expected = Counter((n, place[1] // 20_000 * 20_000) for place, n in rows_of.items())
    assert table == expected


def _chain(*, emit: str = "changes", limit: str | None = None, grace: str = "10s") -> Stream:
    window = tumbling("5s", on="ts", grace=grace)
    return Stream(
        AggregateProcessor(SCHEMA, KEYS, {"n": agg.count()}, window=window, emit=emit, at_most_every=limit)
    )


def _run(stream: Stream, *times: int) -> list[tuple[int, int, bool]]:
    found = stream.run([[batch_of([row_at("a", time) for time in times])]])
    told = [(ms(row["window_start"]) - BASE, row["n"], row.get("removed", False)) for row in found]
    return sorted(told, key=lambda each: each[0])  # the sort is stable: the order within a window remains


def test_a_change_removes_what_the_batch_before_emitted_and_a_closed_window_changes_no_more() -> None:
    stream = _chain()
    assert _run(stream, 1, 2, 3) == [(0, 3, False)], "one change, although three rows updated the key"
    assert _run(stream, 4, 4, 6000) == [(0, 3, True), (0, 5, False), (5000, 1, False)]
    assert _run(stream, 4, 15_000) == [(0, 5, True), (0, 6, False), (15_000, 1, False)]
    assert _run(stream, 4) == [], "the window closed with the batch before"
    assert stream.metrics == {"late_rows": 1}
    assert len(stream.states[0].rows) == 3


def test_results_are_held_back_until_the_limit_or_the_close() -> None:
    stream = _chain(limit="4s")
    assert _run(stream, 1000) == []
    assert _run(stream, 2000, 4999) == []
    assert _run(stream, 5000) == [(0, 3, False)], "four seconds after 1000, when the window first changed"
    assert _run(stream, 4000) == []
    assert _run(stream, 9000) == [(0, 3, True), (0, 4, False), (5000, 2, False)]
    assert _run(stream, 4000) == []
    assert _run(stream, 15_000) == [(0, 4, True), (0, 5, False)], "closed with a change that waited"
    # what never changed after it was emitted is not emitted again when it closes
    assert _run(stream, 60_000) == [(15_000, 1, False)]


def test_results_without_windows_are_held_back_in_processing_time() -> None:
    processor = AggregateProcessor(SCHEMA, KEYS, {"n": agg.count()}, at_most_every="3ms")
    stream = Stream(processor)
    found = []
    for number in range(8):  # the processing time of a batch is its number
        batch = batch_of([row_at("a", 1)] if number in (0, 1, 4) else [])
        found += [(number, row["n"]) for row in stream.run([[batch]])]
    assert found == [(3, 2), (7, 3)]


def test_a_shard_requests_a_batch_for_what_it_holds_back() -> None:
    processor = AggregateProcessor(SCHEMA, KEYS, {"n": agg.count()}, at_most_every="3s")
    state = Stream(processor).states[0]

    def due(time_ms: int, *keys: str) -> int | None:
        context = BatchContext(0, 0, 1, False, time_ms)
        list(processor.process(iter([batch_of([row_at(key, 1) for key in keys])]), state, context))
        return context.due_ms

    assert due(1000, "a") == 4000
    assert due(2000, "b") == 4000
    assert due(4500) == 5000
    assert due(5000) is None


def test_taking_back_every_row_removes_the_key() -> None:
    processor = AggregateProcessor(SIGNED, KEYS, {"n": agg.count(), "sum": agg.sum("i")}, removed="gone")
    stream = Stream(processor)

    def run(*some: tuple[int | None, bool]) -> list[Any]:
        found = [{**row_at("a", 1), "i": value, "gone": gone} for value, gone in some]
        return [(row["n"], row["sum"], row["removed"]) for row in stream.run([[signed_batch(found)]])]

    assert run((5, False), (None, False)) == [(2, 5, False)]
    assert run((5, True)) == [(1, None, False)], "the values are gone, and null remains"
    assert run((None, True)) == [(None, None, True)]
    assert list(stream.states[0].rows) == [META_KEY]
    assert run((7, False), (7, True)) == [], "nothing was emitted, so nothing is removed"
    with pytest.raises(StateError, match="took back 1 more rows than it received"):
        run((7, True))


@pytest.mark.parametrize(
    ("aggregate", "why"),
    [
        (agg.max("i"), "is max, which keeps one value"),
        (agg.min("i"), "is min, which keeps one value"),
        (agg.last("i"), "is last, which keeps one value"),
        (agg.sum("f"), "reads column 'f' of type double, whose sums are not exact"),
        (agg.avg("f"), "reads column 'f' of type double, whose sums are not exact"),
    ],
    ids=lambda value: value.kind if isinstance(value, Aggregate) else None,
)
def test_an_aggregate_that_cannot_forget_a_value_is_refused(aggregate: Aggregate, why: str) -> None:
    with pytest.raises(InvalidSchemaError, match=f"aggregate 'x' cannot take rows back: it {why}"):
        AggregateProcessor(SIGNED, KEYS, {"x": aggregate}, removed="gone")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"emit": "changed"}, "emit is 'changed'; expected on_update or changes"),
        (
            {"emit": "on_close", "window": tumbling("1s", on="ts"), "at_most_every": "1s"},
            "emits each window once",
        ),
        ({"window": session("1s", on="ts"), "removed": "gone"}, "a session cannot take rows back"),
        ({"window": session("1s", on="ts"), "at_most_every": "1s"}, "which sessions do not support"),
        ({"at_most_every": "0s"}, "at_most_every is '0s'; expected a time span of 1 ms or more"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        AggregateProcessor(SIGNED, KEYS, {"n": agg.count()}, **arguments)


def test_the_column_of_removed_rows_is_checked() -> None:
    with pytest.raises(InvalidSchemaError, match="removed='lost' is not among the columns"):
        AggregateProcessor(SIGNED, KEYS, {"n": agg.count()}, removed="lost")
    with pytest.raises(InvalidSchemaError, match="names a column of type int32; expected boolean"):
        AggregateProcessor(SIGNED, KEYS, {"n": agg.count()}, removed="i")


def test_the_smallest_integer_can_be_added_but_not_removed() -> None:
    smallest = -(1 << 63)
    processor = AggregateProcessor(SIGNED, KEYS, {"sum": agg.sum("big")}, removed="gone")
    stream = Stream(processor)
    row = {**row_at("a", 1), "big": smallest, "gone": False}
    (found,) = stream.run([[signed_batch([row, {**row, "big": 5}, {**row, "big": 5, "gone": True}])]])
    assert found["sum"] == smallest
    with pytest.raises(StateError, match="is the smallest bigint"):
        stream.run([[signed_batch([{**row, "gone": True}])]])


MODES: list[dict[str, Any]] = [
    {},
    {"emit": "changes"},
    {"at_most_every": "1s"},
    {"emit": "changes", "at_most_every": "1s"},
    {"removed": "gone"},
]


def _processor(aggregates: dict[str, Aggregate], mode: dict[str, Any]) -> AggregateProcessor:
    return AggregateProcessor(SIGNED, KEYS, aggregates, window=tumbling("5s", on="ts", grace="1h"), **mode)


def _signed(stream: Stream, key: str, time: int, value: int) -> list[Row]:
    return stream.run([[signed_batch([{**row_at(key, time), "i": value, "gone": False}])]])


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("other", MODES, ids=str)
def test_what_was_emitted_is_part_of_the_state_so_these_modes_do_not_change(
    mode: dict[str, Any], other: dict[str, Any]
) -> None:
    stream = Stream(_processor({"n": agg.count()}, mode))
    _signed(stream, "a", 1, 5)
    stream.processor = _processor({"n": agg.count()}, other)
    if mode == other:
        _signed(stream, "a", 1, 5)
        return
    with pytest.raises(StateMismatchError, match=r"changed\. The state holds: key"):
        _signed(stream, "a", 1, 5)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "aggregates",
    [
        {"n": agg.count(), "sum": agg.sum("i"), "mean": agg.avg("d")},
        {"n": agg.count(), "total": agg.sum("i")},
        {"sum": agg.sum("i")},
        {"sum": agg.sum("i"), "n": agg.count()},
    ],
    ids=["added", "renamed", "removed", "reordered"],
)
def test_aggregates_may_change_in_every_mode(mode: dict[str, Any], aggregates: dict[str, Aggregate]) -> None:
    """What a group emitted before the change is removed after it, and what was held back is emitted."""
    stream = Stream(_processor({"n": agg.count(), "sum": agg.sum("i")}, mode))
    _signed(stream, "a", 1, 5)
    _signed(stream, "a", 2000, 5)
    stream.processor = _processor(aggregates, mode)
    if "removed" in mode and "mean" in aggregates:
        with pytest.raises(StateMismatchError, match="it would take back rows that it has never received"):
            _signed(stream, "a", 3000, 7)
        return
    found = _signed(stream, "a", 3000, 7) + _signed(stream, "b", 60_000, 1)
    own = [
        (row.get("removed", False), row.get("sum", row.get("total")), row.get("n"))
        for row in found
        if row["k"] == "a"
    ]
    has_n = "n" in aggregates
    expected = [(False, 17, 3 if has_n else None)]
    if mode.get("emit") == "changes":
        expected.insert(0, (True, 10, 2 if has_n else None))
    assert own == expected


def test_the_length_of_the_limit_may_change() -> None:
    stream = Stream(_processor({"n": agg.count()}, {"at_most_every": "1s"}))
    assert _signed(stream, "a", 1, 5) == []
    stream.processor = _processor({"n": agg.count()}, {"at_most_every": "30m"})
    assert [row["k"] for row in _signed(stream, "b", 1500, 5)] == ["a"], "due since the first start"


def test_hopping_windows_take_rows_back() -> None:
    window = hopping("4s", every="2s", on="ts", grace="1h")
    stream = Stream(AggregateProcessor(SIGNED, KEYS, {"sum": agg.sum("d")}, window=window, removed="gone"))
    row = {**row_at("a", 3000), "d": decimal.Decimal("1.5"), "gone": False}

    def run(one: Row) -> list[bool]:
        return [
            each["removed"] for each in stream.run([list(stream.processor.partial([signed_batch([one])]))])
        ]

    assert run(row) == [False, False]
    assert run({**row, "gone": True}) == [True, True]
    assert list(stream.states[0].rows) == [META_KEY]


def test_the_page_about_windows_shows_what_two_steps_emit() -> None:
    """Runs the views of the paper's Fig. 2 through both steps, and compares with `docs/windows.md`."""
    views = [
        [(1, "books"), (2, "music")],
        [(6, "books"), (8, "music")],
        [(4, "books")],
        [(12, "books"), (13, "music")],
        [(3, "music")],
    ]
    schema = pa.schema([("category", pa.string()), ("ms", pa.int64())])
    window = tumbling("5 seconds", on="ms", grace="10 seconds")
    first = Stream(
        AggregateProcessor(schema, ["category"], {"views": agg.count()}, window=window, emit="changes")
    )
    second = Stream(
        AggregateProcessor(first.processor.output, ["views"], {"windows": agg.count()}, removed="removed")
    )
    lines = ["views                    changes                       windows with so many views"]
    for step in views:
        seen = [f"12:00:{second_:02}  {category}" for second_, category in step]
        batch = pa.RecordBatch.from_pylist([{"category": c, "ms": s * 1000} for s, c in step], schema)
        changes = first.run([[batch]])
        told = []
        for row in changes:
            sign, start = "-" if row["removed"] else "+", row["window_start"] // 1000
            told.append(f"{sign} 12:00:{start:02}  {row['category']}  {row['views']}")
        rows_ = second.run([[pa.RecordBatch.from_pylist(changes, first.processor.output)]])
        results_ = sorted(f"{row['views']}: {'none' if row['removed'] else row['windows']}" for row in rows_)
        lines.append("")
        for left, middle, right in zip_longest(seen, told, results_, fillvalue=""):
            lines.append(f"{left:<25}{middle:<30}{right}".rstrip())
    page = (ROOT / "docs" / "windows.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in page, "\n".join(lines)
