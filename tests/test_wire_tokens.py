"""Tokens of OAUTHBEARER, from a service on this host."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs

import pytest

from kafka_eos_source.kafka.login import LoginRefusedError
from kafka_eos_source.kafka.wire import tokens as module
from kafka_eos_source.kafka.wire.tokens import Tokens, unsupported
from kafka_eos_source.runtime.deadline import Deadline


class Service:
    """A token endpoint.

    Attributes:
        answers: status and body of the next answers; the last one stays.
        asked: authorization and form of each request.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                service.asked.append((self.headers["Authorization"], form))
                status, body = service.answers[0] if len(service.answers) == 1 else service.answers.pop(0)
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def properties(self) -> dict[str, str]:
        return {
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.token.endpoint.url": f"http://127.0.0.1:{self._server.server_port}/token",
            "sasl.oauthbearer.client.id": "me",
            "sasl.oauthbearer.client.secret": "it's a secret",
            "sasl.oauthbearer.scope": "kafka",
            "sasl.oauthbearer.extensions": "pool=a,cluster=b",
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def soon() -> Deadline:
    return Deadline(1e9, 20)


def jwt(**claims: object) -> str:
    part = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"e30.{part}.sig"


def test_a_token_is_kept_until_most_of_its_lifetime_has_passed(service: Service, clock: list[float]) -> None:
    service.answers = [
        (200, {"access_token": "one", "expires_in": 100}),
        (200, {"access_token": jwt(exp=time.time() + 50)}),
        (200, {"access_token": "three"}),
    ]
    tokens = Tokens.of(service.properties)
    tokens.refresh(soon())
    clock[0] += 79
    tokens.refresh(soon())
    assert tokens.token() == "one"
    clock[0] += 2
    tokens.refresh(soon())
    assert tokens.token().startswith("e30."), "80 of 100 seconds have passed"
    clock[0] += 41
    tokens.refresh(soon())
    assert tokens.token() == "three", "the token itself says when it expires"
    authorization, form = service.asked[0]
    assert base64.b64decode(authorization.removeprefix("Basic ")) == b"me:it's a secret"
    assert form == {"grant_type": ["client_credentials"], "scope": ["kafka"]}
    assert tokens.extensions() == {"pool": "a", "cluster": "b"}


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_refusal_is_no_failure_of_the_network(service: Service, status: int) -> None:
    service.answers = [(status, {"error": "invalid_client"})]
    with pytest.raises(LoginRefusedError, match=rf"/token answered {status}"):
        Tokens.of(service.properties).refresh(soon())


@pytest.mark.parametrize("body", [[], {"token": "x"}, {"access_token": 7}])
def test_an_answer_without_a_token_is_refused(service: Service, body: object) -> None:
    service.answers = [(200, body)]
    with pytest.raises(LoginRefusedError, match="without an access_token"):
        Tokens.of(service.properties).refresh(soon())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_service_is_asked_again_later(service: Service, status: int) -> None:
    service.answers = [(status, {}), (200, {"access_token": "one", "expires_in": 9})]
    tokens = Tokens.of(service.properties)
    with pytest.raises(OSError, match=str(status)):
        tokens.refresh(soon())
    tokens.refresh(soon())
    assert tokens.token() == "one"


def test_an_unsecured_token_has_the_claims_of_librdkafkas() -> None:
    tokens = Tokens.of(
        {"sasl.oauthbearer.config": "principal=alice scope=kafka lifeSeconds=60 extension_a=b"}
    )
    tokens.refresh(Deadline.after_seconds(5))
    _header, claims, signature = tokens.token().split(".")
    found = json.loads(base64.urlsafe_b64decode(claims + "=="))
    assert (found["sub"], found["scope"], signature) == ("alice", "kafka", "")
    assert found["exp"] - found["iat"] == pytest.approx(60)
    assert tokens.extensions() == {"a": "b"}
    assert unsupported({"enable.sasl.oauthbearer.unsecure.jwt": "true"}) == ""
