"""Tokens of OAUTHBEARER: of a service on this host, of files, and of functions."""

from __future__ import annotations

import base64
import datetime
import json
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils

from kafka_eos_source.errors import (
    InvalidOptionError,
    RetriableError,
)
from kafka_eos_source.kafka import tokens as module
from kafka_eos_source.kafka.failure import LoginRefusedError
from kafka_eos_source.kafka.tokens import PROVIDER, OAuthService, Tokens, check_tokens
from kafka_eos_source.runtime.deadline import Deadline
from tests.support.doc_pages import ROOT, blocks


class Service:
    """A token endpoint.

    Attributes:
        answers: status and body of the next answers; the last one stays.
        asked: authorization and form of each request.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        self.hangs, self.ended = False, threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                service.asked.append((self.headers["Authorization"], form))
                if service.hangs:
                    service.ended.wait(30)
                status, body = service.answers[0] if len(service.answers) == 1 else service.answers.pop(0)
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                if status == 302:
                    self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
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
        self.ended.set()
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
    assert tokens.current(soon()).token == "one"
    clock[0] += 79
    assert Tokens.of(service.properties).current(soon()).token == "one", "another client of the process"
    clock[0] += 2
    assert tokens.current(soon()).token.startswith("e30."), "80 of 100 seconds have passed"
    clock[0] += 41
    assert tokens.current(soon()).token == "three", "the token itself says when it expires"
    authorization, form = service.asked[0]
    assert base64.b64decode(authorization.removeprefix("Basic ")) == b"me:it's a secret"
    assert form == {"grant_type": ["client_credentials"], "scope": ["kafka"]}
    assert tokens.current(soon()).extensions == {"pool": "a", "cluster": "b"}


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_refusal_is_no_failure_of_the_network(service: Service, status: int) -> None:
    service.answers = [(status, {"error": "invalid_client", "error_description": "unknown client"})]
    with pytest.raises(
        LoginRefusedError, match=rf"/token answered {status} .*invalid_client: unknown client"
    ):
        Tokens.of(service.properties).current(soon())


def test_a_redirect_does_not_carry_the_secret_elsewhere(service: Service) -> None:
    service.answers = [(302, {})]
    with pytest.raises(LoginRefusedError, match=r"/token answered 302"):
        Tokens.of(service.properties).current(soon())
    assert len(service.asked) == 1


@pytest.mark.parametrize("body", [[], {"token": "x"}, {"access_token": 7}])
def test_an_answer_without_a_token_is_refused(service: Service, body: object) -> None:
    service.answers = [(200, body)]
    with pytest.raises(LoginRefusedError, match="without an access_token"):
        Tokens.of(service.properties).current(soon())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_service_is_asked_again_later(service: Service, status: int) -> None:
    service.answers = [(status, {}), (200, {"access_token": "one", "expires_in": 9})]
    tokens = Tokens.of(service.properties)
    with pytest.raises(OSError, match=str(status)):
        tokens.current(soon())
    assert tokens.current(soon()).token == "one"


def test_an_unsecured_token_has_the_claims_of_librdkafkas() -> None:
    issued = Tokens.of(
        {
            "enable.sasl.oauthbearer.unsecure.jwt": "true",
            "sasl.oauthbearer.config": "principal=alice scope=kafka lifeSeconds=60 extension_a=b",
        }
    ).current(soon())
    found, signature = claims(issued.token)
    assert (found["sub"], found["scope"], signature) == ("alice", "kafka", "")
    assert found["exp"] - found["iat"] == pytest.approx(60)
    assert issued.extensions == {"a": "b"}


def claims(token: str) -> tuple[dict[str, Any], str]:
    _, part, signature = token.split(".")
    return json.loads(base64.urlsafe_b64decode(part + "==")), signature


def test_a_file_is_read_again_when_its_token_is_old(tmp_path: Path, clock: list[float]) -> None:
    path = tmp_path / "a token"
    kafka = {"sasl.oauthbearer.token.endpoint.url": path.as_uri()}
    with pytest.raises(OSError, match="a token"):
        Tokens.of(kafka).current(soon())
    path.write_text(jwt(exp=time.time() - 5))
    with pytest.raises(ConnectionError, match="expired 5 s ago"):
        Tokens.of(kafka).current(soon())
    path.write_text(first := jwt(exp=time.time() + 100))
    assert Tokens.of(kafka).current(soon()).token == first
    path.write_text(jwt(exp=time.time() + 200) + "\n")
    assert Tokens.of(kafka).current(soon()).token == first
    clock[0] += 90
    assert claims(Tokens.of(kafka).current(soon()).token)[0]["exp"] > time.time() + 150


# -- assertions (RFC 7523)


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
def test_an_assertion_is_signed_as_the_service_expects(
    service: Service, tmp_path: Path, algorithm: str
) -> None:
    made: Any = (
        rsa.generate_private_key(65537, 2048)
        if algorithm == "RS256"
        else ec.generate_private_key(ec.SECP256R1())
    )
    pem = made.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"phrase-77"),
    )
    (tmp_path / "key").write_bytes(pem)
    (tmp_path / "template").write_text(json.dumps({"header": {"kid": "7"}, "payload": {"tenant": "t"}}))
    prefix = "sasl.oauthbearer.assertion."
    kafka = {
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.grant.type": "urn:ietf:params:oauth:grant-type:jwt-bearer",
        "sasl.oauthbearer.token.endpoint.url": service.properties["sasl.oauthbearer.token.endpoint.url"],
        f"{prefix}algorithm": algorithm,
        f"{prefix}private.key.file": str(tmp_path / "key"),
        f"{prefix}private.key.passphrase": "phrase-77",
        f"{prefix}claim.aud": "service",
        f"{prefix}claim.sub": "me",
        f"{prefix}claim.jti.include": "true",
        f"{prefix}jwt.template.file": str(tmp_path / "template"),
    }
    service.answers = [(200, {"access_token": "one", "expires_in": "100"})]
    assert Tokens.of(kafka).current(soon()).token == "one"
    authorization, form = service.asked[0]
    assert authorization is None
    sent = form["assertion"][0]
    found, signature = claims(sent)
    assert (found["aud"], found["sub"], found["tenant"], len(found["jti"])) == ("service", "me", "t", 36)
    assert found["exp"] - found["iat"] == 300
    header = json.loads(base64.urlsafe_b64decode(sent.split(".")[0] + "=="))
    assert header == {"alg": algorithm, "typ": "JWT", "kid": "7"}
    signed, raw = sent.rpartition(".")[0].encode(), base64.urlsafe_b64decode(signature + "==")
    if algorithm == "RS256":
        made.public_key().verify(raw, signed, padding.PKCS1v15(), hashes.SHA256())
    else:
        der = utils.encode_dss_signature(int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big"))
        made.public_key().verify(der, signed, ec.ECDSA(hashes.SHA256()))
    for changed, said in (
        ({f"{prefix}private.key.passphrase": "other-phrase"}, "wrong passphrase"),
        ({f"{prefix}private.key.file": "/nowhere"}, "No such file"),
        ({f"{prefix}algorithm": "ES512"}, "'ES512'"),
        ({f"{prefix}jwt.template.file": "/nowhere"}, "template"),
    ):
        with pytest.raises(InvalidOptionError, match=said) as caught:
            Tokens.of({**kafka, **changed})
        assert "phrase" not in str(caught.value).replace("passphrase", "")


def test_an_assertion_of_a_file_is_sent_as_it_is(service: Service, tmp_path: Path) -> None:
    (tmp_path / "assertion").write_text("a.b.c\n")
    service.answers = [(200, {"access_token": "one", "expires_in": 100})]
    kafka = {
        "sasl.oauthbearer.token.endpoint.url": service.properties["sasl.oauthbearer.token.endpoint.url"],
        "sasl.oauthbearer.grant.type": "urn:ietf:params:oauth:grant-type:jwt-bearer",
        "sasl.oauthbearer.assertion.file": str(tmp_path / "assertion"),
    }
    Tokens.of(kafka).current(soon())
    assert service.asked[0][1]["assertion"] == ["a.b.c"]


# -- functions of the user

given: list[Any] = []
SECRET = "token-of-the-user"


def provide(config: str) -> Any:
    """A token provider: returns, or raises, the first element of `given`."""
    answer = given.pop(0) if len(given) > 1 else given[0]
    if isinstance(answer, BaseException):
        raise answer
    return answer(config) if callable(answer) else answer


@pytest.fixture
def provided() -> Iterator[Callable[..., Tokens]]:
    module._tokens.cache_clear()

    def of(*answers: Any, config: str = "") -> Tokens:
        given[:] = answers
        return Tokens.of({PROVIDER: f"{__name__}:provide", "sasl.oauthbearer.config": config})

    yield of
    module._tokens.cache_clear()


class Given:
    def __init__(self, **more: Any) -> None:
        self.token = SECRET
        self.__dict__.update(more)


LATER = time.time() + 1000


@pytest.mark.parametrize(
    "answer",
    [
        (SECRET, LATER),
        (SECRET, LATER, "alice", {"logicalCluster": "c"}),
        Given(expires_on=int(LATER)),  # azure-identity
        Given(expiry=datetime.datetime.fromtimestamp(LATER, datetime.timezone.utc).replace(tzinfo=None)),
        Given(expiry=datetime.datetime.fromtimestamp(LATER).astimezone()),
    ],
)
def test_what_a_function_may_return(provided: Callable[..., Tokens], answer: Any) -> None:
    issued = provided(answer).current(soon())
    assert issued.token == SECRET
    assert issued.expires == pytest.approx(LATER, abs=1)


def test_a_function_gets_the_text_of_an_option_and_is_called_again_in_time(
    provided: Callable[..., Tokens], clock: list[float]
) -> None:
    asked: list[str] = []

    def answer(config: str) -> tuple[str, float]:
        asked.append(config)
        return f"token-{len(asked)}", time.time() + 100

    tokens = provided(answer, config="audience=a")
    assert tokens.current(soon()).token == "token-1"
    clock[0] += 79
    assert tokens.current(soon()).token == "token-1"
    clock[0] += 2
    assert tokens.current(soon()).token == "token-2"
    assert asked == ["audience=a"] * 2


@pytest.mark.parametrize(
    "answer",
    [
        None,
        SECRET,
        (SECRET,),
        (SECRET, None),
        (SECRET, "soon"),
        ("", LATER),
        (7, LATER),
        Given(),
        (SECRET, True),
        (SECRET, LATER * 1000),
    ],
)
def test_what_a_function_may_not_return_is_described_without_the_token(
    provided: Callable[..., Tokens], answer: Any
) -> None:
    with pytest.raises(LoginRefusedError, match="test_tokens:provide' returned") as caught:
        provided(answer).current(soon())
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ValueError("no such identity"), LoginRefusedError),
        (ConnectionResetError("reset"), ConnectionError),
        (RetriableError("busy"), ConnectionError),
        (LoginRefusedError("not you"), LoginRefusedError),
    ],
)
def test_a_function_that_raises_is_asked_again(
    provided: Callable[..., Tokens], raised: Exception, kind: type[Exception]
) -> None:
    tokens = provided(raised, (SECRET, LATER))
    with pytest.raises(kind, match=str(raised.args[0])):
        tokens.current(soon())
    assert tokens.current(soon()).token == SECRET


def test_a_function_that_hangs_is_waited_for_and_not_called_twice(provided: Callable[..., Tokens]) -> None:
    released, calls = threading.Event(), []

    def answer(_config: str) -> tuple[str, float]:
        calls.append(1)
        released.wait(60)
        return SECRET, LATER

    tokens = provided(answer)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="test_tokens:provide' has not returned for 0 s"):
            tokens.current(Deadline.after_seconds(0.05))
    released.set()
    assert tokens.current(soon()).token == SECRET
    assert calls == [1]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nothing", "has the value 'nothing'"),
        ("no_such_module:f", "cannot be imported in this process: ModuleNotFoundError"),
        ("json:no_such_function", "AttributeError"),
        ("json:__name__", "is no function but a str"),
    ],
)
def test_a_function_that_does_not_exist_is_named(path: str, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said) as caught:
        Tokens.of({PROVIDER: path})
    assert "on every executor" in caught.value.fix


@pytest.mark.parametrize(
    ("kafka", "said"),
    [
        ({}, "where tokens come from"),
        ({"sasl.oauthbearer.method": "oidc"}, "token.endpoint.url' is missing"),
        ({"sasl.oauthbearer.token.endpoint.url": "ftp://x/"}, "'ftp://x/'"),
        ({"sasl.oauthbearer.token.endpoint.url": "https://x/"}, "client.id' is missing"),
        (
            {"sasl.oauthbearer.token.endpoint.url": "https://x/", "sasl.oauthbearer.client.id": "me"},
            "client.secret' is missing",
        ),
        ({PROVIDER: "a:b", "sasl.oauthbearer.client.id": "me"}, "are both set"),
        (
            {
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.metadata.authentication.type": "aws_iam",
            },
            "'aws_iam'",
        ),
    ],
)
def test_properties_that_conflict_or_lack_something_are_refused(kafka: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        check_tokens(kafka)


# -- the examples of docs/logins.md


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the module of a code block importable; returns the path of its provider."""
    (code,) = (each.code for each in blocks(ROOT / "docs" / "logins.md") if f"# {name}.py" in each.code)
    module = ModuleType(name)
    exec(compile(code, name, "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    return f"{name}:token"


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


class AccessToken(NamedTuple):
    """As in ``azure.core.credentials``."""

    token: str
    expires_on: int


def test_the_example_for_entra_id(monkeypatch: pytest.MonkeyPatch) -> None:
    class Credential:
        def get_token(self, *scopes: str) -> AccessToken:
            assert scopes == ("https://hub.servicebus.windows.net/.default",)
            return AccessToken(SECRET, int(LATER))

    stand_in(monkeypatch, "azure")
    stand_in(monkeypatch, "azure.identity", DefaultAzureCredential=Credential)
    config = "https://hub.servicebus.windows.net/.default"
    kafka = {PROVIDER: example("entra", monkeypatch), "sasl.oauthbearer.config": config}
    assert Tokens.of(kafka).current(soon()) == (SECRET, int(LATER), "", {})


def test_the_example_for_googles_managed_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    class Credentials:
        service_account_email = "me@project.iam.gserviceaccount.com"
        token, expiry = "", None

        def refresh(self, _request: object) -> None:
            self.token = SECRET
            self.expiry = datetime.datetime.fromtimestamp(LATER, datetime.timezone.utc).replace(tzinfo=None)

    stand_in(monkeypatch, "google.auth", default=lambda scopes: (Credentials(), "project"))
    stand_in(monkeypatch, "google", auth=sys.modules["google.auth"])
    stand_in(monkeypatch, "google.auth.transport")
    stand_in(monkeypatch, "google.auth.transport.requests", Request=object)
    issued = Tokens.of({PROVIDER: example("managed_kafka", monkeypatch)}).current(soon())
    header, payload, token = (json.loads(each) if each[:1] == b"{" else each for each in parts(issued.token))
    assert header == {"typ": "JWT", "alg": "GOOG_OAUTH2_TOKEN"}
    assert (payload["sub"], payload["iss"], payload["scope"]) == (
        Credentials.service_account_email,
        "Google",
        "kafka",
    )
    assert payload["exp"] == pytest.approx(LATER) == issued.expires
    assert token == SECRET.encode()


def parts(token: str) -> list[bytes]:
    return [base64.urlsafe_b64decode(each + "=" * (-len(each) % 4)) for each in token.split(".")]


# -- damaged answers


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"no answer of a web server", "did not answer with HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"a" * 70_000, "did not answer with HTTP"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"access_token": "a", "expires_in": NaN}', "did not answer with JSON"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 60_000, "did not answer with JSON"),
        (b"HTTP/1.1 500 No\r\n\r\n" + b"[" * 60_000, "answered 500 No"),
        (b"HTTP/1.1 500 No\r\n\r\n[1]", "answered 500 No"),
    ],
    ids=["no-http", "long-line", "nan", "deep", "deep-refusal", "odd-refusal"],
)
def test_a_service_whose_answer_is_damaged_may_answer_later(answer: bytes, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(1 << 16)
                accepted.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/token"
        tokens = Tokens(OAuthService(url, {}, None, {}), {})
        with pytest.raises(ConnectionError, match=said):
            tokens.current(Deadline.after_seconds(5))
        thread.join(5)


@pytest.mark.parametrize("lifetime", ["9" * 400, '"²"', "[]", "{}", "null", '"soon"'])
def test_a_lifetime_that_is_no_number_is_not_known(service: Service, lifetime: str) -> None:
    service.answers = [(200, json.loads(f'{{"access_token": "a", "expires_in": {lifetime}}}'))]
    assert Tokens.of(service.properties).current(soon()).token == "a"


@pytest.mark.parametrize(
    "url", ["http://me:hunter2@127.0.0.1/token", "http://127.0.0.1/a token", "http://127.0.0.1/é"]
)
def test_an_address_that_is_no_url_is_refused_without_its_password(url: str) -> None:
    service = OAuthService(url, {}, None, {"sasl.oauthbearer.token.endpoint.url": url})
    with pytest.raises(LoginRefusedError, match="is not a URL") as caught:
        service(Deadline.after_seconds(1))
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_hanging_function_does_not_keep_the_process_alive() -> None:
    program = """
import time
from kafka_eos_source.kafka.tokens import Tokens, PROVIDER
from kafka_eos_source.runtime.deadline import Deadline
import sys, types
own = types.ModuleType("own"); own.hang = lambda _: time.sleep(600); sys.modules["own"] = own
try:
    Tokens.of({PROVIDER: "own:hang"}).current(Deadline.after_seconds(0.1))
except TimeoutError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "own:hang" in ended.stdout
