"""The token topic without brokers: its checks, its reader, and the output of its commands."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kafka_eos_source.cli import main
from kafka_eos_source.errors import AuthorizationError, InvalidOptionError, UnavailableError
from kafka_eos_source.kafka import token_topic
from kafka_eos_source.kafka.fetch import Taken
from kafka_eos_source.kafka.reader import LogEnds
from kafka_eos_source.kafka.token_topic import PROPERTIES, NoTokenTopicError, TokenTopic, last, partition_of
from kafka_eos_source.kafka.topic_admin import TopicShape
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate import token_topics
from kafka_eos_source.protocol.token import Token, TokenRecord, record_batch, tombstone_batch
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.arrow import STAGED_ARROW
from tests.support.fetched_log import Batch, Record, decoded

NAME, APP = "tokens", "orders"
FIRST, SECOND = TopicPartition(NAME, 0), TopicPartition(NAME, 1)
IN, OUT = TopicPartition("in", 0), TopicPartition("out", 0)


def in_seconds(seconds: float = 10.0) -> Deadline:
    return Deadline.after_seconds(seconds)


def record(sequence: int, application_id: str = APP) -> TokenRecord:
    token = Token(application_id, "query-1", "run", sequence, sequence, "aa", "bb", 10)
    return TokenRecord(token, {IN: 10 * sequence, OUT: sequence}, OUT, "group", "id-1", 0, 1000)


# -- the topic


class Admin:
    """Replaces `TopicAdmin`: a cluster in which one topic exists or is created."""

    def __init__(self, config: Mapping[str, str] | Exception | None = None) -> None:
        self.configuration = config
        self.created: list[tuple[Any, ...]] = []

    def __call__(self, kafka: Any) -> Admin:
        return self

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None: ...

    def shape(self, name: str, deadline: Deadline) -> TopicShape | None:
        return None if self.configuration is None else TopicShape(2, True, "id-1")

    def create(
        self, name: str, partitions: int, replication: int, config: Mapping[str, str], deadline: Deadline
    ) -> bool:
        self.created.append((name, partitions, replication, config))
        self.configuration = config
        return True

    def await_led(self, name: str, deadline: Deadline) -> TopicShape:
        return TopicShape(2, True, "id-1")

    def config(self, name: str, deadline: Deadline) -> Mapping[str, str]:
        if isinstance(self.configuration, Exception):
            raise self.configuration
        assert self.configuration is not None
        return self.configuration


def cluster(monkeypatch: pytest.MonkeyPatch, config: Mapping[str, str] | Exception | None = None) -> Admin:
    admin = Admin(config)
    monkeypatch.setattr(token_topic, "TopicAdmin", admin)
    return admin


def test_a_compacted_topic_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, PROPERTIES)
    assert token_topic.check({}, NAME, in_seconds()) == TokenTopic(NAME, "id-1", 2)


@pytest.mark.parametrize("policy", ["delete", "", "compact,delete", "delete, compact"])
def test_any_other_cleanup_policy_is_refused(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    admin = cluster(monkeypatch, {**PROPERTIES, "cleanup.policy": policy})
    with pytest.raises(InvalidOptionError) as caught:
        token_topic.check({}, NAME, in_seconds())
    assert f"token.topic='tokens' has cleanup.policy='{policy}'; expected 'compact'" in caught.value.message
    assert "kafka-eos token-topic create" in caught.value.fix
    with pytest.raises(InvalidOptionError):
        token_topic.create({}, NAME, in_seconds())
    assert not admin.created


def test_a_missing_token_topic_is_named_with_the_command_that_creates_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster(monkeypatch)
    with pytest.raises(NoTokenTopicError, match=r"'tokens' does not exist.*create tokens"):
        token_topic.check({}, NAME, in_seconds())


def test_without_the_right_to_describe_the_topic_the_query_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster(monkeypatch, AuthorizationError("looking up the configuration: no"))
    found = token_topic.check({}, NAME, in_seconds())
    assert (found.described, found.topic_id, found.partitions) == (False, "id-1", 2)
    assert "cannot check that token.topic='tokens' is compacted: looking up" in found.warnings[0]


def test_the_token_topic_is_created_compacted_with_small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = cluster(monkeypatch)
    found, made = token_topic.create({}, NAME, in_seconds(), replication_factor=3, min_insync=2)
    assert (found.name, made) == (NAME, True)
    assert admin.created == [(NAME, 1, 3, {**PROPERTIES, "min.insync.replicas": "2"})]
    assert token_topic.create({}, NAME, in_seconds())[1] is False


def test_large_segments_cause_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, {**PROPERTIES, "segment.bytes": str(1 << 30)})
    assert "segment.bytes=1,073,741,824" in token_topic.check({}, NAME, in_seconds()).warnings[0]


def test_keys_are_placed_by_murmur2() -> None:
    """Hashes from Kafka's own UtilsTest.testMurmur2."""
    hashes = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
    for key, expected in hashes.items():
        for partitions in (1, 2, 7, 1000):
            assert partition_of(key, partitions) == (expected & 0x7FFFFFFF) % partitions


def test_a_token_record_is_converted_to_a_row_for_the_producer() -> None:
    batch = record_batch(record(3))
    assert batch.num_rows == 1
    assert all(STAGED_ARROW.field(each.name).type == each.type for each in batch.schema)
    row = batch.to_pylist()[0]
    assert TokenRecord.decode(row["key"], row["value"]) == record(3)
    assert row["partition"] == 0
    assert tombstone_batch(b"k", 1).to_pylist() == [{"key": b"k", "value": None, "partition": 1}]


# -- the reader


@dataclass
class Log:
    """One partition: its messages, and its end offsets at each read; the last ones stay."""

    messages: Sequence[Record] = ()
    looks: list[LogEnds] = field(default_factory=lambda: [LogEnds(0, 0, 0)])
    takes: list[Taken] | None = None
    silent: bool = False

    def ends(self) -> LogEnds:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


@dataclass
class FakeKafka:
    """Replaces the description of the cluster and the pool of consumers."""

    logs: dict[TopicPartition, Log]
    isolation: list[str] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeKafka:
        monkeypatch.setattr(token_topic, "ClusterReader", lambda _config: FakeReader(self))
        monkeypatch.setattr(token_topic, "POOL", self)
        return self

    @contextmanager
    def borrow(self, conf: Mapping[str, str]) -> Iterator[Consumer]:
        self.isolation.append(conf["isolation.level"])
        yield Consumer(self, conf["isolation.level"] == "read_committed")


class FakeReader:
    def __init__(self, kafka: FakeKafka) -> None:
        self._kafka = kafka

    def __enter__(self) -> FakeReader:
        return self

    def __exit__(self, *_: object) -> None: ...

    def logs(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogEnds]:
        if self._kafka.failures:
            raise self._kafka.failures.pop(0)
        return {tp: self._kafka.logs[tp].ends() for tp in partitions}


class Consumer:
    last_complaint, cluster = "", SimpleNamespace(bootstrap="b:9092")

    def __init__(self, kafka: FakeKafka, committed: bool) -> None:
        self._kafka, self._committed = kafka, committed

    def release(self) -> None: ...

    def assign(self, positions: Mapping[TopicPartition, int], columns: Collection[str], ends: object) -> None:
        ((self._tp, self._at),) = positions.items()

    def log_bounds(self, tp: TopicPartition, deadline: Deadline) -> tuple[int, int]:
        ends = self._kafka.logs[tp].looks[-1]
        return ends.earliest, ends.stable

    def take(self, wait_seconds: float) -> Taken:
        log = self._kafka.logs[self._tp]
        if log.silent:
            return Taken()
        if log.takes:
            return log.takes.pop(0)
        ends = log.looks[-1]
        limit = ends.stable if self._committed else ends.end
        found = [each for each in log.messages if self._at <= each.offset < limit]
        self._at = limit
        messages = decoded({self._tp: Batch(found[0].offset, limit - 1, found)}) if found else ()
        return Taken(messages, log_ends={self._tp: limit}, reached={self._tp: limit})


def message_of(at: int, each: TokenRecord) -> Record:
    return Record(at, each.key, each.encode())


def read_record(partitions: int = 1, *, certain: bool = True, seconds: float = 10.0) -> TokenRecord | None:
    return last({}, TokenTopic(NAME, "id-1", partitions), APP, in_seconds(seconds), certain=certain)


def test_the_last_value_of_a_key_is_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [
        message_of(0, record(7)),  # not the highest sequence number of the log, but the last value
        message_of(2, record(3)),
        message_of(4, record(9, "invoices")),
        Record(5, None, b"no key"),
        Record(6, b"foreign", b"not ours"),
    ]
    kafka = FakeKafka({FIRST: Log(messages, [LogEnds(0, 8, 8)])}).install(monkeypatch)
    assert read_record() == record(3)
    assert kafka.isolation == ["read_committed"]


def test_a_tombstone_removes_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [message_of(0, record(7)), Record(2, APP.encode(), None)]
    FakeKafka({FIRST: Log(messages, [LogEnds(0, 4, 4)])}).install(monkeypatch)
    assert read_record() is None


def test_an_empty_topic_has_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka({FIRST: Log()}).install(monkeypatch)
    assert read_record() is None
    kafka.logs[FIRST] = Log([], [LogEnds(5, 9, 9)])  # control records are left
    assert read_record() is None


def test_the_highest_sequence_number_of_several_partitions_is_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeKafka(
        {
            FIRST: Log([message_of(0, record(3))], [LogEnds(0, 2, 2)]),
            SECOND: Log([message_of(0, record(4))], [LogEnds(0, 2, 2)]),
        }
    ).install(monkeypatch)
    assert read_record(2) == record(4)


def test_a_certain_read_waits_for_an_open_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read ends where the log ended when it began, however far the log grows in the meantime."""
    messages = [message_of(0, record(3)), message_of(3, record(4)), message_of(9, record(5))]
    looks = [LogEnds(0, 2, 5), LogEnds(0, 2, 12), LogEnds(0, 5, 20)]
    FakeKafka({FIRST: Log(messages, looks)}).install(monkeypatch)
    assert read_record() == record(4)


def test_a_quick_read_does_not_wait_for_an_open_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [message_of(0, record(3)), message_of(3, record(4))]
    FakeKafka({FIRST: Log(messages, [LogEnds(0, 2, 5)])}).install(monkeypatch)
    assert read_record(certain=False) == record(3)


def test_the_timeout_names_the_application_whose_transaction_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [message_of(0, record(3)), message_of(2, record(1, "invoices")), message_of(3, record(4))]
    kafka = FakeKafka({FIRST: Log(messages, [LogEnds(0, 2, 5)])}).install(monkeypatch)
    with pytest.raises(UnavailableError) as caught:
        read_record(seconds=0.01)
    assert "of application.id='invoices' holds partition tokens-0" in caught.value.message
    assert "at offset 2, while the log ends at 5" in caught.value.message
    assert "kafka-eos fence invoices --yes" in caught.value.fix
    assert kafka.isolation == ["read_uncommitted"]


def test_the_timeout_cannot_name_the_owner_of_records_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([Record(2, None, b"x")], [LogEnds(0, 2, 5)])
    FakeKafka({FIRST: log}).install(monkeypatch)
    with pytest.raises(UnavailableError, match=r"of an unknown producer.*find-hanging"):
        read_record(seconds=0.01)


def test_records_that_are_deleted_during_the_read_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([message_of(6, record(4))], [LogEnds(0, 8, 8), LogEnds(5, 8, 8)], [Taken(out_of_range=[FIRST])])
    FakeKafka({FIRST: log}).install(monkeypatch)
    assert read_record() == record(4)


def test_a_deleted_topic_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([], [LogEnds(0, 8, 8)], [Taken(gone=[FIRST])])
    FakeKafka({FIRST: log}).install(monkeypatch)
    with pytest.raises(UnavailableError, match=r"tokens-0 is gone, .* token-topic create"):
        read_record()


def test_a_read_without_answers_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log([], [LogEnds(0, 8, 8)], silent=True)
    FakeKafka({FIRST: log}).install(monkeypatch)
    with pytest.raises(UnavailableError, match=r"'b:9092'.*reading tokens-0: nothing arrives"):
        read_record(seconds=0.01)


def test_the_read_waits_for_the_election_of_a_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    kafka = FakeKafka({FIRST: Log([message_of(0, record(3))], [LogEnds(0, 2, 2)])}).install(monkeypatch)
    kafka.failures = [UnavailableError("no leader")]
    assert read_record() == record(3)
    kafka.failures = [UnavailableError("no leader")] * 100
    with pytest.raises(UnavailableError, match="no leader"):
        read_record(seconds=0.01)


# -- the commands


def run(*arguments: str) -> Result:
    named = (NAME, "--bootstrap-servers", "h:1")
    result = CliRunner().invoke(main, ["token-topic", arguments[0], *named, *arguments[1:]])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def topic_with_record(monkeypatch: pytest.MonkeyPatch) -> FakeKafka:
    cluster(monkeypatch, PROPERTIES)
    broken = Record(4, b"broken", b"{}")
    return FakeKafka(
        {
            FIRST: Log(
                [message_of(0, record(3)), message_of(2, record(8, "invoices")), broken], [LogEnds(0, 6, 9)]
            ),
            SECOND: Log([message_of(0, record(4))], [LogEnds(0, 2, 2)]),
        }
    ).install(monkeypatch)


def test_create_creates_the_topic_once(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = cluster(monkeypatch)
    assert "Created topic 'tokens', id id-1." in run("create", "--partitions", "3").output
    assert [each[:3] for each in admin.created] == [(NAME, 3, -1)]
    assert "was not changed" in run("create").output


def test_show_prints_records(topic_with_record: FakeKafka) -> None:
    shown = run("show").output
    for text in ("orders", "invoices", "query-1", "1970-01-01 00:00:01 UTC", "damaged"):
        assert text in shown
    rows = json.loads(run("show", "--json").output)
    assert [(each["application_id"], each["partition"]) for each in rows] == [
        ("broken", 0),
        ("invoices", 0),
        (APP, 1),
    ]
    (own,) = json.loads(run("show", "--json", APP).output)
    assert (own["token"]["seq"], own["offsets"]) == (4, {"in-0": 40, "out-0": 4})
    assert "holds no record of application.id='x'" in run("show", "x").output


def test_show_describes_the_topic(topic_with_record: FakeKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kafka_eos_source.kafka.admin.ClusterReader", lambda _config: FakeReader(topic_with_record)
    )
    shown = run("describe").output
    for text in ("id-1", "compact", "segment.bytes", "1048576", "tokens-1"):
        assert text in shown


def test_forget_deletes_a_record_only_with_yes(
    topic_with_record: FakeKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[Any] = []
    monkeypatch.setattr(token_topics, "forget_query", lambda _kafka, _topic, *more: forgotten.append(more[0]))
    topic_with_record.logs[FIRST].looks = [LogEnds(0, 6, 6)]
    said = run("forget", APP).output
    assert "With --yes: the command deletes this record" in said
    assert not forgotten
    assert "Deleted." in run("forget", APP, "--yes").output
    assert forgotten == [APP]
    assert "holds no record" in run("forget", "x", "--yes").output
    assert forgotten == [APP]
