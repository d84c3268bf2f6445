"""Both clients connect to a broker that requires clients' certificates, with the same options of the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from integration.support import broker as brokers
from integration.support.kafka import Admin, read_back, values
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.embedded.cluster import HOST, free_ports
from kafka_eos_source.errors import AuthorizationError
from kafka_eos_source.kafka.admin import ClusterReader
from kafka_eos_source.kafka.config import admin_config, check_producer, producer_config
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.runtime.deadline import Deadline
from tests.kafka.tls_identities import PASSWORD, WAYS, identities
from tests.support.tls_server import Authority, Pair


class Secured:
    """A broker with a listener for everybody, and one that requires a certificate of the authority."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.folder = Authority("test authority"), folder
        self.client = self.authority.sign("me")
        store, trusted = folder / "broker.p12", folder / "ca.pem"
        store.write_bytes(self.authority.sign("broker", HOST).pkcs12(PASSWORD, self.authority))
        trusted.write_text(self.authority.pem)
        self.open, self.secure, controller = free_ports([0, 0, 0])
        listeners = {"PLAINTEXT": self.open, "SECURE": self.secure, "CONTROLLER": controller}
        self.config = {
            "listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in listeners.items()),
            "controller.quorum.voters": f"1@{HOST}:{controller}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SECURE:SSL",
            "listener.name.secure.ssl.client.auth": "required",
            "listener.name.secure.ssl.keystore.type": "PKCS12",
            "listener.name.secure.ssl.keystore.location": str(store),
            "listener.name.secure.ssl.keystore.password": PASSWORD,
            "listener.name.secure.ssl.truststore.type": "PEM",
            "listener.name.secure.ssl.truststore.location": str(trusted),
        }

    def options(self, way: str, client: Pair | None = None) -> dict[str, str]:
        """Returns the user's options, without the prefix ``kafka.``."""
        return {
            "bootstrap.servers": f"{HOST}:{self.secure}",
            "security.protocol": "SSL",
            "ssl.truststore.certificates": self.authority.pem,
            **identities(self.folder, self.authority, client or self.client)[way],
        }


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("tls"))
    with EmbeddedKafka(port=made.open, config=made.config, java_options=brokers.JAVA_OPTIONS):
        yield made


def written(options: Mapping[str, str], topic: str) -> None:
    """Writes a row in a transaction, after a request for administration."""
    deadline = Deadline.after_seconds(60)
    checked = check_producer(options, exactly_once=True)
    with ClusterReader(admin_config(checked)) as reader:
        assert topic in reader.topics(deadline)[1]
    client = TransactionalProducer(producer_config(checked, f"tls-{topic}"))
    try:
        client.init(deadline)
        client.begin()
        client.send(pa.record_batch({"value": pa.array([b"row"], pa.binary())}), topic, deadline)
        client.flush(deadline)
        client.commit(deadline)
    finally:
        client.close()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"ssl.enabled.protocols": "TLSv1.3"},
        {"ssl.enabled.protocols": "TLSv1.2", "ssl.cipher.suites": "ECDHE-ECDSA-AES256-GCM-SHA384"},
        {"ssl.curves.list": "P-256", "client.dns.lookup": "use_all_dns_ips", "broker.address.family": "v4"},
    ],
    ids=["default", "TLS 1.3", "TLS 1.2", "curve"],
)
def test_connections_are_limited_as_the_options_say(secured: Secured, more: dict[str, str]) -> None:
    topic = Admin(f"{HOST}:{secured.open}").create(f"limited-{len(str(more))}")
    written({**secured.options("text"), **more}, topic)
    assert values(read_back(f"{HOST}:{secured.open}", topic)) == ["row"]


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_give_a_key_works(secured: Secured, way: str) -> None:
    topic = Admin(f"{HOST}:{secured.open}").create(way.replace(" ", "-"))
    written(secured.options(way), topic)
    assert values(read_back(f"{HOST}:{secured.open}", topic)) == ["row"]


def test_a_certificate_of_another_authority_is_refused(secured: Secured, tmp_path: Path) -> None:
    stranger = Authority("stranger").sign("me")
    checked = check_producer(secured.options("text", stranger), exactly_once=True)
    client = TransactionalProducer(producer_config(checked, "stranger"))
    try:
        with pytest.raises(AuthorizationError, match="ssl"):
            client.init(Deadline.after_seconds(20))
    finally:
        client.close()
