"""The choice of the client that writes transactions."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import kernel, transaction_client
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.kernel import Choice
from kafka_eos_source.kafka.transaction_client import LIBRDKAFKA, NATIVE, VARIABLE, transactional_producer
from kafka_eos_source.kafka.transactional import TransactionalProducer
from kafka_eos_source.kafka.wire.producer import WireProducer
from kafka_eos_source.options.parse import parse_write

CONFIG = producer_config({"bootstrap.servers": "127.0.0.1:1"}, transactional_id="t")
needs_kernel = pytest.mark.skipif(kernel.choice().kernel is None, reason=kernel.choice().why_not)


@needs_kernel
def test_the_option_goes_before_the_variable_and_librdkafka_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kind(client: str) -> type:
        producer = transactional_producer(CONFIG, client)
        producer.close()
        return type(producer)

    monkeypatch.delenv(VARIABLE, raising=False)
    assert kind("") is TransactionalProducer
    assert kind(NATIVE) is WireProducer
    monkeypatch.setenv(VARIABLE, NATIVE)
    assert kind("") is WireProducer
    assert kind(LIBRDKAFKA) is TransactionalProducer


@needs_kernel
@pytest.mark.parametrize(
    ("kafka", "reason"),
    [
        ({"security.protocol": "sasl_ssl", "sasl.mechanisms": "OAUTHBEARER"}, "sasl.mechanism=OAUTHBEARER"),
        ({"security.protocol": "SASL_PLAINTEXT"}, "sasl.mechanism=GSSAPI"),
        ({"partitioner": "random"}, "kafka.partitioner=random, only murmur2_random"),
        ({"ssl.keystore.location": "k"}, "kafka.ssl.keystore.location"),
    ],
)
def test_what_the_native_client_lacks_is_named(kafka: Mapping[str, str], reason: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"'transaction\.client' has the value 'native'") as raised:
        transactional_producer({**CONFIG, **kafka}, NATIVE)
    assert reason in str(raised.value)


def test_without_the_kernel_there_is_no_native_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_client, "choice", lambda: Choice(None, "it was not built"))
    with pytest.raises(InvalidOptionError, match=r"C kernel is not available \(it was not built\)"):
        transactional_producer(CONFIG, NATIVE)


@needs_kernel
def test_the_option_is_checked_when_the_query_is_defined() -> None:
    options = {"kafka.bootstrap.servers": "b:1", "topic": "t", "transaction.client": "native"}
    assert parse_write(options, streaming=False).transaction_client == NATIVE
    with pytest.raises(InvalidOptionError, match=r"kafka\.partitioner=random"):
        parse_write({**options, "kafka.partitioner": "random"}, streaming=False)
    with pytest.raises(InvalidOptionError, match="exactly_once"):
        parse_write({**options, "processing.guarantee": "at_least_once"}, streaming=False)
    with pytest.raises(InvalidOptionError, match="librdkafka or native"):
        parse_write({**options, "transaction.client": "java"}, streaming=False)
