"""One transaction can commit the offsets of thousands of partitions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import NewPartitions

from integration.support import broker as brokers
from integration.support.driver import ROOT
from integration.support.kafka import TIMEOUT_SECONDS, Admin
from integration.support.processes import await_condition
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.errors import AbortableError, OperatorError
from kafka_eos_source.kafka.group import OFFSETS_TOPIC, GroupOffsets, split
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import Mark
from kafka_eos_source.runtime.deadline import Deadline

TOPIC = "wide"
PARTITIONS = 10_000
MARK = Mark("0123456789ab", 12_345).encode()
#: Metadata as long as a typical full token, and as a long one.
TOKEN, LONG_TOKEN = "t" * 254, "t" * 1000
#: The most partitions that Kafka creates in one request.
_AT_ONCE = 5_000
#: An in-memory file system if there is one; on a disk, creating so many partition logs takes half a minute.
_MEMORY = "/dev/shm"


@pytest.fixture(scope="module")
def wide() -> Iterator[str]:
    """Bootstrap servers of a broker with a topic of many partitions."""
    with pytest.MonkeyPatch.context() as patched:
        if os.access(_MEMORY, os.W_OK):
            patched.setattr(tempfile, "tempdir", _MEMORY)
        with EmbeddedKafka(java_options=brokers.JAVA_OPTIONS) as kafka:
            admin = Admin(kafka.bootstrap_servers)
            admin.create(TOPIC, 1)
            # create the coordinators' topics first, before the many partitions keep the broker busy
            first = producer_in_transaction(kafka.bootstrap_servers, "first")
            first.send_offsets(offsets(count=1), "first", deadline_soon())
            first.commit(deadline_soon())
            first.close()
            for count in range(_AT_ONCE, PARTITIONS + 1, _AT_ONCE):
                grown = admin.client.create_partitions([NewPartitions(TOPIC, count)])
                grown[TOPIC].result(TIMEOUT_SECONDS)
            # the controller has answered before the broker knows of the partitions
            await_condition(
                lambda: len(admin.client.list_topics(TOPIC).topics[TOPIC].partitions) == PARTITIONS,
                TIMEOUT_SECONDS,
                "the broker knows all partitions",
            )
            yield kafka.bootstrap_servers


@pytest.fixture
def application(wide: str) -> str:
    return f"app-{uuid.uuid4().hex[:8]}"


def deadline_soon() -> Deadline:
    return Deadline.after_seconds(60)


def producer_in_transaction(bootstrap: str, application: str) -> TransactionalProducer:
    producer = TransactionalProducer({"bootstrap.servers": bootstrap, "transactional.id": application})
    producer.init(deadline_soon())
    producer.begin()
    return producer


def offsets(at: int = 1, metadata: str = MARK, count: int = PARTITIONS) -> list[GroupOffset]:
    return [GroupOffset(TopicPartition(TOPIC, number), at, metadata) for number in range(count)]


def test_ten_thousand_partitions_commit_in_one_transaction(wide: str, application: str) -> None:
    group = GroupOffsets({"bootstrap.servers": wide})
    producer = producer_in_transaction(wide, application)
    try:
        few = [GroupOffset(TopicPartition(TOPIC, number), 1, LONG_TOKEN) for number in (0, 5_000, 9_999)]
        wanted = {each.tp: each for each in [*offsets(), *few]}
        producer.send_offsets(list(wanted.values()), application, deadline_soon())
        producer.commit(deadline_soon())
        assert group.fetch(application, list(wanted), deadline_soon()) == wanted
        producer.begin()
        later = {each.tp: each for each in offsets(2, TOKEN)}
        producer.send_offsets(list(later.values()), application, deadline_soon())
        assert group.now(application, [], deadline_soon()) == (wanted, True), (
            "nothing is visible before the commit"
        )
        producer.commit(deadline_soon())
        assert group.fetch(application, [], deadline_soon()) == later
        producer.begin()
        producer.send_offsets(offsets(3), application, deadline_soon())
        producer.abort(deadline_soon())
        assert group.fetch(application, [], deadline_soon()) == later
    finally:
        producer.close()


_KILLED = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from integration.test_scale import producer_in_transaction, offsets, deadline_soon

producer = producer_in_transaction(*sys.argv[1:3])

send, requests = producer._transaction.commit_offsets, []

def killed_at_the_second_request(*arguments):
    requests.append(arguments)
    if len(requests) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return send(*arguments)

producer._transaction.commit_offsets = killed_at_the_second_request
producer.send_offsets(offsets(7), sys.argv[2], deadline_soon())
"""


@pytest.mark.fault("T05b", "the producer is killed", "between two requests that send offsets")
def test_a_producer_that_is_killed_between_two_requests_commits_nothing(wide: str, application: str) -> None:
    group = GroupOffsets({"bootstrap.servers": wide})
    killed = subprocess.run([sys.executable, "-c", _KILLED, wide, application], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    requests = list(split(offsets(), application))
    assert len(requests) > 1
    sent, unsent = requests[0][0].tp, requests[1][0].tp
    assert group.now(application, [sent], deadline_soon()) == ({}, True), "the first request arrived"
    assert group.now(application, [unsent], deadline_soon()) == ({}, False), "the second one did not"
    producer = producer_in_transaction(wide, application)
    try:
        assert group.fetch(application, [each.tp for each in offsets()], deadline_soon()) == {}
        producer.send_offsets(offsets(8), application, deadline_soon())
        producer.commit(deadline_soon())
    finally:
        producer.close()
    assert group.fetch(application, [], deadline_soon()) == {each.tp: each for each in offsets(8)}


def test_one_request_that_is_too_large_is_refused_without_a_reason(
    wide: str, application: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker refuses one request with 4,000 offsets and full tokens; the producer therefore splits it."""
    monkeypatch.setattr("kafka_eos_source.kafka.group.split", lambda offsets, _group_id: iter([offsets]))
    producer = producer_in_transaction(wide, application)
    try:
        with pytest.raises(OperatorError, match=r"4,000 offsets.*max\.message\.bytes=1048588") as caught:
            producer.send_offsets(offsets(1, TOKEN, 4_000), application, deadline_soon())
        assert isinstance(caught.value.__cause__, AbortableError)
        producer.abort(deadline_soon())
    finally:
        producer.close()


def test_the_error_names_the_coordinators_limit_on_batch_size(wide: str, application: str) -> None:
    refused: list[OperatorError] = []

    def is_refused() -> bool:
        producer = producer_in_transaction(wide, application)
        try:
            producer.send_offsets(offsets(), application, deadline_soon())
        except OperatorError as error:
            refused.append(error)
        finally:
            producer.abort(deadline_soon())
            producer.close()
        return bool(refused)

    admin = Admin(wide)
    admin.configure(OFFSETS_TOPIC, {"max.message.bytes": "100000"})
    try:
        # the broker applies the new limit some time after it accepts it
        await_condition(is_refused, deadline_soon().budget_seconds, "the coordinator refuses large batches")
    finally:
        admin.configure(OFFSETS_TOPIC, {"max.message.bytes": "1048588"})
    assert "'__consumer_offsets' has max.message.bytes=100000" in str(refused[0])
    assert "raise max.message.bytes of '__consumer_offsets' to 1048588" in refused[0].fix
