"""Rows that are divided by key are processed as if they all fitted into memory."""

from __future__ import annotations

import errno
import tempfile
from collections import Counter
from itertools import chain
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.state import shard_rows
from kafka_eos_source.state.encoding.layout import shards_of
from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.shard_rows import RowsByKey
from kafka_eos_source.state.vector import AggregateProcessor, count, processor, sum_
from tests.state.model_state import ModelState
from tests.state.processor.processor_shard import Shard
from tests.state.processor.scripted_processor import INPUT, ops, results, scripted

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
    counted = AggregateProcessor(schema, ["key"], {"rows": count(), "total": sum_("number")})
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
