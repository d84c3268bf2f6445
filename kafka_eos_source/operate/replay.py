"""Sends dead letters again: which ones, where each goes, and the transactions that send them.

A replay is a consumer group with a transactional producer. So a replay that is killed continues after its
last committed transaction, and a second one with the same group fences the first.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pyarrow as pa

from kafka_eos_source.commit.ownership import refuse_changed
from kafka_eos_source.commit.request import Clients, Producer
from kafka_eos_source.errors import (
    AbortableError,
    KafkaEosError,
    OperatorError,
    OutcomeUnknownError,
    RestartQueryError,
)
from kafka_eos_source.kafka.admin import ClusterReader
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.reader import LogEnds
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate import dead_letters
from kafka_eos_source.operate.dead_letters import Filter, Letter
from kafka_eos_source.operate.records import no_topic
from kafka_eos_source.operate.shared import REPLAY_PREFIX
from kafka_eos_source.protocol.records import INPUT, OUTPUT, without_ours
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.runtime.json_input import JsonError, parse_json
from kafka_eos_source.spark.arrow import STAGED_ARROW, with_unescaped_names
from kafka_eos_source.stage.row_rules import (
    CLIENT_BYTES,
    CLOCKS_DIFFER_MS,
    is_legal_topic,
    size_of,
    time_limit,
    with_small_batches,
)

#: Why a letter cannot be sent again, by a name that programs can rely on.
REFUSALS: Mapping[str, str] = {
    "incomplete": "the letter has only the beginning of the record, which was too large",
    "output_row": "the letter holds a row of the query's output; --to names the topic for such rows",
    "no_origin": "no header says from which topic the record was read; --input-to names one",
    "unknown_contents": "no header says whether the letter holds an input record or a row of the output",
    "own_topic": "the record would go to the dead-letter topic itself",
    "no_topic": "there is no topic of the name from which the record was read; --input-to names another",
    "no_key": "the record has no key, and the topic is compacted",
    "too_large": "the topic does not accept records of this size (max.message.bytes), or the client does not "
    "send them (message.max.bytes); raise the limit, or name another topic with --input-to or --to",
    "timestamp_limit": "the topic refuses the record's timestamp by message.timestamp.before.max.ms or "
    "message.timestamp.after.max.ms; --timestamps now sends it with the present time",
    "past_retention": "the topic would delete the record soon, because its timestamp is older than "
    "retention.ms; --timestamps now sends it with the present time",
}


@dataclass(frozen=True)
class Replay:
    """What to send again, and where.

    Attributes:
        topic: the dead-letter topic.
        topic_id: Kafka's id of the topic.
        logs: bounds of the logs of its partitions when the replay began.
        group_id: the consumer group.
        selection: which letters to send.
        output_to: topic for rows of a query's output; None = such letters are refused.
        input_to: topic for input records; None = the topic from which each was read.
        records_at_once: number of records in one transaction.
        keeps_time: whether records have the timestamps with which they were read; False = the present time.
        new_partitions: whether partitions without an offset are new, so that all of their letters are sent
            although the group has offsets of others.
    """

    topic: str
    topic_id: str
    logs: Mapping[TopicPartition, LogEnds]
    group_id: str
    selection: Filter = field(default_factory=Filter)
    output_to: str | None = None
    input_to: str | None = None
    records_at_once: int = 1000
    keeps_time: bool = True
    new_partitions: bool = False

    @property
    def transactional_id(self) -> str:
        """The transactional id: never that of a query, which the replay would fence."""
        return self.group_id if self.group_id.startswith(REPLAY_PREFIX) else f"{REPLAY_PREFIX}{self.group_id}"

    @property
    def metadata(self) -> str:
        """Text that the replay commits with its offsets. It tells the next run whose offsets they are."""
        return _text({"replay": 1, "topic_id": self.topic_id, "filter": self.selection.conditions()})

    def destination(self, letter: Letter) -> tuple[str, int | None] | str:
        """Returns topic and partition for a letter, or the name of the refusal (`REFUSALS`)."""
        about = letter.about
        topic, partition, missing = self.output_to, None, "output_row"
        if about.holds == INPUT:
            topic, missing = self.input_to or about.origin_topic, "no_origin"
            partition = None if self.input_to else about.origin_partition
        if about.value_bytes is not None:
            return "incomplete"
        if about.holds not in (INPUT, OUTPUT):
            return "unknown_contents"
        if topic is None:
            return missing
        return "own_topic" if topic == self.topic else (topic, partition)


def group_of(topic: str, selection: Filter) -> str:
    """Returns the default group of a replay. Each set of filters has its own."""
    conditions = selection.conditions()
    suffix = f"-{sha256(_text(conditions).encode()).hexdigest()[:8]}" if conditions else ""
    return f"{REPLAY_PREFIX}{topic}{suffix}"


def check_group(kafka: Mapping[str, str], request: Replay, deadline: Deadline) -> None:
    """Raises an OperatorError if the group cannot be that of this replay; see `ranges`."""
    ranges(request, committed(kafka, request, deadline))


def committed(
    kafka: Mapping[str, str], request: Replay, deadline: Deadline
) -> Mapping[TopicPartition, GroupOffset]:
    """Returns all offsets that the group has committed. Does not wait for an open transaction."""
    with ClusterReader(admin_config(kafka)) as cluster:
        return cluster.group(request.group_id, list(request.logs), deadline)[0]


def ranges(
    request: Replay, held: Mapping[TopicPartition, GroupOffset]
) -> dict[TopicPartition, tuple[int, int]]:
    """Returns what the group has not passed yet, of everything that was committed when the replay began.

    Raises:
        OperatorError: if the group belongs to another program, another topic or another set of filters, or
            has offsets of only some partitions.
    """
    for each in held.values():
        _check_owner(request, each)
    if held and not request.new_partitions:
        _check_complete(request, held)
    return {
        tp: (held[tp].offset if tp in held else log.earliest, log.stable) for tp, log in request.logs.items()
    }


def _check_owner(request: Replay, found: GroupOffset) -> None:
    theirs, log = _parsed(found.metadata), request.logs.get(found.tp)
    if theirs is None or found.tp.topic != request.topic:
        what = "holds offsets of another program or topic"
    elif theirs.get("topic_id") != request.topic_id:
        what = f"has replayed a topic {request.topic!r} that was deleted since and created again"
    elif found.metadata != request.metadata:
        conditions = theirs.get("filter") or "no filters"
        what = f"has replayed this topic with other filters ({conditions})"
    elif log is None or found.offset > log.end:
        what = f"has an offset that the topic does not have ({log or 'no such partition'})"
    else:
        return
    raise OperatorError(
        f"group {request.group_id!r} {what}: it committed {found.tp}@{found.offset}.",
        fix="name another group with --group. A letter that two groups select is sent twice.",
    )


def _check_complete(request: Replay, held: Mapping[TopicPartition, GroupOffset]) -> None:
    """Raises if partitions with letters have no offset although others have: each run commits all of them."""
    missing = [tp for tp, log in sorted(request.logs.items()) if tp not in held and log.earliest < log.stable]
    if not missing:
        return
    named = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if missing[10:] else "")
    raise OperatorError(
        f"group {request.group_id!r} has offsets of {len(held)} partitions of topic {request.topic!r}, but "
        f"none of {named}. The topic got these partitions after the group's last replay, or their offsets "
        "were deleted; then some of their letters may have been sent already.",
        fix="if the partitions are new, add --new-partitions, which sends all of their letters. Otherwise "
        "find out with `kafka-eos dead-letters list` what was sent, and name another group with --group; it "
        "sends the selected letters of all partitions again.",
    )


def _parsed(metadata: str) -> dict[str, Any] | None:
    try:
        found = parse_json(metadata)
    except JsonError:
        return None
    return found if isinstance(found, dict) and "replay" in found else None


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


# -- which records the topics take to which a replay sends letters

_TIME_TO_READ_MS = 3_600_000


@dataclass(frozen=True)
class Target:
    """A topic to which records go.

    Attributes:
        topic_id: Kafka's id of the topic.
        partitions: number of partitions.
        record_bytes: size of the largest record that the topic accepts and the client sends.
        batch_bytes: size of the largest record batch that the topic accepts.
        needs_key: whether the topic is compacted, and so refuses records without a key.
        oldest_ms: oldest timestamp that the topic keeps; None = any.
        accepted_ms: oldest and newest timestamp that the topic accepts; None = any.
    """

    topic_id: str
    partitions: int
    record_bytes: int
    batch_bytes: int
    needs_key: bool = False
    oldest_ms: int | None = None
    accepted_ms: tuple[int | None, int | None] = (None, None)

    def refusal(self, key: bytes | None, timestamp_ms: int | None, size: int) -> str | None:
        """Returns the name of the refusal of a record (`REFUSALS`); None if the topic takes it.

        Args:
            key: key of the record.
            timestamp_ms: its timestamp; None = the time at which it is sent.
            size: an upper bound of its size.
        """
        if size > self.record_bytes:
            return "too_large"
        if key is None and self.needs_key:
            return "no_key"
        if timestamp_ms is None:
            return None
        oldest, newest = self.accepted_ms
        if (oldest is not None and timestamp_ms < oldest) or (newest is not None and timestamp_ms > newest):
            return "timestamp_limit"
        return "past_retention" if self.oldest_ms is not None and timestamp_ms < self.oldest_ms else None


class Targets:
    """Looks up the topics to which records go, each of them once."""

    def __init__(self, kafka: Mapping[str, str], request: Replay, deadline: Deadline) -> None:
        self._kafka, self._request, self._seconds = kafka, request, deadline.budget_seconds
        self._known: dict[str, Target | None] = {}
        self._used: dict[str, Target] = {}

    def of(self, name: str) -> Target | None:
        """Returns one of the topics; None if a letter names it, and there is no such topic.

        Raises:
            InvalidOptionError: if an option names it, and there is no such topic.
            AuthorizationError: if the principal may not describe it or its configuration.
        """
        named = name in (self._request.output_to, self._request.input_to)
        is_legal = is_legal_topic(name)  # a broker answers other names with an error
        if not is_legal and not named:
            return None
        if name not in self._known:
            deadline = Deadline.after_seconds(self._seconds)
            found = self._ask(name, deadline) if is_legal else None
            if found is None and named:
                raise no_topic(self._kafka, name, deadline)
            self._known[name] = found
        return self._known[name]

    def use(self, name: str) -> None:
        """Notes that a record goes to one of the topics, which exists."""
        target = self.of(name)
        assert target is not None, "a topic that does not exist takes no record"
        self._used[name] = target

    @property
    def ids(self) -> dict[str, str]:
        """The ids of the topics to which records go. Topics that take none may be deleted meanwhile."""
        return {name: each.topic_id for name, each in self._used.items()}

    @property
    def batch_bytes(self) -> int | None:
        """Size of the largest record batch that all these topics accept; None if there are none."""
        return min((each.batch_bytes for each in self._used.values()), default=None)

    def missing(self) -> list[str]:
        """Returns the topics that do not exist, of those that letters name; without illegal names."""
        return sorted(name for name, target in self._known.items() if target is None)

    def _ask(self, name: str, deadline: Deadline) -> Target | None:
        with TopicAdmin(self._kafka) as admin:
            shape = admin.shape(name, deadline)
            if shape is None:
                return None
            config = admin.config(name, deadline)
        batch_bytes = int(config["max.message.bytes"])
        record_bytes = int(self._kafka.get("message.max.bytes", CLIENT_BYTES))
        if self._kafka.get("compression.type", "none") == "none":  # a compressed record may fit
            record_bytes = min(record_bytes, batch_bytes)
        needs_key = "compact" in config["cleanup.policy"]
        return Target(
            shape.topic_id,
            shape.partitions,
            record_bytes,
            batch_bytes,
            needs_key,
            _oldest_ms(config),
            _accepted_ms(config),
        )


def _oldest_ms(config: Mapping[str, str]) -> int | None:
    """Returns the oldest timestamp that a topic keeps; None if it keeps any.

    A query needs some time to read a record, so the last hour of the retention time does not count.
    """
    kept_ms = int(config["retention.ms"])
    is_deleted = "delete" in config["cleanup.policy"] and config["message.timestamp.type"] == "CreateTime"
    if kept_ms < 0 or not is_deleted:
        return None
    return round(time.time() * 1000) - kept_ms + min(_TIME_TO_READ_MS, kept_ms // 2)


def _accepted_ms(config: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Returns the oldest and the newest timestamp that a topic accepts in the next minute; None = any."""
    now_ms = round(time.time() * 1000)
    before = time_limit(config, "message.timestamp.before.max.ms")
    after = time_limit(config, "message.timestamp.after.max.ms")
    return (
        None if before is None else now_ms - before + min(CLOCKS_DIFFER_MS, before // 2),
        None if after is None else now_ms + after - min(CLOCKS_DIFFER_MS, after // 2),
    )


# -- the replay: records and the group's offsets commit in one Kafka transaction each

#: Columns of a record that the producer sends.
_ROW = pa.schema(
    [STAGED_ARROW.field(name) for name in ("key", "value", "topic", "partition", "headers", "timestamp")]
)
#: How often a topic that a broker does not know is looked up again, and the first pause before that.
_TIMES_MISSING, _PAUSE_SECONDS = 5, 0.1
#: A transaction ends with the letter that makes it this large.
_MOST_BYTES = 16 << 20


@dataclass
class Outcome:
    """What a replay sends, or has sent.

    Attributes:
        sent: number of records by topic.
        refused: number of letters by the name of the refusal.
        unselected: number of letters that the filters do not select.
        expired: number of offsets that the topic's retention deleted before the replay read them.
        waiting: number of offsets behind an open transaction; a later replay sends what is committed there.
        missing_topics: topics that selected letters name and that do not exist.
        new_group: whether the group has no offset, so that the replay starts at the first letter.
    """

    sent: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    unselected: int = 0
    expired: int = 0
    waiting: int = 0
    missing_topics: list[str] = field(default_factory=list)
    new_group: bool = False


def preview(kafka: Mapping[str, str], request: Replay, deadline: Deadline) -> Outcome:
    """Returns what `run` would send and refuse; changes nothing."""
    held = committed(kafka, request, deadline)
    found = _Survey(kafka, request, ranges(request, held), deadline).outcome()
    found.new_group = not held
    return found


def run(
    kafka: Mapping[str, str],
    clients_of: Callable[[Mapping[str, str]], Clients],
    request: Replay,
    deadline: Deadline,
    *,
    skip_refused: bool = False,
) -> Outcome:
    """Sends the letters that the group has not sent yet.

    Each transaction commits the offsets of all partitions, and each run ends with one, also if there is
    nothing to send. Kafka deletes the offset of a partition `offsets.retention.minutes` after its last
    commit, and the group would then send the letters of that partition again.

    Args:
        kafka: librdkafka properties.
        clients_of: returns clients of the same cluster for librdkafka properties.
        request: what to send; `check_group` has accepted it.
        deadline: limits the wait for the brokers; each transaction has as much time again.
        skip_refused: pass over letters that cannot be sent; the group does not come back to them. False =
            send nothing if there are any.

    Raises:
        OperatorError: if letters are refused, a transaction failed, or a topic was deleted meanwhile.
        InvalidOptionError: if a topic that the request names does not exist.
    """
    session = _Session(clients_of(kafka), request, deadline)
    try:
        session.open()
        survey = _Survey(kafka, request, ranges(request, session.held), deadline)
        found = survey.outcome()
        found.new_group = not session.held
        refused = found.refused and not skip_refused
        transactions = survey.transactions()
        if found.sent and survey.batch_bytes is not None:
            session.use(clients_of(with_small_batches(kafka, survey.batch_bytes)))
        if refused:  # the offsets that the group has stay as they are, and are renewed
            transactions = iter([([], survey.starts())] if session.held else [])
        sent: Counter[str] = Counter()
        for rows, ends in transactions:
            try:
                session.commit(rows, ends, survey.topic_ids)
            except (AbortableError, OutcomeUnknownError, RestartQueryError) as error:
                raise OperatorError(
                    f"the replay stopped after {sent.total():,} records: {error.message}",
                    fix="run the same command again; it continues after the last committed transaction. "
                    "If it stops there again, correct what the message names, or select other letters.",
                ) from error
            sent.update(row["topic"] for row in rows)
        if refused:
            raise _refused(found)
        found.sent = sent
        return found
    finally:
        session.close()


class _Survey:
    """The letters that a replay has to look at, which it reads once to count them and once to send them."""

    def __init__(
        self,
        kafka: Mapping[str, str],
        request: Replay,
        ranges: Mapping[TopicPartition, tuple[int, int]],
        deadline: Deadline,
    ) -> None:
        self._kafka, self._request, self._ranges = kafka, request, ranges
        self._targets = Targets(kafka, request, deadline)
        self._silence = deadline.budget_seconds

    @property
    def batch_bytes(self) -> int | None:
        """Size of the largest record batch that all topics accept to which records go."""
        return self._targets.batch_bytes

    @property
    def topic_ids(self) -> dict[str, str]:
        """Ids of the dead-letter topic and of the topics to which records go, as they were at first."""
        return {**self._targets.ids, self._request.topic: self._request.topic_id}

    def outcome(self) -> Outcome:
        """Counts what there is to send and to refuse."""
        found = Outcome()
        for tp, (start, _) in self._ranges.items():
            log = self._request.logs[tp]
            found.expired += max(0, log.earliest - start)
            found.waiting += log.end - log.stable
        for letter in self._letters():
            if not self._request.selection.selects(letter):
                found.unselected += 1
                continue
            row = self._row(letter)
            if isinstance(row, str):
                found.refused[row] += 1
            else:
                found.sent[row["topic"]] += 1
        found.missing_topics = self._targets.missing()
        return found

    def starts(self) -> dict[TopicPartition, int]:
        """Returns the offset of each partition from which the replay reads."""
        return {tp: start for tp, (start, _) in self._ranges.items()}

    def transactions(self) -> Iterator[tuple[list[dict[str, Any]], dict[TopicPartition, int]]]:
        """Yields the rows of each transaction with the offsets of all partitions that it commits.

        The offsets also pass letters that are not sent. The last transaction commits the end of each range.
        """
        rows: list[dict[str, Any]] = []
        ends = self.starts()
        size = 0
        for letter in self._letters():
            record = letter.record
            ends[record.tp] = record.offset + 1
            row = self._row(letter) if self._request.selection.selects(letter) else ""
            if not isinstance(row, str):
                rows.append(row)
                size += len(record.key or b"") + len(record.value or b"")
            if len(rows) >= self._request.records_at_once or size >= _MOST_BYTES:
                yield rows, dict(ends)
                rows, size = [], 0
        # behind the last letter there may be control records
        yield rows, {tp: max(start, end) for tp, (start, end) in self._ranges.items()}

    def _row(self, letter: Letter) -> dict[str, Any] | str:
        """Returns the record to send, without the headers that made it a letter, or the name of a refusal."""
        to = self._request.destination(letter)
        if isinstance(to, str):
            return to
        topic, partition = to
        target = self._targets.of(topic)
        if target is None:
            return "no_topic"
        timestamp = letter.about.origin_timestamp_ms if self._request.keeps_time else None
        headers = without_ours(letter.record.headers)
        size = size_of(letter.record.key, letter.record.value, headers)
        refusal = target.refusal(letter.record.key, timestamp, size)
        if refusal is not None:
            return refusal
        self._targets.use(topic)
        return {
            "key": letter.record.key,
            "value": letter.record.value,
            "topic": topic,
            "partition": None if partition is None or partition >= target.partitions else partition,
            "headers": [{"key": name, "value": value} for name, value in headers] or None,
            "timestamp": timestamp,
        }

    def _letters(self) -> Iterator[Letter]:
        return dead_letters.read_letters(self._kafka, self._ranges, self._request.logs, self._silence)


class _Session:
    """Producer and committed offsets of a replay group.

    Attributes:
        held: offsets that the group has committed.
    """

    def __init__(self, clients: Clients, request: Replay, deadline: Deadline) -> None:
        self._clients, self._request, self._partitions = clients, request, list(request.logs)
        self._seconds = deadline.budget_seconds
        self._producer: Producer | None = None
        self._confirmed = False
        self.held: Mapping[TopicPartition, GroupOffset] = {}

    def open(self) -> None:
        """Takes over the transactional id, then reads the offsets, which no older replay can change."""
        deadline = self._deadline()
        self._producer = self._clients.producer(self._request.transactional_id)
        self._producer.init(deadline)
        self.held = self._clients.group_offsets(self._request.group_id, self._partitions, deadline)
        self._confirmed = False

    def use(self, clients: Clients) -> None:
        """Replaces the clients before the first transaction."""
        self.close()
        self._clients = clients

    def commit(
        self,
        rows: Sequence[Mapping[str, Any]],
        ends: Mapping[TopicPartition, int],
        topic_ids: Mapping[str, str],
    ) -> None:
        """Commits records and offsets together.

        Args:
            rows: the records.
            ends: the offsets.
            topic_ids: ids of the topics that were read and are written. Ids never recur, so if they are the
                same after the last acknowledged record, everything was read and written there.

        Raises:
            KafkaEosError: if that failed. Only after an `OutcomeUnknownError` may they be committed.
        """
        deadline, before = self._deadline(), self.held
        if self._producer is None:
            self.open()
            if any(self.held.get(tp) != before.get(tp) for tp in self._partitions):
                raise AbortableError(f"another replay of group {self._request.group_id!r} has run meanwhile")
        producer = self._producer
        assert producer is not None, "open() sets it"
        offsets = [GroupOffset(tp, end, self._request.metadata) for tp, end in sorted(ends.items())]
        failpoints.reach("replay.before_begin")
        producer.begin()
        try:
            if rows:
                batch = pa.RecordBatch.from_pylist(list(rows), schema=_ROW)
                producer.send(with_unescaped_names(batch), None, deadline)
                producer.flush(deadline)
            if producer.enqueued != len(rows):
                raise AbortableError(f"the client enqueued {producer.enqueued} of {len(rows)} records")
            failpoints.reach("replay.after_flush")
            _check_topics(topic_ids, _present_ids(producer, topic_ids))
            producer.send_offsets(offsets, self._request.group_id, deadline)
            self._confirm(deadline)
            failpoints.reach("replay.before_commit")
            producer.commit(deadline)
        except OutcomeUnknownError:
            raise
        except KafkaEosError:
            producer.abort(deadline)
            raise
        failpoints.reach("replay.after_commit")
        self.held = {**before, **{each.tp: each for each in offsets}}
        if not producer.is_clean():
            self.close()

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def _confirm(self, deadline: Deadline) -> None:
        """Reads the offsets again from the coordinator that accepted those of the first transaction.

        OffsetFetch is not a quorum read: a coordinator that is cut off may have answered with old offsets.
        """
        if not self._confirmed:
            group_id = self._request.group_id
            now = self._clients.proved_offsets(group_id, self._partitions, deadline)
            refuse_changed(group_id, self._partitions, self.held, now)
            self._confirmed = True

    def _deadline(self) -> Deadline:
        return Deadline.after_seconds(self._seconds)


def _present_ids(producer: Producer, topics: Collection[str]) -> dict[str, str]:
    """Returns the ids of topics; only topics that several answers do not contain are missing.

    A broker that has just started may not know a topic for a moment. An id is never asked for again: if it
    differs from the former one, the topic was created again, and a broker that lags behind may not know that.
    The number of answers counts, and not the time: a slow broker does not say that a topic is missing.
    """
    pauses = Pauses(None, _PAUSE_SECONDS, 8 * _PAUSE_SECONDS, most=_TIMES_MISSING)
    found = dict(producer.topic_ids(topics))
    while (missing := sorted(set(topics) - set(found))) and not pauses.expired:
        pauses.wait()
        found |= producer.topic_ids(missing)
    return found


def _check_topics(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises an OperatorError if a topic is not the one that it was when the replay looked it up."""
    for name, topic_id in sorted(before.items()):
        if now.get(name) == topic_id:
            continue
        what = "deleted" if name not in now else "deleted and created again"
        raise OperatorError(
            f"topic {name!r} was {what} while the replay ran: its id was {topic_id} and is "
            f"{now.get(name, 'none')}. The records and offsets of this transaction were not committed.",
            fix="create the topic if it is missing, then run the same command again. If it is the "
            "dead-letter topic, its old letters are lost, and the new ones are sent from the first on.",
        )


def _refused(planned: Outcome) -> OperatorError:
    counts = "; ".join(f"{name}: {count:,} ({REFUSALS[name]})" for name, count in planned.refused.items())
    if planned.missing_topics:
        more = f" and {len(planned.missing_topics) - 10} more" if planned.missing_topics[10:] else ""
        named = ", ".join(map(repr, planned.missing_topics[:10]))
        counts += f". Topics that do not exist: {named}{more}"
    return OperatorError(
        f"{planned.refused.total():,} of the selected letters cannot be sent: {counts}. Nothing was sent.",
        fix="select others with --holds or --error, add the option that the reason names, or pass over these "
        "letters with --skip-refused. They stay in the topic, but this group does not come back to them.",
    )
