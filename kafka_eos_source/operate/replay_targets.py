"""Looks up which records the topics take to which a replay sends dead letters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.operate.replay_plan import Replay
from kafka_eos_source.operate.topics import no_topic
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.stage.row_rules import CLIENT_BYTES, CLOCKS_DIFFER_MS, is_legal_topic, time_limit

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
