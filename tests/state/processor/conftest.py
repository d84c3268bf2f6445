"""The state of the tests of processors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kafka_eos_source.state.model import StateAccess, StoreIdentity
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests.state.store.model_state import ModelState


@pytest.fixture(params=["model", "store"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StateAccess]:
    """Returns an empty state: a dict, or the store."""
    if request.param == "model":
        yield ModelState()
        return
    with TransactionalStateStore.open(tmp_path / "store", StoreIdentity("app", "s", 0, 1, "t")) as store:
        yield store
