"""Spark's `TwsTester` and kafka-eos yield the same outputs and state for the same processors and inputs."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from tests.state.processor.processor_shard import Shard, runner
from tests.state.processor.scripted_processor import INPUT, KEY, OPS, OUTPUT, Scripted

tws_tester = pytest.importorskip("pyspark.sql.streaming.tws_tester", reason="PySpark 4.2 or newer")

_STEP_MS = 10
_DELAY_MS = 5
_KEYS = ["a", "b", "key", "key2"]
_ROWS = st.lists(
    st.tuples(st.sampled_from(_KEYS), st.sampled_from(OPS), st.integers(1, 4), st.integers(0, 3)), max_size=25
)


def _at(time_ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(time_ms / 1000, dt.timezone.utc)


class _Both:
    """A shard and a tester that receive the same input."""

    def __init__(self, time_mode: str) -> None:
        event = time_mode == "EventTime"
        clock = "getCurrentWatermarkInMs" if event else "getCurrentProcessingTimeInMs"
        options = {"event_time": "at", "delay_ms": _DELAY_MS} if event else {}
        made = runner(
            Scripted(clock=clock), key=KEY, columns=INPUT, output=OUTPUT, time_mode=time_mode, **options
        )
        self.shard = Shard(made, INPUT)
        self.tester = tws_tester.TwsTester(
            Scripted(clock=clock),
            timeMode=time_mode,
            eventTimeExtractor=(lambda row: round(row.at.timestamp() * 1000)) if event else None,
        )
        self.event = event

    def step(self, now_ms: int, rows: list[tuple[str, str, int, int]], ages_ms: list[int]) -> None:
        if self.event:
            self.shard.event_time_ms = now_ms + _DELAY_MS
            fired = self.tester.setWatermark(now_ms)
        else:
            fired = self.tester.setProcessingTime(now_ms)
        # The tester fires timers when its clock moves; here a batch without rows does that.
        assert sorted(self.shard.batch(time_ms=now_ms)) == sorted(tuple(row) for row in fired)
        full = [(*row, _at(now_ms + age)) for row, age in zip(rows, ages_ms, strict=True)]
        expected: list[tuple[Any, ...]] = []
        for key in _KEYS:
            mine = [Row(key=r[0], op=r[1], a=r[2], b=r[3], at=r[4]) for r in full if r[0] == key]
            expected += [tuple(row) for row in self.tester.test(key, mine)]
        if self.event:
            self.shard.event_time_ms = now_ms + _DELAY_MS
        found = self.shard.batch(full, time_ms=now_ms, parts=2)
        assert sorted(found, key=lambda row: row[0]) == expected

    def compare_state(self) -> None:
        held = {name: self.shard.values(name) for name in "vlm"}
        for key in _KEYS:
            assert held["v"].get((key,)) == self.tester.peekValueState("v", key)
            assert held["l"].get((key,), []) == self.tester.peekListState("l", key)
            assert held["m"].get((key,), {}) == self.tester.peekMapState("m", key)
            timers = [
                e.expiry_ms for e in self.shard.entries() if e.variable == "$timers" and e.key == (key,)
            ]
            self.tester.handle.setGroupingKey(key)
            assert timers == list(self.tester.handle.listTimers())


@settings(max_examples=60)
@given(st.sampled_from(["ProcessingTime", "EventTime"]), st.lists(_ROWS, min_size=1, max_size=5), st.data())
def test_outputs_and_state_equal_those_of_sparks_tester(
    time_mode: str, batches: list[Any], data: st.DataObject
) -> None:
    both = _Both(time_mode)
    for number, rows in enumerate(batches):
        ages = st.lists(st.integers(-3, 3), min_size=len(rows), max_size=len(rows))
        both.step((number + 1) * _STEP_MS, rows, data.draw(ages))
        both.compare_state()


class _Totals(StatefulProcessor):
    """A processor for ``transformWithStateInPandas``: a running count and sum with an initial state."""

    def init(self, handle: Any) -> None:
        self.totals = handle.getValueState("totals", "rows LONG, total LONG")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        count, total = self.totals.get() or (0, 0)
        for frame in rows:
            assert list(frame.index) == list(range(len(frame)))
            count, total = count + len(frame), total + frame["n"].sum()
            frame["n"] = -1  # a processor may modify its input
        self.totals.update((count, total))
        yield pd.DataFrame({"total": [total], "rows": [count], "key": key[0]})

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: Any) -> None:
        self.totals.update((int(initialState["rows"].iloc[0]), int(initialState["total"].iloc[0])))


_PANDAS_INPUT = "key STRING, n LONG"


@settings(max_examples=25)
@given(
    st.dictionaries(st.sampled_from(_KEYS), st.tuples(st.integers(0, 9), st.integers(0, 9))),
    st.lists(
        st.lists(st.tuples(st.sampled_from(_KEYS), st.integers(-9, 9)), max_size=12), min_size=1, max_size=3
    ),
)
def test_pandas_results_and_initial_state_equal_those_of_sparks_tester(
    initial: dict[str, tuple[int, int]], batches: list[Any]
) -> None:
    seeds = [
        pd.DataFrame({"key": [key], "rows": [row[0]], "total": [row[1]]}) for key, row in initial.items()
    ]
    tester = tws_tester.TwsTester(_Totals(), initialStatePandas=list(zip(initial, seeds, strict=True)))
    made = runner(
        _Totals(),
        key="key STRING",
        columns=_PANDAS_INPUT,
        output="key STRING, rows LONG, total LONG",
        rows="pandas",
        initial=lambda context: (pa.RecordBatch.from_pandas(seed) for seed in seeds),
    )
    shard = Shard(made, _PANDAS_INPUT)
    for rows in batches:
        expected = []
        for key in dict.fromkeys(row[0] for row in rows):
            frame = pd.DataFrame([row for row in rows if row[0] == key], columns=["key", "n"])
            out = tester.testInPandas(key, frame)[["key", "rows", "total"]]
            expected += [tuple(row) for row in out.itertuples(index=False)]
        assert shard.batch(rows, parts=2) == expected
        for key in _KEYS:
            assert shard.values("totals").get((key,)) == tester.peekValueState("totals", key)
