"""Compares Kafka Streams' kinds of store on top of the state store with plain dicts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_kit import IDENTITY

from kafka_eos_source.state.store.shapes import KeyValueShape, Session, SessionShape, Window, WindowShape
from kafka_eos_source.state.store.transactional import TransactionalStateStore

KEYS = st.sampled_from([b"", b"a", b"ab", b"b", b"\xff", b"\xff\xff"])
TIMES = st.sampled_from([-5, -1, 0, 1, 255, 256, 1_700_000_000_000])
VALUES = st.none() | st.binary(max_size=2)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransactionalStateStore]:
    with TransactionalStateStore.open(tmp_path_factory.mktemp("shapes") / "s", IDENTITY) as opened:
        yield opened


@pytest.fixture
def store(shared: TransactionalStateStore) -> TransactionalStateStore:
    shared.rollback()
    return shared


PROPERTY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@PROPERTY
@given(steps=st.lists(st.tuples(KEYS, KEYS, VALUES)), low=KEYS, high=st.none() | KEYS, cleared=KEYS)
def test_a_key_value_store_behaves_like_a_dict(
    store: TransactionalStateStore,
    steps: list[tuple[bytes, bytes, bytes | None]],
    low: bytes,
    high: bytes | None,
    cleared: bytes,
) -> None:
    store.rollback()
    shape, other = KeyValueShape(store, 1), KeyValueShape(store, 2)
    other.put(b"a", b"of another table")
    model: dict[tuple[bytes, bytes], bytes] = {}
    for key, sub, value in steps:
        shape.put(key, value, sub)
        if value is None:
            model.pop((key, sub), None)
        else:
            model[key, sub] = value
    for key in {key for key, _, _ in steps} | {b"ab"}:
        mine = sorted((s, v) for (k, s), v in model.items() if k == key)
        assert list(shape.range(key)) == mine
        assert list(shape.range(key, reverse=True)) == mine[::-1]
        within = [(s, v) for s, v in mine if s >= low and (high is None or s < high)]
        assert list(shape.range(key, low, high)) == within
    assert {(k, s): v for k, s, v in shape.all()} == model
    shape.clear(cleared)
    assert {k for k, _, _ in shape.all()} == {k for k, _ in model} - {cleared}
    assert list(other.all()) == [(b"a", b"", b"of another table")]


def test_single_operations_of_a_key_value_store_behave_like_a_dict(store: TransactionalStateStore) -> None:
    shape = KeyValueShape(store, 1)
    assert shape.put_if_absent(b"k", b"1") is None
    assert shape.put_if_absent(b"k", b"2") == b"1"
    assert shape.get(b"k") == b"1"
    assert shape.delete(b"k") == b"1"
    assert shape.delete(b"k") is None
    assert shape.get(b"k") is None


@PROPERTY
@given(
    steps=st.lists(st.tuples(KEYS, TIMES, VALUES)), low=st.none() | TIMES, high=st.none() | TIMES, end=TIMES
)
def test_a_window_store_behaves_like_a_dict(
    store: TransactionalStateStore,
    steps: list[tuple[bytes, int, bytes | None]],
    low: int | None,
    high: int | None,
    end: int,
) -> None:
    store.rollback()
    shape = WindowShape(store, 3)
    model: dict[tuple[bytes, int], bytes] = {}
    for key, start_ms, value in steps:
        shape.put(key, start_ms, value)
        if value is None:
            model.pop((key, start_ms), None)
        else:
            model[key, start_ms] = value

    def within(start_ms: int) -> bool:
        return (low is None or low <= start_ms) and (high is None or start_ms < high)

    for key, start_ms, _ in steps:
        assert shape.fetch(key, start_ms) == model.get((key, start_ms))
        mine = [Window(k, s, v) for (k, s), v in sorted(model.items()) if k == key and within(s)]
        assert list(shape.fetch_range(key, low, high)) == mine
        assert list(shape.fetch_range(key, low, high, reverse=True)) == mine[::-1]
    found = list(shape.fetch_all(low, high))
    assert {(w.key, w.start_ms): w.value for w in found} == {k: v for k, v in model.items() if within(k[1])}
    assert [w.start_ms for w in found] == sorted(w.start_ms for w in found)
    expired = shape.expire(end)
    assert {(w.key, w.start_ms) for w in expired} == {k for k in model if k[1] < end}
    assert {(w.key, w.start_ms) for w in shape.fetch_all()} == {k for k in model if k[1] >= end}
    assert len(list(store.all())) == 2 * len([k for k in model if k[1] >= end]), "no index entry is left over"


@PROPERTY
@given(
    steps=st.lists(st.tuples(KEYS, TIMES, st.sampled_from([0, 1, 255, 10_000]), VALUES)),
    earliest=st.none() | TIMES,
    latest=st.none() | TIMES,
    before_ms=TIMES,
)
def test_a_session_store_behaves_like_a_dict(
    store: TransactionalStateStore,
    steps: list[tuple[bytes, int, int, bytes | None]],
    earliest: int | None,
    latest: int | None,
    before_ms: int,
) -> None:
    store.rollback()
    shape = SessionShape(store, 4)
    model: dict[tuple[bytes, int, int], bytes] = {}
    for key, start_ms, length, value in steps:
        shape.put(key, start_ms, start_ms + length, value)
        if value is None:
            model.pop((key, start_ms, start_ms + length), None)
        else:
            model[key, start_ms, start_ms + length] = value
    for key, start_ms, length, _ in steps:
        assert shape.fetch(key, start_ms, start_ms + length) == model.get((key, start_ms, start_ms + length))
        expected = [
            Session(k, s, e, v)
            for (k, s, e), v in sorted(model.items(), key=lambda item: (item[0][2], item[0][1]))
            if k == key and (earliest is None or e >= earliest) and (latest is None or s <= latest)
        ]
        assert list(shape.find(key, earliest, latest)) == expected
    expired = shape.expire(before_ms)
    assert {(s.key, s.start_ms, s.end_ms) for s in expired} == {k for k in model if k[2] < before_ms}
    left = list(shape.ended())
    assert {(s.key, s.start_ms, s.end_ms): s.value for s in left} == {
        k: v for k, v in model.items() if k[2] >= before_ms
    }
    for session in left:
        shape.remove(session)
    assert list(store.all()) == [], "no index entry is left over"


def test_an_invalid_session_or_table_number_is_refused(store: TransactionalStateStore) -> None:
    with pytest.raises(ValueError, match="from 5 to 4 ms"):
        SessionShape(store, 1).put(b"k", 5, 4, b"")
    for table in (0, 128, -1):
        with pytest.raises(ValueError, match=f"table {table}"):
            KeyValueShape(store, table)
