"""The first messages of logins; integration tests log in at brokers."""

from __future__ import annotations

import sys

import pytest

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.access import new_exchange
from kafka_eos_source.kafka.failure import LoginRefusedError
from kafka_eos_source.kafka.tokens import Tokens
from kafka_eos_source.runtime.deadline import Deadline

SOON = Deadline.after_seconds(60)


@pytest.mark.parametrize("name", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_scram_escapes_the_user(name: str) -> None:
    """RFC 5802, section 5.1: a comma would end the user."""
    first = new_exchange(name, {"sasl.username": "a,b=c", "sasl.password": "p"}, None, "h", SOON).auth_bytes()
    assert first.startswith(b"n,,n=a=2Cb=3Dc,r=")


def test_plain_sends_the_user_as_it_is() -> None:
    exchange = new_exchange("PLAIN", {"sasl.username": "a,b=c", "sasl.password": "ü"}, None, "h", SOON)
    assert exchange.auth_bytes() == b"a,b=c\0a,b=c\0" + "ü".encode()


def test_oauthbearer_sends_token_and_extensions() -> None:
    kafka = {
        "enable.sasl.oauthbearer.unsecure.jwt": "true",
        "sasl.oauthbearer.config": "principal=me",
        "sasl.oauthbearer.extensions": "pool=p,cluster=c",
    }
    tokens = Tokens.of(kafka)
    sent = new_exchange("OAUTHBEARER", kafka, tokens, "h", SOON).auth_bytes()
    token = tokens.current(SOON).token.encode()
    assert sent == b"n,,\x01auth=Bearer " + token + b"\x01pool=p\x01cluster=c\x01\x01"


def test_an_executor_without_the_package_of_kerberos_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gssapi", None)
    with pytest.raises(InvalidOptionError, match="needs the Python package 'gssapi'") as caught:
        new_exchange("GSSAPI", {}, None, "h", SOON)
    assert "pip install 'kafka-eos-source[kerberos]'" in caught.value.fix


@pytest.mark.parametrize(
    ("iterations", "is_refused"),
    [("1", True), ("4095", True), ("4096", False), ("16384", False), ("1000001", True), ("many", True)],
)
def test_scram_refuses_a_broker_that_asks_for_few_or_endless_iterations(
    iterations: str, is_refused: bool
) -> None:
    """Java's client refuses fewer than 4,096 as well."""
    kafka = {"sasl.username": "u", "sasl.password": "p"}
    exchange = new_exchange("SCRAM-SHA-256", kafka, None, "h", SOON)
    nonce = exchange.auth_bytes().rpartition(b"r=")[2]
    answer = b"r=" + nonce + b"more,s=c2FsdA==,i=" + iterations.encode()
    if is_refused:
        with pytest.raises(LoginRefusedError, match=f"asks for {iterations} iterations"):
            exchange.receive(answer)
    else:
        exchange.receive(answer)
        assert b"p=" in exchange.auth_bytes()
