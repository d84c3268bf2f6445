"""An operator changes the brokers under a running query: no record is lost or doubled.

Features and versions are raised, brokers restart, and drivers are killed in between. The records that
arrive meanwhile are judged by the comparison of input and output, and by the checker of histories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from integration.chaos.brokers import QUICK, await_in_sync
from integration.chaos.conftest import report_measures
from integration.chaos.load import Load
from integration.chaos.oracle import Outcome
from integration.chaos.scenario import Scenario
from integration.support import broker as brokers
from integration.support import features
from integration.support.driver import Driver
from integration.support.tools import console_consumer
from kafka_eos_source.embedded import EmbeddedKafka

TRANSACTION_VERSION = "transaction.version"


@pytest.fixture
def old_protocol() -> Iterator[EmbeddedKafka]:
    """Three brokers on which ``transaction.version`` is finalized at 0, as after an upgrade from Kafka 3."""
    with EmbeddedKafka(
        3, config=QUICK, java_options=brokers.JAVA_OPTIONS, features={TRANSACTION_VERSION: 0}
    ) as kafka:
        yield kafka


@pytest.fixture
def on_old_protocol(
    request: pytest.FixtureRequest, old_protocol: EmbeddedKafka, tmp_path: Path, driver: Callable[..., Driver]
) -> Iterator[Scenario]:
    made = Scenario(old_protocol.bootstrap_servers, tmp_path, driver)
    yield made
    report_measures(request.node, made)


def set_transaction_version(scenario: Scenario, level: int) -> None:
    now = int(features.levels(scenario.bootstrap)[TRANSACTION_VERSION].finalized)
    change = features.upgrade if level > now else features.downgrade
    change(scenario.bootstrap, "--feature", f"{TRANSACTION_VERSION}={level}")
    assert features.levels(scenario.bootstrap)[TRANSACTION_VERSION].finalized == str(level)


def judge(scenario: Scenario, load: Load, driver: Driver) -> None:
    """Ends the load, and checks the records, their order and the history of all readers."""
    findings = load.finish(driver)
    found = scenario.outcome()
    assert found.exactly_once, found
    assert findings.ok, findings


T138 = pytest.mark.fault(
    "T138", "transaction.version is raised from 0 to 2", "under load; in a transaction; a driver is killed"
)


@pytest.mark.long
@T138
def test_t138_the_transaction_version_is_raised_while_a_query_runs(on_old_protocol: Scenario) -> None:
    scenario = on_old_protocol
    with Load(scenario) as load:
        for level in (1, 2):
            running = load.start()
            load.await_progress(running)
            set_transaction_version(scenario, level)
            load.await_progress(running)
            running.kill()
        running = load.start()
        load.await_progress(running)
        judge(scenario, load, running)


#: Points at which a query has an open transaction, first with records, then with offsets too. At the last
#: one, Kafka has committed the batch and Spark does not know it yet.
POINTS = ("commit.within_produce", "commit.after_flush", "commit.before_commit", "commit.after_commit")


def change_within_transactions(
    kafka: EmbeddedKafka,
    folder: Path,
    start: Callable[..., Driver],
    change: Callable[[Scenario], None],
    mutations: Sequence[str] = (),
) -> dict[tuple[str, str], Outcome]:
    """Makes a change while queries are in a transaction; then kills and restarts half of the drivers."""
    queries = {}
    for each in product(POINTS, ("goes on", "is killed")):
        scenario = Scenario(kafka.bootstrap_servers, folder, start)
        scenario.feed(150)
        queries[each] = scenario, scenario.stopped_at(each[0], 2, mutations=mutations)
    change(scenario)
    found = {}
    for (point, fate), (scenario, driver) in queries.items():
        if fate == "is killed":
            driver.kill()
            driver = scenario.start(mutations=mutations)
        else:
            driver.resume()
        driver.finish()
        found[point, fate] = scenario.outcome()
    return found


@pytest.mark.long
@T138
def test_t138_the_transaction_version_is_raised_within_open_transactions(
    old_protocol: EmbeddedKafka, tmp_path: Path, driver: Callable[..., Driver]
) -> None:
    found = change_within_transactions(
        old_protocol, tmp_path, driver, lambda scenario: set_transaction_version(scenario, 2)
    )
    assert all(each.exactly_once for each in found.values()), found


@pytest.mark.long
@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_token_check_a_batch_is_doubled_when_the_transaction_version_is_raised(
    old_protocol: EmbeddedKafka, tmp_path: Path, driver: Callable[..., Driver]
) -> None:
    """Proves that the test above can fail."""
    found = change_within_transactions(
        old_protocol, tmp_path, driver, lambda scenario: set_transaction_version(scenario, 2), ["token check"]
    )
    doubled = {each: outcome.rows.doubled for each, outcome in found.items()}
    assert doubled == {each: 50 if each == ("commit.after_commit", "is killed") else 0 for each in found}


# -- another version of Kafka

OLD, NEW = "3.9.2", "4.4.0"
#: The newest release whose levels Kafka's tool of `jars.KAFKA_VERSION` knows.
RELEASE = "4.3"


def roll(kafka: EmbeddedKafka, scenario: Scenario, version: str) -> Iterator[int]:
    """Restarts one broker after another with another version; yields each when it is in sync again."""
    for node in kafka.nodes:
        kafka.stop_node(node)
        kafka.start_node(node, version)
        await_in_sync(scenario)
        yield node


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.fault(
    "T139",
    f"every broker is upgraded from Kafka {OLD} to {NEW}, then the features",
    "under load; a driver is killed",
)
def test_t139_the_brokers_are_upgraded_one_by_one_while_a_query_runs(
    request: pytest.FixtureRequest, tmp_path: Path, driver: Callable[..., Driver]
) -> None:
    with EmbeddedKafka(3, config=QUICK, java_options=brokers.JAVA_OPTIONS, version=OLD) as kafka:
        scenario = Scenario(kafka.bootstrap_servers, tmp_path, driver)
        assert features.levels(scenario.bootstrap)["metadata.version"].finalized == "3.9-IV0"
        with Load(scenario) as load:
            running = load.start()
            load.await_progress(running)
            for node in roll(kafka, scenario, NEW):
                load.await_progress(running)
                if node == kafka.nodes[1]:  # two versions are in the cluster
                    running.kill()
                    running = load.start()
                    load.await_progress(running)
            features.finalize_newest(scenario.bootstrap, RELEASE)
            load.await_progress(running)
            running.kill()
            running = load.start()
            load.await_progress(running)
            judge(scenario, load, running)
        levels = features.levels(scenario.bootstrap)
        assert levels["metadata.version"].finalized == levels["metadata.version"].highest
        assert levels[TRANSACTION_VERSION].finalized == "2"
        read = console_consumer(scenario.bootstrap, scenario.sink, len(scenario.sent) + 1, idle_ms=5000)
        assert sorted(read) == sorted(value for _, value in scenario.sent), "Kafka's own consumer agrees"
        report_measures(request.node, scenario)
