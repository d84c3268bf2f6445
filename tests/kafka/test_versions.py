"""The clients rely on nothing beyond what brokers announce in ApiVersions.

The simulated brokers fail the test if a request has a version that they did not announce.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kafka_eos_source.errors import KafkaEosError, OperatorError
from kafka_eos_source.kafka.cluster import GROUP, Cluster
from kafka_eos_source.kafka.fetch import RangeConsumer
from kafka_eos_source.model import TopicPartition
from tests.kafka.wire_kit import (
    PARTITIONS,
    SOURCE,
    TOPIC,
    expected,
    producer,
    soon,
    write,
    write_until_committed,
)
from tests.support.fetched_log import ABORT, COMMIT, Log, Record
from tests.support.simulated_kafka import SimulatedKafka

#: What releases of Apache Kafka announce, of what the clients use.
RELEASES = {
    "2.4": {
        "Produce": (0, 8),
        "Fetch": (0, 11),
        "ListOffsets": (0, 5),
        "Metadata": (0, 9),
        "OffsetFetch": (0, 6),
        "FindCoordinator": (0, 3),
        "InitProducerId": (0, 2),
        "OffsetForLeaderEpoch": (0, 3),
        "AddPartitionsToTxn": (0, 1),
        "AddOffsetsToTxn": (0, 1),
        "EndTxn": (0, 1),
        "TxnOffsetCommit": (0, 2),
    },
    "3.3": {
        "Produce": (0, 9),
        "Fetch": (0, 13),
        "ListOffsets": (0, 7),
        "Metadata": (0, 12),
        "OffsetFetch": (0, 8),
        "FindCoordinator": (0, 4),
        "InitProducerId": (0, 4),
        "OffsetForLeaderEpoch": (0, 4),
        "AddPartitionsToTxn": (0, 3),
        "AddOffsetsToTxn": (0, 3),
        "EndTxn": (0, 3),
        "TxnOffsetCommit": (0, 3),
    },
    "4.0": {
        "Produce": (3, 12),
        "Fetch": (4, 17),
        "ListOffsets": (1, 10),
        "Metadata": (0, 13),
        "OffsetFetch": (1, 9),
        "FindCoordinator": (0, 6),
        "InitProducerId": (0, 5),
        "OffsetForLeaderEpoch": (2, 4),
        "AddPartitionsToTxn": (0, 5),
        "AddOffsetsToTxn": (0, 4),
        "EndTxn": (0, 5),
        "TxnOffsetCommit": (0, 5),
        "ApiVersions": (0, 4),
    },
    "a future one": {
        "ApiVersions": (3, 99),
        "Produce": (3, 99),
        "Fetch": (4, 99),
        "Metadata": (3, 99),
        "InitProducerId": (3, 99),
        "EndTxn": (3, 99),
        "TxnOffsetCommit": (3, 99),
    },
}
#: What 2.4 does not know at all.
ADDED_LATER = {"2.4": {"DescribeTransactions"}}
LEVELS = {"2.4": 0, "3.3": 0, "4.0": 2, "a future one": 2}


def log_of(count: int) -> Log:
    log = Log()
    for number in range(count):
        log.append([Record(0, b"k", b"%d" % number)] * 2, producer=1, transactional=True)
        log.finish(1, ABORT if number % 3 == 0 else COMMIT)
    return log


@pytest.fixture(params=RELEASES)
def cluster(request: pytest.FixtureRequest) -> Iterator[SimulatedKafka]:
    topics = {TOPIC: PARTITIONS, "r": [log_of(5), log_of(7)]}
    with SimulatedKafka(topics, brokers=2, version=LEVELS[request.param]) as made:
        made.announced = RELEASES[request.param]
        made.unsupported = ADDED_LATER.get(request.param, set())
        made.release = request.param
        yield made


def test_transactions_use_the_versions_that_brokers_announce(cluster: SimulatedKafka) -> None:
    if cluster.release == "2.4":
        client = producer(cluster)
        with pytest.raises(OperatorError, match=r"InitProducerIdRequest, versions 3 to 5; .* 0 to 2"):
            client.init(soon())
        client.close()
        return
    write_until_committed(cluster, 3)
    assert cluster.committed(TOPIC) == expected(3)
    newest = {"3.3": 9, "4.0": 12, "a future one": 12}[cluster.release]
    assert cluster.used["Produce"] == {newest}


def test_records_are_read_with_the_versions_that_brokers_announce(cluster: SimulatedKafka) -> None:
    tps = [TopicPartition("r", 0), TopicPartition("r", 1)]
    conf = {"bootstrap.servers": cluster.bootstrap, "isolation.level": "read_committed"}
    consumer = RangeConsumer(conf)
    found: dict[TopicPartition, list[int]] = {tp: [] for tp in tps}
    ends = {tp: consumer.log_bounds(tp, soon())[1] for tp in tps}
    assert ends == {tp: cluster.logs["r", tp.partition].stable() for tp in tps}
    wanted = {
        tp: [each.offset for each in cluster.logs["r", tp.partition].visible(0, end, committed=True)]
        for tp, end in ends.items()
    }
    consumer.assign(dict.fromkeys(tps, 0), ["value"], ends)
    limit = soon(20)
    while found != wanted and not limit.expired:
        messages = consumer.take(0.2).messages
        for index in range(len(messages)):
            found[messages.partition_at(index)].append(int(messages.offsets[index]))
    consumer.close()
    assert found == wanted
    assert cluster.used["Fetch"] == {11 if cluster.release == "2.4" else 12}


def test_coordinators_and_ids_are_found_with_older_versions(cluster: SimulatedKafka) -> None:
    wire = Cluster({"bootstrap.servers": cluster.bootstrap})
    assert wire.coordinator(GROUP, "group", soon()) is not None
    wire.close()
    client = producer(cluster)
    ids = client.topic_ids([TOPIC, "unknown"])
    client.close()
    assert list(ids) == [TOPIC]
    assert bool(ids[TOPIC].strip("A")) == (cluster.release != "2.4"), "no id is told apart from another one"


@pytest.mark.parametrize(
    "missing", ["Produce", "InitProducerId", "EndTxn", "TxnOffsetCommit", "FindCoordinator"]
)
def test_a_service_without_a_request_for_transactions_is_named(missing: str) -> None:
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=2) as cluster:
        cluster.unsupported = {missing}
        client = producer(cluster)

        def run() -> None:
            client.init(soon())
            write(client, 0)

        with pytest.raises(KafkaEosError, match=f"{missing}Request") as refused:
            run()
        assert isinstance(refused.value.__cause__ or refused.value, OperatorError)
        client.abort(soon(1))
        client.close()
        assert cluster.committed(TOPIC) == expected(0)
        assert SOURCE not in cluster.offsets


@pytest.mark.parametrize("missing", ["Fetch", "ListOffsets", "Metadata"])
def test_a_service_without_a_request_for_reading_is_named(missing: str) -> None:
    with SimulatedKafka({"r": [log_of(5)]}) as cluster:
        cluster.unsupported = {missing}
        conf = {"bootstrap.servers": cluster.bootstrap, "isolation.level": "read_committed"}
        consumer = RangeConsumer(conf)
        tp = TopicPartition("r", 0)

        def run() -> None:
            consumer.log_bounds(tp, soon(5.0))
            consumer.assign({tp: 0}, ["value"], {tp: 10})
            consumer.take(5.0)

        with pytest.raises(OperatorError, match=f"{missing}Request"):
            run()
        consumer.close()


@pytest.mark.parametrize(
    ("kind", "highest"), [("Produce", 11), ("TxnOffsetCommit", 4)], ids=lambda each: str(each)
)
def test_a_feature_without_its_requests_is_not_used(kind: str, highest: int) -> None:
    """Transactions of version 2 need these versions. A service may announce the feature, and not serve it."""
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=2, version=2) as cluster:
        cluster.announced[kind] = (0, highest)
        client = producer(cluster)
        client.init(soon())
        with pytest.raises(KafkaEosError, match=kind):
            write(client, 0)
        client.abort(soon(1))
        client.close()
        assert cluster.committed(TOPIC) == expected(0)
