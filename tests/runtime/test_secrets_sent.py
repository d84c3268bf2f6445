"""Credentials go to the host that was configured: through no redirect, and not over plain http."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kafka_eos_source.errors import InvalidOptionError, KafkaEosError
from kafka_eos_source.kafka import config
from kafka_eos_source.kafka.config import check_producer
from kafka_eos_source.kafka.schema_registry import SchemaRegistry
from kafka_eos_source.kafka.tokens import Tokens, check_tokens
from kafka_eos_source.runtime import logs
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import is_loopback
from kafka_eos_source.sinks import specs as sinks
from kafka_eos_source.sinks.contract import SinkContext

SECRET = "hunter2-is-secret"
CLIENT = {"sasl.oauthbearer.client.id": "c", "sasl.oauthbearer.client.secret": SECRET}


def _sink(**options: str) -> None:
    (spec,) = sinks.parse(["x"], {f"sink.x.{name}": value for name, value in options.items()})
    spec.build()


def http_sink(url: str, allow: str) -> None:
    _sink(type="http", url=url, auth=SECRET, **{"allow.http": allow})


def http_sink_of_variable(url: str, allow: str) -> None:
    _sink(type="http", url=url, **{"allow.http": allow, "auth.env": "VARIABLE"})


def http_sink_of_query(url: str, allow: str) -> None:
    _sink(type="http", url=f"{url}?api_key={SECRET}", mode="idempotency-key", **{"allow.http": allow})


def http_sink_of_status(url: str, allow: str) -> None:
    status = {"status.url": f"{url}/{{id}}?api_key={SECRET}"}
    _sink(type="http", url=url, mode="idempotency-key", **status, **{"allow.http": allow})


def s3_sink(url: str, allow: str) -> None:
    _sink(type="s3", path="s3://bucket/x", endpoint=url, **{"allow.http": allow})


def iceberg_sink(url: str, allow: str) -> None:
    if importlib.util.find_spec("pyiceberg") is None:
        pytest.skip("pyiceberg is not installed")
    options = {"catalog.type": "rest", "catalog.uri": url, "catalog.token": SECRET}
    _sink(type="iceberg", table="a.b", **options, **{"allow.http": allow})


def registry(url: str, allow: str) -> None:
    SchemaRegistry({"url": url, "basic.auth.user.info": f"bob:{SECRET}", "allow.http": allow})


def registry_of_url(url: str, allow: str) -> None:
    SchemaRegistry({"url": f"https://a:1, {url.replace('://', f'://bob:{SECRET}@')}", "allow.http": allow})


def registry_of_token(url: str, allow: str) -> None:
    SchemaRegistry({"url": url, "bearer.auth.token": SECRET, "allow.http": allow})


def registry_of_oauth(url: str, allow: str) -> None:
    SchemaRegistry(
        {
            "url": "https://a:1",
            "bearer.auth.credentials.source": "OAUTHBEARER",
            "bearer.auth.client.id": "c",
            "bearer.auth.client.secret": SECRET,
            "bearer.auth.scope": "s",
            "bearer.auth.logical.cluster": "l",
            "bearer.auth.identity.pool.id": "p",
            "bearer.auth.issuer.endpoint.url": url,
            "allow.http": allow,
        }
    )


def token_service(url: str, allow: str) -> None:
    check_tokens({**CLIENT, "sasl.oauthbearer.token.endpoint.url": url, "sasl.oauthbearer.allow.http": allow})


def azure(url: str, allow: str) -> None:
    metadata = {"sasl.oauthbearer.metadata.authentication.type": "azure_imds"}
    check_tokens(
        {
            **metadata,
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.token.endpoint.url": url,
            "sasl.oauthbearer.allow.http": allow,
        }
    )


USES = [
    *(http_sink, http_sink_of_variable, http_sink_of_query, http_sink_of_status, s3_sink, iceberg_sink),
    *(registry, registry_of_url, registry_of_token, registry_of_oauth, token_service, azure),
]


@pytest.mark.parametrize("use", USES)
def test_secrets_cross_a_network_only_encrypted_or_with_an_option(use: object) -> None:
    assert callable(use)
    for url in ("http://billing.example:8080/x", "http://10.0.0.7/x", "http://127.0.0.1.example/x"):
        with pytest.raises(InvalidOptionError, match="without encryption") as refused:
            use(url, "false")
        message = str(refused.value)
        assert "allow.http'" in message
        assert url.partition("://")[2].partition("/")[0].partition(":")[0] in message
        assert SECRET not in message
        use(url, "true")
    for url in (
        "http://127.0.0.1:1/x",
        "http://localhost/x",
        "http://[::1]:1/x",
        "https://billing.example/x",
    ):
        use(url, "false")


def test_a_service_without_credentials_may_use_plain_http() -> None:
    _sink(type="http", url="http://billing.example/x")
    SchemaRegistry({"url": "http://registry:8081"})


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("LOCALHOST.", True),
        ("a.localhost", True),
        ("localhost.example", False),
        ("notlocalhost", False),
        ("127.0.0.1.example", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_which_hosts_are_this_one(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("protocol", "mechanism", "servers", "warned"),
    [
        ("sasl_plaintext", "PLAIN", "broker.example:9092", True),
        ("sasl_plaintext", "PLAIN", "localhost:9092,broker.example:9092", True),
        ("sasl_plaintext", "PLAIN", "localhost:9092,[::1]:9092", False),
        ("sasl_plaintext", "SCRAM-SHA-512", "broker.example:9092", False),
        ("sasl_ssl", "PLAIN", "broker.example:9092", False),
    ],
)
def test_a_password_without_encryption_is_warned_of_once(
    protocol: str,
    mechanism: str,
    servers: str,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "_warned", set())
    kafka = {
        "bootstrap.servers": servers,
        "security.protocol": protocol,
        "sasl.mechanism": mechanism,
        "sasl.username": "alice",
        "sasl.password": SECRET,
    }
    for _ in range(2):
        check_producer(kafka, exactly_once=True)
    found = [each.getMessage() for each in caplog.records if each.name == config.__name__]
    assert len(found) == (1 if warned else 0)
    assert SECRET not in caplog.text


class Redirecting:
    """Two services: the first redirects each request to the second, which records who asked it."""

    def __init__(self, status: int) -> None:
        self.asked: list[str] = []
        asked, other = self.asked, ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)

        class Thief(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_error(404)

            def log_message(self, format: str, *args: object) -> None:
                """Prints nothing."""

        class First(Thief):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Location", f"http://127.0.0.1:{other.server_port}{self.path}")
                self.send_header("Content-Length", "0")
                self.end_headers()

        for each in (Thief, First):
            for method in ("POST", "PUT", "HEAD"):
                setattr(each, f"do_{method}", each.do_GET)
        other.RequestHandlerClass = Thief
        self._servers = [other, ThreadingHTTPServer(("127.0.0.1", 0), First)]
        for each in self._servers:
            threading.Thread(target=each.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._servers[1].server_port}"

    def close(self) -> None:
        for each in self._servers:
            each.shutdown()
            each.server_close()


@pytest.fixture(params=[301, 302, 303, 307, 308])
def redirecting(request: pytest.FixtureRequest) -> Iterator[Redirecting]:
    services = Redirecting(request.param)
    yield services
    services.close()


def test_no_credentials_follow_a_redirect(redirecting: Redirecting, monkeypatch: pytest.MonkeyPatch) -> None:
    url = redirecting.url
    with pytest.raises(KafkaEosError):
        SchemaRegistry({"url": url, "basic.auth.user.info": f"b:{SECRET}", "retry.timeout.ms": 0}).answers()
    with pytest.raises(Exception, match=r"answered 30\d"):
        Tokens.of({**CLIENT, "sasl.oauthbearer.token.endpoint.url": url}).current(Deadline.after_seconds(5))
    stated = {"sink.h.type": "http", "sink.h.url": url, "sink.h.auth": SECRET, "sink.h.retries": "0"}
    (spec,) = sinks.parse(["h"], stated)
    sink = spec.build()
    sink.open(SinkContext("h", "app", "cluster"))
    with pytest.raises(KafkaEosError):
        sink.recover(Deadline.after_seconds(5))
    sink.close()
    if importlib.util.find_spec("boto3") is not None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        stated = {"sink.s.type": "s3", "sink.s.path": "s3://bucket/x", "sink.s.endpoint": url}
        (spec,) = sinks.parse(["s"], {**stated, "sink.s.region": "eu-1", "sink.s.path.style": "true"})
        store = spec.build()
        store.open(SinkContext("s", "app", "cluster"))
        with pytest.raises(KafkaEosError):
            store.recover(Deadline.after_seconds(5))
    assert redirecting.asked == []
