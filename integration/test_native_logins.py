"""The native client logs in with each mechanism of these brokers, and renews its sessions (KIP-368)."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pyarrow as pa
import pytest

from integration.support import broker as brokers
from integration.support.kafka import Admin, read_back, values
from integration.support.security import PASSWORDS, SecuredCluster
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.embedded.cluster import HOST, free_ports
from kafka_eos_source.errors import AuthorizationError
from kafka_eos_source.kafka import access, connection
from kafka_eos_source.kafka import producer as module
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.connection import Connection
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

#: The broker ends sessions after this time on all listeners but ``ENDED``. A machine may stand still for some
#: seconds, in which no client renews anything.
SESSION_SECONDS = 60.0
#: The client renews its sessions after this time. Those of the listener ``ENDED`` do not last longer.
RENEWED_SECONDS = 1.5
ROWS = 50


class TokenService:
    """Gives tokens without a signature for ``admin`` to the client ``me``, for some seconds each."""

    def __init__(self) -> None:
        self.given = 0
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                known = self.headers["Authorization"] == "Basic " + base64.b64encode(b"me:secret").decode()
                service.given += known
                now = int(time.time())
                token = f"{part({'alg': 'none'})}.{part({'sub': 'admin', 'iat': now, 'exp': now + 600})}."
                body = json.dumps({"access_token": token, "expires_in": 2} if known else {}).encode()
                self.send_response(200 if known else 401)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        self._server = HTTPServer((HOST, 0), Handler)
        self.url = f"http://{HOST}:{self._server.server_port}/token"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def part(claims: Mapping[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")


@pytest.fixture(scope="module")
def service() -> Iterator[TokenService]:
    made = TokenService()
    yield made
    made.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Mapping[str, str], Admin]]:
    """A broker whose sessions end. Gives its address by mechanism, and an administrator.

    Sessions at the address ``ended`` are shorter than the others; the mechanism is PLAIN.
    """
    plain, tokens, ended, controller = free_ports([0, 0, 0, 0])
    listeners = {"SASL_PLAINTEXT": plain, "TOKENS": tokens, "ENDED": ended, "CONTROLLER": controller}
    session_ms = str(int(SESSION_SECONDS * 1000))
    users = " ".join(f'user_{name}="{password}"' for name, password in PASSWORDS.items())
    config = {
        "listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in listeners.items()),
        "controller.quorum.voters": f"1@{HOST}:{controller}",
        "listener.security.protocol.map": (
            "CONTROLLER:SASL_PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,TOKENS:SASL_PLAINTEXT,ENDED:SASL_PLAINTEXT"
        ),
        "listener.name.tokens.sasl.enabled.mechanisms": "OAUTHBEARER",
        "listener.name.tokens.oauthbearer.sasl.jaas.config": (
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
            'unsecuredLoginStringClaim_sub="admin";'
        ),
        "listener.name.tokens.oauthbearer.connections.max.reauth.ms": session_ms,
        "listener.name.sasl_plaintext.plain.connections.max.reauth.ms": session_ms,
        "listener.name.ended.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.ended.plain.sasl.jaas.config": (
            f"org.apache.kafka.common.security.plain.PlainLoginModule required {users};"
        ),
        "listener.name.ended.plain.connections.max.reauth.ms": str(int(RENEWED_SECONDS * 1000)),
    }
    with EmbeddedKafka(
        port=plain, config=config, users=PASSWORDS, java_options=brokers.JAVA_OPTIONS
    ) as kafka:
        secured = SecuredCluster(kafka)
        addresses = {"PLAIN": plain, "OAUTHBEARER": tokens, "ended": ended}
        yield {name: f"{HOST}:{port}" for name, port in addresses.items()}, secured.admin


def login(name: str, addresses: Mapping[str, str], service: TokenService) -> dict[str, str]:
    """Returns librdkafka properties: PLAIN, OAUTHBEARER with unsecured tokens, or with those of a service."""
    mechanism = "PLAIN" if name in ("PLAIN", "ended") else "OAUTHBEARER"
    login = {"sasl.username": "admin", "sasl.password": PASSWORDS["admin"]}
    common = {
        "bootstrap.servers": addresses[name if name == "ended" else mechanism],
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": mechanism,
    }
    return (
        common
        | {
            "PLAIN": login,
            "ended": login,
            "unsecured": {
                "enable.sasl.oauthbearer.unsecure.jwt": "true",
                "sasl.oauthbearer.config": "principal=admin lifeSeconds=600",
            },
            "OIDC": {
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.token.endpoint.url": service.url,
                "sasl.oauthbearer.client.id": "me",
                "sasl.oauthbearer.client.secret": "secret",
            },
        }[name]
    )


def soon() -> Deadline:
    return Deadline.after_seconds(60)


def rows(first: int) -> pa.RecordBatch:
    return pa.record_batch(
        {"value": pa.array([b"%08d" % n for n in range(first, first + ROWS)], pa.binary())}
    )


def write_until(enough: Callable[[], bool], client: TransactionalProducer, topic: str) -> int:
    """Writes one transaction whose requests are always in flight; returns the number of records."""
    client.begin()
    limit = soon()
    sent = 0
    while not sent or not enough():
        assert not limit.expired
        client.send(rows(sent), topic, soon())
        sent += ROWS
    client.flush(soon())
    client.send_offsets([GroupOffset(TopicPartition(topic, 0), 1, "token")], "group", soon())
    client.commit(soon())
    return sent


def written(addresses: Mapping[str, str], topic: str) -> list[str]:
    """Returns the committed values, in order."""
    admin = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "admin",
        "sasl.password": PASSWORDS["admin"],
    }
    return sorted(values(read_back(addresses["PLAIN"], topic, config=admin)))


@pytest.fixture
def always_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are sent as soon as there are rows, and `send` returns while most of them are on the way."""
    monkeypatch.setattr(module, "_COLLECT_BYTES", 1)
    monkeypatch.setattr(module, "_QUEUE_BYTES", 5_000)


@pytest.fixture
def failed_requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects why connections failed while a broker owed them an answer.

    A broker's answer that asks for a retry is not collected: CONCURRENT_TRANSACTIONS, for example, is the
    ordinary answer to a transaction that begins before the markers of the one before it are written.
    """
    collected: list[str] = []
    fail = Connection.fail

    def recorded(failed: Connection, error: Exception) -> None:
        if failed.in_flight:
            collected.append(f"{failed.address}: {error}")
        fail(failed, error)

    monkeypatch.setattr(Connection, "fail", recorded)
    return collected


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the addresses at which the client logs in."""
    collected: list[str] = []
    log_in = connection.open_session

    def recorded(socket: Any, host: str, address: str, *more: Any) -> Any:
        collected.append(address)
        return log_in(socket, host, address, *more)

    monkeypatch.setattr(connection, "open_session", recorded)
    return collected


@pytest.mark.usefixtures("always_in_flight")
@pytest.mark.parametrize("name", ["PLAIN", "unsecured", "OIDC"])
def test_sessions_that_expire_under_load_are_renewed_without_an_error(
    cluster: tuple[Mapping[str, str], Admin],
    service: TokenService,
    failed_requests: list[str],
    sessions: list[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(access, "_SESSION_SHARE", RENEWED_SECONDS / SESSION_SECONDS)
    addresses, admin = cluster
    topic = admin.create(f"renewed-{name}", 3)
    config = producer_config(login(name, addresses, service), f"renewed-{name}")
    client = TransactionalProducer(config)
    client.init(soon())
    before = write_until(lambda: True, client, topic)  # leaders and coordinators of new topics are known then
    logins, tokens = len(sessions), service.given

    def are_renewed() -> bool:
        # two rounds, because a token outlives the first one
        return len(sessions) >= logins + 2 and (name != "OIDC" or service.given > tokens)

    sent = write_until(are_renewed, client, topic)
    assert failed_requests == [], "each connection was replaced when its requests were answered"
    client.close()
    assert written(addresses, topic) == sorted(f"{n:08d}" for count in (before, sent) for n in range(count))


@pytest.mark.usefixtures("always_in_flight")
def test_a_session_that_the_broker_ends_costs_no_batch(
    cluster: tuple[Mapping[str, str], Admin],
    service: TokenService,
    failed_requests: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client does not renew in time: requests in flight fail, and are sent again, in order."""
    monkeypatch.setattr(access, "_SESSION_SHARE", 100)
    addresses, admin = cluster
    topic = admin.create("ended", 3)
    client = TransactionalProducer(producer_config(login("ended", addresses, service), "ended"))
    client.init(soon())
    sent = write_until(lambda: bool(failed_requests), client, topic)  # until the broker has ended a session
    client.close()
    assert written(addresses, topic) == [f"{number:08d}" for number in range(sent)]


def test_a_token_service_that_refuses_the_client_is_named(
    cluster: tuple[Mapping[str, str], Admin], service: TokenService
) -> None:
    config = login("OIDC", cluster[0], service) | {"sasl.oauthbearer.client.secret": "wrong"}
    client = TransactionalProducer(producer_config(config, "refused"))
    with pytest.raises(AuthorizationError, match=r"/token answered 401") as raised:
        client.init(soon())
    assert "wrong" not in str(raised.value)
    client.close()
