"""Rows that are divided by key are processed as if they all fitted into memory; event times in the future."""

from __future__ import annotations

import errno
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import hopping, session, shard_rows, tumbling
from kafka_eos_source.state.encoding.layout import shards_of
from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.shard_rows import RowsByKey, record_event_times
from kafka_eos_source.state.vector import processor
from kafka_eos_source.state.vector.deduplicate import DeduplicateProcessor
from kafka_eos_source.state.vector.function import FunctionProcessor
from kafka_eos_source.state.vector.processor import AggregateProcessor
from tests.state.processor.processor_shard import Shard
from tests.state.processor.scripted_processor import INPUT, ops, results, scripted
from tests.state.store.model_state import ModelState
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

KEYS = st.one_of(st.none(), st.sampled_from([f"k{n}" for n in range(30)]))
BATCHES = st.lists(st.lists(KEYS, max_size=8), max_size=12)


def batches_of(keys: list[list[str | None]]) -> list[pa.RecordBatch]:
    numbers = iter(range(10_000))
    return [
        pa.record_batch({"key": pa.array(some, pa.string()), "number": [next(numbers) for _ in some]})
        for some in keys
    ]


@given(BATCHES, st.integers(1, 40))
def test_each_key_is_in_one_part_in_order_of_arrival(keys: list[list[str | None]], most: int) -> None:
    given_batches = batches_of(keys)
    with mock.patch.object(shard_rows, "MOST_ROWS", most), RowsByKey(["key"]) as rows:
        for batch in given_batches:
            rows.add(batch)
        parts = [pa.Table.from_batches(part).to_pylist() for part in rows.parts()]
    assert all(parts)
    owner = Counter(key for part in parts for key in {row["key"] for row in part})
    assert set(owner.values()) <= {1}
    wanted = [row for batch in given_batches for row in batch.to_pylist()]
    found = list(chain.from_iterable(parts))
    assert sorted(found, key=lambda row: row["number"]) == wanted
    for key in owner:
        own = [row["number"] for row in found if row["key"] == key]
        assert own == sorted(own)


@pytest.mark.parametrize("shards", [1, 61, 2 * 61])
def test_many_keys_are_divided_although_they_belong_to_one_shard(shards: int) -> None:
    keys = pa.array([f"key{n}" for n in range(2000 * shards)])
    own = keys.filter(pa.array(shards_of([keys], shards) == 0)).to_pylist()[:1500]
    assert len(own) == 1500
    with mock.patch.object(shard_rows, "MOST_BYTES", 1000), RowsByKey(["key"]) as rows:
        for start in range(0, 1500, 100):
            rows.add(batches_of([own[start : start + 100]])[0])
        assert rows.divided
        sizes = [sum(batch.num_rows for batch in part) for part in rows.parts()]
    assert len(sizes) > 25
    assert max(sizes) < 100


def test_a_part_that_is_too_large_is_divided_again_but_not_for_a_key_with_most_rows() -> None:
    others = [f"key{n}" for n in range(2000)]
    with mock.patch.object(shard_rows, "MOST_ROWS", 10), RowsByKey(["key"]) as rows:
        for start in range(0, 2000, 100):
            rows.add(batches_of([others[start : start + 100]])[0])
        rows.add(batches_of([["hot"] * 500])[0])
        sizes = sorted(sum(batch.num_rows for batch in part) for part in rows.parts())
    assert sum(sizes) == 2500
    assert sizes[-1] >= 500
    assert sizes[-2] <= 20


def test_rows_that_change_many_entries_are_divided_in_memory() -> None:
    with (
        mock.patch.object(shard_rows, "MOST_ROWS", 100),
        mock.patch.object(tempfile, "TemporaryFile", side_effect=AssertionError),
        RowsByKey(["key"], entries_per_row=60) as rows,
    ):
        for start in range(0, 90, 10):
            rows.add(batches_of([[f"key{n}" for n in range(start, start + 10)]])[0])
        assert rows.divided
        parts = [[key for batch in part for key in batch["key"].to_pylist()] for part in rows.parts()]
    assert len(parts) > 9
    assert sorted(chain(*parts)) == sorted(f"key{n}" for n in range(90))


def aggregated(keys: list[list[list[str]]], most: int) -> list[list[dict[str, Any]]]:
    """Runs micro-batches with at most this many rows in memory; returns the output of each."""
    schema = pa.schema([("key", pa.string()), ("number", pa.int64())])
    counted = AggregateProcessor(schema, ["key"], {"rows": agg.count(), "total": agg.sum("number")})
    state, emitted = ModelState(), []
    with mock.patch.multiple(shard_rows, MOST_ROWS=most), mock.patch.multiple(processor, KEYED_ROWS=most):
        for number, some in enumerate(keys):
            context = BatchContext(number, 0, 1, number == 0, 0)
            found = [
                row
                for batch in counted.process(iter(batches_of(some)), state, context)  # type: ignore[arg-type]
                for row in batch.to_pylist()
            ]
            emitted.append(sorted(found, key=lambda row: str(row["key"])))
    return emitted


@settings(max_examples=30)
@given(st.lists(BATCHES, max_size=3), st.integers(1, 9))
def test_a_divided_batch_emits_each_key_once_with_the_same_result(keys: Any, most: int) -> None:
    assert aggregated(keys, most) == aggregated(keys, 1 << 20)


def test_a_processor_gets_all_rows_of_a_key_in_one_call() -> None:
    steps = [ops(f"k{n % 40}", f"l.append {n}", "l.get") for n in range(80)]
    flat = [row for some in steps for row in some]

    def run(most: int) -> list[str]:
        shard = Shard(scripted(), INPUT, ModelState())
        with mock.patch.object(shard_rows, "MOST_ROWS", most):
            return sorted(results(shard.batch(flat, 100, parts=10)))

    assert run(3) == run(1 << 20)


def test_a_full_temporary_folder_is_named() -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    one, other = batches_of([["a"], ["b"]])
    with (
        mock.patch.object(shard_rows, "MOST_ROWS", 1),
        mock.patch.object(tempfile, "TemporaryFile", full),
        RowsByKey(["key"]) as rows,
    ):
        rows.add(one)
        with pytest.raises(UnavailableError, match="temporary folder"):
            rows.add(other)


# ---------------------------------------- event times in the far future
#
# They neither close windows nor make other rows late, and are counted.


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
            AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=_window(kind), emit=emit),
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
        processor = AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=window)
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
    processor = AggregateProcessor(SCHEMA, ["k"], {"n": agg.count()}, window=tumbling("1h", on="ts"))
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
        SCHEMA, ["k"], {"n": agg.count()}, window=_window("tumbling"), emit=emit, at_most_every="10s"
    )
    stream = Stream(processor, 1, event_time_limit_ms=LIMIT_MS)
    wrong = [{**row_at("a", 0), "ts": YEAR_2262}]
    for some in (wrong, [row_at("b", 0)], [row_at("b", 30)]):
        stream.run([[batch_of(some)]])
    assert stream.metrics["future_rows"] == 1
