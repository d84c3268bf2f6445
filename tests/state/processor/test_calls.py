"""The arguments that a `StatefulProcessor` receives, and the conversion of its results."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row

from kafka_eos_source.errors import (
    InvalidSchemaError,
    StatefulProcessorError,
)
from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.processor import rows
from tests.state.processor.processor_shard import Custom, Shard, custom, nothing, runner
from tests.state.processor.scripted_processor import INPUT, KEY, OUTPUT, Scripted, ops
from tests.state.store.model_state import ModelState


class TestInput:
    def test_a_processor_gets_a_keys_rows_in_order_of_arrival_with_all_columns(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rows, "SLICE_ROWS", 5)  # some keys have more, some windows hold several keys
        calls: list[Any] = []

        def keep(processor: Any, key: Any, rows: Any, times: Any) -> Any:
            calls.append((key, list(rows)))
            return iter([])

        made = runner(Custom(nothing, keep), key="k STRING", columns="n LONG, k STRING", output="n LONG")
        given = [(i, "abcaab"[i % 6] if i % 7 else None) for i in range(50)]
        shard = Shard(made, "n LONG, k STRING")
        batches = [shard.arrow(given[:20]), shard.arrow([]), shard.arrow(given[20:])]
        made.processor._handle_rows = keep
        assert list(made.process(iter(batches), shard.state, BatchContext(0, 0, 1, True, 0))) == []
        assert [key for key, _ in calls] == [(key,) for key in dict.fromkeys(k for _, k in given)]
        for key, found in calls:
            assert found == [Row(n=n, k=k) for n, k in given if (k,) == key]
            assert found[0].n == found[0][0]

    def test_a_processor_need_not_read_its_rows(self) -> None:
        shard = custom(nothing, lambda p, key, rows, times: iter([Row(k=key[0], n=next(rows).n)]))
        assert shard.batch([(1, 5), (2, 6), (1, 7), (2, 8)]) == [(1, 5), (2, 6)]

    def test_keys_may_have_several_columns_and_types(self) -> None:
        columns = "a DATE, b DECIMAL(5, 1), c BOOLEAN, n LONG"
        shard = custom(
            nothing,
            lambda p, key, rows, times: iter([Row(s=str(key), n=sum(row.n for row in rows))]),
            key="c BOOLEAN, a DATE", columns=columns, output="s STRING, n LONG",
        )  # fmt: skip
        day = dt.date(2026, 1, 2)
        out = shard.batch([(day, None, True, 1), (None, None, True, 2), (day, None, True, 3)])
        assert out == [("(True, datetime.date(2026, 1, 2))", 4), ("(True, None)", 2)]

    def test_close_is_called_even_after_an_error(self) -> None:
        closed: list[str] = []
        made = runner(Custom(nothing), key="k LONG", columns="k LONG", output="k LONG")
        made.processor._close = lambda p: closed.append("closed")
        made.processor._handle_rows = lambda *_: 1 / 0
        batch = Shard(made, "k LONG").arrow([(1,)])
        with pytest.raises(ZeroDivisionError):
            list(made.process(iter([batch]), ModelState(), BatchContext(0, 0, 1, True, 0)))
        assert closed == ["closed"]

    def test_the_handle_returns_the_query_info(self) -> None:
        def handle(processor: Any, key: Any, rows: Any, times: Any) -> Any:
            return iter([Row(k=1, n=processor.handle.getQueryInfo().getBatchId())])

        shard = custom(nothing, handle)
        shard.batch()
        assert shard.batch([(1, 1)]) == [(1, 1)]

    def test_a_processor_gets_the_time_values_of_its_mode(self) -> None:
        def handle(processor: Any, key: Any, rows: Any, times: Any) -> Any:
            return iter([Row(k=times.getCurrentProcessingTimeInMs(), n=times.getCurrentWatermarkInMs())])

        assert custom(nothing, handle).batch([(1, 1)], 55) == [(-1, -1)]
        assert custom(nothing, handle, time_mode="ProcessingTime").batch([(1, 1)], 55) == [(55, -1)]
        columns = "k LONG, at TIMESTAMP"
        shard = custom(nothing, handle, time_mode="EventTime", event_time="at", columns=columns)
        assert shard.batch([(1, dt.datetime.fromtimestamp(1, dt.timezone.utc))], 55) == [(55, 0)]
        assert shard.batch([(1, None)], 56) == [(56, 1000)]


class TestInitialState:
    def test_initial_state_is_passed_once_before_the_rows_of_the_first_batch(self) -> None:
        class Seeded(Scripted):
            def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
                self.l.appendValue((initialState.seed,))
                self.handle.registerTimer(initialState.seed)

        seed = pa.RecordBatch.from_pydict({"key": ["a", "b", "a"], "seed": [1, 2, 3]})
        made = runner(
            Seeded(), key=KEY, columns=INPUT, output=OUTPUT, time_mode="ProcessingTime",
            initial=lambda context: iter([seed, seed.slice(0, 0)]),
        )  # fmt: skip
        shard = Shard(made, INPUT)
        out = shard.batch(ops("a", "l.get"), 2)
        assert out[0] == ("a", "l.get", "[(1,), (3,)]")
        assert [row[0] for row in out[1:]] == ["a", "b"]
        assert [row[0] for row in shard.batch(time_ms=3)] == ["a"]
        assert shard.values("l") == {("a",): [(1,), (3,), (1,), (3,)], ("b",): [(2,), (2,)]}


class TestOutput:
    @pytest.mark.parametrize(
        ("result", "expected"),
        [
            ([Row(k=1, n=2)], [(1, 2)]),
            ([Row(n=2, k=1)], [(1, 2)]),
            ([Row(k=1)], [(1, None)]),
            ([Row(k=1, n=2, more=3)], [(1, 2)]),
            ([Row("k", "n")(1, 2), Row("n", "k")(4, 3), (5, 6)], [(1, 2), (3, 4), (5, 6)]),
            ([], []),
        ],
    )
    def test_rows_are_converted_to_the_output_schema(
        self, result: list[Any], expected: list[tuple[Any, ...]]
    ) -> None:
        assert custom(nothing, lambda *_: iter(result)).batch([(1, 1)]) == expected

    def test_nested_rows_are_converted_to_the_output_schema(self) -> None:
        output = "s STRUCT<x: INT, l: ARRAY<STRUCT<y: STRING>>>, m MAP<STRING, INT>"
        result = Row(s=Row(x=1, l=[Row(y="a"), None]), m={"a": 1})
        shard = custom(nothing, lambda *_: iter([result, Row(s=None, m=None)]), output=output)
        assert shard.batch([(1, 1)]) == [({"x": 1, "l": [{"y": "a"}, None]}, [("a", 1)]), (None, None)]

    @pytest.mark.parametrize(
        ("result", "error", "message"),
        [
            (None, StatefulProcessorError, "handleInputRows returned None"),
            ([5], StatefulProcessorError, "returned int 5"),
            ([(1, 2, 3)], StatefulProcessorError, "expected a pyspark.sql.Row"),
            ([Row(k=1, n="x")], InvalidSchemaError, "output column 'n' is int64"),
        ],
    )
    def test_a_result_that_is_not_a_valid_row_is_refused(
        self, result: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            custom(nothing, lambda *_: result).batch([(1, 1)])

    @pytest.mark.parametrize(
        ("frame", "expected"),
        [
            (pd.DataFrame({"n": [2, 3], "k": [1, 1], "x": [0, 0]}), [(1, 2), (1, 3)]),
            (pd.DataFrame([[1, 2]]), [(1, 2)]),
            (pd.DataFrame({"k": [1.0], "n": [None]}), [(1, None)]),
            (pd.DataFrame({"k": [], "n": []}), []),
        ],
    )
    def test_frames_are_converted_to_the_output_schema(
        self, frame: pd.DataFrame, expected: list[tuple[Any, ...]]
    ) -> None:
        assert custom(nothing, lambda *_: iter([frame]), rows="pandas").batch([(1, 1)]) == expected

    @pytest.mark.parametrize(
        ("frame", "message"),
        [
            (pd.DataFrame({"k": [1]}), "a frame without n"),
            (pd.DataFrame([[1]]), "a frame of 1 columns, expected 2"),
            (pd.DataFrame({"k": [1], "n": ["x"]}), "output column 'n' is int64"),
            (Row(k=1, n=1), "returned Row, expected an iterator of pandas.DataFrame"),
        ],
    )
    def test_a_result_that_is_not_a_valid_frame_is_refused(self, frame: Any, message: str) -> None:
        with pytest.raises((InvalidSchemaError, StatefulProcessorError), match=message):
            custom(nothing, lambda *_: iter([frame]), rows="pandas").batch([(1, 1)])

    def test_timestamps_of_frames_are_in_the_sessions_time_zone(self) -> None:
        seen: list[Any] = []

        def copy_time(processor: Any, key: Any, rows: Any, times: Any) -> Any:
            for frame in rows:
                yield frame[["k", "at"]]

        columns = "k LONG, at TIMESTAMP"
        made = runner(
            Custom(nothing, copy_time),
            key="k LONG",
            columns=columns,
            output=columns,
            rows="pandas",
            timezone="Asia/Tokyo",
        )
        at = dt.datetime(2026, 7, 1, 12, tzinfo=dt.timezone.utc)
        batch = Shard(made, columns).arrow([(1, at)])
        tokyo = batch.set_column(1, "at", batch.column(1).cast(pa.timestamp("us", "Asia/Tokyo")))
        seen = list(made.process(iter([tokyo]), ModelState(), BatchContext(0, 0, 1, True, 0)))
        assert seen[0].column(1).to_pylist() == [at]

    def test_output_batches_have_a_bounded_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kafka_eos_source.state.processor.rows.BATCH_ROWS", 10)
        made = runner(
            Custom(nothing, lambda p, key, rows, times: (Row(k=key[0], n=i) for i in range(4))),
            key="k LONG", columns="k LONG, n LONG", output="k LONG, n LONG",
        )  # fmt: skip
        batch = Shard(made, "k LONG, n LONG").arrow([(k, 0) for k in range(10)])
        sizes = [
            b.num_rows for b in made.process(iter([batch]), ModelState(), BatchContext(0, 0, 1, True, 0))
        ]
        assert sizes == [12, 12, 12, 4]
