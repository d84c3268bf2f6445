"""The dead letters of a topic that filters select."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from kafka_eos_source.kafka.reader import LogEnds
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate import records
from kafka_eos_source.operate.records import TopicRecord, contents_json
from kafka_eos_source.protocol.records import MOST_MS, DeadLetter, without_ours

#: A summary counts so many combinations of error, query and contents separately.
_MOST_LINES = 200


@dataclass(frozen=True)
class Letter:
    """One record of a dead-letter topic.

    Attributes:
        record: the record as it is in the log, with escaped names of headers (`spark.arrow.escaped_names`).
        about: what its headers say.
    """

    record: TopicRecord
    about: DeadLetter

    @classmethod
    def of(cls, record: TopicRecord) -> Letter:
        return cls(record, DeadLetter.parse(record.headers))

    def to_json(self) -> dict[str, Any]:
        record = self.record
        return {
            "topic": record.tp.topic,
            "partition": record.tp.partition,
            "offset": record.offset,
            "timestamp_ms": record.timestamp_ms,
            **asdict(self.about),
            **contents_json(record.key, record.value, without_ours(record.headers)),
        }


@dataclass(frozen=True)
class Filter:
    """Which dead letters to select; None = any.

    Attributes:
        at: place of the letter in its topic, ``<partition>:<offset>``.
        error: class of the error.
        application_id: the query that wrote the letter.
        origin_topic: topic from which the record was read.
        batch: micro-batch that wrote the letter.
        holds: what the letter holds, `protocol.records.INPUT` or ``OUTPUT``.
        since_ms, until_ms: time at which the letter was written, in ms since 1970; ``until_ms`` is excluded.
    """

    at: str | None = None
    error: str | None = None
    application_id: str | None = None
    origin_topic: str | None = None
    batch: int | None = None
    holds: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None

    def selects(self, letter: Letter) -> bool:
        """Returns whether the filter selects a letter."""
        about = letter.about
        for name in ("error", "application_id", "origin_topic", "batch", "holds"):
            if getattr(self, name) not in (None, getattr(about, name)):
                return False
        record = letter.record
        if self.at is not None and self.at != f"{record.tp.partition}:{record.offset}":
            return False
        at = record.timestamp_ms
        if at is None:
            return self.since_ms is None and self.until_ms is None
        if self.since_ms is not None and at < self.since_ms:
            return False
        return self.until_ms is None or at < self.until_ms

    def conditions(self) -> dict[str, Any]:
        """Returns the conditions that are set, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_letters(
    kafka: Mapping[str, Any],
    ranges: Mapping[TopicPartition, tuple[int, int]],
    logs: Mapping[TopicPartition, LogEnds],
    silence_seconds: float,
) -> Iterator[Letter]:
    """Yields the committed letters of offset ranges; of one partition in offset order.

    Args:
        kafka: librdkafka properties that say how to reach the cluster.
        ranges: for each partition the first offset, and the offset after the last one.
        logs: bounds of each partition's log.
        silence_seconds: how long brokers may be silent.
    """
    for record in records.read(kafka, ranges, logs, silence_seconds=silence_seconds, header_names="escape"):
        yield Letter.of(record)


@dataclass
class Summary:
    """Counts letters by error, query and contents.

    Attributes:
        counts: number of letters of each combination; at most `_MOST_LINES` combinations.
        others: number of letters of further combinations.
    """

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    others: int = 0

    def add(self, letter: Letter) -> None:
        about = letter.about
        line = (about.error or "-", about.application_id or "-", about.holds or "-")
        if line in self.counts or len(self.counts) < _MOST_LINES:
            self.counts[line] += 1
        else:
            self.others += 1

    @property
    def total(self) -> int:
        return self.counts.total() + self.others


def newest(letters: Iterable[Letter], count: int) -> list[Letter]:
    """Returns the newest letters, oldest first. No more than ``count`` are in memory."""
    kept: list[tuple[int, TopicPartition, int, Letter]] = []
    for letter in letters:
        record = letter.record
        entry = (record.timestamp_ms or 0, record.tp, record.offset, letter)
        if len(kept) < count:
            heapq.heappush(kept, entry)
        elif kept:
            heapq.heappushpop(kept, entry)
    return [entry[-1] for entry in sorted(kept, key=lambda entry: entry[:-1])]


def time_text(timestamp_ms: int | None) -> str:
    """Returns a time for people, in UTC; the number itself if it is after the year 9999."""
    if timestamp_ms is None:
        return "-"
    if timestamp_ms > MOST_MS:
        return f"{timestamp_ms} ms"
    return f"{datetime.fromtimestamp(timestamp_ms / 1000, timezone.utc):%Y-%m-%d %H:%M:%S}"
