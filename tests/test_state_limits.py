"""How much may be staged (state G1 to G4), and what an entry counts."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_kit import IDENTITY, TP, key

from kafka_eos_source.errors import InvalidOptionError, UncommittedBytesError
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.limits import UncommittedBudget, rows_that_fit
from kafka_eos_source.state.store.overlay import ENTRY_BYTES, Overlay, Ranges
from kafka_eos_source.state.store.transactional import TransactionalStateStore

LIMIT = 100_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TransactionalStateStore]:
    config = StoreConfig(uncommitted_max_bytes=LIMIT)
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY, config) as opened:
        yield opened


def test_g1_an_overwritten_key_counts_once(store: TransactionalStateStore) -> None:
    keys = pa.array([key(1)] * 50_000, pa.binary())
    values = pa.array([b"x" * 50] * 50_000, pa.binary())
    for _ in range(20):  # a million times
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
def test_bytes_are_those_of_what_is_staged(steps: list[tuple[str, object, object]]) -> None:
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
        assert [k for k, _ in overlay.slice(None, None, reverse=False)] == sorted(overlay.rows)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20) | st.none())), st.lists(st.integers(0, 22)))
def test_ranges_cover_what_any_of_them_covers(spans: list[tuple[int, int | None]], probes: list[int]) -> None:
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


def test_the_count_is_about_what_memory_it_takes() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        overlay = Overlay()
        for n in range(20_000):
            overlay.put(b"%16d" % n, b"%100d" % n)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.6 * overlay.bytes < taken < 1.2 * overlay.bytes  # counted: also the batch that a commit makes


def test_g2_over_the_limit_a_smaller_batch_is_asked_for(store: TransactionalStateStore) -> None:
    n = 0
    while store.approximate_num_uncommitted_bytes() <= LIMIT:
        assert not store.commit_requested
        store.put(key(n), b"x" * 100)
        n += 1
    assert store.commit_requested
    fits = rows_that_fit(n, store.approximate_num_uncommitted_bytes(), LIMIT)
    assert fits is not None
    assert 0 < fits < n
    store.commit({TP: 1})
    assert not store.commit_requested
    for number in range(fits):
        store.put(key(number), b"x" * 100)
    assert not store.commit_requested


def test_g3_far_over_it_the_batch_fails_and_says_by_how_much(store: TransactionalStateStore) -> None:
    store.put(b"\1kept", b"1")
    store.commit({TP: 1})
    keys = pa.array([key(n) for n in range(1000)], pa.binary())
    values = pa.array([b"x" * 1000] * 1000, pa.binary())
    with pytest.raises(UncommittedBytesError, match=r"at least 22 times smaller") as raised:
        store.put_many(keys, values)
    assert "counts" in raised.value.message
    store.rollback()
    with pytest.raises(UncommittedBytesError, match=r"at least 5 times smaller"):  # noqa: PT012
        for n in range(100_000):
            store.put(key(n), b"x" * 100)
    store.rollback()
    with pytest.raises(UncommittedBytesError):
        store.put_all([(key(n), b"x" * 1000) for n in range(1000)])
    store.rollback()
    assert [k for k, _ in store.all()] == [b"\1kept"]
    store.put(key(1), b"goes on")
    store.commit({TP: 2})


def test_no_limit_and_senseless_ones(tmp_path: Path) -> None:
    for limit in (0, -2):
        with pytest.raises(InvalidOptionError, match=r"statestore\.uncommitted\.max\.bytes"):
            StoreConfig(uncommitted_max_bytes=limit)
        with pytest.raises(InvalidOptionError, match=r"statestore\.uncommitted\.max\.bytes"):
            UncommittedBudget(limit)
    with TransactionalStateStore.open(
        tmp_path / "s", IDENTITY, StoreConfig(uncommitted_max_bytes=-1)
    ) as store:
        store.put_all([(key(n), b"x" * 1000) for n in range(1000)])
        assert not store.commit_requested
        assert store.metrics()["uncommitted-bytes"] > 2_000_000


def test_g4_writers_share_the_limit() -> None:
    class Writer:
        soft: int | None = 0
        hard: int | None = 0

        def set_share(self, soft_bytes: int | None, hard_bytes: int | None) -> None:
            self.soft, self.hard = soft_bytes, hard_bytes

    budget = UncommittedBudget(1000, hard_factor=3)
    writers = [Writer() for _ in range(3)]
    for count, writer in enumerate(writers, 1):
        budget.join(writer)
        assert [w.soft for w in writers[:count]] == [1000 // count] * count
        assert sum(w.soft or 0 for w in writers[:count]) <= 1000
    assert writers[0].hard == 999
    budget.leave(writers[1])
    budget.leave(writers[1])
    assert [writers[0].soft, writers[2].soft] == [500, 500]
    unlimited = UncommittedBudget(-1)
    unlimited.join(writers[0])
    assert (writers[0].soft, writers[0].hard) == (None, None)


def test_g4_stores_of_a_process_share_and_a_closed_one_gives_back(tmp_path: Path) -> None:
    budget = UncommittedBudget(LIMIT)
    one = TransactionalStateStore.open(tmp_path / "1", IDENTITY)
    two = TransactionalStateStore.open(tmp_path / "2", IDENTITY)
    for store in (one, two):
        store.use_budget(budget)
    rows = [(key(n), b"x" * 100) for n in range(LIMIT * 2 // 3 // (ENTRY_BYTES + 2 * 107))]
    one.put_all(rows)
    assert one.commit_requested
    two.close()
    assert not one.commit_requested
    one.close()


@pytest.mark.parametrize(
    ("rows", "staged", "limit", "fits"),
    [(100, 50, 100, None), (100, 200, 100, 50), (1, 10**9, 1, 1), (0, 200, 100, None), (9, 100, None, None)],
)
def test_rows_that_fit(rows: int, staged: int, limit: int | None, fits: int | None) -> None:
    assert rows_that_fit(rows, staged, limit) == fits
