"""Checks what must hold after every fault: each record once, in order, offsets at the end, nothing open."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaException, TopicPartition

from integration.support.kafka import TIMEOUT_SECONDS, Record, end_offsets, read_back
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.testing.verdict import Verdict, judge


@dataclass(frozen=True)
class Outcome:
    """The verdict on one run.

    Attributes:
        rows: comparison of the output records with the input records.
        out_of_order: keys whose output records are not in the order in which they were sent.
        group_is_behind: source partitions whose committed offset is not the end of the partition.
        open_partitions: output partitions with an open transaction (last stable offset below the end).
        token: the token with the highest sequence number; None if Kafka holds none.
    """

    rows: Verdict
    out_of_order: tuple[str, ...]
    group_is_behind: tuple[str, ...]
    open_partitions: tuple[str, ...]
    token: Token | None

    @property
    def exactly_once(self) -> bool:
        return self.rows.exactly_once and not (
            self.out_of_order or self.group_is_behind or self.open_partitions
        )


def outcome(
    bootstrap: str, source: str, sink: str, group_id: str, sent: Iterable[tuple[str, str]]
) -> Outcome:
    """Reads the output topic with read_committed and compares it with what was sent.

    Args:
        bootstrap: bootstrap servers of the cluster with both topics and the group.
        source, sink: names of the topics.
        group_id: the query's consumer group.
        sent: key and value of every record sent to the source, in order.
    """
    sent = list(sent)
    found = read_back(bootstrap, sink)
    ends, stable = (end_offsets(bootstrap, topic, "read_committed") for topic in (source, sink))
    written = end_offsets(bootstrap, sink)
    group = _group(bootstrap, group_id, [(source, number) for number in ends] + [(sink, 0)])
    tokens = [token for _, text in group.values() if (token := Token.decode(text)) is not None]
    return Outcome(
        rows=judge(sent, ((_text(each.key), _text(each.value)) for each in found)),
        out_of_order=tuple(_out_of_order(sent, found)),
        group_is_behind=tuple(
            f"{source}-{number}: {group.get((source, number), (None,))[0]} of {end}"
            for number, end in ends.items()
            if end and group.get((source, number), (None,))[0] != end
        ),
        open_partitions=tuple(f"{sink}-{number}" for number, end in written.items() if stable[number] != end),
        token=max(tokens, key=lambda token: token.sequence, default=None),
    )


def _out_of_order(sent: list[tuple[str, str]], found: list[Record]) -> Iterable[str]:
    """Yields keys whose order changed. All records of a key are in one partition, ordered by offset."""
    wanted, seen = defaultdict(list), defaultdict(list)
    for key, value in sent:
        wanted[key].append(value)
    for each in found:
        seen[_text(each.key)].append(_text(each.value))
    for key, values in wanted.items():
        position = {value: number for number, value in enumerate(values)}
        numbers = [position[value] for value in seen[key] if value in position]
        if numbers != sorted(numbers):
            yield key


def _group(
    bootstrap: str, group_id: str, partitions: list[tuple[str, int]]
) -> dict[tuple[str, int], tuple[int, str]]:
    """Returns committed offsets and metadata.

    It uses a consumer, because the admin client fails while the group coordinator moves to another broker.
    """
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group_id})
    try:
        found = consumer.committed(
            [TopicPartition(topic, number) for topic, number in partitions], timeout=TIMEOUT_SECONDS
        )
        for each in found:
            if each.error is not None:  # it would look like a partition without an offset
                raise KafkaException(each.error)
        return {
            (each.topic, each.partition): (each.offset, (each.metadata or "").rstrip("\0"))
            for each in found
            if each.offset >= 0
        }
    finally:
        consumer.close()


def _text(data: bytes | None) -> str:
    return "" if data is None else data.decode()
