"""Columns of state that change: any pair of old and new columns is migrated exactly, or refused."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import StateMismatchError
from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.vector.function import FunctionProcessor, KeyedBatch
from tests.state.processor.processor_shard import custom, with_state
from tests.state.state_kit import EFFORT
from tests.state.store.model_state import ModelState

#: Types of columns, each with its Arrow type and the types to which it may be widened.
TYPES: dict[str, tuple[pa.DataType, set[str]]] = {
    "TINYINT": (pa.int8(), {"SMALLINT", "INT", "BIGINT", "FLOAT", "DOUBLE"}),
    "SMALLINT": (pa.int16(), {"INT", "BIGINT", "FLOAT", "DOUBLE"}),
    "INT": (pa.int32(), {"BIGINT", "DOUBLE"}),
    "BIGINT": (pa.int64(), set()),
    "FLOAT": (pa.float32(), {"DOUBLE"}),
    "DOUBLE": (pa.float64(), set()),
    "STRING": (pa.string(), set()),
    "DECIMAL(9,2)": (pa.decimal128(9, 2), {"DECIMAL(12,2)"}),
    "DECIMAL(12,2)": (pa.decimal128(12, 2), set()),
    "DECIMAL(12,3)": (pa.decimal128(12, 3), set()),
}

Columns = dict[str, str]


def columns() -> st.SearchStrategy[Columns]:
    names = st.sampled_from(["a", "b", "c"])
    drawn = st.dictionaries(names, st.sampled_from(sorted(TYPES)), min_size=1, max_size=3)
    return drawn.flatmap(lambda found: st.permutations(sorted(found.items())).map(dict))


@st.composite
def changes(draw: st.DrawFn) -> tuple[Columns, Columns]:
    """Generates columns before and after a change; half of the changes only widen, add, drop or reorder."""
    old = draw(columns())
    if draw(st.booleans()):
        return old, draw(columns())
    new = {name: draw(st.sampled_from([type_, *sorted(TYPES[type_][1])])) for name, type_ in old.items()}
    if draw(st.booleans()):
        new = {**new, **{name: type_ for name, type_ in draw(columns()).items() if name not in new}}
    elif len(new) > 1:
        new.pop(draw(st.sampled_from(sorted(new))))
    return old, dict(draw(st.permutations(sorted(new.items()))))


def value(draw: st.DrawFn, type_: str) -> Any:
    if type_ == "STRING":
        return draw(st.none() | st.sampled_from(["", "x", "ż"]))
    number = draw(st.none() | st.sampled_from([0, 1, -128, 127]))
    if number is None or "INT" in type_:
        return number
    return Decimal(number) / 4 if "DECIMAL" in type_ else number / 4


def migrated(old: Columns, new: Columns, row: dict[str, Any]) -> dict[str, Any] | None:
    """Returns what the changed query must read; None if it must refuse."""
    if old.keys() - new.keys() and new.keys() - old.keys():
        return None
    if any(
        old[name] != new[name] and new[name] not in TYPES[old[name]][1] for name in old.keys() & new.keys()
    ):
        return None
    return {name: row.get(name) for name in new}


SCHEMA = pa.schema([("k", pa.string())])


def through_function(old: Columns, new: Columns, row: dict[str, Any]) -> Any:
    """Writes the row as the state of a function, and returns what the function of the changed query gets."""
    state = ModelState()
    seen: list[Any] = []

    def run(declared: Columns, wanted: dict[str, Any] | None) -> None:
        schema = pa.schema([(name, TYPES[type_][0]) for name, type_ in declared.items()])

        def function(batch: KeyedBatch) -> tuple[None, pa.StructArray]:
            seen.append(batch.state.to_pylist()[0])
            return None, batch.state if wanted is None else pa.array([wanted], batch.state.type)

        processor = FunctionProcessor(SCHEMA, ["k"], function, output=SCHEMA, state=schema)
        batch = pa.record_batch([pa.array(["x"])], schema=SCHEMA)
        list(processor.process(iter([batch]), state, BatchContext(0, 0, 1, False, 0)))

    run(old, row)
    run(new, None)
    return seen[-1]


def through_processor(old: Columns, new: Columns, row: dict[str, Any]) -> Any:
    """Writes the row to a variable of a `StatefulProcessor`, and returns what the changed one gets."""

    def declare(declared: Columns) -> Any:
        text = ", ".join(f"{name} {type_}" for name, type_ in declared.items())
        return lambda handle: handle.getValueState("v", text)

    def write(processor: Any, _key: Any, _rows: Any, _times: Any) -> Any:
        processor.state.update(tuple(row[name] for name in old))
        return iter([])

    before = custom(declare(old), write)
    before.batch([(1, 1)])
    after = with_state(custom(declare(new)), before.state)
    after.batch()
    ((found,),) = [after.values("v").values()]
    return dict(zip(new, found, strict=True))


@settings(max_examples=40 * EFFORT, deadline=None)
@pytest.mark.parametrize("through", [through_function, through_processor])
@given(changes(), st.data())
def test_a_change_of_columns_is_migrated_exactly_or_refused(
    through: Any, change: tuple[Columns, Columns], data: st.DataObject
) -> None:
    old, new = change
    draw: Any = data.draw
    row = {name: value(draw, type_) for name, type_ in old.items()}
    wanted = migrated(old, new, row)
    if wanted is None:
        with pytest.raises(StateMismatchError):
            through(old, new, row)
    else:
        assert through(old, new, row) == wanted
