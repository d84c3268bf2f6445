"""A user's function gets rows with the state of their keys; the state of every processor can be read back."""

from __future__ import annotations

import pickle
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings

from kafka_eos_source.errors import InvalidSchemaError, StateMismatchError
from kafka_eos_source.state import KeyedBatch, session, tumbling
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.vector.deduplicate import DeduplicateProcessor
from kafka_eos_source.state.vector.function import FunctionProcessor
from kafka_eos_source.state.vector.processor import AggregateProcessor, decode_entries
from tests import ROOT
from tests.state.store.model_state import ModelState
from tests.state.vector.vector_model import (
    AGGREGATES,
    SCHEMA,
    Row,
    Stream,
    batch_of,
    key_of,
    results,
    rows,
    same,
    split,
)

STATE = pa.schema([pa.field("rows", pa.int64(), nullable=False), pa.field("longest", pa.string())])
OUTPUT = pa.schema([("k", pa.string()), ("rows", pa.int64()), ("longest", pa.string())])


def longest(batch: KeyedBatch) -> tuple[pa.RecordBatch, pa.StructArray]:
    """Counts a key's rows and keeps its longest string; drops the state if a batch has an "a"."""
    number = batch.key_of_row.to_numpy()
    count_, text = batch.state.field("rows").fill_null(0), batch.state.field("longest")
    total = pc.add(count_, pa.array(np.bincount(number, minlength=len(batch.keys))))
    best = [value.as_py() for value in text]
    forgotten = [False] * len(best)
    for key, value in zip(number, batch.rows.column("s").to_pylist(), strict=True):
        if value is not None and (best[key] is None or len(value) > len(best[key])):
            best[key] = value
        forgotten[key] |= value == "a"
    columns = [total, pa.array(best, pa.string())]
    out = pa.RecordBatch.from_arrays([batch.keys.column("k"), *columns], schema=OUTPUT)
    return out, pa.StructArray.from_arrays(columns, fields=list(STATE), mask=pa.array(forgotten))


PROCESSOR = FunctionProcessor(SCHEMA, ["k"], longest, output=OUTPUT, state=STATE, event_time="ts")


@settings(max_examples=25)
@given(rows(), st.data())
def test_state_is_passed_from_one_call_to_the_next(some: list[Row], data: st.DataObject) -> None:
    stream = Stream(PROCESSOR)
    state: dict[Any, tuple[int, str | None]] = {}
    for batch in split(data.draw, some):
        expected = {}
        for key in dict.fromkeys(row["k"] for row in batch):
            own = [row["s"] for row in batch if row["k"] == key]
            count_, best = state.pop(key, (0, None))
            best = max([best, *own], key=lambda text: -1 if text is None else len(text))
            expected[key] = (count_ + len(own), best)
            if "a" not in own:
                state[key] = expected[key]
        found = stream.run([[batch_of(batch)]])
        assert {row["k"]: (row["rows"], row["longest"]) for row in found} == expected
        assert len(stream.states[0].rows) == 1 + len(state)
    read = decode_entries(PROCESSOR.description, stream.states[0].range())["state"].to_pylist()
    assert {row["k"]: (row["rows"], row["longest"]) for row in read} == state
    assert stream.event_time_ms == max((row["ts"] for row in some if row["ts"] is not None), default=None)


def test_a_function_called_twice_for_a_key_sees_its_state_and_unchanged_state_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kafka_eos_source.state.vector.arrays.CHUNK_ROWS", 2)
    schema = pa.schema([("k", pa.int64())])
    calls: list[Any] = []

    def function(batch: KeyedBatch) -> tuple[None, pa.StructArray]:
        calls.append((batch.keys.to_pydict(), batch.state.to_pylist(), batch.event_time_ms, batch.time_ms))
        return None, pa.StructArray.from_arrays([pa.array([7] * len(batch.keys))], names=["v"])

    processor = FunctionProcessor(
        schema, ["k"], function, output=schema, state=pa.schema([("v", pa.int64())])
    )
    state = ModelState()
    puts: list[int] = []
    put_many = state.put_many
    state.put_many = lambda keys, values: (puts.append(len(keys)), put_many(keys, values))[1]  # type: ignore[method-assign]
    batches = [pa.RecordBatch.from_pydict({"k": [key]}, schema=schema) for key in (1, 2, 1, 3)]
    assert list(processor.process(iter(batches), state, BatchContext(4, 0, 1, False, 99, 55))) == []
    assert calls == [
        ({"k": [1, 2]}, [None, None], 55, 99),
        ({"k": [1, 3]}, [{"v": 7}, None], 55, 99),
    ]
    assert puts == [2, 1]


def test_the_result_of_a_function_is_checked() -> None:
    def processor(result: Any) -> FunctionProcessor:
        state = pa.schema([pa.field("v", pa.int64(), nullable=False)])
        return FunctionProcessor(SCHEMA, ["k"], lambda batch: result, output=OUTPUT, state=state)

    good = pa.StructArray.from_arrays([pa.array([1])], names=["v"])
    batch = batch_of([{**dict.fromkeys(SCHEMA.names), "k": "a"}])

    def fails(match: str, result: Any) -> None:
        with pytest.raises(InvalidSchemaError, match=match):
            Stream(processor(result)).run([[batch]])

    fails("the function returned 2 states for 1 keys", (None, pa.concat_arrays([good, good])))
    fails("the function returned list for 1 keys", (None, [{"v": 1}]))
    fails("'v' is missing", (None, pa.StructArray.from_arrays([pa.array([1])], names=["w"])))
    fails(
        "'v', which is declared not nullable", (None, pa.array([{"v": None}], pa.struct([("v", pa.int64())])))
    )
    fails("'rows' is missing", (pa.RecordBatch.from_pydict({"k": ["a"]}), good))
    table = pa.table({"longest": ["x"], "rows": [1], "k": ["a"]})
    assert Stream(processor((table, pa.chunked_array([good])))).run([[batch]]) == [
        {"k": "a", "rows": 1, "longest": "x"}
    ]


def test_invalid_columns_are_refused_and_the_description_has_the_version() -> None:
    def declared(**options: Any) -> FunctionProcessor:
        return FunctionProcessor(SCHEMA, ["k"], longest, **{"output": OUTPUT, "state": STATE, **options})

    assert pickle.loads(pickle.dumps(PROCESSOR)).description == declared().description
    assert declared(version="2").description != PROCESSOR.description
    with pytest.raises(InvalidSchemaError, match="the state has no columns"):
        declared(state=pa.schema([]))
    with pytest.raises(InvalidSchemaError, match=r"'l' is list<.*which state cannot hold"):
        declared(state=pa.schema([("l", pa.list_(pa.int64()))]))
    with pytest.raises(InvalidSchemaError, match="event-time column 'x' is not among"):
        declared(event_time="x")


# ------------------------------------------------------------------ reading the state


def _read(state: ModelState) -> dict[str, pa.Table]:
    description = Description.from_json(state.rows[META_KEY])
    found = decode_entries(description, state.range())
    assert list(found) == [table.name for _, table in sorted(description.tables.items())]
    return found


@settings(max_examples=15)
@given(rows())
def test_aggregates_can_be_read_from_their_store(some: list[Row]) -> None:
    stream = Stream(AggregateProcessor(SCHEMA, ["k", "j"], AGGREGATES))
    stream.run([[batch_of(some)]])
    found = {
        key_of(row, ["k", "j"]): tuple(same(row[name]) for name in AGGREGATES)
        for row in _read(stream.states[0])["aggregates"].to_pylist()
    }
    keys = {key_of(row, ["k", "j"]) for row in some}
    assert found == {key: results([row for row in some if key_of(row, ["k", "j"]) == key]) for key in keys}


@pytest.mark.parametrize(
    "window", [None, tumbling("5s", on="ts", grace="1h"), session("5s", on="ts", grace="1h")]
)
@pytest.mark.parametrize("emit", ["on_update", "on_close"])
@settings(max_examples=8)
@given(some=rows(most=8))
def test_windows_can_be_read_from_their_store(window: Any, emit: str, some: list[Row]) -> None:
    if window is None and emit == "on_close":
        emit = "on_update"
    update = Stream(AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=window))
    stored = Stream(AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=window, emit=emit))
    emitted = [row for row in update.run([[batch_of(some)]]) if not row.pop("removed", False)]
    stored.run([[batch_of(some)]])
    name = "aggregates" if window is None else "sessions" if "Session" in repr(window) else "windows"
    tables = _read(stored.states[0])
    assert sorted(map(repr, tables[name].to_pylist())) == sorted(map(repr, emitted))
    if name == "sessions":
        assert {row["k"] for row in tables["due"].to_pylist()} == {row["k"] for row in emitted}


def test_keys_of_a_deduplication_can_be_read_from_their_store() -> None:
    some = [{**dict.fromkeys(SCHEMA.names), "k": key, "ts": 1000} for key in ("a", "b")]
    stream = Stream(DeduplicateProcessor(SCHEMA, ["k"]))
    stream.run([[batch_of(some)]])
    assert _read(stream.states[0])["keys"].to_pydict() == {"k": ["a", "b"]}
    stream = Stream(DeduplicateProcessor(SCHEMA, ["k"], within="5s", on="ts"))
    stream.run([[batch_of(some)]])
    tables = _read(stream.states[0])
    assert tables["keys"].to_pydict() == {"k": ["a", "b"], "passed_ms": [1000] * 2, "due_ms": [6000] * 2}
    assert tables["due"].to_pydict() == {"k": ["a", "b"], "due_ms": [6000] * 2}


def test_an_entry_that_contradicts_the_description_is_an_error() -> None:
    description = AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}).description
    with pytest.raises(
        StateMismatchError, match="entries of table 0x03, which its description does not list"
    ):
        decode_entries(description, [(layout.keyed(3, b"a"), b"\x01")])
    for value, why in (
        (b"\x02" + bytes(8), r"a value has version 2, but the store's description lists the versions \[1\]"),
        (b"\x01", "'aggregates' do not match the store's description.*expected 9 or more"),
    ):
        with pytest.raises(StateMismatchError, match=why):
            decode_entries(description, [(layout.keyed(2, b"a"), value)])
    with pytest.raises(StateMismatchError, match="kind 'stateful-processor' wrote the state"):
        decode_entries(Description("stateful-processor", pa.schema([("k", pa.string())]), {}), [])


def test_the_function_in_the_documentation_works() -> None:
    page = (ROOT / "docs" / "aggregates.md").read_text()
    (block,) = [part for part in page.split("```python\n") if "\ndef exceeding" in part]
    names: dict[str, Any] = {}
    exec(compile(block.split("```")[0], "docs/aggregates.md", "exec"), names)
    schema = pa.schema([("sensor", pa.string()), ("value", pa.float64())])
    state = pa.schema([("number", pa.int64()), ("total", pa.float64())])
    stream = Stream(FunctionProcessor(schema, ["sensor"], names["exceeding"], output=schema, state=state))

    def run(*values: float) -> list[float]:
        rows_ = pa.RecordBatch.from_pydict({"sensor": ["a"] * len(values), "value": values}, schema=schema)
        return [row["value"] for row in stream.run([[rows_]])]

    assert [run(1.0, 100.0), run(2.0, 152.0), run(200.0)] == [[], [152.0], [200.0]]
