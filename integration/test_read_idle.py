"""An idle query runs empty micro-batches: to renew its token in time, and for what is due in its state."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from integration.support.alarm import Alarm
from integration.support.driver import Driver
from integration.support.kafka import Admin, produce, read_back
from integration.support.processes import await_condition
from integration.support.security import SecuredCluster
from kafka_eos_source import map_in_read
from kafka_eos_source.errors import AuthorizationError
from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.config import check_consumer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.token import Token, newest
from kafka_eos_source.spark.session import ADAPTIVE_SETTING
from kafka_eos_source.state import (
    aggregate,
    transform,
    tumbling,
)
from kafka_eos_source.state import aggregates as agg

SHARDS = 2
SECONDS = 120


def newest_of(group: Mapping[tuple[str, int], tuple[int, str]]) -> Token | None:
    """Returns the newest token among the offsets of a group."""
    return newest(
        GroupOffset(TopicPartition(*tp), offset, metadata) for tp, (offset, metadata) in group.items()
    )


class Idle:
    """A topic-to-topic query whose source renews the token every second."""

    def __init__(
        self, spark: SparkSession, broker: str, admin: Admin, topic: Callable[..., str], folder: Path
    ) -> None:
        self.spark, self.broker, self.admin, self.folder = spark, broker, admin, folder
        self.source, self.sink = topic(2), topic(2)
        self.application = f"app-{self.sink}"

    def frame(self, **options: str) -> DataFrame:
        read = {
            "kafka.bootstrap.servers": self.broker,
            "subscribe": self.source,
            "startingOffsets": "earliest",
            "token.renewal.interval.ms": "1000",
            **options,
        }
        return self.spark.readStream.format("kafka-eos").options(**read).load()

    def state_options(self) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": self.broker,
            "application.id": self.application,
            "state.dir": str(self.folder / "state"),
        }

    def sink_options(self) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": self.broker,
            "topic": self.sink,
            "application.id": self.application,
            "checkpointLocation": str(self.folder / "checkpoint"),
        }

    @contextmanager
    def running(self, frame: DataFrame, **trigger: Any) -> Iterator[StreamingQuery]:
        """Runs the query until the block ends, and raises the query's failure if there was one."""
        writer = frame.writeStream.format("kafka-eos").options(**self.sink_options())
        query = (writer.trigger(**trigger) if trigger else writer).start()
        try:
            yield query
        finally:
            query.stop()
        if (failure := query.exception()) is not None:
            raise failure

    def token(self) -> Token | None:
        return newest_of(self.admin.group(group_of(self.application), may_be_empty=True))

    def counted(self, metric: str) -> int:
        """Returns what the shards have counted, as the tokens on the changelog show."""
        group = self.admin.group(group_of(self.application), may_be_empty=True)
        tokens = [Token.decode(metadata) for _, metadata in group.values()]
        return sum(token.shard.counts.get(metric, 0) for token in tokens if token and token.shard)

    def sequence(self) -> int:
        token = self.token()
        return -1 if token is None else token.sequence

    def await_renewals(self, query: StreamingQuery, more: int = 2) -> None:
        """Waits until ``more`` empty batches are committed."""
        before = self.sequence()
        await_condition(
            lambda: not query.isActive or self.sequence() >= before + more, SECONDS, "the token is renewed"
        )
        assert query.isActive, query.exception()

    def positions(self) -> list[dict[str, Any]]:
        """Returns the source's line of each entry in Spark's offset log."""
        return [self.entry(number)[-1] for number in self.batches()]

    def batches(self) -> list[int]:
        """Returns the batches in Spark's offset log."""
        log = self.folder / "checkpoint" / "offsets"
        return sorted(int(each.name) for each in log.iterdir() if each.name.isdecimal())

    def entry(self, batch_id: int) -> list[dict[str, Any]]:
        """Returns the positions of all sources in an entry of Spark's offset log."""
        text = (self.folder / "checkpoint" / "offsets" / str(batch_id)).read_text()
        return [json.loads(line) for line in text.splitlines()[2:]]

    def delete_last_commit(self) -> None:
        """Deletes the last commit log entry, as if the driver had died before Spark wrote it."""
        last = len(self.positions()) - 1
        for name in (str(last), f".{last}.crc"):
            (self.folder / "checkpoint" / "commits" / name).unlink(missing_ok=True)

    def written(self) -> list[tuple[str, str]]:
        return [
            ((each.key or b"").decode(), (each.value or b"").decode())
            for each in read_back(self.broker, self.sink)
        ]


@pytest.fixture
def idle(spark: SparkSession, broker: str, admin: Admin, topic: Callable[..., str], tmp_path: Path) -> Idle:
    return Idle(spark, broker, admin, topic, tmp_path)


@pytest.mark.core
def test_an_idle_query_renews_its_token(idle: Idle) -> None:
    produce(idle.broker, idle.source, ["a", "b"], keys=["1", "2"])
    rows = idle.frame().selectExpr("key", "value")
    with idle.running(rows) as query:
        await_condition(lambda: len(idle.written()) == 2, SECONDS, "the first rows")
        offsets = idle.admin.group(group_of(idle.application))
        idle.await_renewals(query)
        produce(idle.broker, idle.source, ["c"], keys=["3"])
        await_condition(lambda: len(idle.written()) == 3, SECONDS, "the last row")
        idle.await_renewals(query, 1)
        progress = [json.loads(each.json) for each in query.recentProgress]
    after = idle.admin.group(group_of(idle.application))
    assert sum(after[tp][0] for tp in after if tp[0] == idle.source) == 3
    assert set(after) == set(offsets)
    assert sorted(idle.written()) == [("1", "a"), ("2", "b"), ("3", "c")]
    ticks = [each for each in idle.positions() if each["@"].get("tick")]
    assert len(ticks) >= 2
    assert sum(each["numInputRows"] for each in progress) == 3
    idle.delete_last_commit()
    assert idle.positions()[-1]["@"]["tick"], "the batch that is replayed is a tick"
    with idle.running(rows, availableNow=True) as query:
        query.awaitTermination(SECONDS)
    before = len(idle.positions())
    with idle.running(rows, availableNow=True) as query:
        query.awaitTermination(SECONDS)
    assert len(idle.positions()) == before, "Trigger.AvailableNow must not add ticks"
    assert len(idle.written()) == 3


def test_a_renewal_has_no_tasks_that_read_and_stage(idle: Idle) -> None:
    """The commit expects no report of such a task, and finds the id of the run all the same."""
    produce(idle.broker, idle.source, ["a"], keys=["1"])
    rows = map_in_read(idle.frame().select("key", "value"), write=idle.sink_options())
    with idle.running(rows) as query:
        await_condition(lambda: len(idle.written()) == 1, SECONDS, "the first row")
        idle.await_renewals(query, 1)
        token = idle.token()
        assert token is not None
        assert token.run_id == str(query.runId)
    assert idle.written() == [("1", "a")]


@pytest.fixture
def adaptive(spark: SparkSession) -> Iterator[None]:
    """Adaptive execution as a user may enable it for streaming queries."""
    assert spark.conf.get("spark.sql.adaptive.enabled") == "true"
    before = spark.conf.get(ADAPTIVE_SETTING, None)
    spark.conf.set(ADAPTIVE_SETTING, "true")
    yield
    spark.conf.unset(ADAPTIVE_SETTING) if before is None else spark.conf.set(ADAPTIVE_SETTING, before)


@pytest.mark.usefixtures("adaptive")
def test_operators_run_in_a_renewal_so_timers_fire_on_an_idle_stream(idle: Idle) -> None:
    """Adaptive execution must not drop the operators behind an empty read."""
    keys = [f"k{number}" for number in range(6)]
    produce(idle.broker, idle.source, ["x"] * 12, keys=keys * 2)
    rows = idle.frame().selectExpr("CAST(key AS STRING) AS k", "CAST(value AS STRING) AS v")
    frame = transform(
        rows.groupBy("k"),
        Alarm(after_ms=2000),
        "key string, value string",
        options=idle.state_options(),
        shards=SHARDS,
        time_mode="ProcessingTime",
    )
    with idle.running(frame) as query:
        await_condition(
            lambda: not query.isActive or len(idle.written()) == len(keys), SECONDS, "the timers fire"
        )
        assert query.isActive, query.exception()
        idle.await_renewals(query)
    assert sorted(idle.written()) == [(key, "2") for key in keys]
    ends = [{topic: at for topic, at in each.items() if topic != "@"} for each in idle.positions()]
    assert ends[-1] == ends[0], "one batch read, and all others were ticks"
    # every shard took part in the last renewal, so its token is the one of the last transaction
    group = idle.admin.group(group_of(idle.application))
    last = newest_of(group)  # of the same answer, because a process may still commit what it had begun
    assert last is not None
    changelog = {tp: metadata for tp, (_, metadata) in group.items() if tp[0].endswith("-changelog")}
    tokens = [Token.decode(metadata) for metadata in changelog.values()]
    assert [token.sequence for token in tokens if token] == [last.sequence] * SHARDS


def test_timers_fire_and_values_expire_on_an_idle_stream_without_renewals(idle: Idle) -> None:
    """The source learns from the commit when the operators need a batch, and causes no other batches."""
    keys = [f"k{number}" for number in range(6)]
    produce(idle.broker, idle.source, ["x"] * 12, keys=keys * 2)
    source = {"token.renewal.interval.ms": "0", "application.id": idle.application}
    rows = idle.frame(**source).selectExpr("CAST(key AS STRING) AS k", "CAST(value AS STRING) AS v")
    frame = transform(
        rows.groupBy("k"),
        Alarm(after_ms=500, ttl_ms=15_000),  # on a busy machine too, the timers fire before the values expire
        "key string, value string",
        options=idle.state_options(),
        shards=SHARDS,
        time_mode="ProcessingTime",
    )
    with idle.running(frame) as query:
        await_condition(
            lambda: not query.isActive or idle.counted("expired_values") == len(keys),
            SECONDS,
            "the timers fire, and the values expire",
        )
        assert query.isActive, str(query.exception())
        ticks = [each for each in idle.positions() if each["@"].get("tick")]
    assert sorted(idle.written()) == [(key, "2") for key in keys]
    assert 2 <= len(ticks) <= 2 * len(keys), "a batch for the timers, one for the values, or one for each"
    token = idle.token()
    assert token is not None
    assert token.due is None, "nothing is left to wait for"
    assert sum(each["numInputRows"] for each in map(_parsed, query.recentProgress)) == 12


def test_an_operator_with_timers_warns_if_the_source_cannot_know_when_they_are_due(
    idle: Idle, caplog: pytest.LogCaptureFixture
) -> None:
    def warned(*identities: dict[str, str], **operator: Any) -> bool:
        caplog.clear()
        frames = [idle.frame(**each).selectExpr("CAST(key AS STRING) AS k") for each in identities]
        rows = reduce(DataFrame.union, frames).where("k IS NOT NULL").groupBy("k")
        options = idle.state_options()
        columns = "key string, value string"
        transform(rows, Alarm(1), columns, options=options, shards=SHARDS, **operator)
        return "timers and times to live wait" in caplog.text

    own, processing_time = {"application.id": idle.application}, {"time_mode": "ProcessingTime"}
    assert warned({}, **processing_time)
    assert warned({"application.id": "another"}, **processing_time)
    assert not warned(own, **processing_time)
    assert not warned({}, own, **processing_time), "one source is enough"
    assert not warned({}), "without a time mode there are no timers"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.fault("T172", "Spark's driver dies in an empty batch that fires timers", "before the commit")
def test_t172_timers_of_a_query_with_two_sources_fire_once_although_the_driver_is_killed(
    idle: Idle, topic: Callable[..., str], driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """Both sources see that a timer is due, and cause one batch together."""
    topics = [idle.source, topic(1)]
    for each in topics:
        produce(idle.broker, each, ["x"] * 3, keys=["a", "b", each])
    own = {"kafka.bootstrap.servers": idle.broker, "application.id": idle.application}
    reading = {**own, "startingOffsets": "earliest", "token.renewal.interval.ms": "0"}
    spec = {
        "sources": [{"format": "kafka-eos", "options": {**reading, "subscribe": each}} for each in topics],
        "state": {"options": idle.state_options(), "shards": SHARDS, "alarm_ms": 1000},
        "sink": {"format": "kafka-eos", "options": idle.sink_options()},
        "trigger": {"processingTime": "200 milliseconds"},
    }
    killed = driver(spec, f"commit.before_commit=kill*2@{tmp_path}/once")
    assert killed.wait() != 0
    assert (tmp_path / "once").exists(), killed.tail()
    assert idle.written() == []
    again = driver(spec)
    wanted = [("a", "2"), ("b", "2"), *((each, "1") for each in topics)]
    await_condition(
        lambda: again.process.poll() is not None or len(idle.written()) >= len(wanted),
        SECONDS,
        "the timers fire",
    )
    again.kill()
    assert sorted(idle.written()) == sorted(wanted)
    logged = [idle.entry(number) for number in idle.batches()]
    assert all(each["@"].get("tick") for entry in logged[1:] for each in entry), "nothing else was read"
    assert len(logged) <= 1 + len(wanted)


def _parsed(progress: Any) -> dict[str, Any]:
    return dict(json.loads(progress.json))


def test_renewals_between_rows_do_not_change_windows(idle: Idle) -> None:
    begin_ms = 1_700_000_000_000

    def feed(seconds: int) -> None:
        keys = ["a", "b", "c", "d"]
        produce(idle.broker, idle.source, ["x"] * 4, keys=keys, timestamps_ms=[begin_ms + 1000 * seconds] * 4)

    rows = idle.frame().selectExpr("CAST(key AS STRING) AS k", "timestamp AS at")
    frame = aggregate(
        rows.groupBy("k"),
        {"n": agg.count()},
        options=idle.state_options(),
        shards=SHARDS,
        window=tumbling("10 seconds", on="at"),
        emit="on_close",
    )
    assert idle.spark.conf.get(ADAPTIVE_SETTING) == "false", "the operator disabled it"
    feed(0)
    with idle.running(frame.selectExpr("k AS key", "CAST(n AS STRING) AS value")) as query:
        await_condition(lambda: idle.sequence() >= 1, SECONDS, "the first rows")
        idle.await_renewals(query)
        assert idle.written() == [], "no window is complete"
        feed(5)
        feed(20)
        await_condition(
            lambda: not query.isActive or len(idle.written()) == 4, SECONDS, "the first windows are complete"
        )
        assert query.isActive, query.exception()
        idle.await_renewals(query)
    assert sorted(idle.written()) == [(key, "2") for key in ("a", "b", "c", "d")]


def test_the_source_reads_retention_and_deleted_topics_from_the_brokers(
    secured_cluster: SecuredCluster,
) -> None:
    """A missing right raises an error: a topic that may not be described does not count as deleted."""

    def source_admin(user: str) -> SourceAdmin:
        login = secured_cluster.login(user)
        config = check_consumer({"bootstrap.servers": secured_cluster.bootstrap_servers, **login})
        return SourceAdmin(config, "read_committed", 2, 10)

    topic = secured_cluster.admin.create(f"t-{uuid.uuid4().hex[:10]}")
    trusted, alice = source_admin("admin"), source_admin("alice")
    assert trusted.offsets_retention_ms() == 7 * 24 * 3_600_000
    with pytest.raises(AuthorizationError, match=r"offsets\.retention\.minutes"):
        alice.offsets_retention_ms()
    assert set(trusted.existing_topic_ids([topic, "no-such-topic"])) == {topic}
    with pytest.raises(AuthorizationError, match=topic):
        alice.existing_topic_ids([topic])
    with pytest.raises(AuthorizationError, match="group 'no-such-group'"):
        alice.committed("no-such-group", [TopicPartition(topic, 0)])
