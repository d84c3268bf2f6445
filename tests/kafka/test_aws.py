"""Tokens for Amazon MSK: the signature is computed a second time, and roles come from a local service."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, parse_qsl, quote, urlsplit

import pytest

from kafka_eos_source.kafka import tokens
from kafka_eos_source.kafka.failure import LoginRefusedError
from kafka_eos_source.kafka.tokens import PROVIDER, Tokens
from kafka_eos_source.runtime.deadline import Deadline

KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI-secret-of-aws"


@pytest.fixture(autouse=True)
def only_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    (tmp_path / "credentials").write_text(
        f"[prod]\naws_access_key_id = AKIDPROD\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


def fields(token: str) -> dict[str, str]:
    """Returns the parameters of the presigned URL in a token."""
    url = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    return dict(parse_qsl(urlsplit(url).query))


def signature(token: str, secret: str) -> str:
    """Computes the signature of a token (AWS Signature Version 4), as MSK does."""
    given = fields(token)
    scope = given["X-Amz-Credential"].split("/", 1)[1]
    host = urlsplit(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()).netloc
    signed = {name: value for name, value in given.items() if name not in ("X-Amz-Signature", "User-Agent")}
    query = "&".join(
        f"{quote(name, safe='-_.~')}={quote(signed[name], safe='-_.~')}" for name in sorted(signed)
    )
    canonical = f"GET\n/\n{query}\nhost:{host}\n\nhost\n{hashlib.sha256(b'').hexdigest()}"
    text = (
        f"AWS4-HMAC-SHA256\n{given['X-Amz-Date']}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    )
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def test_a_token_is_what_msk_expects() -> None:
    token, expires = tokens.aws_token("awsRegion=eu-central-1")
    given = fields(token)
    assert given["Action"] == "kafka-cluster:Connect"
    assert given["X-Amz-Credential"].startswith(f"{KEY}/")
    assert given["X-Amz-Credential"].endswith("/eu-central-1/kafka-cluster/aws4_request")
    assert given["X-Amz-Expires"] == "900"
    assert given["X-Amz-Signature"] == signature(token, SECRET) != signature(token, "other")
    assert expires - time.time() == pytest.approx(900, abs=30)
    assert SECRET not in token


def test_a_profile_has_credentials_of_its_own() -> None:
    token, _ = tokens.aws_token("awsProfileName=prod awsRegion=eu-central-1")
    assert fields(token)["X-Amz-Credential"].startswith("AKIDPROD/")
    assert fields(token)["X-Amz-Signature"] == signature(token, SECRET)


@pytest.fixture
def sts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, list[str]]]]]:
    """AWS's service that gives credentials of roles. Collects region and form of each request."""
    asked: list[tuple[str, dict[str, list[str]]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            asked.append((self.headers["Authorization"].split("/")[2], form))
            is_known = form["RoleArn"][0].endswith("/kafka")
            later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
            body = (
                '<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult>'
                f"<Credentials><AccessKeyId>ASIA{len(asked)}</AccessKeyId><SecretAccessKey>of-role</SecretAccessKey>"
                f"<SessionToken>session</SessionToken><Expiration>{later:%Y-%m-%dT%H:%M:%SZ}</Expiration>"
                "</Credentials></AssumeRoleResult></AssumeRoleResponse>"
                if is_known
                else "<ErrorResponse><Error><Code>AccessDenied</Code><Message>not your role</Message></Error>"
                "</ErrorResponse>"
            ).encode()
            self.send_response(200 if is_known else 403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    server.server_close()


ROLE = "awsRegion=eu-central-1 awsRoleArn=arn:aws:iam::123456789012:role/"


def test_a_role_is_assumed_for_each_token(sts: list[tuple[str, dict[str, list[str]]]]) -> None:
    token, _ = tokens.aws_token(
        f"{ROLE}kafka awsRoleSessionName=spark awsRoleExternalId=77 awsStsRegion=eu-west-1"
    )
    assert fields(token)["X-Amz-Credential"].startswith("ASIA1/")
    assert fields(token)["X-Amz-Security-Token"] == "session"
    assert fields(token)["X-Amz-Signature"] == signature(token, "of-role")
    region, form = sts[0]
    assert region == "eu-west-1"
    assert (form["RoleSessionName"], form["ExternalId"]) == (["spark"], ["77"])
    assert fields(tokens.aws_token(f"{ROLE}kafka")[0])["X-Amz-Credential"].startswith("ASIA2/")
    assert (sts[1][0], sts[1][1]["RoleSessionName"]) == ("eu-central-1", ["kafka-eos"])


@pytest.mark.parametrize(
    ("config", "environment", "said", "kind"),
    [
        (f"{ROLE}other", {}, "AccessDenied", LoginRefusedError),
        ("awsRegion=eu-central-1", {"AWS_ACCESS_KEY_ID": ""}, "no credentials were found", LoginRefusedError),
        ("awsRegion=x awsProfileName=nobody", {}, "nobody", LoginRefusedError),
        (f"{ROLE}kafka", {"AWS_ENDPOINT_URL_STS": "http://127.0.0.1:1"}, "127.0.0.1:1", ConnectionError),
    ],
)
def test_credentials_that_are_missing_or_refused_are_named(
    sts: object,
    config: str,
    environment: dict[str, str],
    said: str,
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = Tokens.of({PROVIDER: tokens.PROVIDER_PATH, "sasl.oauthbearer.config": config})
    with pytest.raises(kind, match=said) as caught:
        given.current(Deadline.after_seconds(60))
    assert SECRET not in str(caught.value)
