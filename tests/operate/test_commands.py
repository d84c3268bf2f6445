"""The commands inspect, adopt, sweep and fence, on generated checkpoints and a fake cluster."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from integration.support.checkpoint import SparkCheckpoint
from kafka_eos_source import errors
from kafka_eos_source.cli import main
from kafka_eos_source.commit import at_least_once, micro_batch
from kafka_eos_source.commit.identity_file import Identity, IdentityFile, set_unproven
from kafka_eos_source.commit.machine import Commit
from kafka_eos_source.commit.request import Cluster, CommitRequest, ProducerSession, ranges
from kafka_eos_source.commit.verdict import Batch, Held, batch_verdict
from kafka_eos_source.errors import (
    GuaranteeChangedError,
    InvalidOptionError,
    KafkaEosError,
    OperatorError,
    OutcomeUnknownError,
    RegistryUnavailableError,
    RestartQueryError,
    UnavailableError,
)
from kafka_eos_source.kafka.reader import LogEnds
from kafka_eos_source.model import Epochs, GroupOffset, TopicPartition
from kafka_eos_source.observe.figures import Step
from kafka_eos_source.operate import inspection as inspecting
from kafka_eos_source.operate import repair
from kafka_eos_source.operate.inspection import Inspection, StagedEntry, inspect, short_name
from kafka_eos_source.operate.query_commands import show_inspection
from kafka_eos_source.operate.repair import BatchOutcome
from kafka_eos_source.operate.shared import (
    Target,
    kafka_options,
    parse_properties,
    target_from_options,
)
from kafka_eos_source.options.parse import parse_read, parse_write
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.offset_log import SourcePosition, digest_of
from kafka_eos_source.protocol.token import Due, Mark, Token, TokenRecord, newest
from kafka_eos_source.runtime.commands import BROKERS_VARIABLE, DEFAULT_BROKERS
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.targets import location
from tests import ROOT
from tests.commit.model_broker import CLUSTER_ID, ModelBroker, ModelRows

IN = TopicPartition("in", 0)
OUT = TopicPartition("out", 0)
APP = "app"
ROWS_PER_BATCH = 10
SECRET = "hunter2-never-shown"


@dataclass
class FakeReader:
    """A cluster reader that returns the values of its fields."""

    offsets: dict[TopicPartition, GroupOffset] = field(default_factory=dict)
    pending: bool = False
    log: dict[TopicPartition, LogEnds] = field(default_factory=dict)
    all_topics: dict[str, int] = field(default_factory=lambda: {"in": 1, "out": 1, "__consumer_offsets": 5})
    ids: dict[str, str] = field(default_factory=lambda: {"in": "id-in"})
    error: Exception | None = None
    epoch_end: int = -1

    def __enter__(self) -> FakeReader:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def topics(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]:
        if self.error is not None:
            raise self.error
        return CLUSTER_ID, self.all_topics

    def group(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> tuple[Mapping[TopicPartition, GroupOffset], bool]:
        return self.offsets, self.pending

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        return {topic: self.ids[topic] for topic in topics}

    def logs(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogEnds]:
        return {tp: self.log.get(tp, LogEnds(0, 1000, 1000)) for tp in partitions}

    def epoch_ends(self, epochs: Epochs) -> Mapping[TopicPartition, int]:
        assert epochs == {IN: 5}
        return {IN: self.epoch_end}


class GeneratedCheckpoint(SparkCheckpoint):
    """A checkpoint as Spark and the sink write it: batch n reads offsets 10n to 10n+10 of `IN`."""

    def __init__(self, folder: Path, query_id: str = "query-1", first: int = 0) -> None:
        super().__init__(folder, query_id)
        self.first = first  # offset at which batch 0 starts

    def plan(self, batch_id: int) -> GeneratedCheckpoint:
        end = {IN: self.first + ROWS_PER_BATCH * (batch_id + 1)}
        start = {IN: self.first} if batch_id == 0 else None
        self.log_offsets(batch_id, SourcePosition(end, start, CLUSTER_ID, {"in": "id-in"}, epochs={IN: 5}))
        return self

    def write_batches(self, committed: int, planned: int) -> GeneratedCheckpoint:
        for batch_id in range(planned + 1):
            self.plan(batch_id)
        for batch_id in range(committed + 1):
            self.log_commit(batch_id)
        return self

    def write_identity_file(self, first_batch: int = 0, application_id: str = APP) -> GeneratedCheckpoint:
        IdentityFile(
            self.location, Identity(application_id, self.query_id, first_batch, location(self.location))
        ).write()
        return self

    def stage(self, name: str, size_bytes: int = 5, age_seconds: float = 0.0) -> Path:
        path = Path(self.location, "kafka-eos/staging", name, "part.arrow")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size_bytes)
        at = path.stat().st_mtime - age_seconds
        os.utime(path, (at, at))
        os.utime(path.parent, (at, at))
        return path

    def request(self, batch_id: int) -> CommitRequest:
        """Returns the commit request of a batch, as the sink builds it."""
        logged = offset_log.read(self.location, batch_id)
        before = offset_log.read(self.location, batch_id - 1)
        assert logged is not None
        batch = Batch(
            application_id=APP,
            query_id=self.query_id,
            run_id="run",
            batch_id=batch_id,
            start=digest_of(before, self.query_id),
            end=digest_of(logged, self.query_id),
            promised=self.file(batch_id).promises_token,
        )
        return CommitRequest(batch, APP, OUT, tuple(ranges(logged, before)), "out")

    def file(self, batch_id: int) -> IdentityFile:
        return IdentityFile(self.location, Identity(APP, self.query_id, batch_id, location(self.location)))

    def group_offsets(self, batch_id: int, /, **more: Any) -> dict[TopicPartition, GroupOffset]:
        """Returns the group's offsets after that batch."""
        request = self.request(batch_id)
        token = replace(_token(request), **more)
        cluster = Cluster(CLUSTER_ID, {"in": 1, "out": 1})
        return {each.tp: each for each in request.offsets(token, request.own(cluster).ends, cluster)}


def _token(request: CommitRequest) -> Token:
    batch = request.batch
    return Token(
        APP,
        batch.query_id,
        batch.run_id,
        batch.batch_id + 1,
        batch.batch_id,
        batch.start,
        batch.end,
        ROWS_PER_BATCH,
    )


def five_seconds() -> Deadline:
    return Deadline.after_seconds(5)


@pytest.fixture
def made(tmp_path: Path) -> GeneratedCheckpoint:
    return GeneratedCheckpoint(tmp_path / "checkpoint")


def inspect_checkpoint(made: GeneratedCheckpoint, reader: FakeReader | None, **more: Any) -> Inspection:
    return inspect(Target(checkpoint=made.location, **more), reader, five_seconds())


# -- connection -------------------------------------------------------------------------------------


def test_a_properties_file_is_read_as_java_reads_it() -> None:
    text = r"""
# a comment
! another
bootstrap.servers = a:9092,\
    b:9092
kafka.client.id : me
sasl.jaas.config=org.X required \
    username="u" \
    password="p=1\\n";
ssl.ca.pem=line\nline
key\ with\:signs	value
empty
"""
    assert dict(parse_properties(text)) == {
        "kafka.bootstrap.servers": "a:9092,b:9092",
        "kafka.client.id": "me",
        "kafka.sasl.jaas.config": 'org.X required username="u" password="p=1\\n";',
        "kafka.ssl.ca.pem": "line\nline",
        "kafka.key with:signs": "value",
        "kafka.empty": "",
    }


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).map(str.strip).filter(bool),
        st.text(st.characters(exclude_categories=["Cs"])).map(str.strip),
    )
)
def test_escaped_names_and_values_of_a_properties_file_are_decoded(expected: dict[str, str]) -> None:
    def escaped(text: str) -> str:
        units = text.encode("utf-16-be")
        return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))

    text = "\n".join(f"{escaped(name)}={escaped(value)}" for name, value in expected.items())
    found = {name.removeprefix("kafka."): value for name, value in parse_properties(text)}
    assert found == {name.removeprefix("kafka."): value for name, value in expected.items()}


def test_connection_options_on_the_command_line_override_the_properties_file() -> None:
    found = kafka_options(
        "host:1", ["client.id=stated"], "bootstrap.servers=file:1\nclient.id=file\nretries=3"
    )
    assert found == {
        "kafka.bootstrap.servers": "host:1",
        "kafka.client.id": "stated",
        "kafka.retries": "3",
    }


def test_commands_check_options_as_the_query_does() -> None:
    with pytest.raises(InvalidOptionError, match="Did you mean"):
        target_from_options({}, kafka_options("host:1", ["security.protcol=SSL"], None))
    with pytest.raises(InvalidOptionError, match=r"application\.id"):
        target_from_options({"application.id": "no spaces here"}, {})
    named = target_from_options(
        {"application.id": APP, "topic": "out", "checkpointLocation": "/c"},
        kafka_options("host:1", ["group.id=g"], None),
    )
    assert (named.group_id, named.anchor_topic, named.staging_location) == (
        "g",
        "out",
        "/c/kafka-eos/staging",
    )


def test_commands_never_print_a_password(
    made: GeneratedCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "client.properties"
    file.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.username=u\n"
        f"sasl.password={SECRET}\nbootstrap.servers=host:1\n"
    )
    seen = fake_cluster(
        monkeypatch, FakeReader(made.write_batches(0, 1).write_identity_file().group_offsets(0))
    )
    result = run("inspect", "--checkpoint", made.location, "--kafka-properties", str(file))
    assert result.exit_code == 0
    assert seen[0]["sasl.password"] == SECRET, "the client must receive the password"
    assert SECRET not in result.output
    assert SECRET not in repr(target_from_options({}, kafka_options(None, [], file.read_text())))
    # nor is one printed that has a misspelled name or is on the command line
    wrong = run("inspect", "--checkpoint", made.location, "--kafka", f"sasl.pasword={SECRET}")
    assert wrong.exit_code == 1
    assert SECRET not in wrong.output
    bare = run("inspect", "--checkpoint", made.location, "--kafka", SECRET)
    assert bare.exit_code == 1
    assert SECRET not in bare.output
    warned = run("inspect", "--checkpoint", made.location, "--kafka", f"sasl.password={SECRET}")
    assert "--kafka-properties" in warned.output
    assert SECRET not in warned.output


# -- inspect ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("committed", "held", "verdict", "source"),
    [
        (6, 7, "Kafka holds batch 7, Spark's commit log does not: a restart skips it.", (70, 80, 80)),
        (6, 6, "batch 7 is planned but not in Kafka: a restart writes it once.", (70, 80, 70)),
        (
            7,
            7,
            "batch 7 is complete in Spark and in Kafka: a restart continues with batch 8.",
            (80, None, 80),
        ),
    ],
)
def test_inspect_says_what_a_restart_does(
    made: GeneratedCheckpoint, committed: int, held: int, verdict: str, source: tuple[int, int | None, int]
) -> None:
    made.write_batches(committed, 7).write_identity_file()
    found = inspect_checkpoint(made, FakeReader(made.group_offsets(held)))
    assert found.verdict.text == verdict
    assert not found.needs_a_person
    assert found.checkpoint is not None
    assert found.kafka is not None
    assert (found.checkpoint.planned, found.checkpoint.committed) == (7, committed)
    assert found.kafka.token is not None
    assert found.kafka.token.batch_id == held
    (read,) = [each for each in found.kafka.partitions if each.tp == IN]
    assert (read.start, read.end, read.group) == source


@pytest.mark.parametrize(
    ("at_ms", "shown"),
    [(1_760_000_000_500, "2025-10-09 08:53:20 UTC"), (2**62, "4611686018427387904 ms since 1970")],
)
def test_inspect_shows_when_timers_are_due(made: GeneratedCheckpoint, at_ms: int, shown: str) -> None:
    made.write_batches(7, 7).write_identity_file()
    due_at = Due(at_ms, 1_760_000_000_000)
    found = inspect_checkpoint(made, FakeReader(made.group_offsets(7, due=due_at)))
    text = io.StringIO()
    show_inspection(Console(file=text, width=200), found)
    assert f"timers due {shown}" in " ".join(text.getvalue().split())


def test_inspect_of_a_checkpoint_without_batches_derives_the_application_id(
    made: GeneratedCheckpoint,
) -> None:
    found = inspect_checkpoint(made, FakeReader())
    assert found.application_id == "kafka-eos-query-1", "derived, as the sink does"
    assert "begins with batch 0" in found.verdict.text


@pytest.mark.parametrize(
    ("committed", "planned", "group_offsets", "condition"),
    [
        (6, 7, None, "TOKEN_MISSING"),
        (7, 7, None, "TOKEN_MISSING"),
        (6, 7, 7, "CHECKPOINT_ROLLED_BACK"),
        (7, 7, 9, "CHECKPOINT_ROLLED_BACK"),
        (6, 7, 5, "CHECKPOINT_AHEAD"),
        (7, 7, 5, "CHECKPOINT_AHEAD"),
    ],
)
def test_inspect_names_the_condition_with_which_the_query_would_fail(
    made: GeneratedCheckpoint,
    tmp_path: Path,
    committed: int,
    planned: int,
    group_offsets: int | None,
    condition: str,
) -> None:
    made.first = 5
    made.write_batches(committed, planned).write_identity_file()
    newer = GeneratedCheckpoint(tmp_path / "newer").write_batches(
        9, 9
    )  # its batches end in the middle of those of the old copy
    offsets = newer.group_offsets(group_offsets) if group_offsets is not None else {}
    found = inspect_checkpoint(made, FakeReader(offsets))
    assert found.verdict.condition == condition
    assert found.verdict.fix
    assert found.needs_a_person


def test_an_old_checkpoint_copy_whose_batches_kafka_holds_is_skipped(made: GeneratedCheckpoint) -> None:
    made.write_batches(8, 9).write_identity_file()
    offsets = made.group_offsets(9)
    made.forget("offsets/9", "offsets/8", "commits/8", "commits/7")
    found = inspect_checkpoint(made, FakeReader(offsets))
    assert found.verdict.text == "Kafka holds batch 7, Spark's commit log does not: a restart skips it."


def test_a_token_of_another_query_is_reported_as_foreign_query(made: GeneratedCheckpoint) -> None:
    made.write_batches(-1, 0).write_identity_file()
    found = inspect_checkpoint(made, FakeReader(made.group_offsets(0, query_id="another")))
    assert found.verdict.condition == "FOREIGN_QUERY"


@dataclass
class FakeTokenTopic:
    """The token topic of a query: it holds one record, or none."""

    record: TokenRecord | None
    name: str = "tokens"
    topic_id: str = "id-tokens"

    def partition_of(self, application_id: str) -> int:
        return 0

    def last(self, application_id: str, deadline: Deadline, *, certain: bool) -> TokenRecord | None:
        return self.record


def inspect_with_token_topic(
    made: GeneratedCheckpoint, reader: FakeReader, record: TokenRecord | UnavailableError | None
) -> Inspection:
    IdentityFile(
        made.location, Identity(APP, made.query_id, 0, location(made.location), token_topic="tokens")
    ).write()
    file = Path(made.location, "kafka-eos/identity.json")
    assert json.loads(file.read_text())["token_topic"] == "tokens"

    def opened(name: str, deadline: Deadline) -> FakeTokenTopic:
        assert name == "tokens"
        if isinstance(record, UnavailableError):
            raise record
        return FakeTokenTopic(record)

    return inspect(Target(checkpoint=made.location), reader, five_seconds(), token_topic=opened)


def test_inspect_completes_a_lost_group_from_the_token_topic(made: GeneratedCheckpoint) -> None:
    made.write_batches(6, 7)
    token = made.request(7)
    record = TokenRecord(_token(token), {IN: 80, OUT: 0}, OUT, APP, "id-tokens", 0, 0)
    for offsets in ({}, made.group_offsets(5)):  # deleted; or older than the record
        found = inspect_with_token_topic(made, FakeReader(dict(offsets)), record)
        assert "Kafka holds batch 7, Spark's commit log does not" in found.verdict.text
        assert found.kafka is not None
        assert found.kafka.token == record.token
    nothing = inspect_with_token_topic(made, FakeReader(), None)
    assert nothing.verdict.condition == "TOKEN_MISSING"
    assert "token.topic='tokens'" in nothing.verdict.text
    silent = inspect_with_token_topic(
        made, FakeReader(), UnavailableError("the topic does not answer", fix="look")
    )
    assert silent.verdict.condition == "UNAVAILABLE"


def test_adopt_refuses_to_answer_for_a_token_topic_that_cannot_be_read(made: GeneratedCheckpoint) -> None:
    """It may hold the token, so nobody knows whether the query needs an answer."""
    made.write_batches(6, 7)
    silent = UnavailableError("the topic does not answer", fix="look")
    found = inspect_with_token_topic(made, FakeReader(), silent)
    adoption = repair.plan_adoption(found, Target(checkpoint=made.location), BatchOutcome.COMMITTED)
    assert adoption.request is None
    assert adoption.refused is not None
    assert adoption.refused.condition == "UNAVAILABLE"


def test_a_token_older_than_a_mark_is_reported_as_missing(made: GeneratedCheckpoint) -> None:
    """An outdated token must not decide the fate of prepared sink transactions."""
    made.write_batches(6, 7).write_identity_file()
    newer = _token(made.request(7))
    offsets = {**made.group_offsets(5), IN: GroupOffset(IN, 80, Mark.of(newer).encode())}
    found = inspect_checkpoint(made, FakeReader(offsets))
    assert found.kafka is not None
    assert found.kafka.token is None
    assert found.verdict.condition == "TOKEN_MISSING"


def test_inspect_without_a_broker_reports_the_checkpoint_alone(made: GeneratedCheckpoint) -> None:
    made.write_batches(6, 7).write_identity_file()
    found = inspect_checkpoint(made, None)
    assert "it is unknown whether Kafka holds batch 7" in found.verdict.text
    assert not found.needs_a_person
    silent = inspect_checkpoint(
        made, FakeReader(error=UnavailableError("no answer from Kafka at 'h:1'", fix="look"))
    )
    assert silent.kafka is None
    assert silent.checkpoint is not None
    assert [each.condition for each in silent.findings] == ["", "UNAVAILABLE"]


def test_inspect_without_a_checkpoint_reports_what_kafka_holds(
    made: GeneratedCheckpoint, tmp_path: Path
) -> None:
    reader = FakeReader(made.write_batches(3, 3).group_offsets(3))
    for missing in (None, str(tmp_path / "lost")):
        found = inspect(Target(checkpoint=missing, application_id=APP), reader, five_seconds())
        assert "Kafka holds batch 3 of query query-1" in found.verdict.text
    with pytest.raises(InvalidOptionError, match="argument QUERY"):
        inspect(Target(checkpoint=str(tmp_path / "lost")), reader, five_seconds())


def test_inspect_reports_data_loss_open_transactions_and_a_wrong_application_id(
    made: GeneratedCheckpoint,
) -> None:
    made.write_batches(6, 7).write_identity_file()
    reader = FakeReader(
        made.group_offsets(6), pending=True, log={IN: LogEnds(72, 90, 95)}, ids={"in": "another id"}
    )
    conditions = {each.condition: each.text for each in inspect_checkpoint(made, reader).findings}
    assert "AGED_OUT" not in conditions["DATA_LOSS"], "offsets of a recreated topic are not comparable"
    assert "TOPIC_RECREATED" in conditions["DATA_LOSS"]
    reader.ids = {"in": "id-in"}
    found = inspect_checkpoint(made, reader)
    texts = " ".join(each.text for each in found.findings)
    assert "AGED_OUT: in-0: offsets 70 to 71 no longer exist" in texts
    reader.epoch_end = 60
    texts = " ".join(each.text for each in inspect_checkpoint(made, reader).findings)
    assert "LOG_WAS_CUT: in-0: the query is at offset 70, but the log was cut at offset 60" in texts
    reader.epoch_end = -1
    texts = " ".join(each.text for each in found.findings)
    assert "an unfinished transaction is about to change the group's offsets" in texts
    assert "a transaction is open in in-0 from offset 90" in texts
    other = inspect_checkpoint(made, reader, application_id="other")
    assert "INVALID_OPTION" in [each.condition for each in other.findings]


@pytest.mark.parametrize("what", ["the checkpoint", "the staging folder"])
def test_a_location_that_does_not_answer_is_an_error_with_a_fix(
    made: GeneratedCheckpoint, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As an S3 bucket whose endpoint is down: its file system raises OSError."""

    class Silent:
        def get_file_info(self, _asked: object) -> None:
            raise OSError("AWS Error NETWORK_CONNECTION")

    made.write_batches(0, 1)
    answers = inspecting.file_system
    where = made.location if what == "the checkpoint" else f"{made.location}/kafka-eos/staging"
    monkeypatch.setattr(
        inspecting, "file_system", lambda uri: (Silent(), uri) if uri == where else answers(uri)
    )
    result = run("inspect", "--checkpoint", made.location)
    assert result.exit_code == 1
    assert f"[KAFKA_EOS.UNAVAILABLE] {what} {where} cannot be read: AWS Error" in result.output
    assert "Fix: check the location" in result.output


def test_inspect_names_a_damaged_file(made: GeneratedCheckpoint) -> None:
    made.write_batches(0, 1).write_identity_file()
    Path(made.location, "kafka-eos/identity.json").write_text('{"application_id":')
    with pytest.raises(OperatorError, match="is damaged"):
        inspect_checkpoint(made, None)
    Path(made.location, "kafka-eos/identity.json").unlink()
    Path(made.location, "offsets/1").write_text("")
    with pytest.raises(OperatorError, match="offsets/1"):
        inspect_checkpoint(made, None)


@given(group_offsets=st.integers(0, 6), planned=st.integers(0, 6), done=st.booleans())
def test_the_commit_does_what_the_verdict_of_inspect_announces(
    tmp_path_factory: pytest.TempPathFactory, group_offsets: int, planned: int, done: bool
) -> None:
    """This holds for any state of Kafka and of Spark's logs."""
    broker = ModelBroker()
    made = GeneratedCheckpoint(tmp_path_factory.mktemp("c") / "checkpoint").write_batches(6, 6)
    for batch_id in range(group_offsets + 1):
        commit(broker, made, batch_id)
    made.forget(*(f"offsets/{batch_id}" for batch_id in range(planned + 1, 7)))
    made.forget(*(f"commits/{batch_id}" for batch_id in range(planned + done, 7)))
    found = inspect_checkpoint(made, FakeReader(dict(broker.group)))
    assert found.checkpoint is not None
    next_batch = found.checkpoint.next_batch
    assert next_batch == planned + done
    if done and next_batch <= group_offsets:  # the next batch is not planned yet, so nothing can be announced
        assert found.verdict.condition == "CHECKPOINT_ROLLED_BACK"
        return
    made.plan(next_batch)
    before = list(broker.log)
    if found.needs_a_person:
        with pytest.raises(OperatorError, match=found.verdict.condition):
            commit(broker, made, next_batch)
        assert broker.log == before
    else:
        step = commit(broker, made, next_batch)
        assert ("skips it" in found.verdict.text) == (step is Step.SKIPPED)


def commit(broker: ModelBroker, made: GeneratedCheckpoint, batch_id: int) -> Step:
    """Commits a batch as another driver of the checkpoint."""
    rows = [f"{batch_id}:{row}" for row in range(ROWS_PER_BATCH)]
    staged, file = ModelRows(rows), made.file(batch_id)
    machine = Commit(
        made.request(batch_id), staged, broker, ProducerSession(), five_seconds(), identity_file=file
    )
    return machine.run().step


# -- adopt ------------------------------------------------------------------------------------------


def plan_adoption(
    made: GeneratedCheckpoint, broker: ModelBroker, outcome: BatchOutcome | None = None
) -> repair.Adoption:
    named = Target(checkpoint=made.location, application_id=APP)
    reader = FakeReader(dict(broker.group), all_topics=dict(broker.topics))
    return repair.plan_adoption(inspect(named, reader, five_seconds()), named, outcome)


def perform(broker: ModelBroker, adoption: repair.Adoption) -> None:
    assert adoption.request is not None
    before = list(broker.log)
    Commit(adoption.request, repair.NoRows(), broker, ProducerSession(), five_seconds()).run()
    assert broker.log == before, "adopt must write nothing but a token"


def test_an_adopted_query_continues_at_the_committed_offsets(tmp_path: Path) -> None:
    broker = ModelBroker(topics={"in": 1, "out": 1, "old": 1, "__consumer_offsets": 5})
    lost = GeneratedCheckpoint(tmp_path / "lost").write_batches(3, 3)
    for batch_id in range(4):
        commit(broker, lost, batch_id)
    # the lost query once wrote another topic, whose token no batch of the new query will replace
    old = TopicPartition("old", 0)
    broker.group[old] = replace(broker.group[OUT], tp=old)

    new = GeneratedCheckpoint(tmp_path / "new", "query-2", first=40)
    guide = plan_adoption(new, broker)
    assert guide.request is None
    assert guide.options["source"] == {"startingOffsets": "group", "application.id": APP}
    assert guide.options["sink"]["onForeignQuery"] == "adopt"

    new.plan(0)
    with pytest.raises(OperatorError, match="belongs to query query-1"):
        commit(broker, new, 0)
    perform(broker, plan_adoption(new, broker))
    assert commit(broker, new, 0) is Step.COMMITTED
    assert commit(broker, new, 0) is Step.SKIPPED, "another driver reads the token"
    assert commit(broker, new.plan(1), 1) is Step.COMMITTED
    with pytest.raises(OperatorError, match="belongs to query query-2"):
        commit(broker, lost.plan(4), 4)
    assert "own query" in " ".join(plan_adoption(new, broker).messages)


def test_adopt_refuses_a_checkpoint_that_does_not_start_at_the_committed_offsets(tmp_path: Path) -> None:
    broker = ModelBroker()
    lost = GeneratedCheckpoint(tmp_path / "lost").write_batches(3, 3)
    for batch_id in range(4):
        commit(broker, lost, batch_id)
    for first in (0, 39, 41):
        adoption = plan_adoption(
            GeneratedCheckpoint(tmp_path / f"new-{first}", "query-2", first).plan(0), broker
        )
        assert adoption.request is None
        assert adoption.refused is not None
        assert adoption.refused.condition == "CHECKPOINT_ROLLED_BACK"


def test_adopt_fails_if_the_old_driver_commits_after_the_plan(tmp_path: Path) -> None:
    """The token that adopt planned to replace is not the newest any more."""
    broker = ModelBroker()
    old = GeneratedCheckpoint(tmp_path / "old").write_batches(1, 1)
    commit(broker, old, 0)
    adoption = plan_adoption(GeneratedCheckpoint(tmp_path / "new", "query-2", first=10).plan(0), broker)
    commit(broker, old, 1)
    with pytest.raises(OperatorError, match="CHECKPOINT_ROLLED_BACK"):
        perform(broker, adoption)
    found = newest(broker.group.values())
    assert found is not None
    assert found.query_id == "query-1"


@pytest.mark.parametrize("outcome", list(BatchOutcome))
def test_adopt_writes_a_lost_token_with_the_outcome_that_the_operator_states(
    made: GeneratedCheckpoint, outcome: BatchOutcome
) -> None:
    broker = ModelBroker()
    made.write_batches(1, 2)
    for batch_id in range(3 if outcome is BatchOutcome.COMMITTED else 2):
        commit(broker, made, batch_id)
    broker.group.clear()
    with pytest.raises(OperatorError, match="TOKEN_MISSING"):
        commit(broker, made, 2)
    assert plan_adoption(made, broker).request is None, "the operator has not stated the outcome yet"
    perform(broker, plan_adoption(made, broker, outcome))
    assert broker.group[IN].offset == (30 if outcome is BatchOutcome.COMMITTED else 20)
    assert commit(broker, made, 2) is (Step.SKIPPED if outcome is BatchOutcome.COMMITTED else Step.COMMITTED)
    assert len(broker.log) == 3 * ROWS_PER_BATCH
    refused = plan_adoption(made, broker, outcome).refused
    assert refused is not None, "the token is written already"


def test_a_lost_token_is_written_again_between_two_batches(made: GeneratedCheckpoint) -> None:
    broker = ModelBroker()
    made.write_batches(1, 1)
    for batch_id in range(2):
        commit(broker, made, batch_id)
    broker.group.clear()
    assert plan_adoption(made, broker, BatchOutcome.COMMITTED).refused is not None
    perform(broker, plan_adoption(made, broker))
    assert commit(broker, made.plan(2), 2) is Step.COMMITTED


def test_adopt_ends_a_time_of_at_least_once(made: GeneratedCheckpoint, tmp_path: Path) -> None:
    """Batches 2 and 3 left no token. Spark has logged batch 2, and only planned batch 3."""
    broker = ModelBroker()
    made.write_batches(1, 1)
    for batch_id in (0, 1):
        commit(broker, made, batch_id)
    made.write_identity_file().write_batches(2, 3)
    for batch_id in (2, 3):
        set_unproven(made.location, batch_id)
    with pytest.raises(GuaranteeChangedError, match="from batch 2 on"):
        made.file(3).check_guarantee()
    found = inspect_checkpoint(made, FakeReader(dict(broker.group)))
    assert "GUARANTEE_CHANGED" in [each.condition for each in found.findings]
    assert plan_adoption(made, broker, BatchOutcome.COMMITTED).refused is not None
    for _ in range(2):  # the command died before it changed the file, and is run again
        adoption = plan_adoption(made, broker)
        assert "The query writes it whole" in " ".join(adoption.messages)
        assert adoption.returns == made.location
        perform(broker, adoption)
    token = newest(broker.group.values())
    assert token is not None
    assert token.batch_id == 2
    set_unproven(made.location, None)
    made.file(3).check_guarantee()
    assert commit(broker, made, 3) is Step.COMMITTED


def test_adopt_keeps_a_batch_that_kafka_holds_although_at_least_once_has_repeated_it(
    made: GeneratedCheckpoint,
) -> None:
    """exactly_once committed batch 2 and died; at_least_once repeated it and died, too."""
    broker = ModelBroker()
    made.write_batches(1, 2)
    for batch_id in (0, 1, 2):
        commit(broker, made, batch_id)
    made.write_identity_file()
    set_unproven(made.location, 2)
    for tp, each in broker.group.items():
        token = Token.decode(each.metadata)
        if token is not None:
            broker.group[tp] = replace(each, metadata=replace(token, unproven_since=2).encode())
    adoption = plan_adoption(made, broker)
    assert "names batch 2, which Kafka holds" in " ".join(adoption.messages)
    perform(broker, adoption)
    set_unproven(made.location, None)
    assert commit(broker, made, 2) is Step.SKIPPED
    assert commit(broker, made.plan(3), 3) is Step.COMMITTED


def test_the_token_says_that_batches_were_written_without_one(
    made: GeneratedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint from before the change does not know of it, and so the token must."""
    broker = ModelBroker()
    made.write_batches(1, 1)
    for batch_id in (0, 1):
        commit(broker, made, batch_id)
    made.write_identity_file().write_batches(1, 2)
    before = dict(broker.group)
    monkeypatch.setattr(micro_batch, "KafkaClients", lambda *_: broker)
    options = parse_write(
        {
            "kafka.bootstrap.servers": "b:9092",
            "topic": "out",
            "processing.guarantee": "at_least_once",
            "checkpointLocation": made.location,
        },
        streaming=True,
    )
    for _ in range(2):
        at_least_once.leave_guarantee(options)
    assert broker.epoch == 3, "once per change of the guarantee, not per batch"
    marked = newest(broker.group.values())
    assert marked is not None
    assert marked.unproven_since == 2
    assert {tp: replace(each, metadata="") for tp, each in broker.group.items()} == {
        tp: replace(each, metadata="") for tp, each in before.items()
    }
    assert marked == replace(newest(before.values()), unproven_since=2)  # type: ignore[type-var]

    set_unproven(made.location, None)  # the checkpoint is restored
    with pytest.raises(GuaranteeChangedError, match="from batch 2 on") as refused:
        commit(broker, made, 2)
    assert "writes again what at_least_once has written" in refused.value.fix
    assert plan_adoption(made, broker).request is None, "nobody can show that this checkpoint is the newest"
    other = made.request(2).batch
    with pytest.raises(GuaranteeChangedError):
        batch_verdict(
            replace(other, query_id="other"), Held.of(APP, broker.group), OUT, foreign_query="adopt"
        )

    set_unproven(made.location, 2)  # the newest checkpoint
    perform(broker, plan_adoption(made, broker))
    set_unproven(made.location, None)
    assert newest(broker.group.values()).unproven_since == -1  # type: ignore[union-attr]
    assert commit(broker, made, 2) is Step.COMMITTED


def test_adopt_writes_nothing_where_no_token_is_missing(made: GeneratedCheckpoint) -> None:
    assert plan_adoption(made.plan(0), ModelBroker(), BatchOutcome.COMMITTED).request is None
    assert plan_adoption(made, ModelBroker()).refused is None


# -- sweep ------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.builds(
            StagedEntry,
            name=st.integers(0, 20).map(str) | st.sampled_from(["write-" + "a" * 32, "notes.txt", "5.bak"]),
            is_folder=st.booleans(),
            newest_seconds=st.floats(0, 2000),
        )
    ),
    st.none() | st.integers(0, 20),
    st.floats(0, 2000),
)
def test_sweep_keeps_every_entry_that_may_still_be_read(
    found: list[StagedEntry], token_batch: int | None, older_than_seconds: float
) -> None:
    decisions = repair.sweep_decisions(
        found, token_batch=token_batch, older_than_seconds=older_than_seconds, now_seconds=2000
    )
    for each in decisions:
        name, young = each.entry.name, 2000 - each.entry.newest_seconds <= older_than_seconds
        if name in ("notes.txt", "5.bak"):
            assert not each.delete
        elif name.isdigit():
            if not each.entry.is_folder or token_batch is None or int(name) > token_batch:
                assert not each.delete
            else:
                assert each.delete == (int(name) < token_batch or not young)
        else:
            assert each.delete == (each.entry.is_folder and not young)


def test_sweep_deletes_old_entries_only_with_yes(
    made: GeneratedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.write_batches(2, 3).write_identity_file()
    fake_cluster(monkeypatch, FakeReader(made.group_offsets(2)))
    week = 7 * 86_400
    old_entries = [made.stage("1", 7), made.stage("2", 5, week), made.stage("write-" + "0" * 32, 3, week)]
    kept_entries = [made.stage("3", 1, week), made.stage("write-" + "1" * 32, 1), made.stage("mine", 1, week)]
    (old_entries[0].parents[1] / "shared-path").write_text("probe")
    command = ["sweep", "--checkpoint", made.location, "--bootstrap-servers", "h:1"]
    dry = run(*command)
    assert dry.exit_code == 0
    assert "3 of 6 entries can be deleted, 15 bytes" in dry.output
    assert all(path.exists() for path in old_entries + kept_entries), "a dry run deletes nothing"
    assert "Deleted 3 entries" in run(*command, "--yes").output
    assert [path.exists() for path in old_entries] == [False] * 3
    assert [path.exists() for path in kept_entries] == [True] * 3
    assert (old_entries[0].parents[1] / "shared-path").exists()
    assert "0 of 3 entries can be deleted" in run(*command).output


def test_sweep_ignores_the_token_of_another_query(
    made: GeneratedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.write_batches(2, 3).write_identity_file()
    fake_cluster(monkeypatch, FakeReader(made.group_offsets(3, query_id="another", batch_id=99)))
    path = made.stage("1", age_seconds=7 * 86_400)
    result = run("sweep", "--checkpoint", made.location, "--bootstrap-servers", "h:1", "--yes")
    assert "the token in Kafka belongs to another query" in result.output
    assert path.exists()


def test_sweep_of_a_folder_of_batch_writes_needs_no_broker(made: GeneratedCheckpoint) -> None:
    week = 7 * 86_400
    batch, write = made.stage("0", age_seconds=week), made.stage("write-" + "0" * 32, age_seconds=week)
    result = run("sweep", "--staging", str(batch.parents[1]), "--yes")
    assert result.exit_code == 0
    assert batch.exists()
    assert not write.exists()
    assert run("sweep").exit_code == 1


# -- the command line -------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def fake_cluster(monkeypatch: pytest.MonkeyPatch, reader: FakeReader) -> list[Mapping[str, Any]]:
    """Replaces the real cluster; returns the configurations with which readers were created."""
    made_with: list[Mapping[str, Any]] = []

    def make(config: Mapping[str, Any]) -> FakeReader:
        made_with.append(config)
        return reader

    monkeypatch.setattr("kafka_eos_source.kafka.admin.ClusterReader", make)
    return made_with


def test_the_exit_code_of_inspect_follows_the_verdict(
    made: GeneratedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.write_batches(6, 7).write_identity_file()
    made.stage("7", 1234)
    reader = FakeReader(made.group_offsets(7))
    fake_cluster(monkeypatch, reader)
    command = ["inspect", "--checkpoint", made.location, "--bootstrap-servers", "h:1"]
    shown = run(*command)
    assert shown.exit_code == 0
    assert shown.output.rstrip().endswith(
        "Kafka holds batch 7, Spark's commit log does not: a restart skips it."
    )
    for text in (
        "query-1",
        "batch 7, 10 rows",
        "batch 6",
        "1,234",
        CLUSTER_ID,
        "in-0",
        "kafka-transactions.sh",
    ):
        assert text in shown.output, text
    found = json.loads(run(*command, "--json").output)
    assert found["kafka"]["token"]["batch"] == 7
    assert found["checkpoint"]["next_batch"] == 7
    assert found["staged"] == [{"name": "7", "batch_id": 7, "files": 1, "bytes": 1234}]
    assert found["findings"][0]["condition"] is None
    reader.offsets = {}
    missing = run(*command)
    assert missing.exit_code == 3
    assert "TOKEN_MISSING" in missing.output
    assert "docs/runbooks.md" in missing.output


@pytest.mark.parametrize(
    ("arguments", "variable", "asked"),
    [
        (("--bootstrap-servers", "a:1"), "v:1", "a:1"),
        (("--kafka", "bootstrap.servers=k:1"), "v:1", "k:1"),
        (("--kafka-properties", "FILE"), "v:1", "f:1"),
        (("--kafka", "client.id=mine"), "v:1", "v:1"),
        ((), "v:1", "v:1"),
        ((), "", DEFAULT_BROKERS),
        (("--kafka", "client.id=mine"), None, DEFAULT_BROKERS),
        ((), None, DEFAULT_BROKERS),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "lag", "fence"])
def test_all_commands_find_the_brokers_in_one_way(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    variable: str | None,
    asked: str,
    command: str,
) -> None:
    """The arguments, then the environment, then 127.0.0.1:9092; commands about a query say the last one."""
    file = tmp_path / "client.properties"
    file.write_text("bootstrap.servers=f:1\n")
    if variable is not None:
        monkeypatch.setenv(BROKERS_VARIABLE, variable)
    made_with = fake_cluster(monkeypatch, FakeReader({IN: GroupOffset(IN, 7, "")}))
    shown = run(command, APP, *(str(file) if each == "FILE" else each for each in arguments))
    assert shown.exit_code == 0, shown.output
    assert [each["bootstrap.servers"] for each in made_with] == [asked]
    says = asked == DEFAULT_BROKERS and command != "lag"
    assert (f"No brokers are named: asking {DEFAULT_BROKERS}." in shown.stderr) == says


def test_inspect_without_brokers_asks_the_default_and_says_that_it_is_silent(
    made: GeneratedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reported an outage of a Kafka that it had not asked, and ended with 0."""
    made.write_batches(6, 7).write_identity_file()
    fake_cluster(monkeypatch, FakeReader(error=UnavailableError("no answer from Kafka", fix="look")))
    shown = run("inspect", "--checkpoint", made.location)
    assert shown.exit_code == 3
    assert f"asking {DEFAULT_BROKERS}. Others: --bootstrap-servers" in shown.stderr
    assert "UNAVAILABLE: no answer from Kafka" in shown.stdout


def test_what_works_without_kafka_asks_it_only_if_brokers_are_named(
    made: GeneratedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_with = fake_cluster(monkeypatch, FakeReader())
    for arguments in (
        ["doctor", "--check", "staging", "--checkpoint", made.location],
        ["acls", "app", "--topic", "out", "--source-topic", "in"],
        ["sweep", "--staging", f"{made.location}/staged"],
        ["state", "list", "--state-dir", made.location],
    ):
        shown = run(*arguments)
        assert shown.exit_code == 0, shown.output
        assert "No brokers are named" not in shown.stderr
    assert made_with == []


def test_inspect_without_arguments_names_the_options_it_needs() -> None:
    result = run("inspect")
    assert result.exit_code == 1
    assert "QUERY" in result.output


@pytest.mark.parametrize("command", ["fence", "adopt"])
def test_commands_that_change_kafka_need_yes(
    made: GeneratedCheckpoint, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    made.write_batches(6, 7).write_identity_file()
    fake_cluster(monkeypatch, FakeReader())

    def never(*_arguments: object, **_named: object) -> None:
        raise AssertionError("a dry run wrote")

    monkeypatch.setattr("kafka_eos_source.operate.repair.fence", never)
    monkeypatch.setattr("kafka_eos_source.operate.repair.perform_adoption", never)
    where = ["--checkpoint", made.location, "--committed"] if command == "adopt" else []
    dry = run(command, APP, *where, "--bootstrap-servers", "h:1")
    assert dry.exit_code == 0
    assert "With --yes" in dry.output


def test_the_next_batch_id_follows_the_rule_of_spark(made: GeneratedCheckpoint) -> None:
    """As `populateStartOffsets`: equal logs mean a new batch, anything else repeats the last planned."""
    nexts = {}
    for committed, planned in ((-1, -1), (-1, 0), (0, 0), (0, 1), (0, 3)):
        folder = Path(made.location).with_name(f"c{committed}{planned}")
        found = inspecting.read_checkpoint(
            GeneratedCheckpoint(folder).write_batches(committed, planned).location
        )
        assert found is not None
        nexts[committed, planned] = found.next_batch
    assert nexts == {(-1, -1): 0, (-1, 0): 0, (0, 0): 1, (0, 1): 1, (0, 3): 3}


# -- the runbooks -----------------------------------------------------------------------------------

RUNBOOKS = (ROOT / "docs/runbooks.md").read_text(encoding="utf-8")


def runbook_sections() -> dict[str, str]:
    """Returns the text of each section by its heading."""
    parts = re.split(r"^## (.+)$", RUNBOOKS, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def errors_for_operators() -> list[type[KafkaEosError]]:
    kinds = (OperatorError, RestartQueryError, OutcomeUnknownError, RegistryUnavailableError)
    return [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, kinds)]


@pytest.mark.parametrize("error", errors_for_operators(), ids=lambda each: each.__name__)
def test_every_error_for_operators_has_a_runbook_section(error: type[KafkaEosError]) -> None:
    page = runbook_sections()[short_name(error)]
    for part in ("**What happened.**", "**What to do.**"):
        assert part in page
    if error is not RestartQueryError:
        assert "**How to check.**" in page
        assert "**What is safe.**" in page


def test_every_runbook_section_of_an_error_belongs_to_an_existing_error() -> None:
    named = {heading for heading in runbook_sections() if heading.isupper()}
    assert named == {short_name(each) for each in errors_for_operators()}


def test_the_parser_accepts_the_commands_of_the_runbooks() -> None:
    """Every option on a command line of the runbooks exists."""
    shown = re.findall(r"kafka-eos ((?:doctor|inspect|fence|adopt|sweep) [^`#\n]*)", RUNBOOKS)
    assert len(shown) >= 12
    for each in shown:
        name, *arguments = shlex.split(each.replace("…", "x"))
        arguments = [argument for argument in arguments if argument.startswith("--")]
        known = {opt for parameter in main.commands[name].params for opt in parameter.opts}
        assert set(arguments) <= known, each


def test_the_options_of_reads_in_the_runbooks_are_valid() -> None:
    found = re.findall(r"```python\n(.*?)```", RUNBOOKS, re.DOTALL)
    assert len(found) == 2
    for each in found:
        options = {
            name: plain or single or number
            for name, plain, single, number in re.findall(
                r"\.option\(\"([\w.]+)\", (?:\"([^\"]*)\"|'([^']*)'|(\d+))\)", each
            )
        }
        assert len(options) == each.count(".option(")
        parse_read(options, streaming=False)


def test_no_runbook_puts_a_secret_on_a_command_line() -> None:
    assert not re.search(r"--kafka [\w.]*(password|jaas|secret)", RUNBOOKS)


def test_adopt_refuses_two_sources_that_read_one_partition(tmp_path: Path) -> None:
    """The group holds the offset of the slower one, so the faster one would read records again."""
    broker = ModelBroker()
    lost = GeneratedCheckpoint(tmp_path / "lost").write_batches(0, 0)
    commit(broker, lost, 0)
    new = GeneratedCheckpoint(tmp_path / "new", "query-2")
    position = SourcePosition({IN: 20}, {IN: 10}, CLUSTER_ID, {"in": "id-in"})
    new.log_offsets(0, position, position)
    adoption = plan_adoption(new, broker)
    assert adoption.request is None
    assert adoption.refused is not None
    assert "two sources" in adoption.refused.text
