"""No secret appears in an error, a log line, a repr or a pickled message."""

from __future__ import annotations

import base64
import json
import pickle
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kafka_eos_source.commit.micro_batch import KafkaClients
from kafka_eos_source.datasource.reader import stream_reader
from kafka_eos_source.datasource.sink import CommitMessage
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.errors import AuthorizationError, InvalidOptionError
from kafka_eos_source.kafka.admin import ClusterReader, SourceAdmin
from kafka_eos_source.kafka.admin_client import Complaints
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import Login, classify, unreachable
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.probe import check_reachable
from kafka_eos_source.model import StagedPart, StagedRead, TaskFigures, WrittenPart
from kafka_eos_source.operate.shared import Target
from kafka_eos_source.options.parse import parse_read, parse_write
from kafka_eos_source.protocol.offset_log import PlannedBatch
from kafka_eos_source.read.fetch import ReadSettings
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import MASK, Secrets
from kafka_eos_source.spark.schema import SinkColumns
from kafka_eos_source.stage.fanout import Plan
from kafka_eos_source.stage.task import StagedTask
from tests.support.simulated_kafka import SimulatedKafka

SECRET = "hunter2-is-secret"
NAMES = (
    "sasl.password",
    "ssl.key.password",
    "ssl.keystore.password",
    "ssl.key.pem",
    "sasl.oauthbearer.config",
    "sasl.oauthbearer.client.secret",
)
#: Secrets longer than any word of a message and not all of one letter, so that a leaked part is found.
any_secret = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=12).filter(
    lambda text: len(set(text)) > 8 and MASK not in text
)


@given(
    st.sampled_from(NAMES),
    any_secret,
    st.sampled_from([ErrorCode.CONNECTION_FAILED, ErrorCode.TLS_HANDSHAKE_FAILED, 29, 58]),
)
def test_secrets_in_messages_of_client_and_broker_are_masked(name: str, secret: str, code: int) -> None:
    config = {name: secret}
    ours = str(classify(KafkaError(code, ""), "reading")) + str(unreachable("servers", 1000, ""))
    ours += str(Login(config).error(KafkaError(code, ""), "reading"))
    assume(secret not in ours)  # a secret that occurs in a message's fixed wording reveals nothing
    for said in (secret, repr(secret), f"refused {secret!r}: {secret}", json.dumps({"with": secret})):
        complaints = Complaints(config)
        complaints.record(KafkaError(code, said))
        for error in (
            classify(KafkaError(code, said), "reading", complaints.secrets),
            unreachable("servers", 1000, complaints.last),
            Login(config).error(KafkaError(code, said), "reading"),
        ):
            assert secret not in str(error)
            assert secret not in repr(error)
            assert MASK in str(error)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), st.sampled_from("\"'/=:&?"))
def test_a_secret_is_found_in_every_encoding(secret: str, around: str) -> None:
    assume(secret.strip())
    encoded = base64.b64encode(secret.encode()).decode()
    for form in (
        secret,
        json.dumps(secret)[1:-1],
        repr(secret)[1:-1],
        quote(secret),
        quote(secret, safe=""),
        quote_plus(secret),
        encoded,
        base64.urlsafe_b64encode(secret.encode()).decode(),
    ):
        hidden = Secrets.of({"sasl.password": secret}).hide(f"with{around}{form}{around}end")
        assert hidden == f"with{around}{MASK}{around}end"


@pytest.mark.parametrize(
    "text",
    [
        "kafka.bootstrap.servers='kafka:9092'",
        "kafka-eos kafka_eos my-kafka akafka kafkas",
        "sasl.kerberos.service.name of broker.kafka.example.com",
    ],
)
def test_a_usual_word_as_password_is_not_masked_inside_other_words(text: str) -> None:
    """Otherwise the text would show what the password is."""
    assert Secrets.of({"sasl.password": "kafka"}).hide(text) == text


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("login alice/kafka failed", f"login alice/{MASK} failed"),
        ("password=kafka.", f"password={MASK}."),
        ("p%3Dkafka%26", f"p%3D{MASK}%26"),
        (repr("a\nkafka\nb"), repr(f"a\n{MASK}\nb")),
        ("Basic " + base64.b64encode(b"alice:kafka").decode(), f"Basic {MASK}"),
    ],
)
def test_a_usual_word_as_password_is_masked_as_a_word(text: str, hidden: str) -> None:
    assert Secrets.of({"sasl.username": "alice", "sasl.password": "kafka"}).hide(text) == hidden


def test_the_secrets_of_one_query_are_not_masked_in_the_texts_of_another() -> None:
    Secrets.of({"sasl.password": "topic"})
    error = classify(
        KafkaError(ErrorCode.CONNECTION_FAILED, "the topic"), "reading topic 't'", Secrets.of({})
    )
    assert error.message.startswith("reading topic 't': the topic (")


def test_passwords_in_urls_are_secret_whatever_the_property() -> None:
    found = Secrets.of({"url": "http://a:p1%40w@h:8081, https://b:p2pw@h", "uri": "postgresql://c:p3pw@h/d"})
    text = found.hide("p1%40w p1@w p2pw p3pw postgresql h")
    assert text == f"{MASK} {MASK} {MASK} {MASK} postgresql h"


@given(st.lists(st.from_regex(r"[a-z]{3,8}=[A-Za-z0-9]{9,20}", fullmatch=True), min_size=1, max_size=4))
def test_parts_of_a_secret_that_librdkafka_quotes_are_masked(words: list[str]) -> None:
    """An example is "Unrecognized sasl.oauthbearer.config beginning at: …"."""
    line = " ".join(words)
    for at in range(len(words)):
        rest = " ".join(words[at:])
        said = Secrets.of({"sasl.oauthbearer.config": line}).hide(f"beginning at: {rest}")
        assert said == f"beginning at: {MASK}"


#: A key that cannot be used, which shows only when a client is created.
UNUSABLE = {
    "bootstrap.servers": "127.0.0.1:1",
    "security.protocol": "ssl",
    "ssl.certificate.pem": "no certificate",
    "ssl.key.pem": SECRET,
    "ssl.key.password": SECRET,
}


@pytest.mark.parametrize(
    "makes",
    [
        lambda: SourceAdmin(UNUSABLE, "read_committed", 0, 1).named(["t"]),
        lambda: ClusterReader(UNUSABLE).topics(Deadline.after_seconds(1)),
        lambda: GroupOffsets(UNUSABLE).delete_group("g", Deadline.after_seconds(1)),
    ],
)
def test_every_kind_of_client_hides_an_invalid_key_in_its_error(
    makes: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidOptionError, match="cannot use the certificates or keys") as caught:
        makes()
    printed = capfd.readouterr()
    for shown in ("".join(traceback.format_exception(caught.value)), caplog.text, printed.out, printed.err):
        assert SECRET not in shown


class QuotingService(BaseHTTPRequestHandler):
    """A token service that refuses each request with a reason that quotes its credentials."""

    def do_POST(self) -> None:
        header = self.headers["Authorization"]
        login = base64.b64decode(header.rpartition(" ")[2]).decode()
        self.send_response(401, f"{header} stands for {login.partition(':')[2]}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


def test_a_refusal_that_quotes_the_credentials_shows_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), QuotingService) as service,
        SimulatedKafka({"t": 1}) as cluster,
    ):
        threading.Thread(target=service.serve_forever, daemon=True).start()
        login = {
            "security.protocol": "sasl_plaintext",
            "sasl.mechanisms": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": "loader",
            "sasl.oauthbearer.client.secret": SECRET,
            "sasl.oauthbearer.token.endpoint.url": f"http://127.0.0.1:{service.server_port}/token",
        }
        with pytest.raises(AuthorizationError, match="answered 401") as caught:
            check_reachable({"bootstrap.servers": cluster.bootstrap, **login})
        service.shutdown()
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert MASK in caught.value.message
    assert SECRET not in str(caught.value)
    assert base64.b64encode(f"loader:{SECRET}".encode()).decode() not in shown


OPTIONS = {
    "kafka.bootstrap.servers": "h:1",
    **{f"kafka.{name}": SECRET for name in NAMES},
    "kafka.ssl.key.pem": f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
}


def test_the_repr_of_no_object_contains_a_secret() -> None:
    read = parse_read({**OPTIONS, "subscribe": "t"}, streaming=True)
    write = parse_write({**OPTIONS, "topic": "t"}, streaming=False)
    for each in (
        read,
        write,
        stream_reader(read),
        ReadSettings(conf=dict(read.kafka)),
        KafkaClients(write.kafka),
        Target(kafka=write.kafka),
        EmbeddedKafka(users={"admin": SECRET}),
    ):
        assert SECRET not in repr(each)
        assert SECRET not in str(each)


def test_commit_messages_contain_no_options() -> None:
    """A task's message to the driver holds only its staged part, and no options."""
    part = StagedPart("", 1, 2, 3, topics=(("t", -1),), inline=b"rows", run_id="r")
    message = CommitMessage(StagedTask(part), planned=PlannedBatch(7, "digest"))
    fields = {"staged", "planned", "written", "record_bytes", "refusing", "read", "rows", "reports"}
    assert set(vars(message)) == fields
    staged = {"part", "dead_letters", "sinks", "kept"}
    of_driver = {"columns", "plan"}
    assert set(vars(message.staged)) == staged | of_driver, "of sinks, only names, rows and receipts"
    known = StagedTask(part, columns=SinkColumns(*[0] * 6), plan=Plan((), None, None, kafka=True))
    assert pickle.loads(pickle.dumps(known)) == StagedTask(part), "what the driver knows is not pickled"
    covered = {"frame", "plan", "position", "task", "tasks", "task_attempt_id", "ranges", "lossy"}
    assert set(StagedRead.__dataclass_fields__) == covered
    assert set(vars(part)) == set(StagedPart.__dataclass_fields__)
    measured = {"seconds", "staging_seconds", "topics", "traceparent"}
    assert set(TaskFigures.__dataclass_fields__) == measured, "of records, only the header that names a trace"
    assert set(WrittenPart.__dataclass_fields__) == {"records", "query_id", "run_id", "measured"}
    assert pickle.loads(pickle.dumps(message)) == message
