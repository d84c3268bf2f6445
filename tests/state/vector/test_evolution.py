"""A changed vectorised operator continues with its state, or refuses it; it never misreads it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings

from kafka_eos_source.errors import StateMismatchError
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import hopping, session, tumbling
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.vector.deduplicate import DeduplicateProcessor
from kafka_eos_source.state.vector.function import FunctionProcessor, KeyedBatch
from kafka_eos_source.state.vector.processor import AggregateProcessor, decode_entries
from tests.state.state_kit import EFFORT
from tests.state.store.model_state import ModelState
from tests.state.vector.vector_model import BASE, Row, Stream, batch_of, same

TIME = pa.timestamp("us", "UTC")
KEYS = pa.schema([("k", pa.string()), ("ts", TIME)])

#: Types of each input column, from the narrowest to the widest.
TYPES: dict[str, list[pa.DataType]] = {
    "tiny": [pa.int8(), pa.int32(), pa.int64()],
    "real": [pa.float32(), pa.float64()],
    "money": [pa.decimal128(9, 2), pa.decimal128(12, 2), pa.decimal128(20, 2)],
    "text": [pa.string()],
}
POOL: list[Aggregate] = [
    *(of(column) for column in ("tiny", "real", "money") for of in (agg.sum, agg.avg, agg.min, agg.max)),
    agg.count("tiny"),
    agg.min("text"),
    agg.max("text"),
]
WINDOWS: dict[str, dict[str, Any]] = {
    "none": {},
    "tumbling": {"window": tumbling("4s", on="ts", grace="2s")},
    "hopping, on close": {"window": hopping("4s", every="2s", on="ts"), "emit": "on_close"},
    "session": {"window": session("2s", on="ts", grace="3s")},
    "session, on close": {"window": session("2s", on="ts"), "emit": "on_close"},
}


@dataclass(frozen=True)
class Declared:
    """An aggregate of the changing query, and the column of the reference that holds what it saw.

    Attributes:
        name: name of its result.
        aggregate: its declaration.
        seen: name of its own column in the reference.
    """

    name: str
    aggregate: Aggregate
    seen: str


@dataclass
class Query:
    """A query that changes between its batches.

    The reference never changes: it computes every aggregate that the query ever had, from columns of their
    own, which are null in the rows of the batches in which the query did not have the aggregate.
    """

    draw: Any
    #: Position in `TYPES` of each column.
    widths: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TYPES, 0))
    aggregates: list[Declared] = field(default_factory=list)
    every: list[Declared] = field(default_factory=list)

    def change(self) -> None:
        """Removes aggregates, or adds some, or renames one; reorders them; widens columns."""
        kind = self.draw(st.sampled_from(["add", "remove", "rename", "none", "widen"]))
        if kind == "add" or not self.aggregates:
            for aggregate in self.draw(st.lists(st.sampled_from(POOL), min_size=1, max_size=3)):
                used = {each.name for each in self.aggregates}
                name = next(f"x{n}" for n in range(99) if f"x{n}" not in used)
                self.aggregates.append(Declared(name, aggregate, f"seen{len(self.every)}"))
                self.every.append(self.aggregates[-1])
        elif kind == "remove":
            gone = self.draw(st.sets(st.integers(0, len(self.aggregates) - 1)))
            self.aggregates = [each for n, each in enumerate(self.aggregates) if n not in gone]
        elif kind == "rename":
            at = self.draw(st.integers(0, len(self.aggregates) - 1))
            name = f"renamed{len(self.every)}{self.draw(st.integers(0, 9))}"
            if all(each.name != name for each in self.aggregates):
                self.aggregates[at] = replace(self.aggregates[at], name=name)
        elif kind == "widen":
            for column, types in TYPES.items():
                self.widths[column] = self.draw(st.integers(self.widths[column], len(types) - 1))
        self.aggregates = self.draw(st.permutations(self.aggregates))

    def schema(self) -> pa.Schema:
        return pa.schema([*KEYS, *((name, types[self.widths[name]]) for name, types in TYPES.items())])

    def processor(self, **options: Any) -> AggregateProcessor:
        declared = {"n": agg.count(), **{each.name: each.aggregate for each in self.aggregates}}
        return AggregateProcessor(self.schema(), ["k"], declared, **options)

    def reference(self, **options: Any) -> AggregateProcessor:
        """Returns a processor of all aggregates that the query had, over columns of the widest types."""
        columns = [(each.seen, TYPES[each.aggregate.inputs[0]][-1]) for each in self.every]
        declared = {f"of_{each.seen}": Aggregate(each.aggregate.kind, (each.seen,)) for each in self.every}
        return AggregateProcessor(
            pa.schema([*KEYS, *columns]), ["k"], {"n": agg.count(), **declared}, **options
        )


def some_rows() -> st.SearchStrategy[list[Row]]:
    small = st.none() | st.integers(-8, 8)
    row = st.fixed_dictionaries(
        {
            "k": st.sampled_from(["a", "b", None]),
            "ts": st.integers(0, 20).map(lambda second: BASE + 1000 * second),
            "tiny": small,
            "real": small.map(lambda n: None if n is None else n / 4),
            "money": small,
            "text": st.none() | st.sampled_from(["", "a", "ż"]),
        }
    )
    return st.lists(row, max_size=6)


@settings(max_examples=20 * EFFORT, deadline=None)
@pytest.mark.parametrize("window", WINDOWS)
@given(st.data())
def test_a_query_that_changes_between_its_batches_continues_with_the_state(
    window: str, data: st.DataObject
) -> None:
    """Each aggregate reflects exactly the rows since it was added, whatever else changed meanwhile."""
    query = Query(data.draw)
    stream = Stream(None)
    history: list[tuple[list[Row], list[Declared]]] = []
    for _ in range(data.draw(st.integers(2, 5))):
        query.change()
        rows = data.draw(some_rows())
        history.append((rows, list(query.aggregates)))
        stream.processor = query.processor(**WINDOWS[window])
        batch = batch_of(rows, query.schema())
        if data.draw(st.booleans()):
            emitted = stream.run([list(stream.processor.partial([batch]))])
        else:
            emitted = stream.run([[batch]])
        assert told(emitted, {each.name: each.name for each in query.aggregates}) == told(
            expected(query, history, **WINDOWS[window]),
            {each.name: f"of_{each.seen}" for each in query.aggregates},
        )
    state = stream.states[0]
    pairs = [(key, value) for key, value in state.rows.items() if key != META_KEY]
    description = Description.from_json(state.rows[META_KEY])
    decoded = decode_entries(description, pairs)  # as other processes read the state
    assert set(decoded) == {table.name for table in description.tables.values()}


def expected(query: Query, history: list[tuple[list[Row], list[Declared]]], **options: Any) -> list[Row]:
    """Returns what the reference emits in the last batch."""
    reference = query.reference(**options)
    columns = [each.seen for each in query.every]
    widest = pa.schema([*KEYS, *((e.seen, TYPES[e.aggregate.inputs[0]][-1]) for e in query.every)])
    stream = Stream(reference)
    emitted: list[Row] = []
    for rows, declared in history:
        seen = {each.seen: each.aggregate.inputs[0] for each in declared}
        shown = [
            {**row, **{name: row[seen[name]] if name in seen else None for name in columns}} for row in rows
        ]
        emitted = stream.run([[batch_of(shown, widest)]])
    return emitted


def told(emitted: list[Row], names: Mapping[str, str]) -> list[Any]:
    """Returns rows in comparable form: key, window, count, and the named results."""
    fixed = ("k", "window_start", "window_end", "removed", "n")
    return sorted(
        repr(
            [
                *(same(row[name]) for name in fixed if name in row),
                *(number(row[name]) for _, name in sorted(names.items())),
            ]
        )
        for row in emitted
    )


def number(value: Any) -> Any:
    """Returns a result without its type, because the reference computes with wider types."""
    return value if value is None or isinstance(value, str) else round(float(value), 2)


# ------------------------------------------------------------------ refusals

SCHEMA = pa.schema(
    [
        *KEYS,
        ("j", pa.string()),
        ("a", pa.int32()),
        ("b", pa.int32()),
        ("f", pa.float64()),
        ("d", pa.decimal128(9, 2)),
        ("late", TIME),
    ]
)
BEFORE: dict[str, Any] = {"n": agg.count(), "total": agg.sum("a"), "least": agg.min("a")}


def declared(
    keys: list[str] | None = None,
    aggregates: Mapping[str, Aggregate] | None = None,
    types: Mapping[str, pa.DataType] | None = None,
    **options: Any,
) -> AggregateProcessor:
    schema = pa.schema([(f.name, (types or {}).get(f.name, f.type)) for f in SCHEMA])
    return AggregateProcessor(schema, keys or ["k", "j"], aggregates or BEFORE, **options)


def filled(processor: Any) -> ModelState:
    """Returns the state of a processor that has seen a few rows."""
    stream = Stream(processor)
    row = {"k": "x", "j": "y", "a": 3, "b": 4, "f": 0.5, "d": None, "ts": BASE, "late": BASE}
    stream.run([[batch_of([row, {**row, "k": "z"}], SCHEMA)]])
    return stream.states[0]


def start(processor: Any, state: ModelState) -> list[Row]:
    """Runs a batch without rows, as the first one after a restart."""
    batches: Iterator[pa.RecordBatch] = processor.process(iter([]), state, BatchContext(1, 0, 1, False, 0))
    return [row for batch in batches for row in batch.to_pylist()]


HOUR = tumbling("1h", on="ts")


def totals(of: Aggregate, **options: Any) -> AggregateProcessor:
    return declared(aggregates={"t": of}, **options)


def sessions(gap: str) -> AggregateProcessor:
    return declared(window=session(gap, on="ts"))


ORDINARY, HOURLY, DUPLICATES = declared(), declared(window=HOUR), DeduplicateProcessor(SCHEMA, ["k"])
OTHER_KEY = "columns of the key, their types or their order"


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (ORDINARY, declared(["j", "k"]), "columns of the key have other names"),
        (ORDINARY, declared(["k"]), OTHER_KEY),
        (ORDINARY, declared(["k", "a"]), OTHER_KEY),
        (declared(["a"]), declared(["a"], types={"a": pa.int64()}), OTHER_KEY),
        (totals(agg.sum("a")), totals(agg.sum("b")), r"'t' was sum\(a\).*is now sum\(b\)"),
        (totals(agg.sum("a")), totals(agg.max("a")), r"'t' was sum\(a\).*is now max\(a\)"),
        (
            ORDINARY,
            declared(aggregates={"n": agg.count(), "total": agg.sum("a"), "most": agg.max("a")}),
            "'least' was removed and 'most' added in one change, which looks like a rename",
        ),
        (ORDINARY, declared(types={"a": pa.int16()}), "'least' has type int32, which cannot become int16"),
        (ORDINARY, declared(types={"a": pa.float32()}), "'total' has type int64, which cannot become double"),
        (
            totals(agg.sum("d")),
            totals(agg.sum("d"), types={"d": pa.decimal128(10, 3)}),
            r"decimal128\(19, 2\), which cannot become decimal128\(20, 3\)",
        ),
        (totals(agg.sum("d")), totals(agg.sum("d"), types={"d": pa.float64()}), "which cannot become double"),
        (
            totals(agg.percentile_approx("a", 0.5), emit="changes"),
            totals(agg.percentile_approx("a", 0.9), emit="changes"),
            r"'t' was percentile_approx.*is now percentile_approx",  # it would take back other rows
        ),
        (totals(agg.last("a", by="b")), totals(agg.last("a", by="f")), r"last\(a by b\).*last\(a by f\)"),
        (
            declared(aggregates={"a1": agg.count(), "a2": agg.count(), "t": agg.sum("a")}),
            declared(aggregates={"b1": agg.count(), "b2": agg.count(), "t": agg.sum("a")}),
            "'a1', 'a2' was removed and 'b1', 'b2' added",
        ),
        (ORDINARY, HOURLY, "the tables changed"),
        (HOURLY, ORDINARY, "the tables changed"),
        (
            HOURLY,
            declared(window=tumbling("2h", on="ts")),
            "windows changed.*size_ms=3600000.*size_ms=7200000",
        ),
        (HOURLY, declared(window=hopping("1h", every="30m", on="ts")), "windows changed"),
        (HOURLY, declared(window=tumbling("1h", on="ts", offset="1m")), "windows changed"),
        (HOURLY, declared(window=tumbling("1h", on="late")), "windows changed.*on=ts.*on=late"),
        (sessions("1h"), sessions("2h"), "windows changed.*gap_ms=7200000"),
        (DUPLICATES, DeduplicateProcessor(SCHEMA, ["k"], within="1h", on="ts"), "the tables changed"),
        (DUPLICATES, DeduplicateProcessor(SCHEMA, ["j"]), "other names.*withColumnRenamed"),
        (DUPLICATES, ORDINARY, "operator of kind 'deduplicate', expected 'aggregate'"),
    ],
)
def test_a_change_that_the_state_does_not_fit_is_refused_with_both_declarations(
    before: Any, after: Any, reason: str
) -> None:
    state = filled(before)
    held = dict(state.rows)
    with pytest.raises(StateMismatchError, match=reason) as refused:
        start(after, state)
    assert state.rows == held, "nothing was written"
    if "of kind" not in reason:
        assert "The state holds: key (" in str(refused.value)
        assert "The query declares: key (" in str(refused.value)
    assert refused.value.fix


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ORDINARY, declared(aggregates=dict(reversed(BEFORE.items())))),
        (ORDINARY, declared(types={"a": pa.int64(), "ts": pa.timestamp("us", "Europe/Berlin")})),
        (totals(agg.count("a")), totals(agg.count("a"), types={"a": pa.string()})),
        (totals(agg.avg("a")), totals(agg.avg("a"), types={"a": pa.float64()})),
        (totals(agg.percentile_approx("a", 0.5)), totals(agg.percentile_approx("a", [0.9]))),
        (HOURLY, declared(window=tumbling("1h", on="ts", grace="5m"), emit="on_close")),
        (HOURLY, declared(window=HOUR, types={"ts": pa.timestamp("ms", "UTC")})),
        (
            DeduplicateProcessor(SCHEMA, ["k"], within="1h", on="ts"),
            DeduplicateProcessor(SCHEMA, ["k"], within="2h", on="ts", grace="5s"),
        ),
    ],
)
def test_a_change_that_the_state_does_not_depend_on_is_accepted(before: Any, after: Any) -> None:
    start(after, filled(before))


def test_a_query_that_did_not_change_writes_the_same_bytes_as_before_there_were_versions() -> None:
    processor = declared()
    state = filled(processor)
    assert state.rows[META_KEY] == processor.description.to_json()
    assert b'"version":1' in state.rows[META_KEY]
    assert {value[:1] for key, value in state.rows.items() if key != META_KEY} == {b"\x01"}
    start(pickle.loads(pickle.dumps(processor)), state)
    assert state.rows[META_KEY] == processor.description.to_json()


def test_an_aggregate_that_was_removed_and_added_again_starts_over() -> None:
    """Also for groups that had no row in between, so that all groups mean the same by it."""
    state = filled(declared())
    start(declared(aggregates={"n": agg.count(), "least": agg.min("a")}), state)
    processor = declared()
    start(processor, state)
    row = {"k": "x", "j": "y", "a": 5, "b": 4, "f": 0.5, "d": None, "ts": BASE, "late": BASE}
    batches = processor.process(iter([batch_of([row], SCHEMA)]), state, BatchContext(2, 0, 1, False, 0))
    assert [batch.to_pylist() for batch in batches] == [
        [{"k": "x", "j": "y", "n": 2, "total": 5, "least": 3}]
    ]


def test_a_value_of_an_unknown_version_is_refused() -> None:
    """As after an older release of this package, which writes a description without versions."""
    wider = declared(aggregates={**BEFORE, "most": agg.max("a")})
    state = filled(declared())
    row = {"k": "x", "j": "y", "a": 5, "b": 4, "f": 0.5, "d": None, "ts": BASE, "late": BASE}
    list(wider.process(iter([batch_of([row], SCHEMA)]), state, BatchContext(1, 0, 1, False, 0)))
    state.rows[META_KEY] = declared().description.to_json()
    with pytest.raises(StateMismatchError, match=r"version 2, but the store's description lists .*\[1\]"):
        list(declared().process(iter([batch_of([row], SCHEMA)]), state, BatchContext(2, 0, 1, False, 0)))
    other = declared(aggregates={**BEFORE, "other": agg.max("b")})
    with pytest.raises(ValueError, match="does not begin with"):  # version 2 again, with another check
        list(other.process(iter([batch_of([row], SCHEMA)]), state, BatchContext(2, 0, 1, False, 0)))


def test_a_store_has_at_most_255_versions() -> None:
    state = filled(declared())
    for number_ in range(254):
        aggregates = {**BEFORE, "most": agg.max("a")} if number_ % 2 == 0 else BEFORE
        start(declared(aggregates=aggregates), state)
    with pytest.raises(StateMismatchError, match="already had 255 versions"):
        start(declared(aggregates={**BEFORE, "most": agg.max("a")}), state)


# ------------------------------------------------------------------ columns of a function's state

OUTPUT = pa.schema([("k", pa.string()), ("seen", pa.string())])


def show_state(batch: KeyedBatch) -> tuple[pa.RecordBatch, pa.StructArray]:
    """Returns the states as text, and one state per key, which stays if there is one."""
    names = [each.name for each in batch.state.type]
    old = batch.state.to_pylist()
    shown = pa.array([str(each) for each in old])
    fresh = [dict.fromkeys(names, 1) if each is None else each for each in old]
    return pa.record_batch([batch.keys["k"], shown], schema=OUTPUT), pa.array(fresh, batch.state.type)


def function(state: Mapping[str, Any], **options: Any) -> FunctionProcessor:
    fields = [column if isinstance(column, pa.Field) else pa.field(n, column) for n, column in state.items()]
    return FunctionProcessor(SCHEMA, ["k"], show_state, output=OUTPUT, state=pa.schema(fields), **options)


def states(processor: FunctionProcessor, state: ModelState, *keys: str) -> list[str]:
    rows = [{**dict.fromkeys(SCHEMA.names), "k": key} for key in keys]
    batches = processor.process(iter([batch_of(rows, SCHEMA)]), state, BatchContext(1, 0, 1, False, 0))
    return sorted(row["seen"] for batch in batches for row in batch.to_pylist())


def test_columns_of_a_function_s_state_are_added_dropped_reordered_and_widened() -> None:
    state = ModelState()
    assert states(function({"n": pa.int32()}), state, "x", "y") == ["None", "None"]
    wider = function({"m": pa.float64(), "n": pa.int64()})
    assert states(wider, state, "x", "z") == ["None", "{'m': None, 'n': 1}"]
    assert states(function({"m": pa.float64()}), state, "x", "y") == ["{'m': None}", "{'m': None}"]
    assert states(function({"m": pa.float64()}), state, "z") == ["{'m': 1.0}"]
    shown = decode_entries(
        Description.from_json(state.rows[META_KEY]),
        [(key, value) for key, value in state.rows.items() if key != META_KEY],
    )["state"]
    assert sorted(shown.to_pylist(), key=str) == [
        {"k": "x", "m": None},
        {"k": "y", "m": None},
        {"k": "z", "m": 1.0},
    ]


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (function({"n": pa.int16()}), "'n' has type int32, which cannot become int16"),
        (function({"n": pa.string()}), "'n' has type int32, which cannot become string"),
        (function({"m": pa.int32()}), "'n' was removed and 'm' added"),
        (function({"n": pa.int32()}, version="2"), "the version of the state changed"),
        (function({"n": pa.field("n", pa.int32(), False)}), "'n' was nullable and no longer is"),
        (
            function({"n": pa.int32(), "m": pa.field("m", pa.int32(), False)}),
            "column 'm' was added and is not nullable",
        ),
    ],
)
def test_other_changes_of_a_function_s_state_are_refused(after: FunctionProcessor, reason: str) -> None:
    state = ModelState()
    states(function({"n": pa.int32()}), state, "x")
    held = dict(state.rows)
    with pytest.raises(StateMismatchError, match=reason):
        states(after, state, "x")
    assert state.rows == held
