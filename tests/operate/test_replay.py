"""A replay of dead letters: which offsets it commits, and which letters it refuses. No broker."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

import pytest

from kafka_eos_source.commit.request import Clients
from kafka_eos_source.errors import InvalidOptionError, OperatorError
from kafka_eos_source.kafka.reader import LogEnds
from kafka_eos_source.kafka.topic_admin import TopicShape
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate import replay
from kafka_eos_source.operate.dead_letters import Letter
from kafka_eos_source.operate.records import TopicRecord
from kafka_eos_source.operate.replay import Replay, ranges
from kafka_eos_source.protocol import records
from kafka_eos_source.runtime.deadline import Deadline

FULL, QUIET, EMPTY = (TopicPartition("dead", number) for number in range(3))
#: Letters at 0 to 2 and a control record; letters that were sent before; nothing.
LOGS = {FULL: LogEnds(0, 4, 4), QUIET: LogEnds(5, 9, 9), EMPTY: LogEnds(0, 0, 0)}
CONFIG = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "message.timestamp.type": "CreateTime",
    "max.message.bytes": "1048588",
    "message.timestamp.before.max.ms": str(2**63 - 1),
    "message.timestamp.after.max.ms": "3600000",
}


class Cluster:
    """Clients of a cluster in memory, which keeps what each transaction commits."""

    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.configs: dict[str, Mapping[str, str]] = {"in": CONFIG}
        self.offsets: dict[TopicPartition, GroupOffset] = {}
        self.transactions: list[tuple[list[Any], dict[TopicPartition, int]]] = []
        self.looked_up: list[str] = []
        self.kafka: Mapping[str, str] = {}
        #: What becomes of topics while a transaction is open: other ids, or none.
        self.replaced: dict[str, str | None] = {}
        #: How many answers about ids of topics do not contain a topic that exists.
        self.unknown: Counter[str] = Counter()
        self.enqueued = 0
        self._open: tuple[list[Any], list[GroupOffset]] = ([], [])

    # the clients

    def producer(self, _transactional_id: str) -> Cluster:
        return self

    def group_offsets(
        self, _group_id: str, _certainly: Collection[TopicPartition], _deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        return dict(self.offsets)

    proved_offsets = group_offsets

    # the producer

    def init(self, _deadline: Deadline) -> None:
        self.enqueued = 0

    def begin(self) -> None:
        self.enqueued, self._open = 0, ([], [])

    def send(self, batch: Any, _columns: object, _deadline: Deadline) -> None:
        self._open[0].extend(batch.to_pylist())
        self.enqueued += batch.num_rows

    def flush(self, _deadline: Deadline) -> None:
        return

    def send_offsets(self, offsets: list[GroupOffset], _group_id: str, _deadline: Deadline) -> None:
        self._open[1].extend(offsets)

    def commit(self, _deadline: Deadline) -> None:
        rows, offsets = self._open
        self.transactions.append((rows, {each.tp: each.offset for each in offsets}))
        self.offsets.update({each.tp: each for each in offsets})

    def abort(self, _deadline: Deadline) -> None:
        self._open = ([], [])

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        found = {
            name: self.replaced.get(name, "id" if name == "dead" else f"id of {name}") for name in topics
        }
        unknown = {name for name in found if self.unknown[name] > 0}
        self.unknown -= Counter(unknown)
        return {
            name: topic_id for name, topic_id in found.items() if topic_id is not None and name not in unknown
        }

    def is_clean(self) -> bool:
        return True

    def close(self) -> None:
        return

    # the admin client

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        return

    def shape(self, name: str, _deadline: Deadline) -> TopicShape | None:
        self.looked_up.append(name)
        return TopicShape(3, True, f"id of {name}") if name in self.configs else None

    def config(self, name: str, _deadline: Deadline) -> Mapping[str, str]:
        return self.configs[name]

    # what a test does

    def write(
        self,
        tp: TopicPartition,
        offset: int,
        *,
        key: bytes | None = b"k",
        value: bytes = b"v",
        **headers: str,
    ) -> None:
        named = {"ORIGIN_TOPIC": "in", "HOLDS": records.INPUT, **headers}
        listed = tuple((getattr(records, name), text.encode()) for name, text in named.items())
        self.letters.append(Letter.of(TopicRecord(tp, offset, 1000, key, value, listed)))

    def read(
        self, _kafka: object, wanted: Mapping[TopicPartition, tuple[int, int]], *_more: object
    ) -> Iterator[Letter]:
        for each in self.letters:
            start, end = wanted[each.record.tp]
            if start <= each.record.offset < end:
                yield each

    def run(self, request: Replay, *, skip_refused: bool = False, seconds: float = 10) -> replay.Outcome:
        deadline = Deadline.after_seconds(seconds)

        def clients_of(kafka: Mapping[str, str]) -> Clients:
            self.kafka = kafka
            return cast(Clients, self)

        kafka = {"bootstrap.servers": "b"}
        return replay.run(kafka, clients_of, request, deadline, skip_refused=skip_refused)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(replay.dead_letters, "read_letters", found.read)
    monkeypatch.setattr(replay, "TopicAdmin", lambda _kafka: found)
    monkeypatch.setattr(replay, "_PAUSE_SECONDS", 0.0)
    return found


def request_of(**given: Any) -> Replay:
    return Replay("dead", "id", LOGS, "g", **given)


def test_each_transaction_commits_the_offsets_of_all_partitions(cluster: Cluster) -> None:
    """Kafka deletes each partition's offset a time after its own last commit."""
    for offset in range(3):
        cluster.write(FULL, offset)
    asked = request_of(records_at_once=1)
    cluster.offsets = {tp: GroupOffset(tp, at, asked.metadata) for tp, at in {FULL: 0, QUIET: 9}.items()}
    assert cluster.run(asked).sent == {"in": 3}
    assert [(len(rows), ends) for rows, ends in cluster.transactions] == [
        (1, {FULL: 1, QUIET: 9, EMPTY: 0}),
        (1, {FULL: 2, QUIET: 9, EMPTY: 0}),
        (1, {FULL: 3, QUIET: 9, EMPTY: 0}),
        (0, {FULL: 4, QUIET: 9, EMPTY: 0}),
    ]


def test_a_run_with_nothing_to_send_renews_the_offsets(cluster: Cluster) -> None:
    first = cluster.run(request_of())
    again = cluster.run(request_of())
    assert (first.new_group, again.new_group) == (True, False)
    assert cluster.transactions == [([], {FULL: 4, QUIET: 9, EMPTY: 0})] * 2


def test_a_refused_run_renews_the_offsets_and_passes_no_letter(cluster: Cluster) -> None:
    cluster.write(FULL, 1, VALUE_BYTES="9")
    with pytest.raises(OperatorError, match="incomplete: 1"):
        cluster.run(request_of())
    assert cluster.transactions == [], "a new group has nothing to renew"
    held = {FULL: 1, QUIET: 9, EMPTY: 0}
    cluster.offsets = {tp: GroupOffset(tp, at, request_of().metadata) for tp, at in held.items()}
    with pytest.raises(OperatorError, match="incomplete: 1"):
        cluster.run(request_of())
    assert cluster.transactions == [([], held)]


def test_a_group_that_lost_the_offset_of_a_partition_with_letters_is_refused(cluster: Cluster) -> None:
    cluster.write(QUIET, 5)
    cluster.offsets = {FULL: GroupOffset(FULL, 4, request_of().metadata)}
    with pytest.raises(OperatorError, match=r"--new-partitions.*--group") as error:
        cluster.run(request_of())
    assert (
        f"group 'g' has offsets of 1 partitions of topic 'dead', but none of {QUIET}." in error.value.message
    )
    assert cluster.transactions == []
    assert cluster.run(request_of(new_partitions=True)).sent == {"in": 1}


def test_partitions_without_letters_need_no_offset() -> None:
    held = {tp: GroupOffset(tp, 4 if tp == FULL else 9, request_of().metadata) for tp in (FULL, QUIET)}
    assert ranges(request_of(), held) == {FULL: (4, 4), QUIET: (9, 9), EMPTY: (0, 0)}


NOW_MS = 2_000_000_000_000
HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("config", "key", "timestamp_ms", "refusal"),
    [
        ({}, b"k", NOW_MS, None),
        ({}, None, NOW_MS, None),
        ({"cleanup.policy": "compact"}, None, NOW_MS, "no_key"),
        ({"cleanup.policy": "compact,delete"}, None, None, "no_key"),
        ({"cleanup.policy": "compact"}, b"", NOW_MS, None),
        ({}, b"k", NOW_MS + 2 * HOUR_MS, "timestamp_limit"),
        ({"message.timestamp.type": "LogAppendTime"}, b"k", NOW_MS + 2 * HOUR_MS, None),
        ({"message.timestamp.before.max.ms": str(HOUR_MS)}, b"k", NOW_MS - 2 * HOUR_MS, "timestamp_limit"),
        ({"message.timestamp.before.max.ms": str(HOUR_MS)}, b"k", NOW_MS - HOUR_MS + 1000, "timestamp_limit"),
        ({"message.timestamp.before.max.ms": str(HOUR_MS)}, b"k", NOW_MS - HOUR_MS // 2, None),
        ({"retention.ms": str(HOUR_MS)}, b"k", NOW_MS - 2 * HOUR_MS, "past_retention"),
        ({"message.timestamp.before.max.ms": str(HOUR_MS)}, b"k", None, None),
    ],
)
def test_a_letter_that_its_topic_does_not_take_is_refused_by_name(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, str],
    key: bytes | None,
    timestamp_ms: int | None,
    refusal: str | None,
) -> None:
    """Otherwise the broker refuses its whole transaction each time, and with it the other letters."""
    monkeypatch.setattr(replay.time, "time", lambda: NOW_MS / 1000)
    cluster.configs["limited"] = {**CONFIG, **config}
    named = {} if timestamp_ms is None else {"ORIGIN_TIMESTAMP": str(timestamp_ms)}
    cluster.write(FULL, 0, key=key, ORIGIN_TOPIC="limited", **named)
    cluster.write(FULL, 1)
    if refusal is None:
        assert cluster.run(request_of()).sent == {"limited": 1, "in": 1}
        return
    with pytest.raises(OperatorError, match=f"{refusal}: 1"):
        cluster.run(request_of())
    found = cluster.run(request_of(), skip_refused=True)
    assert (found.refused, found.sent) == ({refusal: 1}, {"in": 1})
    assert cluster.offsets[FULL].offset == 4


def test_a_letter_that_is_larger_than_its_topic_accepts_is_refused_before_anything_is_sent(
    cluster: Cluster,
) -> None:
    cluster.configs["small"] = {**CONFIG, "max.message.bytes": "20000"}
    cluster.write(FULL, 0)
    cluster.write(FULL, 1, value=b"x" * 19_800, ORIGIN_TOPIC="small")
    assert cluster.run(request_of()).sent == {"in": 1, "small": 1}
    assert cluster.kafka["batch.size"] == "20000", "a broker compares whole batches with the limit"
    cluster.offsets.clear()
    cluster.transactions.clear()
    cluster.write(FULL, 2, value=b"x" * 20_000, ORIGIN_TOPIC="small")
    with pytest.raises(OperatorError, match=r"too_large: 1 .*max\.message\.bytes"):
        cluster.run(request_of())
    assert cluster.transactions == []
    assert cluster.run(request_of(), skip_refused=True).refused == {"too_large": 1}
    cluster.offsets.clear()
    cluster.configs["small"] = {**CONFIG, "max.message.bytes": "30000"}
    assert cluster.run(request_of()).sent == {"in": 1, "small": 2}


@pytest.mark.parametrize(
    ("name", "new_id", "what"),
    [
        ("dead", "another", "deleted and created again"),
        ("dead", None, "deleted"),
        ("in", "another", "deleted and created again"),
        ("in", None, "deleted"),
    ],
)
def test_nothing_is_committed_if_a_topic_is_replaced_while_the_replay_runs(
    cluster: Cluster, name: str, new_id: str | None, what: str
) -> None:
    """The letters of a transaction could be those of two topics, or its records be lost with the old one."""
    for offset in range(3):
        cluster.write(FULL, offset)
    cluster.replaced[name] = new_id
    with pytest.raises(OperatorError, match=f"topic '{name}' was {what} while the replay ran"):
        cluster.run(request_of(records_at_once=2))
    assert (cluster.transactions, cluster.offsets) == ([], {})
    if name == "in":
        cluster.replaced.clear()
        assert cluster.run(request_of()).sent == {"in": 3}


@pytest.mark.parametrize("name", ["dead", "in"])
def test_one_broker_that_does_not_know_a_topic_does_not_stop_the_replay(cluster: Cluster, name: str) -> None:
    """A broker that has just started may not know it for a moment; only several answers say it is gone."""
    cluster.write(FULL, 0)
    cluster.unknown[name] = 2
    assert cluster.run(request_of()).sent == {"in": 1}
    assert cluster.unknown[name] == 0, "the topic was not looked up again"


def test_slow_brokers_do_not_make_a_topic_count_as_missing(cluster: Cluster) -> None:
    """Each answer takes longer than all of them may; still, only several answers say that a topic is gone."""
    cluster.write(FULL, 0)
    cluster.unknown["in"] = 2
    answer = cluster.topic_ids

    def topic_ids(topics: Collection[str]) -> Mapping[str, str]:
        time.sleep(0.1)  # the fault itself
        return answer(topics)

    cluster.topic_ids = topic_ids  # type: ignore[method-assign]
    assert cluster.run(request_of(), seconds=0.05).sent == {"in": 1}


def test_a_topic_that_was_created_again_is_not_looked_up_again(cluster: Cluster) -> None:
    """A broker that lags behind would return the former id."""
    cluster.write(FULL, 0)
    asked: list[Collection[str]] = []
    answer = cluster.topic_ids

    def topic_ids(topics: Collection[str]) -> Mapping[str, str]:
        asked.append(topics)
        return answer(topics) | ({"in": "another"} if len(asked) == 1 else {})  # type: ignore[operator]

    cluster.topic_ids = topic_ids  # type: ignore[method-assign]
    with pytest.raises(OperatorError, match="topic 'in' was deleted and created again"):
        cluster.run(request_of())
    assert len(asked) == 1


def test_topics_whose_letters_are_all_refused_do_not_matter_to_the_others(cluster: Cluster) -> None:
    """They take no record, so the replay needs neither their id nor their largest record batch."""
    cluster.configs["small"] = {**CONFIG, "max.message.bytes": "1000"}
    cluster.write(FULL, 0)
    cluster.write(FULL, 1, value=b"x" * 2000, ORIGIN_TOPIC="small")
    cluster.replaced["small"] = None
    found = cluster.run(request_of(), skip_refused=True)
    assert (found.sent, found.refused) == ({"in": 1}, {"too_large": 1})
    assert "batch.size" not in cluster.kafka


def test_partitions_that_the_topic_gets_while_the_replay_runs_belong_to_the_next_run(
    cluster: Cluster,
) -> None:
    cluster.write(FULL, 0)
    assert cluster.run(request_of()).sent == {"in": 1}
    grown = TopicPartition("dead", 3)
    logs = {**LOGS, grown: LogEnds(0, 2, 2)}
    cluster.write(grown, 0)
    cluster.write(grown, 1)
    later = replace(request_of(), logs=logs)
    with pytest.raises(OperatorError, match=r"none of dead-3.*--new-partitions|--new-partitions"):
        cluster.run(later)
    assert cluster.run(replace(later, new_partitions=True)).sent == {"in": 2}


def test_the_present_time_is_within_the_limits_of_timestamps(cluster: Cluster) -> None:
    cluster.configs["in"] = {**CONFIG, "message.timestamp.before.max.ms": "1000", "retention.ms": "1000"}
    cluster.write(FULL, 0, ORIGIN_TIMESTAMP="1000")
    assert cluster.run(request_of(keeps_time=False)).sent == {"in": 1}


@pytest.mark.parametrize("name", ["gone", "", ".", "a b", "x" * 250])
def test_letters_of_a_topic_that_does_not_exist_are_refused_and_the_others_sent(
    cluster: Cluster, name: str
) -> None:
    for offset in range(2):
        cluster.write(FULL, offset, ORIGIN_TOPIC=name)
    cluster.write(FULL, 2)
    with pytest.raises(OperatorError, match="no_topic: 2") as error:
        cluster.run(request_of())
    assert ("Topics that do not exist: 'gone'" in error.value.message) is (name == "gone")
    found = cluster.run(request_of(), skip_refused=True)
    assert (found.refused, found.sent) == ({"no_topic": 2}, {"in": 1})
    assert found.missing_topics == (["gone"] if name == "gone" else [])
    assert set(cluster.looked_up) <= {"in", "gone"}, "brokers answer illegal names with an error"


@pytest.mark.parametrize("name", ["gone", "a b"])
def test_an_option_that_names_no_topic_is_an_error_although_refusals_are_skipped(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(replay, "no_topic", lambda _kafka, name, _deadline: InvalidOptionError(name, fix=""))
    cluster.write(FULL, 0)
    with pytest.raises(InvalidOptionError, match=name):
        cluster.run(request_of(input_to=name), skip_refused=True)
    assert cluster.transactions == []
