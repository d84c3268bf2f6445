"""The vectorised processors work on the real store across commits, dropped task attempts and reopening."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as count_up
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchContext, StoreIdentity
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from kafka_eos_source.state.vector import (
    AggregateProcessor,
    DeduplicateProcessor,
    count,
    hopping,
    latest,
    max_,
    session,
    sum_,
)
from tests.state.model_state import ModelState
from tests.state.vector.vector_model import SCHEMA, Row, batch_of, rows, same, split

SOME = {"n": count(), "sum": sum_("i"), "max": max_("s"), "new": latest("f", by=("ts", "seq"))}
CHANGELOG = TopicPartition("app-store-changelog", 0)

PROCESSORS = {
    "keyed": AggregateProcessor(SCHEMA, ["k"], SOME),
    "hopping": AggregateProcessor(
        SCHEMA, ["k"], SOME, window=hopping("5s", every="2s", on="ts", grace="3s"), emit="on_close"
    ),
    "session": AggregateProcessor(SCHEMA, ["k"], SOME, window=session("3s", on="ts", grace="1s")),
    "deduplicate": DeduplicateProcessor(SCHEMA, ["k"], within="5s", on="ts", grace="5s"),
}


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """Returns an iterator of unused folders."""
    return (tmp_path / str(number) for number in count_up())


def _open(path: Path, processor: Any) -> TransactionalStateStore:
    return TransactionalStateStore.open(path, StoreIdentity("app", "store", 0, 1, CHANGELOG.topic))


def _emit(processor: Any, batch: list[Row], state: Any, context: BatchContext) -> list[Any]:
    found = [
        row for out in processor.process(iter([batch_of(batch)]), state, context) for row in out.to_pylist()
    ]
    return [{name: same(value) for name, value in row.items()} for row in found]


@pytest.mark.parametrize("name", PROCESSORS)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some=rows(), data=st.data())
def test_a_processor_gives_the_same_results_on_the_store_as_on_a_dict(
    folders: Iterator[Path], name: str, some: list[Row], data: st.DataObject
) -> None:
    processor = PROCESSORS[name]
    path, model, seen = next(folders), ModelState(), None
    store = _open(path, processor)
    for batch_id, batch in enumerate(split(data.draw, some)):
        context = BatchContext(batch_id, 0, 1, batch_id == 0, batch_id, seen)
        expected = _emit(processor, batch, model, context)
        for attempt in ("thrown away", "committed"):
            again = BatchContext(batch_id, 0, 1, batch_id == 0, batch_id, seen)
            assert _emit(processor, batch, store, again) == expected
            assert again == context
            if attempt == "thrown away":
                store.rollback()
        assert list(store.all()) == list(model.range())
        store.commit({CHANGELOG: batch_id + 1})
        if data.draw(st.booleans()):
            store.close()
            store = _open(path, processor)
        seen = max([time for time in (seen, context.seen_event_time_ms) if time is not None], default=None)
    assert list(store.all()) == list(model.range())
    store.close()
