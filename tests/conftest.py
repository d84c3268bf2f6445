"""Common test settings: no test fails for its run time, because the machine may be shared."""

import os

import pytest
from hypothesis import settings

from kafka_eos_source.kafka import failure
from kafka_eos_source.observe import journal
from kafka_eos_source.stage import staging
from tests import ROOT

settings.register_profile("untimed", deadline=None)
# `.ci/run` judges each change by the same examples. All other runs look for new ones.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.load_profile(os.environ.get("KAFKA_EOS_EXAMPLES", "untimed"))


#: Files that take longest. They come first, so that no slow file is left for the end.
_SLOW_FILES = (
    "tests/chain/test_limits.py",
    "tests/chain/test_model.py",
    "tests/commit/test_errors.py",
    "tests/operate/test_command_line.py",
    "tests/kafka/test_faults.py",
    "tests/kafka/test_records.py",
    "tests/commit/test_outcome.py",
    "tests/kafka/test_consumer.py",
    "tests/native/test_kernel_read.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs slow files first. With ``--no-loadscope-reorder``, xdist keeps this order."""
    place = {name: number for number, name in enumerate(_SLOW_FILES)}
    items.sort(key=lambda item: place.get(item.path.relative_to(ROOT).as_posix(), len(place)))  # stable


@pytest.fixture(autouse=True)
def forget_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets which credentials worked, as a new process does."""
    monkeypatch.setattr(failure, "_worked", set())


@pytest.fixture(autouse=True)
def forget_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets the newest batches of queries, as a new process does."""
    monkeypatch.setattr(journal, "_remembered", {})


@pytest.fixture
def unknown_topic_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tasks stage rows, as when no broker names the limits of the topic, but without waiting for one."""
    monkeypatch.setattr(staging, "sealing_plan", lambda kafka, topic: None)
