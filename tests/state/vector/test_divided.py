"""Processors give the same results and state in divided batches, and on the store across dropped attempts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count as count_up
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import hopping, session, shard_rows, tumbling
from kafka_eos_source.state.model import BatchContext, StoreIdentity
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from kafka_eos_source.state.vector import arrays, groups, processor
from kafka_eos_source.state.vector.deduplicate import DeduplicateProcessor
from kafka_eos_source.state.vector.processor import AggregateProcessor
from tests.state.store.model_state import ModelState
from tests.state.vector.vector_model import (
    BASE,
    SCHEMA,
    Row,
    Stream,
    batch_of,
    row_at,
    rows,
    same,
    split,
)

SOME = {
    "n": agg.count(),
    "sum": agg.sum("i"),
    "sum_f": agg.sum("f"),
    "min": agg.min("f"),
    "new": agg.last("s", by=("ts", "seq")),
}
CHANGELOG = TopicPartition("app-store-changelog", 0)
IDENTITY = StoreIdentity("app", "store", 0, 1, CHANGELOG.topic)
EXACT = {"n": agg.count(), "sum": agg.sum("i"), "mean": agg.avg("d")}
SIGNED = SCHEMA.append(pa.field("gone", pa.bool_()))
TUMBLING = tumbling("3s", on="ts", grace="2s")
HOPPING = hopping("5s", every="1s", on="ts", grace="3s")
SESSION = session("2s", on="ts", grace="2s")


def aggregated(**more: Any) -> AggregateProcessor:
    return AggregateProcessor(SCHEMA, ["k", "j"], SOME, **more)


PROCESSORS: dict[str, Any] = {
    "running": aggregated(),
    "running, changes": aggregated(emit="changes"),
    "running, held": aggregated(at_most_every="3ms"),  # a batch of `Stream` takes one ms
    "running, rows taken back": AggregateProcessor(
        SIGNED, ["k"], EXACT, removed="gone", emit="changes", at_most_every="2ms"
    ),
    "tumbling": aggregated(window=TUMBLING),
    "tumbling, changes": aggregated(window=TUMBLING, emit="changes"),
    "tumbling, on close": aggregated(window=TUMBLING, emit="on_close"),
    "tumbling, held": aggregated(window=TUMBLING, at_most_every="4s"),
    "hopping": aggregated(window=HOPPING),
    "hopping, changes held": aggregated(window=HOPPING, emit="changes", at_most_every="2s"),
    "hopping, on close": aggregated(window=HOPPING, emit="on_close"),
    "session": aggregated(window=SESSION),
    "session, changes": aggregated(window=SESSION, emit="changes"),
    "session, on close": aggregated(window=SESSION, emit="on_close"),
    "deduplicate": DeduplicateProcessor(SCHEMA, ["k", "j"], within="4s", on="ts", grace="3s"),
}


@contextmanager
def limits(rows_in_memory: int, chunk: int, files: int, scanned: int) -> Iterator[None]:
    """Lets only a few rows, and a few due entries, be in memory at a time."""
    with (
        mock.patch.multiple(shard_rows, MOST_ROWS=rows_in_memory, _FILES=files),
        mock.patch.object(processor, "KEYED_ROWS", chunk),
        mock.patch.object(arrays, "CHUNK_ROWS", chunk),
        mock.patch.multiple(groups, SCAN_ROWS=scanned, GROUP_KEYS=2 * scanned),
    ):
        yield


def in_order(found: list[Row]) -> list[dict[str, Any]]:
    return [{name: same(value) for name, value in row.items()} for row in found]


def by_key(found: list[Row]) -> dict[Any, list[Any]]:
    """Returns the emitted rows of each key, in their order."""
    own: dict[Any, list[Any]] = defaultdict(list)
    for values in in_order(found):
        own[values["k"], values.get("j")].append(values)
    return dict(own)


@pytest.mark.parametrize("name", PROCESSORS)
@settings(max_examples=12)
@given(
    some=rows(most=40),
    tiny=st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(2, 7), st.integers(1, 4)),
    data=st.data(),
)
def test_a_divided_batch_gives_the_same_results_state_and_counts(
    name: str, some: list[Row], tiny: tuple[int, int, int, int], data: st.DataObject
) -> None:
    declared = PROCESSORS[name]
    if isinstance(declared, AggregateProcessor) and declared._removed:
        some = [{**row, "gone": False} for row in some]
        for at in data.draw(st.sets(st.sampled_from(range(len(some))))) if some else ():
            some.append({**some[at], "gone": True})
    # Whether a session that reaches beyond the limit counts depends on which of its rows come together.
    limit_ms = None if name.startswith("session") else data.draw(st.none() | st.just(BASE + 9_000))
    whole, divided = (Stream(declared, event_time_limit_ms=limit_ms) for _ in range(2))
    for batch in split(data.draw, some):
        own = [_batch(part, declared) for part in split(data.draw, batch, 6)]
        if data.draw(st.booleans()):
            own = [out for part in own for out in declared.partial([part])]
        expected = whole.run([own])
        with limits(*tiny):
            found = divided.run([own])
        if name == "deduplicate":
            assert in_order(found) == in_order(expected)  # rows pass in their order of arrival
        assert by_key(found) == by_key(expected)
        assert divided.states[0].rows == whole.states[0].rows
        assert divided.event_time_ms == whole.event_time_ms
        assert divided.metrics == whole.metrics


def _batch(some: list[Row], declared: Any) -> pa.RecordBatch:
    if isinstance(declared, AggregateProcessor) and declared._removed:
        return batch_of(some, SIGNED)
    return batch_of(some)


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_divided_batch_whose_changes_go_to_disk_leaves_the_same_state(name: str, tmp_path: Path) -> None:
    """Due entries are read while their changes go to disk. The last batches close all windows."""
    declared = PROCESSORS[name]
    whole, seen, divided, spilled = ModelState(), None, 0, 0
    some = [row_at(f"k{number * 7 % 300}", number * 17 % 9_000) for number in range(1000)]
    # The second batch changes windows and also closes them; the third one is a single row that closes others.
    batches = [some[:500], [*some[300:], row_at("other", 30_000)], some[500:], [row_at("other", 90_000)], []]
    with TransactionalStateStore.open(tmp_path, IDENTITY, StoreConfig(10_000)) as store:
        for batch_id, batch in enumerate(batches):
            signed = [{**row, "gone": False} for row in batch]
            own = [_batch(signed[at : at + 100], declared) for at in range(0, len(batch), 100)]
            contexts = [BatchContext(batch_id, 0, 1, batch_id == 0, batch_id, seen) for _ in range(2)]
            expected = _emitted(declared, own, whole, contexts[0])
            with (
                limits(50, 40, 7, 30),
                mock.patch.object(
                    shard_rows.RowsByKey, "_divide", autospec=True, side_effect=shard_rows.RowsByKey._divide
                ) as divide,
            ):
                found = _emitted(declared, own, store, contexts[1])
            divided += divide.call_count
            assert contexts[0] == contexts[1]
            assert Counter(map(repr, found)) == Counter(map(repr, expected))
            assert by_key(found) == by_key(expected)
            assert list(store.all()) == list(whole.range())
            spilled += store.staged_bytes()[1]
            store.commit({CHANGELOG: batch_id + 1})
            seen = contexts[0].seen_event_time_ms or seen
    assert divided
    assert spilled
    if "running" not in name:
        assert len(whole.rows) < 15  # the description, and what the last row opened


def _emitted(declared: Any, own: list[pa.RecordBatch], state: Any, context: BatchContext) -> list[Row]:
    return [row for out in declared.process(iter(own), state, context) for row in out.to_pylist()]


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """Returns an iterator of unused folders."""
    return (tmp_path / str(number) for number in count_up())


@pytest.mark.parametrize("name", ["running", "hopping, on close", "session", "deduplicate"])
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some=rows(), data=st.data())
def test_a_processor_gives_the_same_results_on_the_store_as_on_a_dict(
    folders: Iterator[Path], name: str, some: list[Row], data: st.DataObject
) -> None:
    """The store is opened again between batches, and each batch has a first attempt that is thrown away."""
    declared = PROCESSORS[name]
    path, model, seen = next(folders), ModelState(), None
    store = TransactionalStateStore.open(path, IDENTITY)
    for batch_id, batch in enumerate(split(data.draw, some)):
        context = BatchContext(batch_id, 0, 1, batch_id == 0, batch_id, seen)
        expected = in_order(_emitted(declared, [batch_of(batch)], model, context))
        for attempt in ("thrown away", "committed"):
            again = BatchContext(batch_id, 0, 1, batch_id == 0, batch_id, seen)
            assert in_order(_emitted(declared, [batch_of(batch)], store, again)) == expected
            assert again == context
            if attempt == "thrown away":
                store.rollback()
        assert list(store.all()) == list(model.range())
        store.commit({CHANGELOG: batch_id + 1})
        if data.draw(st.booleans()):
            store.close()
            store = TransactionalStateStore.open(path, IDENTITY)
        seen = max([time for time in (seen, context.seen_event_time_ms) if time is not None], default=None)
    assert list(store.all()) == list(model.range())
    store.close()
