"""TLS, SCRAM and ACLs: the documented rights are enough, and an error names each right that is missing.

Most tests drive source and sink without Spark (`chaos.loop`), because Spark does not deal with Kafka's
rights. One test with Spark checks that it shows no secrets.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from confluent_kafka import KafkaError
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StringType, StructField, StructType

from integration.chaos.loop import Run
from integration.chaos.stateful import StatefulRun
from integration.support import broker as brokers
from integration.support.kafka import produce, read_back, transaction, values
from integration.support.security import SCRAM_PASSWORDS, UNUSED_SECRETS, Said, TlsCluster, tls_cluster
from kafka_eos_source.cli import main
from kafka_eos_source.commit import direct, session
from kafka_eos_source.datasource import KafkaEosDataSource
from kafka_eos_source.errors import AuthorizationError, KafkaEosError, UnavailableError
from kafka_eos_source.kafka.cluster_reader import ClusterReader
from kafka_eos_source.kafka.consumer import POOL
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.request import Complaints
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.kafka.wire.cluster import Cluster
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate.exit_codes import ExitCode
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.retry import Pauses, retry
from kafka_eos_source.state.changelog.committed import CommittedShard, changelog_client, end_open_transaction

#: ``user, kind, name, operation``: all rights that a query from ``in`` to ``out`` needs, as documented in
#: docs/security.md. Read and Write imply Describe.
LEAST = (
    ("reader", "topic", "in", "READ"),
    ("writer", "topic", "out", "WRITE"),
    ("writer", "topic", "out", "READ"),
    ("writer", "topic", "in", "READ"),
    ("writer", "transactional_id", "app", "WRITE"),
    ("writer", "group", "group", "READ"),
)
ROWS = ["a", "b", "c"]
WRONG = "wrong-pass-77"
ROTATED = ("rotated-pass-4a", "rotated-pass-4b")
SECRETS = (*SCRAM_PASSWORDS.values(), *UNUSED_SECRETS.values(), *ROTATED, WRONG)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsCluster]:
    with tls_cluster(tmp_path_factory.mktemp("tls"), java_options=brokers.JAVA_OPTIONS) as running:
        yield running


@pytest.fixture(autouse=True)
def said(capfd: pytest.CaptureFixture[str]) -> Iterator[Said]:
    """What this process says in a test: errors, log lines of all levels, and what librdkafka prints."""
    said = Said()
    with said.installed():
        yield said
    printed = capfd.readouterr()
    said.texts += [printed.out, printed.err]
    assert said.secrets(SECRETS) == []


@pytest.fixture
def query(cluster: TlsCluster, tmp_path: Path) -> Iterator[Query]:
    yield Query(cluster, tmp_path)
    TaskContext._taskContext = None
    while session._sessions:  # cached sessions would look for a broker that is gone
        session._sessions.popitem()[1].drop()
    while direct._producers:
        direct._producers.popitem()[1].close()
    POOL.close()


class Query:
    """A topic-to-topic query whose source logs in as ``reader`` and whose sink logs in as ``writer``."""

    def __init__(self, cluster: TlsCluster, folder: Path) -> None:
        name = uuid.uuid4().hex[:8]
        self.cluster = cluster
        self.names = {each: f"{each}-{name}" for each in ("in", "out", "app")}
        self.names["group"] = group_of(self.names["app"])
        self.checkpoint = str(folder / "checkpoint")
        self._servers, self._login = cluster.admins
        for topic in ("in", "out"):
            cluster.admin.create(self.names[topic])
        produce(self._servers, self.names["in"], ROWS, config=self._login)

    def allow(self, *rights: tuple[str, str, str, str]) -> None:
        for user, kind, name, operation in rights:
            self.cluster.allow(user, kind, self.names.get(name, name), operation)

    def source(self, **changed: str) -> dict[str, str]:
        options = {"subscribe": self.names["in"], "startingOffsets": "earliest"}
        return {**self.cluster.options("reader", **changed), **options}

    def sink(self, **changed: str) -> dict[str, str]:
        return {
            **self.cluster.options("writer", **changed),
            "topic": self.names["out"],
            "application.id": self.names["app"],
            "checkpointLocation": self.checkpoint,
            "commitTimeoutMs": "20000",
        }

    def run(self, **source: str) -> None:
        spec = {
            "source": {**self.source(), **source},
            "sink": self.sink(),
            "checkpoint": self.checkpoint,
        }
        Run(spec, threading.Event()).to_the_end()

    def refused(self, *named: str, **source: str) -> AuthorizationError:
        with pytest.raises(AuthorizationError) as caught:
            self.run(**source)
        for each in named:
            assert each in str(caught.value)
        return caught.value

    def written(self, committed: bool = True) -> list[str]:
        return values(read_back(self._servers, self.names["out"], committed=committed, config=self._login))


def test_the_least_privileges_are_enough(query: Query) -> None:
    query.allow(*LEAST)
    query.run()
    assert query.written() == ROWS
    query.run()  # from the checkpoint
    assert query.written() == ROWS


@pytest.mark.fault("T40", "the right on topic, group, transactional id is taken away", "commit")
@pytest.mark.parametrize(
    ("missing", "instead", "resource", "said"),
    [
        (LEAST[0], None, "in", "looking up the topics"),
        (LEAST[0], "DESCRIBE", "in", "reading"),
        (LEAST[1], None, "out", "writing records to"),
        (LEAST[2], None, "out", "committing offsets"),
        (LEAST[3], None, "in", "reading the offsets of group"),
        (LEAST[3], "DESCRIBE", "in", "committing offsets"),
        (LEAST[4], None, "app", "initialising transactional id"),
        (LEAST[5], None, "group", "reading the members of group"),
        (LEAST[5], "DESCRIBE", "group", "committing offsets of group"),
    ],
)
def test_the_error_names_each_missing_right_and_granting_it_suffices(
    query: Query,
    missing: tuple[str, str, str, str],
    instead: str | None,
    resource: str,
    said: str,
) -> None:
    query.allow(*(each for each in LEAST if each != missing))
    if instead is not None:
        query.allow((*missing[:3], instead))
    error = query.refused(said, query.names[resource])
    kind = {"transactional_id": "transactional id", "group": "consumer group"}.get(missing[1], missing[1])
    assert f"grant the principal access to the {kind}" in error.fix
    assert query.written() == []
    query.allow(missing)
    query.run()
    assert query.written() == ROWS


def test_the_error_names_a_right_that_was_revoked_between_two_batches(query: Query) -> None:
    query.allow(*LEAST)
    query.run()
    query.cluster.forbid("writer", "transactional_id", query.names["app"], "WRITE")
    produce(*_to(query), ["d"], config=query.cluster.admins[1])
    query.refused(query.names["app"])
    assert query.written() == ROWS
    query.allow(LEAST[4])
    query.run()
    assert query.written() == [*ROWS, "d"]


def test_dead_letters_need_the_right_to_write_their_topic(query: Query, tmp_path: Path) -> None:
    """Doctor names what is missing. Without DescribeConfigs, the sink does not know the size limit."""
    dead = query.names["dead"] = query.cluster.admin.create(f"dead-{query.names['out']}")
    options = {"onInvalidRecord": "dead-letter", "deadLetter.topic": dead}
    spec = {
        "source": query.source(),
        "sink": {**query.sink(), **options},
        "checkpoint": query.checkpoint,
        "marks": "a",
    }
    rights = ("--principal", "sink", "--check", "rights", "--dead-letter-topic", dead)
    query.allow(*LEAST, ("writer", "topic", "out", "DESCRIBE_CONFIGS"))
    for operation, said in (("DESCRIBE", "looking up output topic"), ("WRITE", "writing records to")):
        with pytest.raises(AuthorizationError) as caught:
            Run(spec, threading.Event()).to_the_end()
        assert said in str(caught.value)
        assert dead in str(caught.value)
        assert query.written() == []
        missing = {each["what"] for each in doctor(query, tmp_path, "writer", *rights)[1]}
        assert f"the right Write on topic {dead!r} is missing" in missing
        query.allow(("writer", "topic", "dead", operation))
    Run(spec, threading.Event()).to_the_end()
    assert query.written() == ["b", "c"]
    assert values(read_back(query.cluster.admins[0], dead, config=query.cluster.admins[1])) == ["a"]
    (left,) = doctor(query, tmp_path, "writer", *rights)[1]
    assert left["what"] == f"the right DescribeConfigs on topic {dead!r} is missing"
    query.allow(("writer", "topic", "dead", "DESCRIBE_CONFIGS"))
    code, found = doctor(query, tmp_path, "writer", *rights, "--check", "dead-letters")
    assert (code, [each["check"] for each in found]) == (ExitCode.DONE, ["rights", "dead-letters"])


def test_offsets_of_a_group_are_read_with_the_right_to_describe_it(query: Query) -> None:
    query.allow(*LEAST)
    begin = {"startingOffsets": "group", "application.id": query.names["app"]}
    query.refused("reading the offsets of group", query.names["group"], **begin)
    query.allow(("reader", "group", "group", "DESCRIBE"))
    query.run(**begin)


def _to(query: Query) -> tuple[str, str]:
    return query.cluster.admins[0], query.names["in"]


# -- a stateful operator


def stateful(query: Query, folder: Path) -> StatefulRun:
    """The query with a stateful operator in between, which logs in as ``operator``."""
    own = {"application.id": query.names["app"], "state.dir": str(folder), "state.timeout.ms": "20000"}
    options = {**query.cluster.options("operator"), **own}
    spec = {"source": query.source(), "sink": query.sink(), "checkpoint": query.checkpoint, "state": options}
    return StatefulRun(spec, threading.Event())


#: The rights that ``operator`` needs, and ``writer`` in addition to `LEAST`, in the order in which a first
#: batch needs them; each with a part of the error message if it is missing.
STATE = (
    ("operator", "topic", "app-counts-changelog", "DESCRIBE", "looking up topic"),
    ("operator", "topic", "app-counts-changelog", "CREATE", "creating topic"),
    ("operator", "topic", "app-counts-changelog", "DESCRIBE_CONFIGS", "looking up the configuration"),
    ("operator", "group", "group", "DESCRIBE", "reading the offsets of group"),
    ("writer", "topic", "app-counts-changelog", "DESCRIBE", "looking up output topic"),
    ("writer", "topic", "app-counts-changelog", "WRITE", "writing records to"),
    ("writer", "topic", "app-counts-changelog", "READ", "committing offsets"),
    # by now the changelog ends with records of an aborted transaction, which the shard must read past
    ("operator", "topic", "app-counts-changelog", "READ", "reading"),
)


def test_the_error_names_each_missing_right_of_a_stateful_query(query: Query, tmp_path: Path) -> None:
    query.names["app-counts-changelog"] = f"{query.names['app']}-counts-changelog"
    query.allow(*LEAST)
    for user, kind, name, operation, said in STATE:
        with pytest.raises(AuthorizationError) as caught:
            stateful(query, tmp_path).to_the_end()
        assert said in str(caught.value)
        assert query.names[name] in str(caught.value)
        query.allow((user, kind, name, operation))
    assert query.written() == []
    stateful(query, tmp_path).to_the_end()
    assert query.written() == ["1 +1"] * len(ROWS)

    produce(*_to(query), ["a"], config=query.cluster.admins[1])
    stateful(query, tmp_path / "another machine").to_the_end()
    assert query.written() == [*["1 +1"] * len(ROWS), "2 +1"]

    # the first shard that meets a dead driver's open transaction ends it
    login = {name.removeprefix("kafka."): each for name, each in query.cluster.options("operator").items()}
    with pytest.raises(AuthorizationError, match="initialising transactional id"):
        end_open_transaction(login, query.names["app"], Deadline.after_seconds(30))
    query.allow(("operator", "transactional_id", "app", "WRITE"))
    end_open_transaction(login, query.names["app"], Deadline.after_seconds(30))


# -- batch

SCHEMA = StructType([StructField("value", StringType())])


def _write(query: Query, **changed: str) -> None:
    """Runs a ``df.write`` by the calls that Spark makes."""
    options = query.sink()
    for name in ("application.id", "checkpointLocation"):
        del options[name]
    options |= changed
    writer: Any = KafkaEosDataSource(options).writer(SCHEMA, overwrite=False)
    context: Any = TaskContext()
    context._localProperties = {}
    context._attemptNumber = 0
    TaskContext._taskContext = context
    writer.commit([writer.write(iter([pa.record_batch({"value": ROWS})]))])


#: Generated names for a single batch write match this pattern.
DISPOSABLE = "kafka-eos-batch-*"
DISPOSABLE_GROUP = group_of(DISPOSABLE)


def test_a_batch_write_deletes_its_group_if_it_has_the_right(query: Query) -> None:
    query.allow(LEAST[1], LEAST[2])
    query.allow(("writer", "transactional_id", DISPOSABLE, "WRITE"))
    query.allow(("writer", "group", DISPOSABLE_GROUP, "READ"))
    _write(query)  # without the right to delete it, the group is left to expire
    left = [each for each in query.cluster.admin.groups() if each.startswith(DISPOSABLE_GROUP[:-1])]
    assert len(left) == 1
    query.allow(("writer", "group", DISPOSABLE_GROUP, "DELETE"))
    _write(query)
    assert [each for each in query.cluster.admin.groups() if each.startswith(DISPOSABLE_GROUP[:-1])] == left
    assert query.written() == sorted(ROWS * 2)


def test_at_least_once_needs_only_the_right_to_write_the_topic(query: Query) -> None:
    with pytest.raises(AuthorizationError, match=query.names["out"]):
        _write(query, **{"processing.guarantee": "at_least_once"})
    query.allow(LEAST[1])
    _write(query, **{"processing.guarantee": "at_least_once"})
    assert query.written() == ROWS


# -- who is who

_MISFITS = {
    "password": ({"sasl_password": WRONG}, "Authentication failed", "correct the credentials"),
    "user": ({"sasl_username": "nobody"}, "Authentication failed", "correct the credentials"),
    "authority": ({"ssl_ca_location": "{other_ca}"}, "certificate verify failed", "kafka.ssl.ca.location"),
    "host name": ({"bootstrap_servers": "{by_host_name}"}, "certificate verify failed", "must name"),
}
_MISFIT_SECONDS = 30


def test_wrong_credentials_and_certificates_fail_at_once_with_a_fix(query: Query) -> None:
    """The error names the option and the fix.

    The cases run at the same time, because each one waits a little.
    """
    query.allow(*LEAST)

    def run_misfit(side: str, misfit: str) -> tuple[KafkaEosError, float]:
        changed = {name: value.format(**vars(query.cluster)) for name, value in _MISFITS[misfit][0].items()}
        source: Any = KafkaEosDataSource(query.source(**changed))
        sink = KafkaEosDataSource(query.sink(**changed))
        begun = time.monotonic()
        with pytest.raises(AuthorizationError) as caught:
            (
                source.streamReader(source.schema()).initialOffset()
                if side == "source"
                else sink.streamWriter(SCHEMA, overwrite=False)
            )
        return caught.value, time.monotonic() - begun

    cases = [(side, misfit) for side in ("source", "sink") for misfit in _MISFITS]
    with ThreadPoolExecutor(len(cases)) as threads:
        found = dict(zip(cases, threads.map(lambda case: run_misfit(*case), cases), strict=True))
    for (_, misfit), (error, seconds) in found.items():
        _, said, fix = _MISFITS[misfit]
        assert said in error.message
        assert fix in error.fix
        assert seconds < _MISFIT_SECONDS, "an error, not a hang"
    query.run()  # the same options without the wrong values work
    assert query.written() == ROWS


REQUESTS: dict[str, Callable[[dict[str, str], Deadline], object]] = {
    "group": lambda kafka, deadline: GroupOffsets(kafka).fetch("some-group", [], deadline),
    "shard": lambda kafka, deadline: _committed_shard(kafka, deadline),
    "cluster": lambda kafka, deadline: ClusterReader(kafka).topics(deadline),
    "topics": lambda kafka, deadline: TopicAdmin(kafka).shape("some-topic", deadline),
    "producer": lambda kafka, deadline: end_open_transaction(kafka, "some-id", deadline),
}
_LONG_SECONDS = 120.0


def _committed_shard(kafka: dict[str, str], deadline: Deadline) -> object:
    with changelog_client(kafka) as consumer:
        return CommittedShard(consumer, "some-group", TopicPartition("some-topic", 0)).offset(deadline)


def _properties(options: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("kafka."): value for name, value in options.items()}


@pytest.mark.parametrize("misfit", _MISFITS)
def test_every_request_with_credentials_that_never_worked_ends_at_once(query: Query, misfit: str) -> None:
    changed = {name: value.format(**vars(query.cluster)) for name, value in _MISFITS[misfit][0].items()}
    # a property without effect: no other test's success counts for these credentials
    kafka = _properties(query.cluster.options("writer", **changed)) | {"sasl.kerberos.keytab": misfit}
    _, said, fix = _MISFITS[misfit]

    def ask(send: Callable[[dict[str, str], Deadline], object]) -> None:
        deadline = Deadline.after_seconds(_LONG_SECONDS)
        with pytest.raises(AuthorizationError) as caught:
            send(kafka, deadline)
        assert not deadline.expired, "the deadline was waited out"
        assert said in caught.value.message
        assert kafka["bootstrap.servers"] in caught.value.message
        assert "SCRAM-SHA-512" in caught.value.message
        assert fix in caught.value.fix

    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        list(threads.map(ask, REQUESTS.values()))


@pytest.mark.parametrize("name", ["group", "topics", "producer"])
def test_credentials_that_are_rotated_interrupt_no_query(
    query: Query, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker refuses a password that worked before, until the rotation is complete."""
    user, group = "rotated", "some-group"
    query.cluster.set_password(user, "rotated-pass-4a")
    query.cluster.allow(user, "group", group, "DESCRIBE")
    query.cluster.allow(user, "topic", "some-topic", "DESCRIBE")
    query.cluster.allow(user, "transactional_id", "some-id", "WRITE")
    kafka = _properties(query.cluster.options("writer", sasl_username=user, sasl_password="rotated-pass-4a"))
    patience = Deadline.after_seconds(_LONG_SECONDS)
    retry(
        lambda: REQUESTS[name](kafka, patience), KafkaEosError, Pauses(patience, 0.1)
    )  # brokers learn of it

    query.cluster.set_password(user, "rotated-pass-4b")
    error = None
    while error is None:  # until the broker has learned of the new password
        try:
            REQUESTS[name](kafka, Deadline.after_seconds(3))
        except AuthorizationError as found:
            error = found
        except UnavailableError:
            continue  # a broker of a busy machine has not answered in time
        finally:
            assert not patience.expired
    assert "Authentication failed" in error.message, "at the deadline, the reason is the error"

    refused = threading.Event()
    on_error, complain = Complaints.on_error, Cluster.complain

    def admin_is_refused(self: Complaints, error: KafkaError) -> None:
        on_error(self, error)
        if self.login_error("test") is not None:
            refused.set()

    def client_is_refused(self: Cluster, what: object) -> None:
        complain(self, what)
        if "Authentication failed" in str(what):
            refused.set()

    monkeypatch.setattr(Complaints, "on_error", admin_is_refused)
    monkeypatch.setattr(Cluster, "complain", client_is_refused)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(REQUESTS[name], kafka, Deadline.after_seconds(_LONG_SECONDS))
        assert refused.wait(_LONG_SECONDS)
        assert not waiting.done()
        query.cluster.set_password(user, "rotated-pass-4a")
        waiting.result(_LONG_SECONDS)


# -- what Spark shows


def test_nothing_that_spark_shows_or_stores_contains_a_secret(
    query: Query, spark: SparkSession, request: pytest.FixtureRequest
) -> None:
    """No secret is in plans, errors, the checkpoint or staged files, of a good query or a failing one."""
    query.allow(*LEAST)
    # Spark shows a streaming source's options in its plan, except names like "password" and "secret";
    # docs/security.md explains how to mask the others
    spark.conf.set("spark.sql.redaction.options.regex", r"(?i)url|jaas|\.pem$|oauthbearer")
    request.addfinalizer(lambda: spark.conf.unset("spark.sql.redaction.options.regex"))
    unmasked = {"kafka.sasl.oauthbearer.config": "principal=" + WRONG}

    def start(**changed: str) -> StreamingQuery:
        frame = spark.readStream.format("kafka-eos").options(**query.source(), **unmasked).load()
        writer = frame.select("key", "value").writeStream.format("kafka-eos")
        writer = writer.options(**query.sink(**changed), **unmasked, **{"staging.inline.bytes": "0"})
        started = writer.trigger(availableNow=True).start()
        shown.append(frame._jdf.queryExecution().toString())
        return started

    shown: list[str] = []
    good = start()
    good.awaitTermination(60)
    shown.append(good._jsq.explainInternal(True))  # type: ignore[attr-defined]
    shown.append(json.dumps([each.json for each in good.recentProgress]))
    assert query.written() == ROWS
    produce(*_to(query), ["d"], config=query.cluster.admins[1])
    with pytest.raises(PySparkException, match=r"(?s)NOT_AUTHORIZED.*correct the credentials") as caught:
        start(sasl_password=WRONG).awaitTermination(60)
    shown.append(str(caught.value))
    batch = spark.read.format("kafka-eos").options(**query.source(), **unmasked).load()
    shown.append(batch._jdf.queryExecution().toString())
    assert "kafka-eos" in "".join(shown)
    kept = [path for path in Path(query.checkpoint).rglob("*") if path.is_file()]
    assert {"0", "metadata", "identity.json"} <= {path.name for path in kept}
    for secret in SECRETS:
        assert [line for each in shown for line in each.splitlines() if secret in line] == []
        assert not any(secret.encode() in path.read_bytes() for path in kept)
    group = query.cluster.admin.group(query.names["group"])
    assert group
    assert not any(secret in str(group) for secret in SECRETS)


# -- doctor


def doctor(query: Query, folder: Path, user: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Runs ``kafka-eos doctor`` with a user's login, and returns its exit code and findings."""
    options = {name.removeprefix("kafka."): each for name, each in query.cluster.options(user).items()}
    file = folder / f"{user}.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in options.items()))
    names = ["--application-id", query.names["app"], "--source-topic", query.names["in"]]
    command = ["doctor", "--kafka-properties", str(file), *names, "--topic", query.names["out"], "--json"]
    result = CliRunner().invoke(main, [*command, *arguments])
    assert not any(secret in result.output for secret in SECRETS)
    found: list[dict[str, Any]] = json.loads(result.stdout)["findings"]
    return result.exit_code, found


def test_doctor_names_each_missing_right_and_harms_no_transaction(query: Query, tmp_path: Path) -> None:
    """What doctor calls sufficient is sufficient, and each right that it names was taken away."""
    sink = [each for each in LEAST if each[0] == "writer"]
    names = {"topic": "topic", "group": "group", "transactional_id": "transactional id"}
    query.allow(*sink)
    rights = ("--principal", "sink", "--check", "rights")
    for user, kind, name, operation in sink:
        query.cluster.forbid(user, kind, query.names[name], operation)
        code, found = doctor(query, tmp_path, "writer", *rights)
        assert code == ExitCode.NEEDS_A_PERSON
        missing = f"the right {operation.title()} on {names[kind]} '{query.names[name]}' is missing"
        assert [each["what"] for each in found] == [missing]
        query.allow((user, kind, name, operation))
    query.allow(LEAST[0])
    query.run()

    login = {key.removeprefix("kafka."): each for key, each in query.cluster.options("writer").items()}
    producer = transaction(login.pop("bootstrap.servers"), query.names["app"], login)
    producer.produce(query.names["out"], b"of an open transaction")
    assert producer.flush(30) == 0
    code, found = doctor(query, tmp_path, "writer", *rights)
    assert (code, [each["severity"] for each in found]) == (ExitCode.DONE, ["ok"])
    producer.commit_transaction(30)
    assert query.written() == sorted([*ROWS, "of an open transaction"])


def test_doctor_looks_at_brokers_behind_tls(query: Query, tmp_path: Path) -> None:
    query.allow(*LEAST)
    query.run()
    checks = [part for name in ("brokers", "transactions", "retention") for part in ("--check", name)]
    code, found = doctor(query, tmp_path, "writer", *checks, "--checkpoint", query.checkpoint)
    by_name = {each["check"]: each for each in found}
    assert "1 of 1 brokers" in by_name["brokers"]["what"]
    assert by_name["transactions"]["what"] == "finalized transaction.version=2"
    assert by_name["retention"]["severity"] == "note", "the right DescribeConfigs on the cluster is missing"
    assert code == ExitCode.DONE
