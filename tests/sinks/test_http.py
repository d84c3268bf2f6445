"""The `http` sink against a service in its own process: the contract, lost answers, restarts, secrets."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidOptionError, SinkFailedError, SinkRetryableError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import MASK
from kafka_eos_source.sinks import constructors
from kafka_eos_source.sinks.contract import OK, Fatal, Retryable, SinkContext
from kafka_eos_source.sinks.http import HttpSink
from kafka_eos_source.sinks.http_client import (
    Answer,
    Credentials,
    Meaning,
    State,
    Transport,
    meaning_of,
    pending_ids,
    retry_after_seconds,
    state_of,
)
from kafka_eos_source.sinks.specs import parse
from kafka_eos_source.testing.sinks import (
    ROWS,
    Rows,
    SinkConformance,
    SinkKills,
    System,
    deadline,
    new_txn,
    opened,
    stage,
)
from tests.support import foreign_manifests as foreign
from tests.support.http_service import DELAY, LOSE_AFTER, LOSE_BEFORE, HttpService, running

IDEMPOTENCY_KEY = "idempotency-key"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    with running(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture
def service(process: HttpService) -> HttpService:
    """Returns a service without any batches."""
    process.reset()
    return process


def _rows(service: HttpService, kind: str) -> Rows:
    found: list[dict[str, Any]] = []
    for body in service.committed():
        if kind == "json":
            found += [json.loads(line) for line in body.decode().split("\n") if line]
        else:
            found += pa.ipc.open_stream(io.BytesIO(body)).read_all().to_pylist()
    return found


def _system(service: HttpService, mode: str, folder: Path, kind: str = "json", **options: Any) -> System:
    url = f"{service.url}/rows" if mode == IDEMPOTENCY_KEY else service.url
    return System(
        sink=lambda: constructors.http(url, mode=mode, format=kind, **options).build(),
        visible=lambda: _rows(service, kind),
        store=str(folder / "store") if mode == IDEMPOTENCY_KEY else None,
    )


class TestTwoPhase(SinkConformance):
    """The service does not name the rows that it refuses."""

    most_kills: ClassVar[int] = 10
    names: ClassVar[int | None] = 0

    @pytest.fixture
    def system(self, service: HttpService, tmp_path: Path) -> System:
        service.refuse("poison", names=self.names)
        poison = pa.table({"id": [100, 101], "name": ["poison", "poison"], "amount": [0.0, 1.0]})
        return replace(_system(service, "two-phase", tmp_path, "arrow"), poison=poison)


class TestTwoPhaseThatNamesRows(SinkKills):
    """The service names one of the rows that it refuses."""

    most_kills: ClassVar[int] = 20
    names: ClassVar[int | None] = 1
    system = TestTwoPhase.system


class TestIdempotencyKey(SinkConformance):
    most_kills: ClassVar[int] = 10

    @pytest.fixture
    def system(self, service: HttpService, tmp_path: Path) -> System:
        return _system(service, IDEMPOTENCY_KEY, tmp_path)


@pytest.fixture(params=["two-phase", IDEMPOTENCY_KEY, "idempotency-key with a status"])
def system(service: HttpService, tmp_path: Path, request: pytest.FixtureRequest) -> System:
    mode, _, status = request.param.partition(" ")
    options = {"status_url": f"{service.url}/status/{{id}}"} if status else {}
    # an answer that a busy machine delays must not look like the lost one of another fault
    timeout = 500 if request.node.callspec.params.get("fault") == DELAY else 30_000
    return _system(service, mode, tmp_path, timeout=timeout, **options)


def _decisive(system: System) -> str:
    """Returns the name of the request that makes the rows visible."""
    return "commit" if system.store is None else "rows"


@pytest.mark.parametrize("fault", [LOSE_AFTER, LOSE_BEFORE, DELAY, "500", "503", "202", "408", "429"])
def test_a_commit_with_an_inconclusive_answer_takes_effect_once(
    service: HttpService, system: System, fault: str
) -> None:
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        service.fault((_decisive(system), fault))
        assert sink.commit(txn, deadline()) == OK
        assert list(sink.recover(deadline())) == []
    assert sorted(row["id"] for row in system.visible()) == ROWS["id"].to_pylist()


@pytest.mark.parametrize("fault", [LOSE_AFTER, LOSE_BEFORE, DELAY, "502", "429"])
def test_a_prepare_with_an_inconclusive_answer_takes_effect_once(
    service: HttpService, tmp_path: Path, fault: str
) -> None:
    system = _system(service, "two-phase", tmp_path, timeout=500)
    txn = new_txn()
    with opened(system) as sink:
        service.fault(("prepare", fault))
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        assert list(sink.recover(deadline())) == [txn]
        service.fault(("abort", fault))
        assert sink.abort(txn, deadline()) == OK
        assert list(sink.recover(deadline())) == []
    assert system.visible() == []


def test_an_unanswered_commit_and_status_request_are_retried(service: HttpService, tmp_path: Path) -> None:
    """The outcome is unknown, so the sink returns `Retryable`. The next call finds the batch committed."""
    system = _system(service, "two-phase", tmp_path, retries=0)
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        service.fault(("commit", LOSE_AFTER), ("status", "500"))
        assert isinstance(sink.commit(txn, deadline()), Retryable)
        assert sink.commit(txn, deadline()) == OK
    assert len(system.visible()) == ROWS.num_rows


def test_a_restart_of_the_service_loses_no_batch(service: HttpService, system: System) -> None:
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        service.kill()
        assert isinstance(sink.commit(txn, Deadline.after_seconds(0.3)), Retryable)
        service.start()
        assert sink.commit(txn, deadline()) == OK
    assert len(system.visible()) == ROWS.num_rows


def test_a_call_survives_a_restart_of_the_service_before_its_answer(
    service: HttpService, system: System
) -> None:
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        service.fault((_decisive(system), LOSE_AFTER), ("status", LOSE_BEFORE), ("status", "503"))
        back = threading.Thread(target=lambda: (service.kill(), service.start()))
        back.start()
        outcome = sink.commit(txn, deadline())
        back.join()
        assert outcome == OK or isinstance(outcome, Retryable)
        assert sink.commit(txn, deadline()) == OK
    assert len(system.visible()) == ROWS.num_rows


@pytest.mark.parametrize("status", ["400", "401", "403", "413", "422", "307"])
def test_a_refusal_is_not_retried(service: HttpService, system: System, status: str) -> None:
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        service.fault((_decisive(system), status))
        outcome = sink.commit(txn, deadline())
        assert isinstance(outcome, Fatal)
        assert status in outcome.why
        assert ("maxOffsetsPerTrigger" in outcome.fix) is (status == "413")
        assert list(sink.recover(deadline())) == [txn], "a person can commit it yet"
    assert system.visible() == []


def test_the_sink_waits_as_long_as_the_service_asks(service: HttpService, system: System) -> None:
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        service.fault((_decisive(system), "429"), headers={"Retry-After": "1"})
        begun = time.monotonic()
        assert sink.commit(txn, deadline()) == OK
        assert time.monotonic() - begun >= 1
        service.fault((_decisive(system), "503"), headers={"Retry-After": "3600"})
        later = new_txn()
        assert sink.prepare(later, stage(sink, ROWS), deadline()) == OK
        # the service asks for a pause that exceeds the deadline
        service.fault((_decisive(system), "429"), headers={"Retry-After": "3600"})
        assert isinstance(sink.commit(later, deadline()), Retryable)


def test_status_409_means_committed_or_still_in_progress(service: HttpService, tmp_path: Path) -> None:
    """In the IETF draft, status 409 means that the first request with the key is still in progress."""
    for on_conflict, sent in (("done", 1), ("retry", 2)):
        system = _system(service, IDEMPOTENCY_KEY, tmp_path, on_conflict=on_conflict)
        before = len(service.log())
        txn = new_txn()
        with opened(system) as sink:
            assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
            service.fault(("rows", "409"))
            assert sink.commit(txn, deadline()) == OK
        assert len(service.log()) - before == sent


def test_the_status_of_an_earlier_processs_batch_is_requested_before_it_is_sent_again(
    service: HttpService, tmp_path: Path
) -> None:
    """The earlier process died after it sent the rows, and the service has expired the key since."""
    status = f"{service.url}/status/{{id}}"
    system = _system(service, IDEMPOTENCY_KEY, tmp_path, status_url=status)
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
    (service.folder / "committed" / str(txn)).write_bytes(b"")
    with opened(system) as sink:
        assert list(sink.recover(deadline())) == [txn]
        service.fault(("status", "500"))
        assert isinstance(sink.commit(txn, deadline()), Retryable)
        assert sink.commit(txn, deadline()) == OK
    assert service.log() == []


@pytest.mark.parametrize("mode", ["two-phase", IDEMPOTENCY_KEY])
def test_a_request_has_credentials_content_type_row_count_and_transaction_id(
    service: HttpService, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_AUTH", "Bearer s3cr3t-of-the-test")
    system = _system(service, mode, tmp_path, auth_env="SERVICE_AUTH")
    with opened(system) as sink:
        sink.make_ready(ROWS.schema, deadline())
        txn = new_txn()
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    headers = next(each["headers"] for each in service.log() if each["bytes"])
    assert headers["authorization"] == "Bearer s3cr3t-of-the-test"
    assert headers["content-type"] == "application/x-ndjson"
    assert headers["kafka-eos-rows"] == str(ROWS.num_rows)
    assert headers.get("idempotency-key") == (str(txn) if mode == IDEMPOTENCY_KEY else None)


class Quoting(BaseHTTPRequestHandler):
    """A service that refuses each request with a text that quotes its credentials."""

    def do_GET(self) -> None:
        value = self.headers["Authorization"]
        text = f"no such token: {value.rpartition(' ')[2]}, of {value!r}".encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_credentials_that_a_service_quotes_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_AUTH", "Bearer s3cr3t-of-the-test")
    with _serving(Quoting) as url:
        transport = Transport(url, Credentials("Authorization", variable="SERVICE_AUTH"), 5.0)
        answer = str(transport.request("GET", "/", deadline()))
        transport.close()
    assert answer == f"HTTP 401 no such token: {MASK}, of '{MASK}'"


def test_a_connection_is_used_again_while_many_files_are_open(service: HttpService) -> None:
    """``select.select`` knows only 1,024 of them, however many a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    transport = Transport(service.url, Credentials("Authorization"), 5.0)
    files = []
    try:
        while not files or files[-1] < 1_100:
            files.append(os.open(os.devnull, os.O_RDONLY))
        assert [transport.request("GET", "/status/a", deadline()).status for _ in range(3)] == [200] * 3
    finally:
        transport.close()
        for each in files:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_answer_that_is_cut_off_is_none() -> None:
    """The service said how long its answer is, so a shorter one says nothing about the request."""

    class Cutting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b'{"pending":[]}')

        def log_message(self, *_: Any) -> None:
            return

    with _serving(Cutting) as url:
        transport = Transport(url, Credentials("Authorization"), 5.0)
        assert transport.request("GET", "/pending", deadline()).status is None
        transport.close()


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig", b"HTTP/1.1 200 OK\r\n\r\n", b""]
)
def test_a_refusal_is_read_although_the_service_closes_before_it_has_the_whole_body(answer: bytes) -> None:
    """Any other answer cannot mean the whole body."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)
                # closed with unread bytes, so the client gets a reset

        thread = threading.Thread(target=serve)
        thread.start()
        transport = Transport(f"http://127.0.0.1:{server.getsockname()[1]}", Credentials("h"), 30.0)
        found = transport.request(
            "POST", "/rows", Deadline.after_seconds(30), body=memoryview(bytes(64 << 20))
        )
        thread.join()
    if b"413" in answer:
        assert (found.status, found.body) == (413, b"big")
    else:
        assert found.status is None
        assert b"BrokenPipeError" in found.body or b"ConnectionResetError" in found.body
    assert transport._connection is None, "the rest of the body cannot be sent any more"


class Answering(BaseHTTPRequestHandler):
    """Answers at once, but ``/slow`` after a second; keeps connections, as services do."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/slow":
            time.sleep(1.0)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        return


@pytest.mark.parametrize(("first_seconds", "second_seconds", "status"), [(10.0, 0.2, None), (0.2, 10.0, 200)])
def test_each_request_has_its_own_time_limit_on_a_connection_that_is_used_again(
    first_seconds: float, second_seconds: float, status: int | None
) -> None:
    """The connection may have been made shortly before another deadline, or long before this one."""
    with _serving(Answering) as url:
        transport = Transport(url, Credentials("Authorization"), 10.0)
        assert transport.request("GET", "/", Deadline.after_seconds(first_seconds)).status == 200
        assert transport.request("GET", "/slow", Deadline.after_seconds(second_seconds)).status == status
        transport.close()


def test_a_key_in_the_address_is_not_logged_if_the_head_of_an_answer_is_malformed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Malformed(Answering):
        def end_headers(self) -> None:
            self._headers_buffer.append(b"no colon\r\n")
            super().end_headers()

    with _serving(Malformed) as url:
        transport = Transport(url, Credentials("Authorization"), 5.0)
        transport.request("GET", "/?key=hidden-in-query", deadline())
        transport.close()
    assert "Failed to parse headers" in caplog.text
    assert "hidden" not in caplog.text


def test_credentials_never_appear_in_logs_or_errors(service: HttpService, tmp_path: Path) -> None:
    stated = {"sink.a.type": "http", "sink.a.url": service.url, "sink.a.auth": "Token hidden-in-options"}
    (spec,) = parse(["a"], stated)
    sink = spec.build()
    assert isinstance(sink, HttpSink)
    assert "hidden" not in f"{spec} {sink.credentials}"
    sink.open(SinkContext("a", "application", "cluster"))
    assert "hidden" not in spec.secrets(sink).hide(str(stated))
    assert "hidden" not in sink.credentials.secrets.hide("401: no such token hidden-in-options")


def test_recover_raises_if_the_service_does_not_list_prepared_ids(
    service: HttpService, tmp_path: Path
) -> None:
    """Returning an empty list instead would lose a batch."""
    with opened(_system(service, "two-phase", tmp_path)) as sink:
        service.fault(("pending", "503"))
        with pytest.raises(SinkRetryableError, match="HTTP 503"):
            sink.recover(deadline())
        service.fault(("pending", "401"))
        with pytest.raises(SinkFailedError, match="HTTP 401"):
            sink.recover(deadline())
    elsewhere = System(sink=lambda: constructors.http(f"{service.url}/other").build(), visible=list)
    with opened(elsewhere) as sink, pytest.raises(SinkFailedError, match="HTTP 404"):
        sink.make_ready(ROWS.schema, deadline())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'sink.a.url' is missing"),
        ({"url": "ftp://h/"}, "expected http://"),
        ({"url": "http://user:pa55word@h/"}, "without user and password"),
        ({"url": "http://h/?x=1"}, "contains a query string"),
        ({"url": "http://h/", "mode": "one"}, "expected two-phase or idempotency-key"),
        ({"url": "http://h/", "auth": "x", "auth.env": "Y"}, "are both set"),
        ({"url": "http://h/", "on.conflict": "retry"}, "requires mode=idempotency-key"),
        (
            {"url": "http://h/", "mode": "idempotency-key", "status.url": "http://i/{id}"},
            "different schemes or hosts",
        ),
        ({"url": "http://h/", "mode": "idempotency-key", "status.url": "http://h/"}, "that contains {id}"),
        ({"url": "http://h/", "auth.header": "a b"}, "the name of an HTTP header"),
        ({"url": "http://h/", "timeout": "0"}, "1ms or more"),
        ({"url": "http://h/", "retries": "-1"}, "an integer, 0 or more"),
    ],
)
def test_invalid_options_are_refused_at_the_start(options: dict[str, str], message: str) -> None:
    stated = {"sink.a.type": "http", **{f"sink.a.{name}": value for name, value in options.items()}}
    with pytest.raises(InvalidOptionError) as error:
        parse(["a"], stated)
    assert message in str(error.value)
    assert "pa55word" not in str(error.value)


def test_missing_credentials_or_checkpoint_are_detected_before_the_first_batch(tmp_path: Path) -> None:
    missing = constructors.http("http://127.0.0.1:9/", auth_env="KAFKA_EOS_TEST_UNSET").build()
    with (
        opened(System(lambda: missing, list)) as sink,
        pytest.raises(InvalidOptionError, match="KAFKA_EOS_TEST_UNSET"),
    ):
        sink.make_ready(ROWS.schema, deadline())
    no_checkpoint = System(
        lambda: constructors.http("http://127.0.0.1:9/", mode=IDEMPOTENCY_KEY).build(), list
    )
    with opened(no_checkpoint) as sink, pytest.raises(SinkFailedError, match="checkpointLocation"):
        sink.make_ready(ROWS.schema, deadline())


def test_every_status_has_one_meaning() -> None:
    meanings = {status: meaning_of(Answer(status)) for status in range(200, 600)}
    assert meaning_of(Answer(None)) is Meaning.UNKNOWN
    assert all(meanings[status] is Meaning.UNKNOWN for status in range(500, 600))
    done = {status for status, meaning in meanings.items() if meaning is Meaning.DONE}
    assert done == set(range(200, 300)) - {202}
    assert {status for status, meaning in meanings.items() if meaning is Meaning.LATER} == {425, 429}
    assert all(meanings[status] is Meaning.REFUSED for status in (*range(300, 400), 400, 401, 403, 422))
    assert state_of(Answer(200, b'{"state": "no such"}')) is None
    assert state_of(Answer(200, b"<html>a proxy's page</html>")) is None


def test_retry_after_is_seconds_or_a_date() -> None:
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    assert retry_after_seconds("7", now) == 7
    assert retry_after_seconds("Thu, 01 Jan 2026 00:00:09 GMT", now) == 9
    assert retry_after_seconds("Wed, 31 Dec 2025 00:00:00 GMT", now) == 0
    for wrong in (None, "", "soon", "-1", "9" * 30):
        assert retry_after_seconds(wrong, now) is None


STRANGE_DATES = (
    "Mon, 01 Jan 99999999999 00:00:00 GMT",
    "Mon, 01 Jan 2020 00:00:00 +99999999999999999999",
    "Mon, 01 Jan 2020 99999999999999999999:00:00 GMT",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "\u0663",
    "9" * 5000,
)


@pytest.mark.parametrize("header", STRANGE_DATES)
def test_a_retry_after_that_no_clock_has_counts_as_none(header: str) -> None:
    assert retry_after_seconds(header, datetime(2026, 1, 1, tzinfo=timezone.utc)) is None


@given(st.text(max_size=60) | st.builds("Mon, {} Jan {} {}:00:00 {}".format, *[st.integers()] * 4))
def test_no_retry_after_raises(header: str) -> None:
    found = retry_after_seconds(header, datetime(2026, 1, 1, tzinfo=timezone.utc))
    assert found is None or 0 <= found < 1e12


@given(foreign.garbage | st.builds(json.dumps, foreign.values).map(str.encode))
@settings(deadline=None)
def test_no_answer_raises_whatever_is_in_its_body(body: bytes) -> None:
    answer = Answer(200, body)
    assert state_of(answer) is None
    found = pending_ids(answer)
    assert found is None or all(isinstance(each, str) for each in found)
    assert str(answer).isprintable()
    for name in ("state", "pending"):
        assert state_of(Answer(200, b'{"%s": %s}' % (name.encode(), body))) in (None, *State)
        pending_ids(Answer(200, b'{"%s": %s}' % (name.encode(), body)))


class _Foreign(BaseHTTPRequestHandler):
    """Answers as a service that somebody took over, or that is none."""

    requests: ClassVar[list[str]] = []
    how: ClassVar[str] = ""

    def do_POST(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append(self.path)
        if self.how == "redirect":
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_address[1]}/elsewhere")  # type: ignore[index]
            self.end_headers()
        elif self.how == "endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"[" * 65536)
        elif self.how == "nested":
            body = b'{"pending":' + b"[" * 100_000
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            self.send_response(429)
            self.send_header("Retry-After", self.how)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def foreign_service() -> Iterator[str]:
    _Foreign.requests.clear()
    with _serving(_Foreign) as url:
        yield url


@pytest.mark.parametrize("how", ["redirect", "endless", "nested"])
def test_a_list_of_prepared_ids_that_is_none_is_refused_and_credentials_go_nowhere_else(
    foreign_service: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Foreign, "how", how)
    system = System(
        sink=lambda: constructors.http(foreign_service, auth="Bearer s3cret").build(), visible=list
    )
    with opened(system) as sink, pytest.raises(SinkFailedError, match="list 'pending'") as refused:
        sink.recover(deadline())
    assert len(refused.value.message) < 1000
    assert all(path.startswith("/pending") for path in _Foreign.requests), "no redirect was followed"


@pytest.mark.parametrize("header", ["999999999", *STRANGE_DATES[:3]])
def test_a_service_that_asks_for_an_endless_pause_is_asked_again_by_the_driver(
    foreign_service: str, header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Foreign, "how", header)
    system = System(sink=lambda: constructors.http(foreign_service, retries=1).build(), visible=list)
    begun = time.monotonic()
    with opened(system) as sink:
        assert isinstance(sink.commit(new_txn(), deadline()), Retryable)
    assert time.monotonic() - begun < 30
