"""Fixtures of the integration tests, described in `integration.support`."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

from integration.support import broker as brokers
from integration.support import processes
from integration.support import registry as registries
from integration.support.driver import Driver
from integration.support.faults import FAULTS, Table
from integration.support.kafka import Admin
from integration.support.security import PASSWORDS, SecuredCluster
from integration.support.session import builder, end
from kafka_eos_source.embedded import EmbeddedKafka, cluster

_PROCESSES_END_SECONDS = 60.0
#: The files that take longest, in this order.
_SLOW_FILES = (
    "test_sink_stream.py",
    "test_continuity.py",
    "test_brokers.py",
    "test_read_stream.py",
    "test_producer_epochs.py",
    "test_security.py",
    "test_schema_registry.py",
    "test_sink_kills.py",
    "test_embedded.py",
    "test_token_topic.py",
    "test_cluster.py",
    "test_sinks.py",
    "test_replay.py",
    "test_start.py",
    "test_state.py",
    "test_state_operator.py",
    "test_sink_batch.py",
    "test_demo.py",
    "test_pauses.py",
    "test_state_restore.py",
    "test_state_in_read.py",
    "test_read_batch.py",
    "test_in_read.py",
    "test_read_jump.py",
    "test_chained.py",
    "test_due.py",
    "test_metrics.py",
    "test_quick_start.py",
    "test_state_windows.py",
    "test_state_reading.py",
    "test_changed_queries.py",
)


# some seconds pass between the choice of a port and its use: workers that run at the same time share no ports
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
cluster._FREE_PORTS = cluster._FREE_PORTS[_worker::_workers]

# every process that the tests start inherits this mark; a nested test run sets its own
os.environ[processes.RUN] = uuid.uuid4().hex


@pytest.hookimpl(trylast=True)  # after the fixtures' teardown
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Kills processes that tests left behind, and fails the run if there were any."""
    run = os.environ[processes.RUN]
    try:
        processes.await_condition(
            lambda: not processes.marked(processes.RUN, run), _PROCESSES_END_SECONDS, "all processes ended"
        )
    except AssertionError:
        left = [" ".join(each.info["cmdline"] or [])[:120] for each in processes.marked(processes.RUN, run)]
        processes.kill_marked(processes.RUN, run)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nprocesses were left, and killed:", *left, sep="\n  ", file=sys.stderr)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the slow files first, so that all workers end at about the same time.

    With ``--no-loadscope-reorder``, xdist keeps this order; by itself it runs files with one test last.
    """
    place = {name: number for number, name in enumerate(_SLOW_FILES)}
    # stable, so the tests of a file keep their order
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-table", type=Path, help="document whose table of faults is written anew")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--faults-table")
    if path is not None and not hasattr(config, "workerinput"):  # with xdist, only in the controller
        config.pluginmanager.register(_FaultsTable(path))


class _FaultsTable:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._table = Table()
        self._passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid in self._passed:
            self._table.add(report.nodeid, report.user_properties)

    def pytest_sessionfinish(self) -> None:
        self._table.write(self._path)


@pytest.fixture(autouse=True)
def _faults(request: pytest.FixtureRequest) -> None:
    marks = [mark.args for mark in request.node.iter_markers("fault")]
    if marks:
        request.node.user_properties.append((FAULTS, marks))


@pytest.fixture(scope="session")
def broker_kind() -> str:
    return brokers.choose(os.environ, brokers.container_engine_answers)


@pytest.fixture(scope="session")
def broker(broker_kind: str) -> Iterator[str]:
    with brokers.running(broker_kind) as bootstrap:
        yield bootstrap


@pytest.fixture(scope="session")
def admin(broker: str) -> Admin:
    return Admin(broker)


@pytest.fixture
def topic(admin: Admin) -> Callable[..., str]:
    def make(partitions: int = 1, **config: str) -> str:
        return admin.create(f"t-{uuid.uuid4().hex[:10]}", partitions, **config)

    return make


@pytest.fixture(scope="session")
def other_cluster() -> Iterator[str]:
    with brokers.running("embedded") as bootstrap:
        yield bootstrap


@pytest.fixture
def fresh_cluster() -> Iterator[Callable[..., EmbeddedKafka]]:
    with ExitStack() as running:

        def start(number: int = 1, **arguments: Any) -> EmbeddedKafka:
            return running.enter_context(
                EmbeddedKafka(number, java_options=brokers.JAVA_OPTIONS, **arguments)
            )

        yield start


@pytest.fixture(scope="session")
def secured_cluster() -> Iterator[SecuredCluster]:
    with EmbeddedKafka(users=PASSWORDS, java_options=brokers.JAVA_OPTIONS) as kafka:
        yield SecuredCluster(kafka)


@pytest.fixture(scope="module")
def schema_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[registries.Registry]:
    with registries.running(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = builder().getOrCreate()
    session.sparkContext.setLogLevel("FATAL")
    yield session
    end(session)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    with ExitStack() as started:

        def start(spec: Mapping[str, Any], failpoints: str = "", **more: Any) -> Driver:
            driver = Driver(spec, tmp_path / "drivers", failpoints, **more)
            started.callback(driver.kill)
            return driver

        yield start


@pytest.fixture
def own_spark_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the test its own ``SPARK_HOME``, because ``local-cluster`` creates executors' folders in it."""
    home = tmp_path / "spark"
    home.mkdir()
    for each in Path(pyspark.__file__).parent.iterdir():
        if each.name != "work":
            (home / each.name).symlink_to(each)
    monkeypatch.setenv("SPARK_HOME", str(home))
    return home


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")
