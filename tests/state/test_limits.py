"""Tests of the limit of staged writes in memory, and of the size that an entry counts as."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.state.store.overlay import ENTRY_BYTES, Overlay, Ranges
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests.state.state_kit import IDENTITY, TP, key

LIMIT = 100_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TransactionalStateStore]:
    config = StoreConfig(uncommitted_max_bytes=LIMIT)
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY, config) as opened:
        yield opened


def test_an_overwritten_key_counts_once(store: TransactionalStateStore) -> None:
    keys = pa.array([key(1)] * 50_000, pa.binary())
    values = pa.array([b"x" * 50] * 50_000, pa.binary())
    for _ in range(20):  # a million writes
        store.put_many(keys, values)
    for _ in range(1000):
        store.put(key(1), b"x" * 50)
    assert store.approximate_num_uncommitted_bytes() == ENTRY_BYTES + 2 * (len(key(1)) + 50)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.binary(min_size=1, max_size=2), st.none() | st.binary(max_size=9)),
            st.tuples(
                st.just("many"),
                st.lists(st.tuples(st.binary(min_size=1, max_size=2), st.none() | st.binary(max_size=9))),
                st.none(),
            ),
            st.tuples(st.just("range"), st.binary(max_size=2), st.binary(max_size=2)),
            st.tuples(st.just("drop"), st.binary(max_size=2), st.binary(max_size=2)),
        )
    )
)
def test_the_byte_count_equals_the_size_of_staged_entries(steps: list[tuple[str, object, object]]) -> None:
    overlay = Overlay()
    for kind, one, two in steps:
        if kind == "put":
            overlay.put(one, two)  # type: ignore[arg-type]
        elif kind == "many":
            overlay.put_many([k for k, _ in one], [v for _, v in one])  # type: ignore[attr-defined]
        elif kind == "range":
            overlay.delete_range(one, two)  # type: ignore[arg-type]
        else:
            overlay.drop(one, two)  # type: ignore[arg-type]
        payload = sum(len(k) + len(v or b"") for k, v in overlay.rows.items())
        assert overlay.bytes == ENTRY_BYTES * len(overlay.rows) + 2 * payload
        assert [k for k, _ in overlay.scan(None, None, reverse=False)] == sorted(overlay.rows)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20) | st.none())), st.lists(st.integers(0, 22)))
def test_merged_ranges_cover_exactly_what_any_of_them_covers(
    spans: list[tuple[int, int | None]], probes: list[int]
) -> None:
    ranges = Ranges()
    for low, high in spans:
        if high is None or low < high:
            ranges = ranges.plus(bytes([low]), None if high is None else bytes([high]))
    for probe in probes:
        expected = any(low <= probe and (high is None or probe < high) for low, high in spans)
        assert ranges.covers(bytes([probe])) is expected
    ends = [end for _, end in ranges.spans]
    assert all(end is not None for end in ends[:-1])
    assert all(end < low for end, (low, _) in zip(ends, ranges.spans[1:], strict=False))  # type: ignore[operator]


def test_the_byte_count_approximates_the_memory_in_use() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        overlay = Overlay()
        for n in range(20_000):
            overlay.put(b"%16d" % n, b"%100d" % n)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.6 * overlay.bytes < taken < 1.2 * overlay.bytes  # the count includes the batch of the commit


def test_writes_over_the_limit_leave_the_memory_and_commit(store: TransactionalStateStore) -> None:
    n = 0
    while store.staged_bytes()[0] <= 5 * LIMIT:
        store.put(key(n), b"x" * 100)
        assert store.approximate_num_uncommitted_bytes() <= LIMIT
        n += 1
    store.commit({TP: 1})
    assert store.approximate_num_uncommitted_bytes() == 0
    assert len(list(store.all())) == n


def test_invalid_limits_are_refused() -> None:
    for limit in (0, -2):
        with pytest.raises(InvalidOptionError, match=r"statestore\.uncommitted\.max\.bytes"):
            StoreConfig(uncommitted_max_bytes=limit)
