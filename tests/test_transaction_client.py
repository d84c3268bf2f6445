"""The choice of the client that writes transactions."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import kernel, native_support
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.kernel import Choice
from kafka_eos_source.kafka.native_support import AUTO, LIBRDKAFKA, NATIVE, Chosen
from kafka_eos_source.kafka.transaction_client import TRANSACTION_CLIENT, transactional_producer
from kafka_eos_source.kafka.transactional import TransactionalProducer
from kafka_eos_source.kafka.wire.access import Access
from kafka_eos_source.kafka.wire.producer import WireProducer
from kafka_eos_source.options.parse import parse_write

CONFIG = producer_config({"bootstrap.servers": "127.0.0.1:1"}, transactional_id="t")
VARIABLE, choose = TRANSACTION_CLIENT.variable, TRANSACTION_CLIENT.choose
needs_kernel = pytest.mark.skipif(kernel.choice().kernel is None, reason=kernel.choice().why_not)


OAUTH = {"security.protocol": "SASL_SSL", "sasl.mechanisms": "OAUTHBEARER"}
OIDC = {
    **OAUTH,
    "sasl.oauthbearer.method": "oidc",
    "sasl.oauthbearer.token.endpoint.url": "https://t",
}


@needs_kernel
def test_the_option_goes_before_the_variable_and_native_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kind(client: str) -> type:
        producer = transactional_producer(CONFIG, client)
        producer.close()
        return type(producer)

    monkeypatch.delenv(VARIABLE, raising=False)
    assert kind("") is WireProducer
    assert kind(AUTO) is WireProducer
    assert kind(LIBRDKAFKA) is TransactionalProducer
    monkeypatch.setenv(VARIABLE, LIBRDKAFKA)
    assert kind("") is TransactionalProducer
    assert kind(NATIVE) is WireProducer


@needs_kernel
@pytest.mark.parametrize(
    ("kafka", "reason"),
    [
        ({"partitioner": "random"}, "kafka.partitioner=random, only murmur2_random"),
        ({"ssl.keystore.location": "k"}, "kafka.ssl.keystore.location"),
    ],
)
def test_what_the_native_client_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kafka: Mapping[str, str], reason: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(InvalidOptionError, match=r"'transaction\.client' has the value 'native'") as raised:
        choose({**CONFIG, **kafka}, NATIVE)
    assert reason in str(raised.value)
    chosen = choose({**CONFIG, **kafka}, AUTO)
    assert chosen.client == LIBRDKAFKA
    assert reason in chosen.reason


@needs_kernel
@pytest.mark.parametrize(
    "kafka",
    [
        {"security.protocol": "SASL_SSL", "sasl.mechanisms": "SCRAM-SHA-512"},
        {"security.protocol": "SSL", "ssl.ca.location": "ca.pem"},
        {**OAUTH, "enable.sasl.oauthbearer.unsecure.jwt": "true"},
        OIDC,
        # has no effect with this mechanism
        {"security.protocol": "SASL_SSL", "sasl.mechanisms": "PLAIN", "sasl.oauthbearer.config": "x"},
    ],
)
def test_supported_logins_choose_the_native_client(
    monkeypatch: pytest.MonkeyPatch, kafka: Mapping[str, str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose({**CONFIG, **kafka}).client == NATIVE


def test_without_the_kernel_there_is_no_native_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(native_support, "choice", lambda: Choice(None, "it was not built"))
    with pytest.raises(InvalidOptionError, match=r"C kernel is not available \(it was not built\)"):
        choose(CONFIG, NATIVE)
    expected = Chosen(LIBRDKAFKA, "the C kernel is not available (it was not built)")
    assert choose(CONFIG) == expected


def test_the_choice_is_logged_once_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    TRANSACTION_CLIENT._logged.clear()
    with caplog.at_level(logging.INFO, native_support.__name__):
        for _ in range(2):
            transactional_producer(CONFIG, LIBRDKAFKA).close()
    (record,) = caplog.records
    assert record.getMessage() == ("transactions are written by librdkafka: transaction.client=librdkafka")


def test_certificates_that_cannot_be_used_are_named() -> None:
    with pytest.raises(InvalidOptionError, match=r"kafka\.ssl\.ca\.location=/none"):
        Access.of({"security.protocol": "SSL", "ssl.ca.location": "/none"}, 1, 1)


@needs_kernel
def test_the_option_is_checked_when_the_query_is_defined() -> None:
    options = {"kafka.bootstrap.servers": "b:1", "topic": "t", "transaction.client": "native"}
    assert parse_write(options, streaming=False).transaction_client == NATIVE
    with pytest.raises(InvalidOptionError, match=r"kafka\.partitioner=random"):
        parse_write({**options, "kafka.partitioner": "random"}, streaming=False)
    with pytest.raises(InvalidOptionError, match="exactly_once"):
        parse_write({**options, "processing.guarantee": "at_least_once"}, streaming=False)
    with pytest.raises(InvalidOptionError, match="auto or native or librdkafka"):
        parse_write({**options, "transaction.client": "java"}, streaming=False)
