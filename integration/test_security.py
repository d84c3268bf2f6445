"""TLS, SCRAM and ACLs: the documented rights are enough, and an error names each right that is missing.

Most tests drive source and sink without Spark (`chaos.loop`), because Spark does not deal with Kafka's
rights. One test with Spark checks that it shows no secrets.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import KafkaException
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StringType, StructField, StructType

from integration.chaos.loop import Run
from integration.chaos.stateful import StatefulRun
from integration.support import broker as brokers
from integration.support import tools
from integration.support.kafka import Admin, produce, read_back, transaction, values
from integration.support.security import SCRAM_PASSWORDS, UNUSED_SECRETS, Said, TlsCluster, tls_cluster
from kafka_eos_source.cli import main
from kafka_eos_source.commit import at_least_once, micro_batch
from kafka_eos_source.datasource import KafkaEosDataSource
from kafka_eos_source.errors import (
    AuthorizationError,
    CheckpointRolledBackError,
    ForeignQueryError,
    KafkaEosError,
    OffsetsMovedError,
    OperatorError,
    TokenMissingError,
    UnavailableError,
)
from kafka_eos_source.kafka.admin import ClusterReader
from kafka_eos_source.kafka.cluster import Cluster
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.reader import POOL
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate.rights import BATCH, COMMANDS, QUERY, TABLE, Names, Right, needs, title
from kafka_eos_source.operate.shared import ExitCode
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.token import Mark, Token
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.state.changelog.topic import CommittedShard, changelog_client, end_open_transaction

#: The user of each part of a query.
USERS = {"source": "reader", "sink": "writer", "operator": "operator", BATCH: "writer"}
_SIMPLE = Names("app", "group", read=("in",), written=("out",), anchor_topic="out")


def rights_of(names: Names, *parts: str) -> list[tuple[str, str, str, str]]:
    """Returns ``user, kind, name, operation`` of each right without which one of the parts fails."""
    return [
        (USERS.get(part, "person"), need.kind.replace(" ", "_"), need.name, need.operation)
        for part in parts
        for need in needs(names, [part])
        if not need.without
    ]


#: All rights that a query from ``in`` to ``out`` needs. Read and Write imply Describe.
LEAST = tuple(rights_of(_SIMPLE, "source", "sink"))
READS_IN, USES_ID, READS_GROUP, WRITES_OUT, COMMITS_IN, COMMITS_OUT = LEAST
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
    forget_connections()


def forget_connections() -> None:
    """Ends what this process keeps between two runs, as the end of a driver does."""
    TaskContext._taskContext = None
    while micro_batch._sessions:  # cached sessions would look for a broker that is gone
        micro_batch._sessions.popitem()[1].drop()
    while at_least_once._producers:
        at_least_once._producers.popitem()[1].close()
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

    def forbid(self, *rights: tuple[str, str, str, str]) -> None:
        for user, kind, name, operation in rights:
            self.cluster.forbid(user, kind, self.names.get(name, name), operation)

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


#: What the error says about a resource, with the operations that a sink needs.
_OPERATIONS = {
    WRITES_OUT: "for a sink: Write and Describe",
    READS_GROUP: "the consumer group (Read;",
    USES_ID: "the transactional id (Write and Describe)",
}


@pytest.mark.fault("T40", "the right on topic, group, transactional id is taken away", "commit")
@pytest.mark.parametrize(
    ("missing", "instead", "resource", "said"),
    [
        (READS_IN, None, "in", "looking up the topics"),
        (READS_IN, "DESCRIBE", "in", "reading"),
        (WRITES_OUT, None, "out", "writing records to"),
        (COMMITS_OUT, None, "out", "committing offsets"),
        (COMMITS_IN, None, "in", "reading the offsets of group"),
        (COMMITS_IN, "DESCRIBE", "in", "committing offsets"),
        (USES_ID, None, "app", "initialising transactional id"),
        (READS_GROUP, None, "group", "reading the members of group"),
        (READS_GROUP, "DESCRIBE", "group", "committing offsets of group"),
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
    assert _OPERATIONS.get(missing, "") in str(error)
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
    query.allow(USES_ID)
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
    left, fine = doctor(query, tmp_path, "writer", *rights)[1]
    assert (left["severity"], fine["severity"]) == ("note", "ok"), "the sink can do without it"
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


def test_a_changelog_is_read_after_an_aborted_transaction_and_on_another_machine(
    query: Query, tmp_path: Path
) -> None:
    changelog = query.names["changelog"] = f"{query.names['app']}-counts-changelog"
    names = replace(_SIMPLE, changelogs=("changelog",))
    query.allow(*(each for each in rights_of(names, *QUERY) if each != ("writer", "topic", "out", "WRITE")))
    with pytest.raises(AuthorizationError, match="writing records to"):
        stateful(query, tmp_path).to_the_end()
    query.allow(WRITES_OUT)
    stateful(query, tmp_path).to_the_end()
    assert query.written() == ["1 +1"] * len(ROWS)
    produce(*_to(query), ["a"], config=query.cluster.admins[1])
    stateful(query, tmp_path / "another machine").to_the_end()
    assert query.written() == [*["1 +1"] * len(ROWS), "2 +1"]
    assert query.cluster.admin.client.list_topics(changelog, 30).topics[changelog].error is None


# -- each right of the table


class Complete:
    """Two queries that use every resource of the table: one has state; the other one, dead letters.

    Both have a token topic. Nobody has a right yet; `allow` and `forbid` name resources as the table does.
    """

    def __init__(self, cluster: TlsCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.plain, self.state = Query(cluster, folder / "plain"), Query(cluster, folder / "state")
        for query, others in ((self.plain, ("tokens", "dead")), (self.state, ("tokens",))):
            for each in others:
                policy = "compact" if each == "tokens" else "delete"
                topic = f"{each}-{query.names['app']}"
                query.names[each] = cluster.admin.create(topic, cleanup_policy=policy)
        self.state.names["changelog"] = f"{self.state.names['app']}-counts-changelog"
        simple = replace(_SIMPLE, token_topic="tokens")
        self.names = {
            id(self.plain): replace(simple, dead_letter_topic="dead"),
            id(self.state): replace(simple, changelogs=("changelog",)),
        }
        self.machines = 0

    def of(self, right: Right) -> Query:
        """Returns the query that uses a right."""
        return self.state if "changelog" in right.resource or right.part == "operator" else self.plain

    def run(self, query: Query) -> None:
        """Restarts a query with a new record, on a machine that has no state yet."""
        forget_connections()
        produce(*_to(query), ["a", "b"], config=query.cluster.admins[1])
        sink = {**query.sink(), "token.topic": query.names["tokens"]}
        if query is self.plain:
            sink |= {"onInvalidRecord": "dead-letter", "deadLetter.topic": query.names["dead"]}
        spec = {"source": query.source(), "sink": sink, "checkpoint": query.checkpoint}
        if query is self.plain:
            Run({**spec, "marks": "a"}, threading.Event()).to_the_end()
            return
        self.machines += 1
        own = {"application.id": query.names["app"], "state.timeout.ms": "20000"}
        own |= {**query.cluster.options("operator"), "state.dir": str(self.folder / f"at-{self.machines}")}
        StatefulRun({**spec, "state": own}, threading.Event()).to_the_end()

    def command(self, name: str) -> Result:
        """Runs a command of ``kafka-eos`` as ``person``."""
        forget_connections()
        query = self.state if name == "state restore" else self.plain
        at = ["--kafka-properties", str(_properties_file(query, self.folder, "person"))]
        who = [query.names["app"]]
        if name == "adopt":  # the token is lost
            with contextlib.suppress(KafkaException):
                query.cluster.admin.delete_group(query.names["group"])
            login = str(_properties_file(query, self.folder, "admin"))
            forget = ["token-topic", "forget", query.names["tokens"], *who, "--yes"]
            forgotten = invoke(*forget, "--kafka-properties", login)
            assert forgotten.exit_code == ExitCode.DONE, forgotten.output
        self.machines += 1
        checkpoint = ["--checkpoint", query.checkpoint, "--topic", query.names["out"]]
        restored = ["--store", "counts", "--state-dir", str(self.folder / f"at-{self.machines}")]
        topic = query.names.get("dead" if name == "dead-letters list" else "out", "")
        own = {
            "inspect": [*checkpoint, "--json"],
            "fence": [*who, "--yes"],
            "adopt": [*checkpoint, "--not-committed", "--yes", "--json"],
            "state restore": [*who, *restored, "--yes"],
            "token-topic show": [query.names["tokens"]],
        }.get(name, [topic])
        return invoke(*name.split(), *own, *at)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def complete(cluster: TlsCluster, tmp_path_factory: pytest.TempPathFactory) -> Complete:
    """Each part has exactly the rights of the table, and each query has committed a batch."""
    made = Complete(cluster, tmp_path_factory.mktemp("complete"))
    for query in (made.plain, made.state):
        query.allow(*rights_of(made.names[id(query)], *QUERY))
        made.run(query)
    forget_connections()
    return made


def _row(right: Right) -> str:
    return f"{right.part}-{right.operation}-{right.resource}"


#: An error names the missing right within this time.
_NAMED_WITHIN_SECONDS = 10


@pytest.mark.fault("T397", "each right of the table of least rights is taken away", "restart")
@pytest.mark.parametrize(
    "right", [each for each in TABLE if each.part in QUERY and not each.without], ids=_row
)
def test_without_each_right_of_the_table_the_query_ends_with_an_error_that_names_it(
    complete: Complete, right: Right, tmp_path: Path
) -> None:
    if right.operation == "CREATE":  # only a query without a changelog uses it
        complete = Complete(complete.cluster, tmp_path)
        complete.state.allow(*rights_of(complete.names[id(complete.state)], *QUERY))
    query = complete.of(right)
    ((kind, name),) = {
        (each.kind.replace(" ", "_"), each.name)
        for each in needs(complete.names[id(query)], [right.part])
        if (each.operation, each.purpose) == (right.operation, right.purpose)
    }
    given = (USERS[right.part], kind, name, right.operation)
    ends = (right.part, right.resource) == ("operator", "id")
    query.forbid(given)
    begun = time.monotonic()
    try:
        with pytest.raises(AuthorizationError) as caught:
            _end_transaction(query) if ends else complete.run(query)
    finally:
        query.allow(given)
    assert time.monotonic() - begun < _NAMED_WITHIN_SECONDS
    assert query.names[name] in caught.value.message
    assert title(right.operation) in caught.value.fix
    if ends or right.operation == "CREATE":
        _end_transaction(query) if ends else complete.run(query)


def _end_transaction(query: Query) -> None:
    """Ends the transaction of a dead driver, as the first shard does that meets it."""
    login = {name.removeprefix("kafka."): each for name, each in query.cluster.options("operator").items()}
    end_open_transaction(login, query.names["app"], Deadline.after_seconds(30))


def test_with_the_rights_of_the_table_both_queries_continue(complete: Complete) -> None:
    """Runs after the test above, which has left a batch of each query to be written."""
    servers, login = complete.cluster.admins
    for query in (complete.plain, complete.state):
        complete.run(query)
    sent = values(read_back(servers, complete.plain.names["in"], config=login))
    assert complete.plain.written() == [each for each in sent if each != "a"]
    counted = [int(each.partition("+")[2]) for each in complete.state.written()]
    assert sum(counted) == len(read_back(servers, complete.state.names["in"], config=login))


@pytest.mark.parametrize("which", ["plain", "state"])
def test_the_command_prints_the_rights_that_these_tests_grant(complete: Complete, which: str) -> None:
    query: Query = getattr(complete, which)
    names = complete.names[id(query)]
    own = ["--source-principal", "User:reader", "--sink-principal", "User:writer", "--json"]
    own += ["--operator-principal", "User:operator"]
    dead = ["--dead-letter-topic", query.names["dead"]] if which == "plain" else []
    store = ["--store", "counts"] if which == "state" else []
    given = invoke(
        "acls", "--checkpoint", query.checkpoint, *own, *dead, *store, "--topic", query.names["out"]
    )
    login = ["--kafka-properties", str(_properties_file(query, complete.folder, "admin"))]
    looked_up = json.loads(invoke("acls", "--checkpoint", query.checkpoint, *own, *dead, *login).output)
    assert looked_up == {**json.loads(given.output), "looked_up": True}
    printed = {
        (f"User:{user}", operation, query.names.get(name, name))
        for user, _, name, operation in rights_of(names, *QUERY)
    }
    assert printed == {
        (each["principal"], re.sub(r"(?<=[a-z])(?=[A-Z])", "_", each["operation"]).upper(), each["name"])
        for each in looked_up["rights"]
        if each["without"] is None
    }


#: These change what other tests read, or need state that is damaged. Their requests show their rights.
_CHANGE_MUCH = (
    *("topics create", "dead-letters replay", "sinks list", "state rescale", "state lower-time"),
    *("token-topic forget", "token-topic restore"),
)


@pytest.mark.fault("T398", "each right that a command needs is taken away", "any command")
@pytest.mark.parametrize("name", [each for each in COMMANDS if each not in _CHANGE_MUCH])
def test_without_each_right_of_the_table_a_command_fails_and_names_it(complete: Complete, name: str) -> None:
    query = complete.state if name == "state restore" else complete.plain
    rights = rights_of(complete.names[id(query)], name)
    query.allow(*rights)
    for given in rights:
        query.forbid(given)
        begun = time.monotonic()
        result = complete.command(name)
        seconds = time.monotonic() - begun
        query.allow(given)
        assert result.exit_code in (ExitCode.FAILED, ExitCode.NEEDS_A_PERSON), (given, result.output)
        refusals = [each for each in result.output.splitlines() if "AUTHORIZ" in each]
        assert any(query.names[given[2]] in each for each in refusals), (given, result.output)
        assert seconds < _NAMED_WITHIN_SECONDS, given
    result = complete.command(name)
    assert result.exit_code == ExitCode.DONE, result.output
    query.forbid(*rights)


# -- what somebody who may commit offsets in the group can forge


@pytest.mark.fault("T399", "somebody with Read on the group commits made-up offsets and tokens", "restart")
def test_forged_offsets_that_contradict_the_checkpoint_stop_the_query_until_they_are_corrected(
    query: Query,
) -> None:
    """Those that look like the query's are believed (docs/security.md, tests/commit/test_verdict.py)."""
    query.allow(*LEAST)
    query.run()
    group, out, read = query.names["group"], query.names["out"], (query.names["in"], 0)
    true = query.cluster.admin.group(group)
    token = Token.decode(true[out, 0][1])
    assert token is not None
    query.allow(("person", "group", "group", "READ"))
    query.allow(*(("person", "topic", each, "READ") for each in ("in", "out")))
    login = {name.removeprefix("kafka."): each for name, each in query.cluster.options("person").items()}
    forger = Admin(login.pop("bootstrap.servers"), **login)
    later = replace(token, sequence=token.sequence + 1, batch_id=token.batch_id + 1, end_digest="made up")
    at = true[out, 0][0]
    produce(*_to(query), ["d", "e"], config=query.cluster.admins[1])
    for forged, refused in (
        ({read: (5, "made up")}, OffsetsMovedError),
        ({(out, 0): (at, "made up")}, OffsetsMovedError),
        (forged_at(query, at, replace(later, query_id="made up")), ForeignQueryError),
        (forged_at(query, at, replace(later, cluster_id="made up")), TokenMissingError),
        (forged_at(query, at, replace(later, target="made up")), CheckpointRolledBackError),
        ({(out, 0): (at, later.encode()), read: (4, Mark.of(later).encode())}, CheckpointRolledBackError),
        ({(out, 0): (at, later.encode()[:-9])}, OperatorError),
    ):
        forget_connections()
        forger.commit(group, forged)
        with pytest.raises(refused):
            query.run()
        forger.commit(group, true)
    assert query.written() == ROWS
    forget_connections()
    query.run()
    assert query.written() == [*ROWS, "d", "e"]


def forged_at(query: Query, at: int, token: Token) -> dict[tuple[str, int], tuple[int, str]]:
    """Returns offsets that are far ahead, all with a made-up token."""
    ahead = 1000, token.encode()
    return {(query.names["in"], 0): ahead, (query.names["out"], 0): (at, token.encode())}


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
    query.allow(WRITES_OUT, COMMITS_OUT)
    query.allow(("writer", "transactional_id", DISPOSABLE, "WRITE"))
    query.allow(("writer", "group", DISPOSABLE_GROUP, "READ"))
    _write(query)  # without the right to delete it, the group is left to expire
    left = [each for each in query.cluster.admin.groups() if each.startswith(DISPOSABLE_GROUP[:-1])]
    assert len(left) == 1
    query.allow(("writer", "group", DISPOSABLE_GROUP, "DELETE"))
    _write(query)
    assert [each for each in query.cluster.admin.groups() if each.startswith(DISPOSABLE_GROUP[:-1])] == left
    assert query.written() == sorted(ROWS * 2)


def test_kafkas_own_tool_grants_what_the_command_prints(query: Query, tmp_path: Path) -> None:
    servers, login = query.cluster.admins
    user = f'username="{login["sasl.username"]}" password="{login["sasl.password"]}"'
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    java = {
        "security.protocol": login["security.protocol"],
        "sasl.mechanism": "PLAIN",
        "sasl.jaas.config": f"{module} {user};",
    }
    file = tmp_path / "admin.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in java.items()))
    who = ("--sink-principal", "User:person", "--bootstrap-servers", servers)
    printed = invoke("acls", "--batch", "--topic", query.names["out"], *who).output
    for line in printed.splitlines():
        if not line.startswith("#"):
            tool, *arguments = shlex.split(line)
            assert tool == "kafka-acls.sh"
            placed = (str(file) if each == file.name else each for each in arguments)
            tools.run("org.apache.kafka.tools.AclCommand", *placed)
    _write(query, **query.cluster.options("person"))
    assert query.written() == ROWS


def test_at_least_once_needs_only_the_right_to_write_the_topic(query: Query) -> None:
    with pytest.raises(AuthorizationError, match=query.names["out"]):
        _write(query, **{"processing.guarantee": "at_least_once"})
    query.allow(WRITES_OUT)
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
    complain = Cluster.complain

    def client_is_refused(self: Cluster, what: object) -> None:
        complain(self, what)
        if "Authentication failed" in str(what):
            refused.set()

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


def _properties_file(query: Query, folder: Path, user: str) -> Path:
    """Writes the login of a user to a file for ``--kafka-properties``."""
    servers, login = query.cluster.admins
    admin = {"kafka.bootstrap.servers": servers, **login}
    options = admin if user == "admin" else query.cluster.options(user)
    file = folder / f"{user}.properties"
    file.write_text("".join(f"{name.removeprefix('kafka.')}={value}\n" for name, value in options.items()))
    return file


def doctor(query: Query, folder: Path, user: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Runs ``kafka-eos doctor`` with a user's login, and returns its exit code and findings."""
    file = _properties_file(query, folder, user)
    names = [query.names["app"], "--source-topic", query.names["in"]]
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
    query.allow(READS_IN)
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
