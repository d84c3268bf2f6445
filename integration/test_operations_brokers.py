"""An operator changes the brokers under a running query: no record is lost or doubled.

Features and versions are raised, brokers restart, and drivers are killed in between. The records that
arrive meanwhile are judged by the comparison of input and output, and by the checker of histories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from integration.chaos.brokers import NEW, OLD, QUICK, await_in_sync, undisturbed_end
from integration.chaos.conftest import behind_a_proxy, report_measures
from integration.chaos.late_requests import INVALID_PRODUCER_EPOCH, NONE, late_abort
from integration.chaos.load import Load
from integration.chaos.oracle import Outcome
from integration.chaos.scenario import Scenario
from integration.support import broker as brokers
from integration.support import features
from integration.support.disk import SmallDisk, small_disk
from integration.support.driver import Driver
from integration.support.processes import await_condition
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
    # the controller answers before the broker that is asked knows of it
    await_condition(
        lambda: features.levels(scenario.bootstrap)[TRANSACTION_VERSION].finalized == str(level),
        60,
        f"{TRANSACTION_VERSION} is {level}",
    )


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
        load.judge(running)


#: Points at which a query has an open transaction, first with records, then with offsets too. At the last
#: one, Kafka has committed the batch and Spark does not know it yet.
POINTS = ("commit.within_produce", "commit.after_flush", "commit.before_commit", "commit.after_commit")


def change_within_transactions(
    kafka: EmbeddedKafka,
    folder: Path,
    start: Callable[..., Driver],
    change: Callable[[Scenario], object],
    mutations: Sequence[str] = (),
) -> dict[tuple[str, str], Outcome]:
    """Makes a change while queries are in a transaction; then kills and restarts half of the drivers."""
    # the change may take minutes, in which the drivers stand still
    patient = {"kafka.transaction.timeout.ms": "600000", "commitTimeoutMs": "600000"}
    queries = {}
    for each in product(POINTS, ("goes on", "is killed")):
        scenario = Scenario(kafka.bootstrap_servers, folder, start)
        scenario.feed(150)
        queries[each] = scenario, scenario.stopped_at(each[0], 2, mutations=mutations, sink=patient)
    change(scenario)
    found = {}
    for (point, fate), (scenario, driver) in queries.items():
        if fate == "is killed":
            driver.kill()
            driver = scenario.start(mutations=mutations, sink=patient)
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


def lowered_within_transactions(
    kafka: EmbeddedKafka, folder: Path, start: Callable[..., Driver]
) -> dict[tuple[str, str], Outcome]:
    set_transaction_version(Scenario(kafka.bootstrap_servers, folder, start), 2)
    return change_within_transactions(kafka, folder, start, lambda each: set_transaction_version(each, 0))


@pytest.mark.long
@pytest.mark.fault(
    "T187", "transaction.version is lowered from 2 to 0", "in a transaction; a driver is killed"
)
def test_t187_the_transaction_version_is_lowered_within_open_transactions_of_version_2(
    old_protocol: EmbeddedKafka, tmp_path: Path, driver: Callable[..., Driver]
) -> None:
    """At level 0, brokers cannot write what they know of these transactional ids."""
    found = lowered_within_transactions(old_protocol, tmp_path, driver)
    assert all(each.exactly_once for each in found.values()), found


@pytest.mark.long
@pytest.mark.parametrize(
    ("mutations", "expected"),
    [
        pytest.param(
            (),
            INVALID_PRODUCER_EPOCH,
            marks=pytest.mark.fault(
                "T144", "EndTxn(abort) from before transaction.version was raised comes late", "after flush"
            ),
        ),
        pytest.param(
            ("own epoch",),
            NONE,
            marks=pytest.mark.fault(
                "T54", "a rule is switched off; the others' tests must then fail", "its own"
            ),
        ),
    ],
    ids=["T144", "T54-without-an-epoch-of-its-own"],
)
def test_t144_a_late_endtxn_from_before_the_change_is_refused(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    driver: Callable[..., Driver],
    mutations: Sequence[str],
    expected: int,
) -> None:
    """The transaction was begun below version 2; its own epoch protects it, not the brokers' new protocol."""
    with behind_a_proxy(features={TRANSACTION_VERSION: 0}) as proxied:
        scenario = Scenario(proxied.bootstrap, tmp_path, driver)
        answer, found = late_abort(
            scenario, proxied, *mutations, meanwhile=lambda: set_transaction_version(scenario, 2)
        )
        assert answer == expected
        assert found.exactly_once == (not mutations), found
        if not mutations:
            report_measures(request.node, scenario)


# -- another version of Kafka

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
            load.judge(running)
        levels = features.levels(scenario.bootstrap)
        assert levels["metadata.version"].finalized == levels["metadata.version"].highest
        assert levels[TRANSACTION_VERSION].finalized == "2"
        read = console_consumer(scenario.bootstrap, scenario.sink, len(scenario.sent) + 1)
        assert sorted(read) == sorted(value for _, value in scenario.sent), "Kafka's own consumer agrees"
        report_measures(request.node, scenario)


# -- full disks

_DISK_MEBIBYTES = 48


@dataclass(frozen=True)
class SmallCluster:
    """Brokers whose data folders are on small disks of their own."""

    kafka: EmbeddedKafka
    disks: Mapping[int, SmallDisk]

    def fill(self, nodes: Iterable[int]) -> None:
        """Fills the disks of some brokers."""
        for node in nodes:
            self.disks[node].fill()

    def await_stopped(self, nodes: Iterable[int]) -> None:
        """Waits until these brokers have ended, because they could not write."""
        for node in nodes:
            await_condition(
                lambda node=node: not self.kafka.is_running(node), 120, f"broker {node} has ended"
            )  # type: ignore[misc]
            log = (self.kafka.directory / f"node-{node}" / "broker.log").read_text()
            assert "No space left on device" in log

    def repair(self, nodes: Iterable[int]) -> None:
        """Frees space, and starts the brokers that have ended."""
        for node in nodes:
            self.disks[node].free()
        for node in nodes:
            self.kafka.kill_node(node)
            self.kafka.start_node(node)


@contextmanager
def on_small_disks(folder: Path, number: int) -> Iterator[SmallCluster]:
    with ExitStack() as disks:
        found = {
            node: disks.enter_context(small_disk(folder / f"node-{node}" / "data", _DISK_MEBIBYTES))
            for node in range(1, number + 1)
        }
        with EmbeddedKafka(
            number, directory=folder, config=QUICK, version=NEW, java_options=brokers.JAVA_OPTIONS
        ) as kafka:
            yield SmallCluster(kafka, found)


T142 = pytest.mark.fault(
    "T142", "a disk is full: of 1 of 1, 1 of 3, 2 of 3 brokers; 1 of 2 disks of a broker", "while it runs"
)


@pytest.mark.long
@T142
@pytest.mark.parametrize(
    ("number", "full"), [(1, [1]), (3, [2]), (3, [1, 2])], ids=["1-of-1", "1-of-3", "2-of-3"]
)
def test_t142_a_query_continues_after_the_disks_of_brokers_were_full(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    driver: Callable[..., Driver],
    number: int,
    full: list[int],
) -> None:
    with on_small_disks(tmp_path / "kafka", number) as cluster:
        scenario = Scenario(cluster.kafka.bootstrap_servers, tmp_path, driver, batch=50)
        scenario.feed(3000)
        running = scenario.start(available_now=False, sink={"commitTimeoutMs": "240000"})
        running.await_text("BATCH 2")
        cluster.fill(full)
        cluster.await_stopped(full)
        if len(full) < 2 and number == 3:
            undisturbed_end(scenario, running)
            cluster.repair(full)
            await_in_sync(scenario)
        else:
            cluster.repair(full)
            undisturbed_end(scenario, running)
        report_measures(request.node, scenario)


@pytest.mark.long
@T142
def test_t142_a_query_says_that_no_broker_answers_and_continues_after_a_restart(
    request: pytest.FixtureRequest, tmp_path: Path, driver: Callable[..., Driver]
) -> None:
    """The patience of the query ends before there is space again."""
    with on_small_disks(tmp_path / "kafka", 1) as cluster:
        scenario = Scenario(cluster.kafka.bootstrap_servers, tmp_path, driver, batch=50)
        scenario.feed(3000)
        running = scenario.start(available_now=False, sink={"commitTimeoutMs": "5000"})
        running.await_text("BATCH 2")
        cluster.fill([1])
        assert running.wait() == 1
        assert "KAFKA_EOS.UNAVAILABLE" in running.tail(3)
        cluster.await_stopped([1])
        cluster.repair([1])
        scenario.run()
        found = scenario.outcome()
        assert found.exactly_once, found
        report_measures(request.node, scenario)


@pytest.mark.long
@T142
def test_t142_a_query_continues_after_one_of_two_disks_of_the_only_broker_was_full(
    request: pytest.FixtureRequest, tmp_path: Path, driver: Callable[..., Driver]
) -> None:
    """The broker runs on without the partitions that are on that disk, until it is restarted."""
    small = tmp_path / "small"
    whole = tmp_path / "whole"
    folders = {"log.dirs": f"{whole},{small}", "metadata.log.dir": str(whole)}
    with (
        small_disk(small, _DISK_MEBIBYTES) as disk,
        EmbeddedKafka(config=QUICK | folders, version=NEW, java_options=brokers.JAVA_OPTIONS) as kafka,
    ):
        scenario = Scenario(kafka.bootstrap_servers, tmp_path, driver, batch=50, partitions=4)
        scenario.feed(3000)
        running = scenario.start(available_now=False, sink={"commitTimeoutMs": "240000"})
        running.await_text("BATCH 2")
        disk.fill()
        log = kafka.directory / "node-1" / "broker.log"
        await_condition(lambda: "Stopping serving logs in dir" in log.read_text(), 120, "the disk is offline")
        assert kafka.is_running(1)
        disk.free()
        kafka.stop_node(1)
        kafka.start_node(1)
        undisturbed_end(scenario, running)
        report_measures(request.node, scenario)
