"""What is checked before a query starts: each mistake is named, and what may pass is no error."""

from __future__ import annotations

import json
import re
import socket
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from integration.support.checkpoint import SparkCheckpoint
from kafka_eos_source import datasource
from kafka_eos_source.commit import open_sinks
from kafka_eos_source.commit.identity_file import Identity
from kafka_eos_source.datasource import KafkaEosDataSource, start_checks
from kafka_eos_source.datasource.checks_on_server import check_on_server, options_of_check, schema_of_check
from kafka_eos_source.datasource.start_checks import RunningQuery, check_query
from kafka_eos_source.errors import (
    AuthorizationError,
    CheckpointMovedError,
    DataLossError,
    ForeignQueryError,
    InvalidOptionError,
    InvalidSchemaError,
    KafkaEosError,
    SinkUnavailableError,
    StateMismatchError,
    UnavailableError,
)
from kafka_eos_source.kafka import admin_client, cluster, first_contact, probe
from kafka_eos_source.kafka.admin_client import AdminClient
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.observe.source import SourceObserver
from kafka_eos_source.protocol.offset_log import SourcePosition
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.protocol.token import ShardProgress, Token
from kafka_eos_source.sinks.targets import location
from kafka_eos_source.spark.schema import ONLY_BAD_RECORDS
from tests.support.simulated_kafka import Fault, SimulatedKafka

FRAME = StructType([StructField("key", BinaryType()), StructField("value", StringType())])
WITH_STATE = StructType([*FRAME.fields, StructField(CHANGELOG, BinaryType())])
#: Requests that change something.
CHANGING = {
    "InitProducerId",
    "AddPartitionsToTxn",
    "AddOffsetsToTxn",
    "Produce",
    "TxnOffsetCommit",
    "EndTxn",
}


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(admin_client, "_answered", set())
    monkeypatch.setattr(datasource, "_found", set())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # how long to wait for what does not come
    monkeypatch.setattr(first_contact, "_SECONDS", 0.3)
    monkeypatch.setattr(first_contact, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(probe, "_PASS_SECONDS", 0.3)
    monkeypatch.setattr(cluster, "_LEAST_CONNECT_SECONDS", 0.2)


@pytest.fixture
def kafka() -> Iterator[SimulatedKafka]:
    with SimulatedKafka({"orders": 2, "revenue": 2, "letters": 1}) as running:
        yield running
        assert not CHANGING & set(running.received), "the checks change nothing"


@dataclass
class Job:
    """A query that can start; tests change one thing."""

    kafka: SimulatedKafka
    folder: Path
    source: dict[str, str] = field(default_factory=dict)
    sink: dict[str, str] = field(default_factory=dict)
    operators: dict[str, dict[str, str]] = field(default_factory=dict)
    schema: StructType = FRAME
    running: tuple[RunningQuery, ...] = ()

    def __post_init__(self) -> None:
        brokers = {"kafka.bootstrap.servers": self.kafka.bootstrap}
        self.source = {**brokers, "subscribe": "orders", "fetchOffset.retryIntervalMs": "10"}
        self.sink = {**brokers, "topic": "revenue", "checkpointLocation": str(self.folder / "checkpoint")}

    def check(self) -> list[str]:
        return check_query([self.source], self.operators, self.sink, self.schema, self.running)

    def with_state(self, *stores: str, application_id: str = "app") -> Job:
        """Adds operators to the query, all with the same ``application.id`` as the sink."""
        own = {"kafka.bootstrap.servers": self.kafka.bootstrap, "application.id": application_id}
        self.operators = {store: dict(own) for store in stores}
        self.sink["application.id"], self.schema = application_id, WITH_STATE
        return self

    def has_run(
        self, query_id: str = "query", topic: str = "orders", application_id: str = "app", *stores: str
    ) -> Job:
        """Writes what a run of the query leaves in the checkpoint and in Kafka."""
        checkpoint = SparkCheckpoint(self.folder / "checkpoint", query_id)
        checkpoint.log_offsets(0, SourcePosition({TopicPartition(topic, 0): 3}, cluster_id="c"))
        checkpoint.log_commit(0)
        self.identify(application_id, query_id)
        self.token(query_id, application_id, *stores)
        return self

    def identify(self, application_id: str, query_id: str, place: str = "") -> None:
        """Writes the identity file of the checkpoint."""
        file = self.folder / "checkpoint" / "kafka-eos" / "identity.json"
        file.parent.mkdir(exist_ok=True)
        where = place or location(str(self.folder / "checkpoint"))
        file.write_text(json.dumps(vars(Identity(application_id, query_id, 0, where))))

    def token(self, query_id: str, application_id: str = "app", *stores: str) -> None:
        """Commits a token for batch 0, and the state of stores."""
        token = Token(application_id, query_id, "run", 1, 0, "", "", 3)
        self.kafka.offsets["revenue", 0] = (0, token.encode())
        for store in stores:
            shard = replace(token, shard=ShardProgress("attempt", 1, None), shards=1)
            self.kafka.offsets[f"{application_id}-{store}-changelog", 0] = (1, shard.encode())


@pytest.fixture
def job(kafka: SimulatedKafka, tmp_path: Path) -> Job:
    return Job(kafka, tmp_path)


def refused(job: Job, error: type[KafkaEosError]) -> str:
    """Returns the text of the error with which a query is refused, which must be short and name a fix."""
    with pytest.raises(error) as caught:
        job.check()
    text = str(caught.value)
    assert type(caught.value) is error
    assert caught.value.fix
    assert len(text) < 15 * 80, "15 lines"
    return text


def test_a_query_that_can_start_has_no_complaint_and_costs_one_request_to_the_cluster(job: Job) -> None:
    assert job.check() == []
    assert job.kafka.received["Metadata"] == 1
    assert not Path(job.sink["checkpointLocation"]).exists()


def test_a_query_that_has_run_can_start_again(job: Job) -> None:
    job.with_state("totals").has_run("query", "orders", "app", "totals")
    assert job.check() == []


# -- the mistakes of the table in docs/troubleshooting.md


def test_a_typo_in_an_option_of_the_source(job: Job) -> None:
    job.source["startingOffset"] = "earliest"
    assert "Did you mean 'startingOffsets'" in refused(job, InvalidOptionError)


def test_a_typo_in_an_option_of_the_sink(job: Job) -> None:
    job.sink["aplication.id"] = "x"
    assert "Did you mean 'application.id'?" in refused(job, InvalidOptionError)


def test_a_typo_in_an_option_of_an_operator(job: Job) -> None:
    job.with_state("totals").operators["totals"]["state.dirr"] = "/x"
    assert "Did you mean 'state.dir'" in refused(job, InvalidOptionError)


@pytest.mark.parametrize("part", ["source", "sink"])
@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:9092"])
def test_a_wrong_address(job: Job, part: str, address: str) -> None:
    getattr(job, part)["kafka.bootstrap.servers"] = address
    text = refused(job, UnavailableError)
    assert f"cannot connect to {address}: the " in text
    assert "was refused" in text or "does not resolve" in text


def test_a_missing_topic_of_the_source(job: Job) -> None:
    job.source["subscribe"] = "ordrs"
    text = refused(job, UnavailableError)
    assert "looking up the topics ordrs: topic 'ordrs' does not exist" in text
    assert "Did you mean 'orders'?" in text


def test_a_missing_partition_list_names_its_topic(job: Job) -> None:
    del job.source["subscribe"]
    job.source["assign"] = '{"ordrs": [0]}'
    assert "topic 'ordrs' does not exist" in refused(job, UnavailableError)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("topic", "output topic 'revenu'"),
        ("deadLetter.topic", "deadLetter.topic 'revenu'"),
        ("token.topic", "token.topic 'revenu'"),
    ],
)
def test_a_missing_topic_of_the_sink(job: Job, option: str, said: str) -> None:
    job.sink[option] = "revenu"
    if option == "deadLetter.topic":
        job.sink["onInvalidRecord"] = "dead-letter"
    text = refused(job, UnavailableError)
    assert f"looking up {said}: topic 'revenu' does not exist" in text
    assert "Did you mean 'revenue'?" in text


def test_no_checkpoint(job: Job) -> None:
    del job.sink["checkpointLocation"]
    assert "'checkpointLocation' is not set" in refused(job, InvalidOptionError)


def test_a_column_of_the_wrong_type(job: Job) -> None:
    job.schema = StructType([StructField("value", IntegerType())])
    assert "column 'value' has type int" in refused(job, InvalidSchemaError)


@pytest.mark.parametrize("part", ["sink", "source", "operator"])
def test_an_application_id_that_one_part_lacks_or_has_alone(job: Job, part: str) -> None:
    if part == "source":
        job.source["application.id"] = "app"
    else:
        job.with_state("totals")
        del (job.sink if part == "sink" else job.operators["totals"])["application.id"]
    text = refused(job, InvalidOptionError)
    assert "different values of 'application.id'" in text
    assert "(not set)" in text
    assert "'app'" in text


def test_a_source_may_leave_the_application_id_out(job: Job) -> None:
    job.sink["application.id"] = "app"
    assert job.check() == []


def test_groups_that_differ(job: Job) -> None:
    job.with_state("totals").sink["kafka.group.id"] = "mine"
    text = refused(job, InvalidOptionError)
    assert "different consumer groups: the sink 'mine', the operator with the store 'totals'" in text


def test_the_checkpoint_of_another_application(job: Job) -> None:
    job.has_run(application_id="other").sink["application.id"] = "app"
    text = refused(job, InvalidOptionError)
    assert "committed with application.id='other'" in text


def test_the_checkpoint_of_a_query_that_reads_other_topics(job: Job) -> None:
    """Neither has an ``application.id``, so only the topics show it."""
    checkpoint = SparkCheckpoint(job.folder / "checkpoint", "query")
    checkpoint.log_offsets(0, SourcePosition({TopicPartition("letters", 0): 3}))
    text = refused(job, DataLossError)
    assert "probably the checkpoint of another query" in text
    job.source["failOnDataLoss"] = "false"
    assert job.check() == []


def test_offsets_of_sources_of_other_formats_say_nothing(job: Job) -> None:
    checkpoint = SparkCheckpoint(job.folder / "checkpoint", "query")
    of_spark = SourcePosition({TopicPartition("letters", 0): 3})
    checkpoint.log_offsets(0, SourcePosition({TopicPartition("orders", 0): 3}), of_spark)
    assert job.check() == []


def test_two_queries_on_one_checkpoint(job: Job) -> None:
    SparkCheckpoint(job.folder / "checkpoint", "query")
    job.sink["queryName"] = "revenue"
    job.running = (RunningQuery("another"), RunningQuery("query", "audit"))
    text = refused(job, InvalidOptionError)
    assert "is the checkpoint of query 'audit' (query), which runs in this session" in text


def test_a_query_without_a_name_that_is_started_again_is_replaced_as_spark_does(job: Job) -> None:
    SparkCheckpoint(job.folder / "checkpoint", "query")
    job.running = (RunningQuery("query"),)
    (warning,) = job.check()
    assert "Spark stops that run" in warning


@pytest.mark.parametrize("query_id", ["query", "another"])
def test_a_name_that_a_query_of_the_session_has_is_refused(job: Job, query_id: str) -> None:
    """Spark refuses it too, whatever the checkpoint; this error names the fix."""
    SparkCheckpoint(job.folder / "checkpoint", "query")
    job.sink["queryName"] = "revenue"
    job.running = (RunningQuery("x"), RunningQuery(query_id, "revenue"))
    text = refused(job, InvalidOptionError)
    assert f"the query 'revenue' ({query_id}) already runs in this session" in text
    assert "q.name == 'revenue').stop()" in text


def test_a_query_that_runs_in_another_process_of_this_host_is_a_warning(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.has_run().sink["application.id"] = "app"
    observer = SourceObserver("orders", "app")
    with observer.asking():  # what the planner of a query leaves while it runs
        observer.write()
    (warning,) = job.check()
    assert "seems to run on this host" in warning
    assert warning in caplog.text
    observer.stopped()
    assert job.check() == []


@pytest.mark.parametrize("operators", [("sums",), ("sums", "others")])
def test_a_renamed_store(job: Job, operators: tuple[str, ...]) -> None:
    job.with_state(*operators).has_run("query", "orders", "app", "totals", "others")
    text = refused(job, StateMismatchError)
    assert "store 'sums' of application.id 'app' does not exist yet" in text
    assert "set its store to 'others', 'totals' again" in text if len(operators) == 1 else "'totals' again"
    assert "onMissingState=new:1" in text
    for each in job.operators.values():
        each["onMissingState"] = "new:1"
    assert job.check() == []


def test_a_wrong_password(job: Job) -> None:
    job.kafka.users["alice"] = "right"
    login = {
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": "alice",
        "kafka.sasl.password": "wrong-9d",
    }
    job.source |= login
    job.sink |= login
    text = refused(job, AuthorizationError)
    assert "Authentication failed" in text
    assert "correct the credentials" in text
    assert "wrong-9d" not in text


# -- other mistakes


def test_a_checkpoint_that_was_copied(job: Job) -> None:
    job.has_run()
    job.identify("app", "query", "file:///elsewhere")
    job.sink["application.id"] = "app"
    refused(job, CheckpointMovedError)


@pytest.mark.parametrize("place", ["a file", "not writable"])
def test_a_checkpoint_that_cannot_be_created(job: Job, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.folder / "file").touch()
    if place == "a file":
        job.sink["checkpointLocation"] = str(job.folder / "file" / "checkpoint")
    else:
        monkeypatch.setattr("os.access", lambda *_: False)  # the tests may run as root
    text = refused(job, UnavailableError)
    assert "is no folder" in text if place == "a file" else "is not writable" in text


def test_state_changes_that_do_not_reach_the_sink(job: Job) -> None:
    job.with_state("totals").schema = FRAME
    assert f"no column {CHANGELOG!r}" in refused(job, InvalidSchemaError)


def test_an_application_id_that_belongs_to_another_query(job: Job) -> None:
    job.sink["application.id"] = "app"
    job.token("another")
    text = refused(job, ForeignQueryError)
    assert "belongs to query another" in text
    job.sink["onForeignQuery"] = "adopt"
    assert job.check() == []


def test_an_operator_on_another_cluster(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    described = AdminClient.described

    def elsewhere(client: AdminClient, names: Any, seconds: float, **more: Any) -> tuple[str, Any]:
        _, found = described(client, names, seconds, **more)
        return ("other" if not names else "c"), found

    monkeypatch.setattr(AdminClient, "described", elsewhere)
    job.with_state("totals").operators["totals"]["kafka.client.dns.lookup"] = "use_all_dns_ips"
    assert "Expected the same cluster" in refused(job, InvalidOptionError)


READS_LETTERS = [
    {"subscribe": "orders, letters"},
    {"assign": json.dumps({"letters": [0]})},
    {"subscribePattern": "orders|let.*"},
]


@pytest.mark.parametrize("topics", READS_LETTERS)
def test_a_query_that_reads_its_own_dead_letters(job: Job, topics: dict[str, str]) -> None:
    del job.source["subscribe"]
    job.source |= topics
    job.sink |= {"onInvalidRecord": "dead-letter", "deadLetter.topic": "letters"}
    text = refused(job, InvalidOptionError)
    assert "option 'deadLetter.topic' has the value 'letters', which is a topic that the query reads" in text


@pytest.mark.parametrize("topics", READS_LETTERS)
def test_a_query_that_reads_what_it_writes_is_warned(job: Job, topics: dict[str, str]) -> None:
    del job.source["subscribe"]
    job.source |= topics
    job.sink["topic"] = "letters"
    (warning,) = job.check()
    assert "option 'topic' has the value 'letters', which is a topic that the query reads" in warning


@pytest.mark.parametrize("is_other", [True, False])
def test_a_topic_of_the_same_name_on_another_cluster_is_another_topic(
    job: Job, is_other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    described, answered = AdminClient.described, iter(["read", "written"])

    def elsewhere(client: AdminClient, names: Any, seconds: float, **more: Any) -> tuple[str, Any]:
        cluster_id, found = described(client, names, seconds, **more)
        return (next(answered) if is_other else cluster_id), found

    monkeypatch.setattr(AdminClient, "described", elsewhere)
    job.source["kafka.client.dns.lookup"] = "use_all_dns_ips"  # the same address with other properties
    job.sink["topic"] = "orders"
    assert bool(job.check()) is not is_other


def test_sinks_outside_kafka_check_their_targets(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_sinks, "_opened", OrderedDict())
    folders = [str(job.folder / name) for name in ("lake", "copy")]
    job.sink |= {"application.id": "app", "sinks": "lake, copy"}
    for name, folder in zip(("lake", "copy"), folders, strict=True):
        job.sink |= {f"sink.{name}.type": "filesystem", f"sink.{name}.path": folder}
    assert job.check() == []
    assert not open_sinks._opened, "they are closed again"
    job.sink["sink.copy.path"] = folders[0]
    assert "write to the same target" in refused(job, InvalidOptionError)


def test_a_sink_that_is_down_stops_a_new_query_and_is_a_warning_for_one_that_has_run(job: Job) -> None:
    down = {"sinks": "billing", "sink.billing.type": "http", "sink.billing.url": "http://127.0.0.1:9/"}
    job.sink |= {"application.id": "app", **down}
    assert "sink 'billing'" in refused(job, SinkUnavailableError)
    (warning,) = job.has_run().check()
    assert "sink 'billing'" in warning
    (job.folder / "checkpoint" / "commits" / "0").unlink()  # Kafka committed batch 0, then the driver died
    (warning,) = job.check()
    assert "sink 'billing'" in warning
    job.sink["sink.billing.auth.env"] = "KAFKA_EOS_TEST_UNSET"
    assert "option 'sink.billing.auth.env'" in refused(job, InvalidOptionError)


# -- what may pass


def test_bad_records_that_would_stop_the_query_are_a_warning(job: Job) -> None:
    bad = StructField(CHANGELOG, BinaryType(), metadata={ONLY_BAD_RECORDS: True})
    job.schema = StructType([*FRAME.fields, bad])
    (warning,) = job.check()
    assert "'onInvalidRecord' of the sink has the value 'fail'" in warning
    job.sink["onInvalidRecord"] = "drop"
    assert job.check() == []
    job.sink["onInvalidRecord"] = "fail"
    job.with_state("totals")
    assert job.check() == []


def test_a_pattern_that_matches_nothing_is_a_warning(job: Job) -> None:
    del job.source["subscribe"]
    job.source["subscribePattern"] = "sales-.*"
    (warning,) = job.check()
    assert "matches no topic" in warning
    job.source["subscribePattern"] = "ord.*"
    assert job.check() == []


def test_a_topic_that_was_just_created_is_waited_for(job: Job) -> None:
    answers = iter([True])
    job.kafka.fault = lambda kind: Fault("error", 3) if kind == "Metadata" and next(answers, False) else None
    assert job.check() == []


def test_a_topic_without_a_leader_is_left_to_the_first_batch(job: Job) -> None:
    job.kafka.fault = lambda kind: Fault("error", 5) if kind == "Metadata" else None
    job.check()


@pytest.mark.parametrize("has_run", [False, True])
def test_brokers_that_are_silent_stop_only_a_new_query(job: Job, has_run: bool) -> None:
    if has_run:
        job.has_run(application_id="kafka-eos-query")
    job.kafka.hung.add(1)
    if has_run:
        (*_, warning) = job.check()
        assert "waits for its brokers" in warning
    else:
        assert f"cannot connect to {job.kafka.bootstrap}: it did not answer in time" in refused(
            job, UnavailableError
        )


def test_a_right_that_is_missing_is_a_warning(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    described = AdminClient.described

    def with_rights(client: AdminClient, names: Any, seconds: float, **more: Any) -> tuple[str, Any]:
        cluster_id, found = described(client, names, seconds, **more)
        rights = {"orders": frozenset({"READ"}), "revenue": frozenset({"DESCRIBE"})}
        return cluster_id, {name: replace(each, operations=rights.get(name)) for name, each in found.items()}

    monkeypatch.setattr(AdminClient, "described", with_rights)
    (warning,) = job.check()
    assert "no right to Write topic 'revenue'" in warning


def test_an_open_transaction_is_a_warning(job: Job) -> None:
    job.with_state("totals").has_run("query", "orders", "app", "totals")
    job.kafka.pending["revenue", 0] = (0, "")
    (warning,) = job.check()
    assert "is open" in warning


def test_a_group_that_cannot_be_read_now_is_a_warning(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "_GROUP_SECONDS", 0.2)
    job.has_run().sink["application.id"] = "app"
    job.kafka.fault = lambda kind: Fault("error", 15) if kind == "FindCoordinator" else None
    assert len(job.check()) == 1


@pytest.mark.parametrize("how", ["check", "load"])
def test_no_request_lets_a_broker_create_a_topic(job: Job, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ``auto.create.topics.enable`` says: a typo would become a topic."""
    allowed: list[bool] = []
    answer = job.kafka._on_Metadata

    def record(node: int, request: Any, version: int, refusal: int) -> dict[str, Any]:
        allowed.append(request.allow_auto_topic_creation)
        return answer(node, request, version, refusal)

    monkeypatch.setattr(job.kafka, "_on_Metadata", record)
    job.source["subscribe"] = "ordrs"
    with pytest.raises(UnavailableError):
        job.check() if how == "check" else KafkaEosDataSource(job.source).schema()
    assert len(allowed) > 1
    assert not any(allowed)


# -- on a server of Spark Connect


def as_spark_passes(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


def test_the_parts_of_a_query_travel_as_options(job: Job) -> None:
    job.with_state("Totals", "others").has_run("query", "orders", "app", "Totals")
    job.running = (RunningQuery("query"), RunningQuery("x", "Revenue"))
    options = options_of_check([job.source], job.operators, job.sink, job.schema, job.running)
    schema = schema_of_check(as_spark_passes(options))
    assert schema["warnings"].metadata["warnings"] == job.check() != []
    job.sink["queryName"] = "Revenue"
    options = options_of_check([job.source], job.operators, job.sink, job.schema, job.running[1:])
    with pytest.raises(InvalidOptionError, match=r"the query 'Revenue' \(x\) already runs"):
        schema_of_check(as_spark_passes(options))


def test_an_error_on_the_server_is_raised_by_the_schema_of_the_read(job: Job) -> None:
    job.with_state("Sums").has_run("query", "orders", "app", "Totals")
    options = options_of_check([job.source], job.operators, job.sink, job.schema)
    with pytest.raises(StateMismatchError, match="store 'Sums'"):
        KafkaEosDataSource(as_spark_passes(options)).schema()


class Server:
    """Answers as a session of Spark Connect does: errors arrive as text, with a traceback around it."""

    def __init__(self) -> None:
        self.read = self
        self.stated: dict[str, str] = {}

    def format(self, _name: str) -> Server:
        return self

    def options(self, **stated: str) -> Server:
        self.stated = as_spark_passes(stated)
        return self

    def load(self) -> Server:
        return self

    @property
    def schema(self) -> StructType:
        try:
            return KafkaEosDataSource(self.stated).schema()
        except Exception as error:  # noqa: BLE001 - as Spark does
            text = "".join(traceback.format_exception(error))
            raise PySparkException(
                f"[PYTHON_DATA_SOURCE_ERROR] Failed: {text} SQLSTATE: 38000\n\nJVM stacktrace:\nat x"
            ) from None


def test_an_error_on_the_server_is_the_same_error_for_the_client(job: Job) -> None:
    job.with_state("Sums").has_run("query", "orders", "app", "Totals")
    with pytest.raises(StateMismatchError) as here:
        job.check()
    with pytest.raises(StateMismatchError) as there:
        check_on_server(cast(Any, Server()), [job.source], job.operators, job.sink, job.schema)
    assert str(there.value) == str(here.value)
    assert there.value.fix == here.value.fix != ""


def test_warnings_of_the_server_reach_the_client(job: Job) -> None:
    del job.source["subscribe"]
    job.source["subscribePattern"] = "sales-.*"
    found = check_on_server(cast(Any, Server()), [job.source], {}, job.sink, job.schema)
    assert found == job.check() != []


@pytest.mark.parametrize("said", ["a bug", "kafka_eos_source.errors.NoSuchError: [X] y", ""])
def test_an_error_of_spark_itself_stays_as_it_is(
    job: Job, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: KafkaEosDataSource) -> StructType:
        raise RuntimeError(said)

    monkeypatch.setattr(KafkaEosDataSource, "schema", fail)
    with pytest.raises(PySparkException, match="RuntimeError"):
        check_on_server(cast(Any, Server()), [job.source], {}, job.sink, job.schema)


def test_spark_masks_each_secret_of_a_check_by_the_name_of_its_option(job: Job) -> None:
    login = {"kafka.sasl.password": "p", "kafka.ssl.key.password": "p"}
    job.with_state("totals")
    options = options_of_check(
        [{**job.source, **login}],
        {store: {**each, **login} for store, each in job.operators.items()},
        {**job.sink, **login},
        job.schema,
    )
    masked = re.compile("(?i)secret|password|token|access[.]?key")  # Spark's default
    assert sum(value == "p" for value in options.values()) == 6
    assert all(masked.search(name) for name, value in options.items() if value == "p")


@pytest.mark.parametrize("more", [{"subscribe": "x"}, {}])
def test_options_that_do_not_belong_to_a_check_are_refused(more: dict[str, str]) -> None:
    with pytest.raises(InvalidOptionError, match="internal"):
        schema_of_check({"check.query.sink.topic": "x", **more})


# -- the load of a source


def test_a_load_asks_the_brokers_once_per_process(job: Job) -> None:
    for _ in range(3):
        KafkaEosDataSource(job.source).schema()
    assert job.kafka.received["Metadata"] == 1


def test_a_load_names_a_missing_topic_and_a_wrong_address(job: Job) -> None:
    with pytest.raises(UnavailableError, match=r"topic 'ordrs' does not exist.*Did you mean 'orders'"):
        KafkaEosDataSource({**job.source, "subscribe": "ordrs"}).schema()
    with pytest.raises(UnavailableError, match=r"cannot connect to 127.0.0.1:1: the connection was refused"):
        KafkaEosDataSource({**job.source, "kafka.bootstrap.servers": "127.0.0.1:1"}).schema()


def test_a_load_suggests_options_of_streams_and_of_batch_reads(job: Job) -> None:
    """It does not know which of them the read will be."""
    with pytest.raises(InvalidOptionError, match="Did you mean 'maxOffsetsPerTrigger'"):
        KafkaEosDataSource({**job.source, "maxoffsetpertrigger": "5"}).schema()
    with pytest.raises(InvalidOptionError, match="Did you mean 'endingOffsets'"):
        KafkaEosDataSource({**job.source, "endingoffset": "latest"}).schema()


def test_a_load_leaves_brokers_that_are_silent_to_the_first_batch(job: Job) -> None:
    job.kafka.hung.add(1)
    assert KafkaEosDataSource(job.source).schema().names[0] == "key"
    job.kafka.hung.clear()
    KafkaEosDataSource(job.source).schema()
    assert job.kafka.received["Metadata"] >= 1, "it was asked again"


def test_an_address_that_does_not_accept_connections_is_a_definite_answer(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike brokers that accept connections and are slow."""

    def silent(*_: Any) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket.socket, "connect", silent)
    with pytest.raises(UnavailableError, match="did not accept a connection in time"):
        KafkaEosDataSource(job.source).schema()
