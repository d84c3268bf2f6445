"""Plans a replay of dead letters: which ones, for which group, and where each is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from kafka_eos_source.errors import OperatorError
from kafka_eos_source.kafka.admin import ClusterReader
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.reader import LogEnds
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate.dead_letters import Filter, Letter
from kafka_eos_source.operate.topics import log_ends
from kafka_eos_source.protocol.records import INPUT, OUTPUT
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.json_input import JsonError, parse_json

_PREFIX = "kafka-eos-replay-"

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
        return self.group_id if self.group_id.startswith(_PREFIX) else f"{_PREFIX}{self.group_id}"

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
    return f"{_PREFIX}{topic}{suffix}"


def plan(
    kafka: Mapping[str, str],
    topic: str,
    selection: Filter,
    deadline: Deadline,
    *,
    group_id: str | None = None,
    output_to: str | None = None,
    input_to: str | None = None,
    records_at_once: int = 1000,
    keeps_time: bool = True,
    new_partitions: bool = False,
) -> Replay:
    """Returns a replay of what is committed now.

    Raises:
        InvalidOptionError: if there is no such topic.
        OperatorError: as `ranges`.
        UnavailableError, AuthorizationError: the cluster does not answer, or refuses to.
    """
    topic_id, logs = log_ends(kafka, topic, deadline)
    request = Replay(
        topic,
        topic_id,
        logs,
        group_id or group_of(topic, selection),
        selection,
        output_to,
        input_to,
        records_at_once,
        keeps_time,
        new_partitions,
    )
    ranges(request, committed(kafka, request, deadline))
    return request


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
