"""What is secret in a URL is shown nowhere: neither by this package, nor in the words of a library."""

from __future__ import annotations

import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source import option_values
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError, OperatorError, SinkFailedError
from kafka_eos_source.in_read.staged import described
from kafka_eos_source.kafka.schema_registry import SchemaRegistry
from kafka_eos_source.kafka.tokens import Tokens
from kafka_eos_source.observe.exporters import exposition, queries_of_host
from kafka_eos_source.observe.figures import BatchFigures, Outcome
from kafka_eos_source.observe.journal import Journal
from kafka_eos_source.observe.lines import this_writer
from kafka_eos_source.operate.doctor.finding import Finding, Severity
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import MASK, Secrets, is_secret, shown_url, url_secrets
from kafka_eos_source.sinks import specs as sinks
from kafka_eos_source.sinks.contract import Fatal, SinkContext
from kafka_eos_source.sinks.manifest import NotesFolder

SECRET = "hunter2-is-secret"
words = st.text("abcdefghijklmnopqrstuvwxyz0123456789-._~%/?#@:,;=&+ ", min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h:1/v1/input?dd-api-key=abc&host=x", f"https://h:1/v1/input?dd-api-key={MASK}&host={MASK}"),
        ("https://u:p@h/x?sig=a%2Fb#part", f"https://h/x?sig={MASK}"),
        ("/v1/input?api_key=abc", f"/v1/input?api_key={MASK}"),
        ("https://h/x?abc", f"https://h/x?{MASK}"),
        ("https://h/x?a b c=1", f"https://h/x?{MASK}"),
        ("https://h/x?", "https://h/x"),
        ("https://h/path", "https://h/path"),
        ("https://[broken", "https://[broken"),
        ("h:1/x?key=abc", f"h:1/x?key={MASK}"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_user_and_values_of_its_query(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@given(st.text("abz019-._~%", max_size=5), words, words)
def test_no_part_of_a_secret_is_shown_however_the_url_is_written(user: str, word: str, name: str) -> None:
    secret = f"S3CR3T{word}S3CR3T"
    for url in (
        f"https://{user}:{secret}@host/path",
        f"https://host/path?{name}={secret}",
        f"https://host/path?{name}={secret}&more=1",
        f"https://host/path#{secret}",
    ):
        assert "S3CR3T" not in shown_url(url)
        assert "S3CR3T" not in str(option_values.invalid("url", url, "another"))


@given(st.text("abcdefXYZ0123456789-_/+=&@", min_size=8))
def test_what_a_url_hides_is_found_in_the_words_of_a_library(value: str) -> None:
    for url in (f"https://h/x?anything={quote_plus(value)}", f"https://u:{quote(value, safe='')}@h/x"):
        hidden = Secrets.of({"url": url}).hide(f"cannot open '{value}': denied")
        assert hidden == f"cannot open '{MASK}': denied"


def test_short_words_are_secret_only_under_the_name_of_a_secret() -> None:
    assert set(url_secrets("s3://b/x?scheme=http&password=abc&region=eu-1&secret_key=k")) == {"abc", "k"}


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("basic.auth.user.info", True),
        ("basic.auth.user.info.env", False),
        ("bearer.auth.token", True),
        ("bearer.auth.client.secret.env", False),
        ("dd-api-key", True),
        ("DD-APPLICATION-KEY", True),
        ("sig", True),
        ("auth", True),
        ("auth.header", False),
        ("ssl.key.location", False),
        ("key.serializer", False),
        ("sasl.username", False),
        ("token.topic", False),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


URLS = {
    "query": f"https://127.0.0.1:1/v1?dd-api-key={SECRET}",
    "plain name": f"https://127.0.0.1:1/v1?x={SECRET}",
    "user": f"https://bob:{SECRET}@127.0.0.1:1/v1",
    "key as user": f"https://{SECRET}@127.0.0.1:1/v1",
    "no scheme": f"127.0.0.1:1/v1?dd-api-key={SECRET}",
    "broken": f"https://[127.0.0.1/v1?dd-api-key={SECRET}",
}


def _http_sink(url: str) -> None:
    stated = {
        "sink.h.type": "http",
        "sink.h.mode": "idempotency-key",
        "sink.h.url": url,
        "sink.h.timeout": "1s",
    }
    (spec,) = sinks.parse(["h"], {**stated, "sink.h.retries": "0"})
    assert SECRET not in repr(spec) + spec.target()
    sink: Any = spec.build()
    sink.open(SinkContext("app", "cluster", "h"))
    try:
        answer = sink._transport.request("GET", url, Deadline.after_seconds(1))
        raise SinkRefusedError(str(answer) + str(sink._protocol))
    finally:
        sink.close()


class SinkRefusedError(KafkaEosError):
    """Carries a text of the sink."""


def _status_url(url: str) -> None:
    stated = {"sink.h.type": "http", "sink.h.mode": "idempotency-key", "sink.h.url": "https://other/x"}
    sinks.parse(["h"], {**stated, "sink.h.status.url": url})


def _token_service(url: str) -> None:
    login = {"sasl.oauthbearer.client.id": "c", "sasl.oauthbearer.client.secret": SECRET}
    kafka = {**login, "sasl.oauthbearer.token.endpoint.url": url}
    Tokens.of(kafka).current(Deadline.after_seconds(1))


def _registry(url: str) -> None:
    SchemaRegistry({"url": url, "retry.timeout.ms": 0}).answers()


def _store(url: str) -> None:
    sinks.parse(["s"], {"sink.s.type": "s3", "sink.s.path": "s3://b/x", "sink.s.endpoint": url})
    raise SinkRefusedError("an endpoint may have a query")


@pytest.mark.parametrize("url", URLS.values(), ids=URLS)
@pytest.mark.parametrize("use", [_status_url, _token_service, _registry, _store])
def test_no_error_and_no_log_shows_the_secret_of_a_url(
    use: Callable[[str], None], url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "kafka_eos_source")
    with pytest.raises((KafkaEosError, OSError, RuntimeError)) as caught:
        use(url)
    assert SECRET not in f"{caught.value} {caught.value!r}"
    for record in caplog.records:
        if record.name.startswith("kafka_eos_source"):
            assert SECRET not in record.getMessage()


@pytest.mark.parametrize("kind", ["query", "plain name", "no scheme", "broken", "user", "key as user"])
def test_the_http_sink_never_shows_the_secret_of_its_url(kind: str) -> None:
    with pytest.raises((InvalidOptionError, SinkRefusedError)) as caught:
        _http_sink(URLS[kind])
    assert SECRET not in "".join(traceback.format_exception_only(caught.value))


def test_a_plan_of_spark_shows_no_secret_of_a_url() -> None:
    """The schema of a frame that is staged in the read describes the sink; Spark shows it."""
    stated = {
        "kafka.bootstrap.servers": "h:1",
        "topic": "t",
        "checkpointLocation": "/no/such/checkpoint",
        "sinks": "h",
        "sink.h.type": "http",
        "sink.h.mode": "idempotency-key",
        "sink.h.url": URLS["query"],
    }
    options = parse_write(stated, streaming=True)
    assert SECRET not in str(described(options)) + repr(options)
    assert SECRET in options.secrets.values


class QuotingService(BaseHTTPRequestHandler):
    """A service that refuses each request with a text that quotes its URL and its credentials."""

    def do_POST(self) -> None:
        said = f"{self.path} with {self.headers['Authorization']} is refused".encode()
        self.send_response(400)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


@pytest.mark.parametrize("mode", ["two-phase", "idempotency-key"])
def test_what_a_service_quotes_reaches_neither_outcome_nor_journal_nor_metrics(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), QuotingService) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{service.server_port}/rows"
        stated = {"type": "http", "mode": mode, "retries": "0", "auth": f"Bearer {SECRET}", "url": url}
        if mode == "idempotency-key":
            stated["url"] += f"?dd-api-key={SECRET}-2"
            stated["status.url"] = f"{url}/{{id}}?dd-api-key={SECRET}-2"
        (spec,) = sinks.parse(["h"], {f"sink.h.{name}": value for name, value in stated.items()})
        sink: Any = spec.build()
        store = NotesFolder(str(tmp_path / "notes"))
        sink.open(SinkContext("h", "app", "cluster", store))
        txn = sink.context.txn(3, "attempt")
        if mode == "idempotency-key":
            store.put_rows(str(txn), pa.schema([("a", pa.int64())]), [pa.record_batch({"a": [1]})])
            sink._protocol._prepared_here.add(txn)
        outcome = sink.commit(txn, Deadline.after_seconds(5))
        sink.close()
        service.shutdown()
    assert isinstance(outcome, Fatal)
    assert MASK in str(outcome)
    error = str(SinkFailedError(str(outcome)))
    figures = BatchFigures(
        application_id="app", query_id="q", run_id="r", batch_id=3, outcome=Outcome.FAILED,
        began_at=time.time(), ended_at=time.time(), error=error, writer=this_writer(), seconds={}, counts={},
    )  # fmt: skip
    Journal("app").finished(figures)
    files = [each for each in tmp_path.rglob("*") if each.is_file() and each.suffix != ".arrow"]
    written = "".join(each.read_text() for each in files)
    for text in (repr(outcome), error, written, exposition(queries_of_host())):
        assert text
        assert SECRET not in text


@pytest.mark.parametrize("kind", ["query", "user", "key as user"])
def test_no_error_of_this_package_shows_the_secret_of_a_location(kind: str) -> None:
    """Checkpoints, staging folders, snapshots and sinks are URLs too; each of many messages may name one."""
    for error in (
        OperatorError(
            f"{URLS[kind]!r} cannot be written.", fix=f"make the folder {URLS[kind]}, then restart."
        ),
        pickle.loads(pickle.dumps(OperatorError(f"checkpointLocation={URLS[kind]!r}"))),
    ):
        assert SECRET not in f"{error} {error!r} {error.args}"
        assert "127.0.0.1:1/v1" in str(error)
    assert str(OperatorError("see https://kafka.apache.org/documentation/#acks.")).endswith("#acks.")
    assert "fs://container@account.net/x" in str(OperatorError("abfs://container@account.net/x is full"))
    finding = Finding("staging", Severity.BAD, f"cannot use {URLS[kind]}: no", fix=f"correct {URLS[kind]}")
    assert SECRET not in repr(finding)
