"""What the producer's epochs protect, at each level of ``transaction.version``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from integration.chaos.conftest import Proxied, behind_a_proxy, report_measures
from integration.chaos.late_requests import INVALID_PRODUCER_EPOCH, NONE, late_abort, late_commit
from integration.chaos.oracle import Outcome
from integration.chaos.scenario import Scenario
from integration.chaos.steps import STEPS
from integration.support import broker as brokers
from integration.support import features
from integration.support.driver import Driver
from integration.support.kafka import Admin, read_back
from integration.support.tools import console_consumer
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.errors import KafkaEosError, OperatorError, UnavailableError
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

PRODUCER_FENCED = 90
#: Finalized levels of ``transaction.version``. Brokers before 4.0 behave like version 0.
VERSIONS = [2, 1]
#: Brokers give another producer id after this epoch.
_LAST_EPOCH = 32766


def _id(version: int) -> str:
    return f"transaction.version={version}"


@pytest.fixture(scope="module", params=VERSIONS, ids=_id)
def of_version(request: pytest.FixtureRequest, proxied: Proxied) -> Iterator[Proxied]:
    if request.param == VERSIONS[0]:  # that of new clusters
        yield proxied
        return
    with behind_a_proxy(features={"transaction.version": request.param}) as both:
        yield both


_OLDER = pytest.mark.parametrize("of_version", VERSIONS[1:], indirect=True, ids=_id)


@pytest.fixture
def scenario_of_version(
    request: pytest.FixtureRequest, of_version: Proxied, tmp_path: Path, driver: Callable[..., Driver]
) -> Iterator[Scenario]:
    of_version.proxy.catch_nothing()
    made = Scenario(of_version.bootstrap, tmp_path, driver)
    yield made
    report_measures(request.node, made)


@_OLDER  # `test_kills` does the same on a new cluster
@pytest.mark.fault("T150", "the driver is killed", "within and after the transaction")
def test_t150_a_killed_driver_neither_loses_nor_doubles_records(scenario_of_version: Scenario) -> None:
    scenario = scenario_of_version
    scenario.feed(200)
    for step in STEPS:
        killed = scenario.start(f"{step}=kill@{scenario.once(step)}")
        assert killed.wait() != 0, f"{step}: the driver was not killed:\n{killed.tail()}"
        assert scenario.once(step).exists(), f"{step} was not reached:\n{killed.tail()}"
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found
    read = console_consumer(scenario.bootstrap, scenario.sink, len(scenario.sent) + 1)
    assert sorted(read) == sorted(value for _, value in scenario.sent), "Kafka's own consumer reads the same"


@pytest.mark.fault("T151", "EndTxn of the batch before comes late", "within produce")
@pytest.mark.parametrize("late", [late_abort, late_commit], ids=["abort", "commit"])
def test_t151_a_late_endtxn_is_refused_because_each_batch_has_its_own_epoch(
    scenario_of_version: Scenario, of_version: Proxied, late: Callable[..., object]
) -> None:
    answer, found = late(scenario_of_version, of_version)  # type: ignore[misc]
    assert answer in (INVALID_PRODUCER_EPOCH, PRODUCER_FENCED)  # the latter since version 2 of the request
    assert found.exactly_once, found


def raised(scenario: Scenario, *mutations: str) -> Outcome:
    """Raises ``transaction.version`` from 1 to 2 between two batches of the same size and process."""
    scenario.feed(100)
    driver = scenario.stopped_at("commit.before_begin", at_time=2, mutations=mutations)
    features.upgrade(scenario.bootstrap, "--feature", "transaction.version=2")
    driver.resume()
    driver.wait()
    scenario.run()
    return scenario.outcome()


@pytest.mark.fault("T152", "transaction.version is raised between two batches", "before begin")
@pytest.mark.parametrize(
    "mutation",
    ["", pytest.param("own epoch", marks=pytest.mark.long)],
    ids=["", "without an epoch of its own"],
)
def test_t152_the_transaction_version_is_raised_between_two_batches_of_one_process(
    tmp_path: Path, driver: Callable[..., Driver], mutation: str
) -> None:
    """If both batches had the same epoch, brokers would take the records of the second for duplicates."""
    with behind_a_proxy(features={"transaction.version": 1}) as proxied:
        found = raised(Scenario(proxied.bootstrap, tmp_path, driver), *filter(None, [mutation]))
    assert found.rows.exactly_once == (not mutation), found


@_OLDER
@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_an_epoch_of_its_own_a_late_endtxn_ends_the_wrong_transaction(
    scenario_of_version: Scenario, of_version: Proxied
) -> None:
    """With ``transaction.version`` 1, the client itself must ask for an epoch before each transaction."""
    answer, found = late_abort(scenario_of_version, of_version, "own epoch")
    assert answer == NONE
    assert not found.rows.exactly_once, "without an own epoch the late request must do damage"


def transact(client: TransactionalProducer, topic: str, number: int, deadline: Deadline) -> None:
    """Writes one transaction of 20 records."""
    client.begin()
    values = pa.array([b"%d-%d" % (number, row) for row in range(20)], pa.binary())
    client.send(pa.record_batch({"value": values}), topic, deadline)
    client.flush(deadline)
    offsets = [GroupOffset(TopicPartition(topic, 0), number, "token")]
    client.send_offsets(offsets, client.transactional_id, deadline)
    client.commit(deadline)


def check_written(bootstrap: str, topic: str, transactions: int) -> None:
    written = read_back(bootstrap, topic)
    assert sorted(each.value for each in written if each.value is not None) == sorted(
        b"%d-%d" % (number, row) for number in range(transactions) for row in range(20)
    )


@pytest.mark.fault(
    "T300", "the broker is silent for longer than a new topic may be unknown", "before produce"
)
def test_t300_a_silent_broker_delays_the_lookup_of_a_topic_only_while_it_is_silent(proxied: Proxied) -> None:
    """An output topic that does not exist is still reported soon, and not after the deadline."""
    topic = Admin(proxied.bootstrap).create("silent-lookup", 2)
    client = TransactionalProducer(producer_config({"bootstrap.servers": proxied.bootstrap}, "silent-lookup"))
    client.check_partitions({topic: 1}, Deadline.after_seconds(60))
    client._counts.clear()  # as after a minute
    silence = threading.Thread(target=proxied.proxy.silence_for, args=(6,))
    silence.start()
    client.check_partitions({topic: 1}, Deadline.after_seconds(60))
    silence.join()
    with pytest.raises(UnavailableError, match="UNKNOWN_TOPIC_OR_PARTITION"):
        client.check_partitions({"missing": -1}, Deadline.after_seconds(60))
    client.close()


@pytest.mark.long
@pytest.mark.fault(
    "T188", "a request of version 2 arrives after transaction.version was lowered to 0", "within EndTxn"
)
def test_t188_an_error_names_the_way_out_of_a_coordinator_that_cannot_write_its_state() -> None:
    """Nothing but a restart heals it; the queries then use their transactional ids again."""
    deadline = Deadline.after_seconds(250)
    with EmbeddedKafka(features={"transaction.version": 2}, java_options=brokers.JAVA_OPTIONS) as kafka:
        bootstrap = kafka.bootstrap_servers
        topic = Admin(bootstrap).create("lowered", 2)

        def client() -> TransactionalProducer:
            return TransactionalProducer(producer_config({"bootstrap.servers": bootstrap}, "lowered"))

        first = client()
        first.init(deadline)
        transact(first, topic, 0, deadline)
        features.downgrade(bootstrap, "--feature", "transaction.version=0")
        with pytest.raises(KafkaEosError, match="UNSUPPORTED_VERSION"):
            first._transaction.end(False, deadline)  # as if it had been on its way
        first.close()
        second = client()
        with pytest.raises(OperatorError, match=r"transaction\.version was lowered to 0"):
            second.init(deadline)
        second.close()
        (node,) = kafka.nodes
        kafka.stop_node(node)
        kafka.start_node(node)
        third = client()
        third.init(deadline)
        transact(third, topic, 1, deadline)
        third.close()
        check_written(bootstrap, topic, 2)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", VERSIONS)
def test_transactions_continue_when_the_epoch_wraps_to_another_producer_id(version: int) -> None:
    """An epoch has 16 bits: at ten batches a second, they last for less than an hour."""
    with EmbeddedKafka(features={"transaction.version": version}, java_options=brokers.JAVA_OPTIONS) as kafka:
        topic = Admin(kafka.bootstrap_servers).create("wraps", 2)
        client = TransactionalProducer(
            producer_config({"bootstrap.servers": kafka.bootstrap_servers}, "wraps")
        )
        deadline = Deadline.after_seconds(800)
        client.init(deadline)
        requests = client._transaction
        first = requests.producer_id
        while requests.epoch < _LAST_EPOCH - 5:
            requests.init(-1, -1, deadline)
        for number in range(10):
            transact(client, topic, number, deadline)
        assert requests.producer_id != first
        client.close()
        check_written(kafka.bootstrap_servers, topic, 10)
