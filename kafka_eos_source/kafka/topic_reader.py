"""Reads records of a topic for people: the newest ones, or new ones as they arrive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.cluster_reader import LogEnds
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.failure import classify, is_transient
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

#: librdkafka requires a group id of every consumer. The reader joins no group and commits nothing.
_GROUP = "kafka-eos-topic-reader"
_POLL_SECONDS = 0.2
_RECORDS_AT_ONCE = 10_000

#: ``committed``: read_committed consumers see the record. ``open``: its transaction has not ended, or a
#: transaction before it in the partition has not. ``aborted``: no read_committed consumer will ever see it.
State = Literal["committed", "open", "aborted"]


@dataclass(frozen=True)
class TopicRecord:
    """One record as it is in the log.

    Attributes:
        tp, offset: where the record is.
        timestamp_ms: milliseconds since the epoch; None if the record has no timestamp.
        key, value: bytes; None is Kafka's null.
        headers: names and values in their order.
        state: whether read_committed consumers see the record.
    """

    tp: TopicPartition
    offset: int
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    state: State = "committed"


class TopicReader:
    """Reads one topic with a consumer that joins no group; a context manager.

    Args:
        kafka: librdkafka properties that say how to reach the cluster.
        deadline_seconds: how long brokers may be silent during a read, in seconds.
        records_at_once: number of records in memory, besides those that the client prefetches.
        prefetched_kib: how much the client prefetches.
    """

    def __init__(
        self,
        kafka: Mapping[str, Any],
        deadline_seconds: float = 30.0,
        records_at_once: int = _RECORDS_AT_ONCE,
        prefetched_kib: int = 65_536,
    ) -> None:
        self._kafka = {**admin_config(kafka), "queued.max.messages.kbytes": prefetched_kib}
        self._records_at_once = records_at_once
        self._deadline_seconds = deadline_seconds
        self._clients: dict[str, Any] = {}

    def __enter__(self) -> TopicReader:
        return self

    def __exit__(self, *_error: object) -> None:
        for client in self._clients.values():
            client.close()

    def newest(
        self, logs: Mapping[TopicPartition, LogEnds], count: int, *, uncommitted: bool
    ) -> list[TopicRecord]:
        """Returns the newest records of all partitions together, oldest first.

        Offsets are no record numbers, because control records and compaction leave gaps. So the reader starts
        some offsets before the end and goes further back until it has found enough.

        Args:
            logs: bounds of each partition's log.
            count: how many records.
            uncommitted: whether to include records of open and aborted transactions.

        Raises:
            UnavailableError, AuthorizationError: as `read`.
        """
        back = 2 * count + 10
        while True:
            ranges = {}
            for tp, log in logs.items():
                end = log.end if uncommitted else log.stable
                ranges[tp] = (max(log.earliest, end - back), end)
            found = list(self.read(ranges, logs, uncommitted=uncommitted))
            whole = all(ranges[tp][0] == log.earliest for tp, log in logs.items())
            if len(found) >= count or whole:
                return _in_time_order(found)[-count:] if count else []
            back *= 8

    def read(
        self,
        ranges: Mapping[TopicPartition, tuple[int, int]],
        logs: Mapping[TopicPartition, LogEnds],
        *,
        uncommitted: bool,
    ) -> Iterator[TopicRecord]:
        """Yields the records of offset ranges; of one partition in offset order.

        Args:
            ranges: for each partition the first offset, and the offset after the last one.
            logs: bounds of each partition's log, which tell open transactions from ended ones.
            uncommitted: whether to include records of open and aborted transactions, marked as such.

        Raises:
            UnavailableError: no broker sends more of the ranges for too long, or a log was truncated.
            AuthorizationError: the topic may not be read.
        """
        if not uncommitted:
            yield from self._read(ranges, "read_committed")
            return
        stable = {tp: (start, min(end, logs[tp].stable)) for tp, (start, end) in ranges.items()}
        seen = {(record.tp, record.offset) for record in self._read(stable, "read_committed")}
        for record in self._read(ranges, "read_uncommitted"):
            state: State = "committed"
            if record.offset >= logs[record.tp].stable:
                state = "open"
            elif (record.tp, record.offset) not in seen:
                state = "aborted"
            yield replace(record, state=state)

    def _read(
        self, ranges: Mapping[TopicPartition, tuple[int, int]], isolation_level: str
    ) -> Iterator[TopicRecord]:
        left = {tp: end for tp, (start, end) in ranges.items() if start < end}
        if not left:
            return
        positions = {tp: ranges[tp][0] for tp in left}
        short: dict[TopicPartition, int] = {}  # where a broker said that a log ends, before its range does
        client = self._client(isolation_level)
        client.assign([ClientPartition(tp.topic, tp.partition, ranges[tp][0]) for tp in left])
        silence = Deadline.after_seconds(self._deadline_seconds)
        try:
            while left:
                messages = client.consume(self._records_at_once, _POLL_SECONDS)
                proceeds = False
                for message in messages:
                    tp = TopicPartition(message.topic(), message.partition())
                    error = message.error()
                    if error is None:
                        # a log that was truncated below the position is read from its beginning
                        if tp not in left or message.offset() < positions[tp]:
                            continue
                        proceeds, positions[tp] = True, message.offset() + 1
                        if message.offset() < left[tp]:
                            yield _record(tp, message)
                        if positions[tp] >= left[tp]:
                            del left[tp]
                    elif error.code() == KafkaError._PARTITION_EOF:
                        if tp not in left:
                            continue
                        if message.offset() >= left[tp]:
                            proceeds = True
                            del left[tp]  # only control records were left
                        else:  # a new leader may not know yet how far the log is committed
                            short[tp] = message.offset()
                    elif not is_transient(error):
                        raise classify(error, f"reading topic {tp.topic!r}")
                if proceeds:  # only now: what the caller did with the records is not the brokers' silence
                    silence = Deadline.after_seconds(self._deadline_seconds)
                elif silence.expired:
                    raise self._silent(left, short)
        except KafkaException as error:
            raise classify(error, "reading records") from error
        finally:
            client.unassign()

    def _silent(
        self, left: Mapping[TopicPartition, int], short: Mapping[TopicPartition, int]
    ) -> UnavailableError:
        """Returns the error for ranges of which nothing more arrives."""
        ends = "".join(
            f" The log of {tp} ends at {short[tp]}; records up to {end} were expected."
            for tp, end in sorted(left.items())
            if tp in short
        )
        return UnavailableError(
            f"nothing arrives from {', '.join(map(str, sorted(left)))}; waited "
            f"{self._deadline_seconds:.0f} s.{ends}",
            fix="check that the leaders of these partitions are up"
            + (", and whether an unclean leader election truncated a log." if ends else "."),
        )

    def _client(self, isolation_level: str) -> Any:
        if isolation_level not in self._clients:
            self._clients[isolation_level] = make(
                Consumer,
                {
                    **self._kafka,
                    "group.id": _GROUP,
                    "isolation.level": isolation_level,
                    "enable.auto.commit": False,
                    "enable.partition.eof": True,
                    "auto.offset.reset": "earliest",
                    "allow.auto.create.topics": False,
                    "fetch.wait.max.ms": 20,
                },
            )
        return self._clients[isolation_level]


def _in_time_order(records: list[TopicRecord]) -> list[TopicRecord]:
    """Merges partitions by time, and keeps the offset order within each of them."""
    latest: dict[TopicPartition, int] = {}
    times = []
    for record in records:
        latest[record.tp] = max(record.timestamp_ms or 0, latest.get(record.tp, 0))
        times.append((latest[record.tp], record.tp, record.offset))
    return [record for _, record in sorted(zip(times, records, strict=True), key=lambda pair: pair[0])]


def _record(tp: TopicPartition, message: Any) -> TopicRecord:
    kind, timestamp = message.timestamp()
    return TopicRecord(
        tp,
        message.offset(),
        timestamp if kind else None,
        message.key(),
        message.value(),
        tuple(message.headers() or ()),
    )
