"""The native client on brokers whose ``transaction.version`` a person lowers from 2 to 0.

Such a coordinator is stuck as soon as a request makes it write a state of version 2 (`simulated.kafka`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow.compute as pc
import pytest

from kafka_eos_source.errors import AbortableError, KafkaEosError, OperatorError
from kafka_eos_source.kafka import transaction
from kafka_eos_source.model import GroupOffset
from tests.kafka.wire_kit import PARTITIONS, SOURCE, TOPIC, expected, producer, rows, soon, write
from tests.kafka.wire_kit import write_until_committed as write_all
from tests.support.simulated_kafka import UNSUPPORTED_VERSION, Fault, SimulatedKafka


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedKafka]:
    # no level is known long enough to be the present one at the next step
    monkeypatch.setattr(transaction, "_PRESENT_SECONDS", 0.0)
    with SimulatedKafka({TOPIC: PARTITIONS}) as cluster:
        yield cluster


@pytest.mark.parametrize("step", ["begin", "send", "flush", "send_offsets", "commit"])
@pytest.mark.parametrize("is_killed", [False, True], ids=["goes on", "is killed"])
def test_the_batch_is_written_again_when_the_version_is_lowered_before_a_step(
    cluster: SimulatedKafka, step: str, is_killed: bool
) -> None:
    client = producer(cluster)
    client.init(soon())
    write(client, 0)
    steps = {
        "begin": client.begin,
        "send": lambda: client.send(rows(1), TOPIC, soon()),
        "flush": lambda: client.flush(soon()),
        "send_offsets": lambda: client.send_offsets([GroupOffset(SOURCE, 1, "token")], "group", soon()),
        "commit": lambda: client.commit(soon()),
    }
    for name, call in steps.items():
        if name == step:
            cluster.version = 0
            if is_killed:
                break
        try:
            call()
        except AbortableError:
            client.abort(soon())
            break
    client.close()
    assert not cluster.is_stuck, "no request may ask for version 2"
    write_all(cluster, 3)
    assert cluster.committed(TOPIC) == expected(3)
    assert not cluster.is_stuck


def test_no_partition_joins_a_transaction_after_the_version_was_lowered(cluster: SimulatedKafka) -> None:
    client = producer(cluster)
    client.init(soon())
    client.begin()
    numbers = rows(0)["partition"]
    client.send(rows(0).filter(pc.equal(numbers, 0)), TOPIC, soon())
    client.flush(soon())
    cluster.version = 0
    client.send(rows(0).filter(pc.equal(numbers, 1)), TOPIC, soon())
    with pytest.raises(AbortableError, match="lowered from 2 to 0"):
        client.flush(soon())
    client.abort(soon())
    client.close()
    assert not cluster.is_stuck


def test_an_idle_transactional_id_is_used_again_after_the_version_is_lowered(
    cluster: SimulatedKafka,
) -> None:
    write_all(cluster, 1)
    cluster.version = 0
    write_all(cluster, 2)
    assert cluster.committed(TOPIC) == expected(2)


def test_a_transaction_after_an_empty_one_of_version_2_needs_a_new_producer(cluster: SimulatedKafka) -> None:
    client = producer(cluster)
    client.init(soon())
    write(client, 0)
    client.begin()
    client.commit(soon())
    cluster.version = 0
    with pytest.raises(AbortableError, match="lowered from 2 to 0"):
        client.begin()
    client.close()
    assert not cluster.is_stuck
    write_all(cluster, 2)
    assert cluster.committed(TOPIC) == expected(2)


def test_without_a_transaction_of_version_0_before_it_an_initialisation_is_refused(
    cluster: SimulatedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that the tests above can fail."""
    write_all(cluster, 1)
    cluster.version = 0
    monkeypatch.setattr(transaction.LoweredId, "prepare", lambda *_: None)
    client = producer(cluster)
    with pytest.raises(AbortableError, match="UNSUPPORTED_VERSION"):
        client.init(soon())
    client.close()
    assert cluster.is_stuck


def test_an_error_says_soon_what_to_do_with_a_stuck_coordinator(
    cluster: SimulatedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "_STUCK_SECONDS", 0.1)
    write_all(cluster, 1)
    cluster.version, cluster.is_stuck = 0, True
    client = producer(cluster)
    with pytest.raises(OperatorError, match=r"lowered to 0 .*CONCURRENT_TRANSACTIONS") as refused:
        client.init(soon())
    client.close()
    assert "transaction.version=1" in refused.value.fix
    cluster.is_stuck = False  # its coordinator was restarted
    write_all(cluster, 2)
    assert cluster.committed(TOPIC) == expected(2)


def test_a_refusal_of_the_group_does_not_prevent_the_initialisation(cluster: SimulatedKafka) -> None:
    """The principal of a batch write may use other groups than its transactional id."""
    cluster.version = 0
    cluster.fault = lambda name: Fault("error", 30) if name == "AddOffsetsToTxn" else None
    client = producer(cluster)
    client.init(soon())
    client.close()


def test_a_small_transaction_asks_for_the_version_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "_PRESENT_SECONDS", 60.0)
    with SimulatedKafka({TOPIC: PARTITIONS}) as cluster:
        client = producer(cluster)
        client.init(soon())
        write(client, 0)
        before = dict(cluster.received)
        write(client, 1)
        client.close()
        more = {kind: number - before[kind] for kind, number in cluster.received.items()}
        assert {kind: number for kind, number in more.items() if number and kind != "Produce"} == {
            "ApiVersions": 1,
            "TxnOffsetCommit": 1,
            "EndTxn": 1,
        }


def test_a_refused_version_ends_only_the_transaction(cluster: SimulatedKafka) -> None:
    client = producer(cluster)
    client.init(soon())
    client.begin()
    cluster.fault = lambda name: Fault("error", UNSUPPORTED_VERSION) if name == "Produce" else None
    client.send(rows(0), TOPIC, soon())
    with pytest.raises(KafkaEosError, match="UNSUPPORTED_VERSION"):
        client.flush(soon())
    client.abort(soon())
    client.close()
    cluster.fault = lambda _: None
    write_all(cluster, 1)
    assert cluster.committed(TOPIC) == expected(1)
