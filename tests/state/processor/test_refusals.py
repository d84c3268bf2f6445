"""Uses that Spark's handle refuses are refused, and all of Spark's classes are supported."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pyspark.sql import types as t
from pyspark.sql.streaming import stateful_processor

from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidRecordError,
    InvalidSchemaError,
    StatefulProcessorError,
)
from kafka_eos_source.state.processor import handle as ours
from kafka_eos_source.state.processor.variables import ListState, MapState, ValueState
from tests.state.processor.processor_shard import custom, nothing


@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("number", [1, 20_000])
def test_a_time_beyond_pythons_calendar_is_an_error_that_names_the_column(is_key: bool, number: int) -> None:
    """A producer that sets microseconds instead of milliseconds writes records of the year 59,000."""
    columns = "k LONG, at TIMESTAMP"
    shard = custom(nothing, lambda _p, _k, rows, _t: [list(rows), iter([])][1], columns=columns)
    if is_key:
        shard = custom(nothing, columns="at TIMESTAMP, n LONG", key="at TIMESTAMP")
    rows = [(far, far) for far in [1_800_000_000_000_000_000] * number]
    with pytest.raises(
        InvalidRecordError, match=r"column 'at' \(timestamp.*before the operator, filter such rows"
    ):
        shard.batch(rows)


class TestRefusals:
    @pytest.mark.parametrize(
        ("init", "condition"),
        [
            (
                lambda h: [h.getValueState("v", "n LONG"), h.getListState("v", "n LONG")],
                "DUPLICATE_STATE_VARIABLE",
            ),
            (lambda h: h.getValueState("v", "n LONG", 0), "TTL_DURATION_MUST_BE_POSITIVE"),
            (lambda h: h.getValueState("v", "n LONG", -1), "TTL_DURATION_MUST_BE_POSITIVE"),
            (lambda h: h.getListState("v", "n LONG", 1.5), "TTL_DURATION_MUST_BE_POSITIVE"),
            (lambda h: h.registerTimer(5), "INVALID_HANDLE_STATE: register_timer in handle state PRE_INIT"),
            (lambda h: h.deleteTimer(5), "INVALID_HANDLE_STATE: delete_timer"),
            (lambda h: h.listTimers(), "INVALID_HANDLE_STATE: list_timers"),
            (lambda h: h.getValueState("v", "n LONG").get(), "IMPLICIT_KEY_NOT_FOUND"),
            (lambda h: h.getListState("v", "n LONG").exists(), "IMPLICIT_KEY_NOT_FOUND"),
            (lambda h: h.getMapState("v", "n LONG", "n LONG").exists(), "IMPLICIT_KEY_NOT_FOUND"),
        ],
    )
    def test_an_invalid_call_in_init_is_refused_on_the_driver(self, init: Any, condition: str) -> None:
        with pytest.raises(StatefulProcessorError, match=condition):
            custom(init, time_mode="ProcessingTime")

    @pytest.mark.parametrize(
        ("schema", "message"),
        [
            ("n LONK", "is not a type; did you mean LONG"),
            (t.StructType().add("n", t.VariantType()), "cannot hold"),
            (t.LongType(), "expected a StructType"),
        ],
    )
    def test_an_invalid_schema_is_refused_on_the_driver(self, schema: Any, message: str) -> None:
        with pytest.raises(InvalidSchemaError, match=message):
            custom(lambda h: h.getValueState("v", schema))

    def test_a_map_as_key_of_a_map_is_refused(self) -> None:
        with pytest.raises(InvalidSchemaError, match="has no order"):
            custom(lambda h: h.getMapState("v", "m MAP<INT, INT>", "n LONG"))

    @pytest.mark.parametrize("time_mode", ["None", "EventTime"])
    def test_a_time_to_live_is_refused_outside_processing_time_mode(self, time_mode: str) -> None:
        options = {"event_time": "at", "columns": "k LONG, n LONG, at TIMESTAMP"}
        with pytest.raises(StatefulProcessorError, match="INCORRECT_TIME_MODE_TO_ASSIGN_TTL"):
            custom(lambda h: h.getValueState("v", "n LONG", 5), time_mode=time_mode, **options)

    @pytest.mark.parametrize(
        ("call", "condition"),
        [
            (lambda p: p.handle.getValueState("w", "n LONG"), "INVALID_HANDLE_STATE: get_value_state"),
            (lambda p: p.handle.deleteIfExists("v"), "INVALID_HANDLE_STATE: delete_if_exists"),
            (lambda p: p.handle.registerTimer(1), "INVALID_TIME_MODE: register_timer"),
            (lambda p: p.handle.deleteTimer(1), "INVALID_TIME_MODE: delete_timer"),
            (lambda p: p.handle.listTimers(), "INVALID_TIME_MODE: list_timers"),
            (lambda p: p.state[0].update(None), "ILLEGAL_STATE_STORE_VALUE.NULL_VALUE"),
            (lambda p: p.state[0].update(5), "STATE_STORE_VALUE: 5 is not a row of"),
            (lambda p: p.state[0].update((1, 2)), "STATE_STORE_VALUE"),
            (lambda p: p.state[1].put([]), "ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE"),
            (lambda p: p.state[1].put(None), "ILLEGAL_STATE_STORE_VALUE.NULL_VALUE"),
            (lambda p: p.state[1].appendList([]), "ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE"),
            (lambda p: p.state[1].appendList([(1,), None]), "ILLEGAL_STATE_STORE_VALUE.NULL_VALUE"),
            (lambda p: p.state[1].appendValue(None), "ILLEGAL_STATE_STORE_VALUE.NULL_VALUE"),
            (lambda p: p.state[2].updateValue(None, (1,)), "ILLEGAL_STATE_STORE_VALUE.NULL_VALUE"),
            (lambda p: p.state[2].updateValue((1,), None), "ILLEGAL_STATE_STORE_VALUE.NULL_VALUE"),
            (lambda p: p.state[2].getValue(None), "ILLEGAL_STATE_STORE_VALUE.NULL_VALUE"),
        ],
    )
    def test_an_invalid_call_in_a_handler_without_a_time_mode_is_refused(
        self, call: Any, condition: str
    ) -> None:
        def init(handle: Any) -> Any:
            kinds = [handle.getValueState("v", "n LONG"), handle.getListState("l", "n LONG")]
            return [*kinds, handle.getMapState("m", "k LONG", "n LONG")]

        shard = custom(init, lambda p, key, rows, times: call(p))
        with pytest.raises(StatefulProcessorError, match=condition):
            shard.batch([(1, 1)])

    @pytest.mark.parametrize("time", ["5", 1.5, 1 << 63, None])
    def test_a_timer_at_an_invalid_time_is_refused(self, time: Any) -> None:
        shard = custom(nothing, lambda p, *_: p.handle.registerTimer(time), time_mode="ProcessingTime")
        with pytest.raises(StatefulProcessorError, match="expected milliseconds since the epoch"):
            shard.batch([(1, 1)])

    def test_state_and_timers_are_refused_in_close(self) -> None:
        def read(processor: Any) -> None:
            if not processor.asked:
                processor.state.get()

        def register(processor: Any) -> None:
            if not processor.asked:
                processor.handle.registerTimer(1)

        reads = custom(lambda h: h.getValueState("v", "n LONG"), close=read)
        with pytest.raises(StatefulProcessorError, match="IMPLICIT_KEY_NOT_FOUND"):
            reads.batch([(1, 1)])
        sets = custom(nothing, close=register, time_mode="ProcessingTime")
        with pytest.raises(StatefulProcessorError, match="register_timer in handle state TIMER_PROCESSED"):
            sets.batch([(1, 1)])

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"time_mode": "Event"}, InvalidOptionError, "time_mode is 'Event'"),
            ({"rows": "arrow"}, InvalidOptionError, "style is 'arrow'"),
            ({"delay_ms": -1}, InvalidOptionError, "-1 ms"),
            ({"time_mode": "EventTime"}, InvalidOptionError, "event_time does not name a column"),
            ({"event_time": "n"}, InvalidSchemaError, "'n' is int64, expected a timestamp"),
            ({"event_time": "x"}, InvalidSchemaError, "'x' is not among the input columns"),
            ({"key": "x LONG"}, InvalidSchemaError, "'x' of type int64 is not among the input columns"),
            ({"key": "k STRING"}, InvalidSchemaError, "'k' of type string is not among the input columns"),
            ({"key": "k ARRAY<LONG>", "columns": "k ARRAY<LONG>"}, InvalidSchemaError, "k"),
        ],
    )
    def test_an_invalid_option_of_the_operator_is_refused(
        self, options: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            custom(nothing, **options)


@pytest.mark.parametrize(
    ("mine", "sparks"),
    [
        (ValueState, stateful_processor.ValueState),
        (ListState, stateful_processor.ListState),
        (MapState, stateful_processor.MapState),
        (ours.StatefulProcessorHandle, stateful_processor.StatefulProcessorHandle),
    ],
)
def test_every_method_of_sparks_classes_exists_with_its_parameters(mine: type, sparks: type) -> None:
    methods = {
        name: member for name, member in vars(sparks).items() if not name.startswith("_") and callable(member)
    }
    assert methods
    for name, member in methods.items():
        own = inspect.signature(vars(mine)[name])
        spark = inspect.signature(member)
        assert list(own.parameters) == list(spark.parameters)
        assert [p.default for p in own.parameters.values()] == [p.default for p in spark.parameters.values()]
