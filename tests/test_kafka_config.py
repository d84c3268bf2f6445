"""``kafka.*`` options: translated, or refused with the way out; judged by librdkafka; secrets never shown."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.config import (
    admin_config,
    check_consumer,
    check_producer,
    consumer_config,
    masked,
    producer_config,
    redact,
)

SERVERS = {"bootstrap.servers": "127.0.0.1:1"}
SECRET = "hunter2-is-secret"


@pytest.mark.parametrize(
    ("java", "value", "ours"),
    [
        ("fetch.max.wait.ms", "100", "fetch.wait.max.ms"),
        ("receive.buffer.bytes", "65536", "socket.receive.buffer.bytes"),
        ("max.request.size", "2000000", "message.max.bytes"),
        ("sasl.mechanism", "PLAIN", "sasl.mechanisms"),
    ],
)
def test_java_names_that_mean_the_same_are_translated(java: str, value: str, ours: str) -> None:
    assert check_consumer({java: value}) == {ours: value}


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("key.serializer", "org.apache.kafka.StringSerializer", "cast the column 'key'"),
        ("value.deserializer", "x", "cast the column 'value'"),
        ("ssl.truststore.location", "/s.jks", "kafka.ssl.ca.location"),
        ("ssl.truststore.password", SECRET, "kafka.ssl.ca.location"),
        ("ssl.keystore.location", "/k.JKS", "keytool -importkeystore"),
        ("interceptor.classes", "", "transform the frame"),
        ("partitioner.class", "x", "kafka.partitioner"),
        ("buffer.memory", "1", "kafka.queue.buffering.max.kbytes"),
        ("auto.offset.reset", "earliest", "startingOffsets"),
        ("enable.auto.commit", "false", "committed with the batch"),
        ("max.poll.records", "5", "maxOffsetsPerTrigger"),
    ],
)
def test_what_only_java_has_is_refused_with_the_way_out(name: str, value: str, instead: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        check_consumer({name: value})
    assert instead in caught.value.fix
    assert f"'kafka.{name}'" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_jaas_lines_of_plain_and_scram_are_translated() -> None:
    line = (
        "org.apache.kafka.common.security.scram.ScramLoginModule required "
        f'username="alice" password="{SECRET}";'
    )
    assert check_consumer({"sasl.jaas.config": line}) == {
        "sasl.username": "alice",
        "sasl.password": SECRET,
    }


def test_other_jaas_lines_are_refused_without_their_secrets() -> None:
    line = f'com.sun.security.auth.module.Krb5LoginModule required keyTab="{SECRET}";'
    with pytest.raises(InvalidOptionError, match="Krb5LoginModule") as caught:
        check_consumer({"sasl.jaas.config": line})
    assert SECRET not in str(caught.value)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(InvalidOptionError, match=r"Did you mean 'kafka\.security\.protocol'"):
        check_consumer({"security.protocl": "SSL"})


@pytest.mark.parametrize(
    ("name", "value"), [("security.protocol", "SSLL"), ("linger.ms", "abc"), ("message.max.bytes", "-1")]
)
def test_values_are_judged_by_librdkafka(name: str, value: str) -> None:
    with pytest.raises(
        InvalidOptionError, match=f"'kafka.{name}' has the value '{value}'; librdkafka refuses"
    ):
        check_producer({name: value}, exactly_once=True)


def test_secrets_are_masked() -> None:
    kafka = {"sasl.password": SECRET, "sasl.username": "alice", "ssl.key.password": SECRET}
    assert SECRET not in str(masked(kafka))
    assert masked(kafka)["sasl.username"] == "alice"
    assert SECRET not in redact(f"login with {SECRET} failed", kafka)


def test_what_exactly_once_needs_may_be_said_and_is_not_doubled() -> None:
    assert check_producer({"acks": "-1", "enable.idempotence": "TRUE"}, exactly_once=True) == {}


@pytest.mark.parametrize("timeout", [None, "2000", "900000"])
def test_every_client_can_be_made(timeout: str | None) -> None:
    kafka = {**SERVERS, "linger.ms": "7", **({"transaction.timeout.ms": timeout} if timeout else {})}
    checked = check_producer(kafka, exactly_once=True)
    config = producer_config(checked, transactional_id="t")
    assert config["linger.ms"] == "7"
    assert config["partitioner"] == "murmur2_random"
    Producer(config).close()
    Producer(producer_config(SERVERS)).close()
    Consumer(consumer_config(check_consumer(SERVERS), "g", "read_committed")).close()
    AdminClient(admin_config({**kafka, "client.id": "c"}))
    assert admin_config(kafka) == SERVERS
