"""Vectorised deduplication agrees with plain Python and removes expired keys from the state."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, UnavailableError
from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.vector import arrays
from kafka_eos_source.state.vector.deduplicate import DeduplicateProcessor, _passing
from tests.state.store.model_state import ModelState
from tests.state.vector.vector_model import (
    SCHEMA,
    Row,
    Stream,
    batch_of,
    key_of,
    row_at,
    rows,
    sharded,
    split,
)

KEYS = ["k", "j"]


@settings(max_examples=25)
@given(rows(), st.data())
def test_the_first_row_of_each_key_passes_once(some: list[Row], data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 2))
    processor = DeduplicateProcessor(SCHEMA, KEYS)
    stream = Stream(processor, shards)
    seen: set[Any] = set()
    for batch in split(data.draw, some):
        firsts = []
        for shard in sharded(batch, KEYS, shards):
            for row in shard:
                if key_of(row, KEYS) not in seen:
                    seen.add(key_of(row, KEYS))
                    firsts.append(row["seq"])
        assert [row["seq"] for row in stream.run(_inputs(processor, data, batch, shards))] == firsts
    # one entry per key, and the description
    assert sum(len(state.rows) - 1 for state in stream.states) == len(seen)


def _inputs(
    processor: DeduplicateProcessor, data: st.DataObject, batch: list[Row], shards: int
) -> list[list[pa.RecordBatch]]:
    found = []
    for own in sharded(batch, KEYS, shards):
        parts = [batch_of(part) for part in split(data.draw, own, 3)]
        partial = data.draw(st.booleans())
        found.append([out for part in parts for out in processor.partial([part])] if partial else parts)
    return found


@settings(max_examples=25)
@given(rows(), st.integers(1, 20), st.integers(0, 20), st.data())
def test_duplicates_within_a_time_are_dropped(
    some: list[Row], within: int, grace: int, data: st.DataObject
) -> None:
    within, grace = within * 500, grace * 500
    processor = DeduplicateProcessor(SCHEMA, KEYS, within=f"{within}ms", on="ts", grace=f"{grace}ms")
    stream = Stream(processor)
    passed: dict[Any, int] = {}
    event_time: int | None = None
    late = no_time = 0
    for batch in split(data.draw, some):
        partial = data.draw(st.booleans())
        expected = []
        if event_time is not None:  # keys that no later row can duplicate are removed
            passed = {key: time for key, time in passed.items() if time + within > event_time - grace}
        timed = [row for row in batch if row["ts"] is not None]
        own = [row for row in timed if event_time is None or row["ts"] >= event_time - grace]
        late, no_time = late + len(timed) - len(own), no_time + len(batch) - len(timed)
        for row in sorted(own, key=lambda row: (row["ts"], row["seq"])):
            key = key_of(row, KEYS)
            if key not in passed or row["ts"] >= passed[key] + within:
                passed[key] = row["ts"]
                expected.append(row["seq"])
        arrow = batch_of(batch)
        found = stream.run([list(processor.partial([arrow])) if partial else [arrow]])
        assert [row["seq"] for row in found] == sorted(expected)
        event_time = max(
            [row["ts"] for row in timed] + ([] if event_time is None else [event_time]), default=None
        )
        assert stream.event_time_ms == event_time
        # two entries for each remaining key
        assert len(stream.states[0].rows) == 1 + 2 * len(passed)
        if partial:
            late = stream.metrics.get("late_rows", 0)  # late rows are dropped before the duplicate check
            no_time = stream.metrics.get("null_time_rows", 0)
    assert stream.metrics.get("late_rows", 0) == late
    assert stream.metrics.get("null_time_rows", 0) == no_time


@pytest.mark.parametrize("within", [None, "3s"])
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows(), st.data())
def test_how_a_batch_is_cut_into_chunks_does_not_matter(
    within: str | None, monkeypatch: pytest.MonkeyPatch, some: list[Row], data: st.DataObject
) -> None:
    """A replay whose shuffle delivers the same rows in other chunks has the same output and state."""
    on = None if within is None else "ts"
    batches = split(data.draw, some)
    cuts = [split(data.draw, batch, 6) for batch in batches]

    def run(chunk_rows: int) -> tuple[list[list[int]], dict[bytes, bytes], dict[str, int]]:
        monkeypatch.setattr(arrays, "CHUNK_ROWS", chunk_rows)
        stream = Stream(DeduplicateProcessor(SCHEMA, KEYS, within=within, on=on, grace="20s"))
        emitted = [[row["seq"] for row in stream.run([map(batch_of, cut)])] for cut in cuts]
        return emitted, stream.states[0].rows, stream.metrics

    assert run(1) == run(1 << 19)


def test_a_later_chunk_may_hold_the_earlier_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "CHUNK_ROWS", 1)
    stream = Stream(DeduplicateProcessor(SCHEMA, ["k"], within="5s", on="ts"))
    cut = [batch_of([{**row_at("a", time), "seq": time}]) for time in (9000, 1000, 4000, 6000, 8000)]
    assert [row["seq"] for row in stream.run([cut])] == [1000, 6000]


def test_held_rows_leave_no_file_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(arrays, "CHUNK_ROWS", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    processor = DeduplicateProcessor(SCHEMA, ["k"], within="5s", on="ts")
    cut = [batch_of([row_at(key, 0)]) for key in "abc"]
    found = processor.process(iter(cut), ModelState(), BatchContext(0, 0, 1, True, 0, None))
    assert next(found).num_rows == 1
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    open_files = len(os.listdir("/proc/self/fd"))
    found.close()  # Spark ends a task early
    assert len(os.listdir("/proc/self/fd")) == open_files - 1


@pytest.mark.parametrize("rows_of_chunk", [1, 5000], ids=["at the end", "while rows are added"])
def test_a_full_disk_is_reported_with_the_folder(monkeypatch: pytest.MonkeyPatch, rows_of_chunk: int) -> None:
    monkeypatch.setattr(arrays, "CHUNK_ROWS", 1)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "w+b"))  # noqa: SIM115
    state = ModelState()
    processor = DeduplicateProcessor(SCHEMA, ["k"], within="5s", on="ts")
    cut = [batch_of([row_at(key, 0)] * rows_of_chunk) for key in "abc"]
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnavailableError, match=r"temporary folder .* No space left") as caught:
        list(processor.process(iter(cut), state, BatchContext(0, 0, 1, True, 0, None)))
    assert "maxOffsetsPerTrigger" in caught.value.fix
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_late_rows_and_expired_keys_are_exact_to_the_millisecond() -> None:
    stream = Stream(DeduplicateProcessor(SCHEMA, ["k"], within="5s", on="ts", grace="1s"))

    def run(*some: tuple[str, int]) -> list[str]:
        batch = [{**dict.fromkeys(SCHEMA.names), "k": key, "ts": time} for key, time in some]
        return [row["k"] for row in stream.run([[batch_of(batch)]])]

    assert run(("a", 4000), ("b", 4001), ("c", 10_000)) == ["a", "b", "c"]
    # the watermark is 9 s: the 5 s of "a" are over, so its entry is gone; a row at 9 s is not late
    assert run(("d", 8999), ("e", 9000), ("b", 9000)) == ["e"]
    assert stream.metrics == {"late_rows": 1}
    assert len(stream.states[0].rows) == 1 + 2 * len("bce")
    assert run(("b", 9001)) == ["b"]


def test_rows_keep_all_columns_and_their_order() -> None:
    schema = pa.schema([("id", pa.int64()), ("l", pa.list_(pa.int64()))])
    processor = DeduplicateProcessor(schema, ["id"])
    batch = pa.RecordBatch.from_pydict({"id": [3, 1, 3, 2], "l": [[1], None, [2], []]}, schema=schema)
    assert [row["l"] for row in Stream(processor).run([[batch]])] == [[1], None, []]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-20, 20)), max_size=12),
    st.lists(st.none() | st.integers(-10, 10), min_size=3, max_size=3),
    st.integers(1, 10),
)
def test_a_batch_passes_the_same_rows_as_one_row_at_a_time(
    some: list[tuple[int, int]], floors: list[int | None], within: int
) -> None:
    lowest = np.iinfo(np.int64).min
    floor = [lowest if each is None else each for each in floors]
    number, times = (np.array([row[at] for row in some], np.int64) for at in range(2))
    passed, after = _passing(number, times, np.array(floor), within)
    expected = []
    for at in sorted(range(len(some)), key=lambda at: (some[at][1], at)):
        key, time = some[at]
        if time >= floor[key]:
            floor[key] = time + within
            expected.append(at)
    assert sorted(passed.tolist()) == sorted(expected)
    assert after.tolist() == floor


def test_invalid_columns_are_refused_and_the_schema_depends_on_the_key() -> None:
    with pytest.raises(InvalidOptionError, match="within is '1h' and on is None"):
        DeduplicateProcessor(SCHEMA, ["k"], within="1h")
    with pytest.raises(InvalidSchemaError, match="key column 'x'"):
        DeduplicateProcessor(SCHEMA, ["x"])
    with pytest.raises(InvalidSchemaError, match="event-time column 's' has type string"):
        DeduplicateProcessor(SCHEMA, ["k"], within="1h", on="s")
    with pytest.raises(InvalidSchemaError, match="which state cannot hold"):
        DeduplicateProcessor(pa.schema([("l", pa.list_(pa.int64()))]), ["l"])
    one = DeduplicateProcessor(SCHEMA, ["k"], within="1h", on="ts")
    assert pickle.loads(pickle.dumps(one)).description == one.description
    other = DeduplicateProcessor(SCHEMA, ["k"], within="2h", on="ts", grace="5s")
    assert other.description == one.description
