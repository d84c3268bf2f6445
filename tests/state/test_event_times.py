"""Event times in the far future neither close windows nor make other rows late, and are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings

from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.shard_rows import record_event_times
from kafka_eos_source.state.vector import (
    AggregateProcessor,
    DeduplicateProcessor,
    FunctionProcessor,
    count,
    hopping,
    session,
    tumbling,
)
from tests.state.vector.vector_model import (
    BASE,
    SCHEMA,
    Row,
    Stream,
    batch_of,
    inputs,
    key_of,
    ms,
    row_at,
    rows,
    sharded,
    split,
)

YEAR_2262 = 9_214_646_400_000
LIMIT_MS = BASE + 3_600_000


def _window(kind: str) -> Any:
    if kind == "session":
        return session("3s", on="ts", grace="2s")
    every = {"tumbling": "4s", "hopping": "1s"}[kind]
    return hopping("4s", every=every, on="ts", grace="2s")


@settings(max_examples=25)
@given(
    rows(),
    st.lists(st.integers(0, 23), min_size=1, max_size=4),
    st.sampled_from(["tumbling", "hopping", "session"]),
    st.sampled_from(["on_update", "changes", "on_close"]),
    st.data(),
)
def test_rows_from_the_far_future_change_nothing_for_the_others(
    some: list[Row], positions: list[int], kind: str, emit: str, data: st.DataObject
) -> None:
    """With and without such rows, every batch emits the same results of all other windows."""
    shards = data.draw(st.integers(1, 2))
    wrong = [{**row_at("a", 0), "ts": YEAR_2262 + at, "wrong": True} for at in positions]
    with_wrong = list(some)
    for row, at in zip(wrong, positions, strict=True):
        with_wrong.insert(min(at, len(with_wrong)), row)
    streams = [
        Stream(
            AggregateProcessor(SCHEMA, ["k"], {"n": count()}, window=_window(kind), emit=emit),
            shards,
            event_time_limit_ms=LIMIT_MS,
        )
        for _ in range(2)
    ]
    for batch in split(data.draw, with_wrong):
        right = [row for row in batch if not row.get("wrong")]
        found = []
        for stream, own in zip(streams, (right, batch), strict=True):
            emitted = stream.run(inputs(data.draw, stream.processor, sharded(own, ["k"], shards)))
            found.append(
                sorted(
                    (repr(key_of(row, ["k"])), ms(row["window_start"]), ms(row["window_end"]), row["n"] or 0,
                     row.get("removed", False))
                    for row in emitted
                    if ms(row["window_end"]) < LIMIT_MS
                )
            )  # fmt: skip
        assert found[0] == found[1]
        assert streams[0].event_time_ms == streams[1].event_time_ms
    assert streams[1].metrics.pop("future_rows") == len(wrong)
    assert streams[1].metrics == streams[0].metrics


def test_without_the_limit_one_record_closes_every_window() -> None:
    """Shows what the limit prevents."""
    window = tumbling("5s", on="ts")
    for limit_ms, late in ((None, 1), (LIMIT_MS, 0)):
        processor = AggregateProcessor(SCHEMA, ["k"], {"n": count()}, window=window)
        stream = Stream(processor, event_time_limit_ms=limit_ms)
        stream.run([[batch_of([row_at("a", 0), {**row_at("a", 0), "ts": YEAR_2262}])]])
        stream.run([[batch_of([row_at("a", 1)])]])
        assert stream.metrics.get("late_rows", 0) == late


def test_the_last_event_time_within_the_limit_counts() -> None:
    context = BatchContext(0, 0, 1, True, 0, event_time_limit_ms=100)

    def seen(*times: int) -> tuple[int | None, int]:
        record_event_times(context, pa.array(times, pa.int64()).to_numpy())
        return context.seen_event_time_ms, context.metrics.get("future_rows", 0)

    assert seen() == (None, 0)
    assert seen(101) == (None, 1)
    assert seen(99, 102, 103) == (99, 3)
    assert seen(100) == (100, 3)
    assert seen(5) == (100, 3)


def test_a_window_that_begins_within_the_limit_advances_the_watermark_to_the_limit() -> None:
    processor = AggregateProcessor(SCHEMA, ["k"], {"n": count()}, window=tumbling("1h", on="ts"))
    stream = Stream(processor, event_time_limit_ms=BASE)
    stream.run([[batch_of([row_at("a", 1)])]])
    assert (stream.event_time_ms, stream.metrics) == (BASE, {})


@pytest.mark.parametrize("kind", ["deduplicate", "function"])
def test_other_operators_ignore_such_times_too(kind: str) -> None:
    def function(batch: Any) -> Any:
        return batch.rows, pa.StructArray.from_arrays(
            [pa.array([1] * batch.keys.num_rows, pa.int64())], names=["n"]
        )

    processors: dict[str, Callable[[], Any]] = {
        "deduplicate": lambda: DeduplicateProcessor(SCHEMA, ["k"], within="1s", on="ts"),
        "function": lambda: FunctionProcessor(
            SCHEMA, ["k"], function, output=SCHEMA, state=pa.schema([("n", pa.int64())]), event_time="ts"
        ),
    }
    stream = Stream(processors[kind](), event_time_limit_ms=LIMIT_MS)
    stream.run([[batch_of([row_at("a", 1), {**row_at("b", 0), "ts": YEAR_2262}])]])
    assert (stream.event_time_ms, stream.metrics) == (BASE + 1, {"future_rows": 1})
    assert len(stream.run([[batch_of([row_at("c", 1)])]])) == 1, "the row is not late"


@pytest.mark.parametrize("emit", ["on_update", "changes"])
def test_results_are_held_back_before_any_event_time_counts(emit: str) -> None:
    """The first batch of a shard has only times of the far future, which its watermark ignores."""
    processor = AggregateProcessor(
        SCHEMA, ["k"], {"n": count()}, window=_window("tumbling"), emit=emit, at_most_every="10s"
    )
    stream = Stream(processor, 1, event_time_limit_ms=LIMIT_MS)
    wrong = [{**row_at("a", 0), "ts": YEAR_2262}]
    for some in (wrong, [row_at("b", 0)], [row_at("b", 30)]):
        stream.run([[batch_of(some)]])
    assert stream.metrics["future_rows"] == 1
