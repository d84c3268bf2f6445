"""A changed processor is checked against the state that its older version wrote."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row

from kafka_eos_source.errors import (
    StateMismatchError,
)
from kafka_eos_source.state.encoding.describe import META_KEY, Description
from kafka_eos_source.state.model import StateAccess
from tests.state.processor.processor_shard import check_indexes, custom, nothing, variables_in, with_state
from tests.state.store.model_state import ModelState


class TestChangedProcessors:
    """The declared variables are checked against the stored ones."""

    @staticmethod
    def _declared(init: Any, state: StateAccess, **options: Any) -> list[tuple[Any, ...]]:
        return with_state(custom(init, **options), state).batch([])

    @pytest.mark.parametrize(
        ("init", "message"),
        [
            (lambda h: h.getValueState("w", "n LONG"), "holds state variable 'v', which init"),
            (nothing, "holds state variable 'v', which init"),
            (lambda h: h.getListState("v", "n LONG"), "holds a value state, init.. creates a list state"),
            (lambda h: h.getValueState("v", "n STRING"), "n was bigint and is now string"),
            (lambda h: h.getValueState("v", "n INT"), "n was bigint and is now int"),
            (
                lambda h: h.getValueState("v", "m LONG"),
                "n was dropped and m added, which looks like a rename",
            ),
            (lambda h: h.getValueState("v", "n LONG", 5), "it was not created with a time to live"),
        ],
    )
    def test_an_incompatible_change_of_a_variable_is_refused(self, init: Any, message: str) -> None:
        shard = custom(lambda h: h.getValueState("v", "n LONG"), time_mode="ProcessingTime")
        shard.batch([(1, 1)])
        before = dict(shard.state.rows)  # type: ignore[attr-defined]
        with pytest.raises(StateMismatchError, match=message):
            self._declared(init, shard.state, time_mode="ProcessingTime")
        assert shard.state.rows == before  # type: ignore[attr-defined]

    def test_a_changed_key_or_time_mode_is_refused(self) -> None:
        shard = custom(nothing, time_mode="ProcessingTime")
        shard.batch()
        with pytest.raises(StateMismatchError, match="created with time_mode 'ProcessingTime'"):
            self._declared(nothing, shard.state)
        with pytest.raises(StateMismatchError, match="grouped by k bigint, but the query by k string"):
            self._declared(
                nothing, shard.state, key="k STRING", columns="k STRING", time_mode="ProcessingTime"
            )
        two = custom(nothing, key="a STRING, b STRING", columns="a STRING, b STRING")
        two.batch()
        with pytest.raises(StateMismatchError, match="grouped by a string, b string, but the query by b str"):
            self._declared(nothing, two.state, key="b STRING, a STRING", columns="a STRING, b STRING")
        maps = custom(lambda h: h.getMapState("m", "a LONG", "n LONG"))
        maps.batch()
        with pytest.raises(
            StateMismatchError, match="keys were struct<a:bigint> and are now struct<a:string>"
        ):
            self._declared(lambda h: h.getMapState("m", "a STRING", "n LONG"), maps.state)

    def test_the_store_of_another_kind_of_processor_is_refused(self) -> None:
        state = ModelState()
        state.put(META_KEY, Description("aggregate", pa.schema([("k", pa.int64())]), {}).to_json())
        with pytest.raises(StateMismatchError, match="holds the state of an operator of kind 'aggregate'"):
            self._declared(nothing, state)

    def test_variables_may_be_added_and_deleted(self, state: StateAccess) -> None:
        def both(handle: Any) -> Any:
            return [handle.getMapState("m", "k LONG", "n LONG", 90), handle.getListState("l", "n LONG", 90)]

        def fill(processor: Any, key: Any, rows: Any, times: Any) -> Any:
            maps, lists = processor.state
            maps.updateValue((1,), (2,))
            lists.appendValue((3,))
            return iter([])

        shard = with_state(custom(both, fill, time_mode="ProcessingTime"), state)
        shard.batch([(1, 1)], 100)

        def only_list(handle: Any) -> Any:
            handle.deleteIfExists("m")
            handle.deleteIfExists("never seen")
            return [handle.getValueState("new", "n LONG"), handle.getListState("l", "n LONG", 90)]

        less = with_state(custom(only_list, time_mode="ProcessingTime"), state)
        less.batch((), 101)
        assert [(v.name, v.kind) for v in variables_in(state)] == [("new", "value"), ("l", "list")]
        assert [entry.variable for entry in less.entries()] == ["l"]
        check_indexes(less)
        less.batch((), 200)
        assert less.entries() == []

    def test_values_of_an_older_schema_are_read(self, state: StateAccess) -> None:
        written = {
            "n INT, f FLOAT": (1, 0.5),
            "f DOUBLE, n INT": (1.5, 2),
            "n LONG, s STRING, f DOUBLE": (3, "x", 2.5),
        }
        for number, (schema, row) in enumerate(written.items()):
            shard = with_state(
                custom(
                    lambda h, schema=schema: h.getValueState("v", schema),
                    lambda p, key, rows, times, row=row: p.state.update(row) or iter([]),
                ),
                state,
            )
            shard.batch([(number, 0)])
            assert len(variables_in(state)[0].schemas) == number + 1
        assert shard.values("v") == {(0,): (1, None, 0.5), (1,): (2, None, 1.5), (2,): (3, "x", 2.5)}
        narrower = with_state(custom(lambda h: h.getValueState("v", "n INT, s STRING, f DOUBLE")), state)
        with pytest.raises(StateMismatchError, match="n was bigint and is now int"):
            narrower.batch([])

    def test_values_of_an_older_schema_become_rows_of_the_newest(self) -> None:
        state = ModelState()
        for number, (schema, row) in enumerate([("n INT", (1,)), ("s STRING, n LONG", ("x", 1 << 40))]):
            with_state(
                custom(
                    lambda h, schema=schema: h.getMapState("m", "k LONG", schema),
                    lambda p, key, rows, times, row=row: p.state.updateValue((key[0],), row) or iter([]),
                ),
                state,
            ).batch([(number, 0)])
        shard = with_state(
            custom(
                lambda h: h.getMapState("m", "k LONG", "n LONG, s STRING, d DOUBLE"),
                lambda p, key, rows, times: iter([Row(k=key[0], s=str(p.state.getValue(key)))]),
                output="k LONG, s STRING",
            ),
            state,
        )
        assert shard.batch([(0, 0), (1, 0)]) == [
            (0, "Row(n=1, s=None, d=None)"),
            (1, "Row(n=1099511627776, s='x', d=None)"),
        ]
        assert shard.values("m") == {(0,): {(0,): (1, None, None)}, (1,): {(1,): (1 << 40, "x", None)}}
