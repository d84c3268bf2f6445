"""What must be true when everything has come to rest, whatever was broken on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from confluent_kafka import Consumer, TopicPartition

from integration.support.kafka import TIMEOUT_SECONDS, Record, end_offsets, read_back
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.testing.verdict import Verdict, judge


@dataclass(frozen=True)
class Outcome:
    """The verdict on one run.

    Attributes:
        rows: records of the output against those of the input.
        out_of_order: keys whose records are not in the order in which they were sent.
        group_is_behind: source partitions where the group does not stand at the end.
        open_partitions: output partitions whose last stable offset is below their end: a transaction is open.
        token: the token of the last batch.
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
    """Reads the output under read_committed and compares.

    Args:
        bootstrap: of the cluster that has it all.
        source, sink: topics.
        group_id: of the query.
        sent: key and value of what was sent to the source, in order.
    """
    sent = list(sent)
    found = read_back(bootstrap, sink)
    ends, stable = (end_offsets(bootstrap, topic, "read_committed") for topic in (source, sink))
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
        open_partitions=tuple(
            f"{sink}-{number}"
            for number, end in end_offsets(bootstrap, sink).items()
            if stable[number] != end
        ),
        token=max(tokens, key=lambda token: token.sequence, default=None),
    )


def _out_of_order(sent: list[tuple[str, str]], found: list[Record]) -> Iterable[str]:
    """Keys stay in their partition, whose offsets tell their order."""
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
    """Offsets and metadata. Not by an admin client, which does not survive a coordinator that moves."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group_id})
    try:
        found = consumer.committed(
            [TopicPartition(topic, number) for topic, number in partitions], timeout=TIMEOUT_SECONDS
        )
        return {
            (each.topic, each.partition): (each.offset, (each.metadata or "").rstrip("\0"))
            for each in found
            if each.offset >= 0
        }
    finally:
        consumer.close()


def _text(data: bytes | None) -> str:
    return "" if data is None else data.decode()
