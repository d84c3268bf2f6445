"""The client's TLS settings, against real servers, and librdkafka with the same properties."""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import tls
from kafka_eos_source.kafka.access import Access
from kafka_eos_source.kafka.config import check_consumer
from kafka_eos_source.runtime.deadline import Deadline
from tests.kafka.tls_identities import PASSWORD, WAYS, file, identities
from tests.support.tls_server import GREETING, Authority, Pair, Server, tls_server

SECONDS = 10


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("test authority")


@pytest.fixture(scope="module")
def client(authority: Authority) -> Pair:
    return authority.sign("me")


@pytest.fixture(scope="module")
def broker(authority: Authority) -> Pair:
    return authority.sign("broker", "127.0.0.1", "localhost")


@pytest.fixture
def server(tmp_path: Path, authority: Authority, broker: Pair) -> Iterator[Server]:
    """A server that requires certificates of clients."""
    with tls_server(tmp_path, broker, authority) as running:
        yield running


def greeted(server: Server, options: Mapping[str, str], host: str = "127.0.0.1") -> bytes:
    """Connects as the client does, with options as the user writes them."""
    access = Access.of(check_consumer({"security.protocol": "SSL", **options}), SECONDS, SECONDS)
    plain = access.addresses.connect(host, server.port, Deadline.after_seconds(SECONDS))
    try:
        with access.wrapped(plain, host) as encrypted:
            return encrypted.recv(100)  # with TLS 1.3, the refusal of a certificate arrives here
    finally:
        plain.close()


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_give_a_key_works(
    way: str, tmp_path: Path, server: Server, authority: Authority, client: Pair
) -> None:
    options = {"ssl.ca.pem": authority.pem, **identities(tmp_path, authority, client)[way]}
    assert greeted(server, options) == GREETING
    assert server.seen.pop()[2] == "me"


@pytest.mark.parametrize("has_memory", [True, False])
def test_keys_are_in_no_file_that_stays_or_that_others_can_read(
    has_memory: bool,
    tmp_path: Path,
    server: Server,
    authority: Authority,
    client: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    if not has_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    modes = []
    loads = ssl.SSLContext.load_cert_chain

    def load(self: ssl.SSLContext, *arguments: str, **more: str) -> None:
        modes.extend(each.stat().st_mode & 0o777 for each in folder.iterdir())
        loads(self, *arguments, **more)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load)
    options = identities(tmp_path, authority, client)["text"]
    assert greeted(server, {"ssl.ca.pem": authority.pem, **options}) == GREETING
    assert list(folder.iterdir()) == []
    assert modes == ([] if has_memory else [0o600, 0o600])


def test_authorities_come_from_a_file_a_folder_or_text(
    tmp_path: Path, server: Server, authority: Authority, client: Pair
) -> None:
    me = identities(tmp_path, authority, client)["text"]
    path = file(tmp_path, "ca.pem", Authority("another").pem + authority.pem)
    for options in (
        {"ssl.ca.location": path},
        {"ssl.ca.pem": authority.pem},
        {"ssl.truststore.type": "PEM", "ssl.truststore.location": path},
        {"ssl.truststore.certificates": authority.pem.replace("\n", " ")},
        {"enable.ssl.certificate.verification": "false"},
    ):
        assert greeted(server, {**me, **options}) == GREETING
    for options in ({}, {"ssl.ca.pem": Authority("another").pem}):
        with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
            greeted(server, {**me, **options})


def test_the_certificate_must_name_the_host_unless_the_user_says_otherwise(
    tmp_path: Path, authority: Authority
) -> None:
    with tls_server(tmp_path, authority.sign("broker", "elsewhere")) as server:
        with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
            greeted(server, {"ssl.ca.pem": authority.pem})
        for off in ("none", ""):
            options = {"ssl.ca.pem": authority.pem, "ssl.endpoint.identification.algorithm": off}
            assert greeted(server, options) == GREETING


def test_a_revoked_certificate_is_refused(tmp_path: Path, authority: Authority, broker: Pair) -> None:
    with tls_server(tmp_path, broker) as server:
        other = file(tmp_path, "other.crl", authority.revocations(authority.sign("other")))
        options = {"ssl.ca.pem": authority.pem, "ssl.crl.location": other}
        assert greeted(server, options) == GREETING
        options["ssl.crl.location"] = file(tmp_path, "broker.crl", authority.revocations(broker))
        with pytest.raises(ssl.SSLCertVerificationError, match="revoked"):
            greeted(server, options)


def test_versions_are_limited(tmp_path: Path, authority: Authority, broker: Pair) -> None:
    with tls_server(tmp_path, broker) as server:
        for options, version in (
            ({}, "TLSv1.3"),
            ({"ssl.protocol": "TLS"}, "TLSv1.3"),
            ({"ssl.protocol": "TLSv1.2"}, "TLSv1.2"),
            ({"ssl.enabled.protocols": "TLSv1.2"}, "TLSv1.2"),
            ({"ssl.enabled.protocols": "TLSv1.2,TLSv1.3", "ssl.protocol": "TLSv1.3"}, "TLSv1.3"),
        ):
            assert greeted(server, {"ssl.ca.pem": authority.pem, **options}) == GREETING
            assert server.seen.pop()[0] == version
    with tls_server(tmp_path, broker, maximum_version=ssl.TLSVersion.TLSv1_2) as server:
        assert greeted(server, {"ssl.ca.pem": authority.pem}) == GREETING
        with pytest.raises(ssl.SSLError, match=r"(?i)version"):
            greeted(server, {"ssl.ca.pem": authority.pem, "ssl.enabled.protocols": "TLSv1.3"})


def test_ciphers_and_curves_are_limited(tmp_path: Path, authority: Authority, broker: Pair) -> None:
    cipher = "ECDHE-ECDSA-AES128-GCM-SHA256"
    with tls_server(tmp_path, broker, maximum_version=ssl.TLSVersion.TLSv1_2) as server:
        options = {"ssl.ca.pem": authority.pem, "ssl.cipher.suites": cipher}
        assert greeted(server, options) == GREETING
        assert server.seen.pop()[1] == cipher
    with tls_server(tmp_path, broker, curve="secp384r1") as server:
        assert greeted(server, {"ssl.ca.pem": authority.pem, "ssl.curves.list": "P-384"}) == GREETING
        with pytest.raises(ssl.SSLError):
            greeted(server, {"ssl.ca.pem": authority.pem, "ssl.curves.list": "X25519"})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ssl.ca.location": "/none/ca.pem"}, r"kafka\.ssl\.ca\.location=/none/ca\.pem: No such file"),
        ({"ssl.crl.location": "/none/crl.pem"}, r"kafka\.ssl\.crl\.location=/none/crl\.pem: No such file"),
        ({"ssl.keystore.location": "/none/k.p12"}, r"kafka\.ssl\.keystore\.location=/none/k\.p12: No such"),
        ({"ssl.keystore.location": "{store}", "ssl.keystore.password": "wrong-7f"}, r"Invalid password"),
        ({"ssl.certificate.pem": "{pem}", "ssl.key.pem": "{key}"}, r"kafka\.ssl\.key\.pem"),
        (
            {"ssl.certificate.pem": "{pem}", "ssl.key.pem": "{key}", "ssl.key.password": "wrong-7f"},
            r"kafka\.ssl\.key\.password",
        ),
    ],
)
def test_an_error_names_the_options_and_shows_no_secret(
    options: dict[str, str], named: str, tmp_path: Path, client: Pair
) -> None:
    key = client.key_pem(PASSWORD)
    store = file(tmp_path, "k.p12", client.pkcs12(PASSWORD))
    given = {name: value.format(pem=client.pem, key=key, store=store) for name, value in options.items()}
    checked = check_consumer({"security.protocol": "SSL", **given})
    with pytest.raises(InvalidOptionError, match=named) as caught:
        tls.context(checked)
    shown = str(caught.value)
    assert "wrong-7f" not in shown
    assert key.splitlines()[1] not in shown
    assert "/proc/" not in shown


def test_a_broker_without_tls_is_an_error_of_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(listener.getsockname()[1])
        access = Access.of(check_consumer({"security.protocol": "SSL"}), SECONDS, SECONDS)
        plain = access.addresses.connect("127.0.0.1", server.port, Deadline.after_seconds(SECONDS))
        accepted, _ = listener.accept()
        accepted.sendall(b"\0" * 100)
        with accepted, pytest.raises(ssl.SSLError):
            access.wrapped(plain, "127.0.0.1")
