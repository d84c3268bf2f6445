"""Fixtures of the integration tests, described in `integration.support`."""

from __future__ import annotations

import os
import re
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
#: The tests that take longest, in this order.
_SLOW_TESTS = (
    "test_the_demo_finds_every_event_exactly_once",
    "test_the_quick_start_works_when_pasted",
    "test_the_documented_app_is_exact_in_three_systems_although_it_is_killed",
    "test_the_page_views_example_prints_revisions_and_complete_windows",
    "test_t435_state_survives_a_users_steps_although_the_driver_is_killed",
    "test_staged_rows_are_written_once_although_driver_and_task_workers_are_killed",
    "test_records_are_written_once_although_the_driver_is_killed_before_kafkas_commit",
    "test_alarms_of_a_real_query_fire_and_clear",
    "test_commits_in_changing_processes_and_failed_tasks_are_exactly_once",
    "test_t200_t392_a_host_that_lost_its_state_begins_with_the_snapshots_of_committed_batches",
    "test_t49_a_batch_is_in_every_system_once_although_the_driver_is_killed_at_every_step",
    "test_a_store_is_read_as_a_dataframe_and_by_lookups",
    "test_t174_a_changed_query_continues_exactly_although_it_is_killed_around_its_first_commits",
    "test_rows_are_written_once_although_an_executor_is_killed_and_a_task_fails_while_staging",
    "test_two_sources_jump_in_one_batch",
    "test_t212_counts_stay_exact_although_processes_are_killed_between_shards",
    "test_the_jvm_maps_the_archive_and_workers_are_forked_from_a_daemon_that_has_imported_kafka_eos",
    "test_t120_dead_letters_commit_with_the_records_of_their_batch",
    "test_t350_a_query_begins_only_in_a_group_without_members_and_offsets",
    "test_lookups_while_the_query_runs_show_one_batch_each",
    "test_a_staging_folder_that_executors_do_not_share_is_refused",
    "test_stopping_a_query_while_it_commits_neither_loses_nor_duplicates_records",
    "test_a_full_staging_disk_fails_the_batch_and_the_query_continues_when_there_is_space",
    "test_a_query_with_retries_survives_a_broker_outage",
    "test_revisions_reach_the_second_step_once_although_drivers_are_killed",
    "test_a_query_survives_a_restart_of_the_broker",
    "test_a_session_starts_without_an_archive_that_is_damaged",
)
#: Fixtures of the session that start a cluster for few tests: one worker runs all of these.
_CLUSTERS = ("secured_cluster", "other_cluster", "proxied")


# some seconds pass between the choice of a port and its use: workers that run at the same time share no ports
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
cluster._FREE_PORTS = cluster._FREE_PORTS[_worker::_workers]
# the tool that formats the data of a broker loads the classes of a broker
cluster._BRIEF_JVM = (*cluster._BRIEF_JVM, *brokers.JAVA_OPTIONS)

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


@pytest.hookimpl(wrapper=True)  # around the hook of xdist, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Runs the slow tests first, and says which tests are long, and which ones one worker has to run.

    With ``--dist loadgroup --no-loadscope-reorder``, xdist keeps this order, and gives each test to a worker
    of its own, except for groups: the tests of a file with fixtures for the whole file, and those that need
    the same cluster. The run fails if xdist ignores the groups: each worker would start all the clusters.
    """
    slow = {name: number for number, name in enumerate(_SLOW_TESTS)}
    places: dict[str, int] = {}
    grouped: dict[pytest.Item, str] = {}
    for item in items:
        if _proves_that_others_can_fail(item):
            item.add_marker("long")
        group = _group(item)
        if group is not None:
            grouped[item] = group
            item.add_marker(pytest.mark.xdist_group(group))
            places[item.nodeid] = -1  # groups take longest
        else:
            places[item.nodeid] = slow.get(getattr(item, "originalname", item.name), len(slow))
    items.sort(key=lambda item: places[item.nodeid])  # stable, so the tests of a file keep their order
    yield
    for item, group in grouped.items():
        if item.config.getoption("loadgroup", False) and not item.nodeid.endswith(f"@{group}"):
            text = (
                f"xdist ignores the groups with pytest {pytest.__version__}: install that of pyproject.toml"
            )
            item.ihook.pytest_collectreport(
                report=pytest.CollectReport("integration", "failed", longrepr=text, result=[])
            )
            break


def _proves_that_others_can_fail(item: pytest.Item) -> bool:
    """Returns whether a test switches a rule off (T54). These are long, except for those of the main rules.

    They fail if another test has lost its power, and not because of a defect of the product.
    """
    faults = {mark.args[0] for mark in item.iter_markers("fault")}
    return "T54" in faults and item.path.stem != "test_mutations"


def _group(item: pytest.Item) -> str | None:
    assert isinstance(item, pytest.Function)
    for name in _CLUSTERS:
        if name in item.fixturenames:
            return name
    defined = {each.scope for found in item._fixtureinfo.name2fixturedefs.values() for each in found}
    if "module" in defined:
        return item.path.stem
    return f"{item.path.stem}_{item.cls.__name__}" if "class" in defined and item.cls is not None else None


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
            nodeid = re.sub(r"@\w+$", "", report.nodeid)  # xdist appends the group
            self._table.add(nodeid, report.user_properties)

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
