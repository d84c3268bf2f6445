"""The record of one query in the token topic: its newest token and every offset committed with it.

A consumer group can be deleted, and Kafka forgets the offsets of a group that nobody uses. The token topic is
compacted, so its record of a query stays. The commit writes the record in the transaction of the batch, which
makes it exactly as new as the token in the group.

The key of the record is the ``application.id``. Its value is compact JSON::

    {"kafka-eos-record":1, "by":"1.2.0", "token":"<text of the token>", "group":"orders", "anchor":["out",0],
     "topic-id":"<id of the token topic>", "partition":0, "time":1760000000123,
     "ends":{"in":[[0,120,98,131],[7,55]]},
     "shards":{"orders-counts-changelog":[[0,"<task attempt>",1760000000000,null,{},0]]},
     "in-read":["orders-counts-changelog"]}

``ends`` holds runs of partitions: ``[7,55]`` is partition 7 at offset 55, and ``[0,120,98,131]`` are the
partitions 0, 1 and 2. Figures for one topic, with offsets of ten digits (``len(record.encode())``):

========== ============
partitions size in bytes
========== ============
1                   437
100               1,526
4,000            44,426
========== ============
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from itertools import groupby
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import OperatorError
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import Mark, ShardProgress, Token
from kafka_eos_source.protocol.writer_version import BY, newer_version, package_version
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json

#: Format of the records that this version writes and reads. The token inside has a format of its own.
FORMAT = 1
_FORMAT_KEY = "kafka-eos-record"
#: Keys of a record. It must have the first set, may have the second, and has no other key: whoever adds a key
#: raises the format.
_REQUIRED = frozenset({_FORMAT_KEY, BY, "token", "group", "anchor", "topic-id", "partition", "time", "ends"})
_OPTIONAL = frozenset({"shards", "in-read"})
_LONG_MAX = 2**63 - 1


@dataclass(frozen=True)
class TokenRecord:
    """The record of one query in the token topic.

    Attributes:
        token: the token of the newest transaction.
        ends: every offset that the transaction committed in the group: the end offsets of the source
            partitions, the anchor, and the changelog partitions.
        anchor: the partition that carries the full token in the group.
        group_id: the group.
        topic_id: Kafka's id of the token topic that the record was written to. A record that was copied to
            another topic still names the first one.
        partition: partition of the token topic that the record was written to.
        time_ms: when the record was written, by the clock of the committing process, in ms since the epoch.
            It is for people; no decision depends on it.
        shards: progress of the shards of stateful operators, by changelog partition.
        in_read: changelog topics of the operators that run in the tasks that read Kafka.
    """

    token: Token
    ends: Mapping[TopicPartition, int] = field(hash=False)
    anchor: TopicPartition
    group_id: str
    topic_id: str
    partition: int
    time_ms: int
    shards: Mapping[TopicPartition, ShardProgress] = field(default_factory=dict, hash=False)
    in_read: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        token: Token,
        offsets: Iterable[GroupOffset],
        anchor: TopicPartition,
        group_id: str,
        topic_id: str,
        partition: int,
        time_ms: int,
    ) -> TokenRecord:
        """Returns the record of a transaction.

        Args:
            token: the token of the transaction.
            offsets: all offsets that the transaction commits in the group, with their metadata.
            anchor: the partition that carries the full token in the group.
            group_id: the group.
            topic_id, partition: where the record is written.
            time_ms: the time now, in ms since the epoch.
        """
        ends: dict[TopicPartition, int] = {}
        shards: dict[TopicPartition, ShardProgress] = {}
        in_read: set[str] = set()
        for each in offsets:
            ends[each.tp] = each.offset
            own = Token.decode(each.metadata)
            if own is not None and own.shard is not None:
                shards[each.tp] = own.shard
                if own.in_read:
                    in_read.add(each.tp.topic)
            elif own is not None and each.tp == anchor:
                token = own  # as the group holds it
        return cls(token, ends, anchor, group_id, topic_id, partition, time_ms, shards, frozenset(in_read))

    @property
    def key(self) -> bytes:
        """Key of the record."""
        return self.token.application_id.encode()

    def encode(self) -> bytes:
        """Returns the value of the record."""
        fields: dict[str, Any] = {
            _FORMAT_KEY: FORMAT,
            BY: package_version(),
            "token": self.token.encode(),
            "group": self.group_id,
            "anchor": list(self.anchor),
            "topic-id": self.topic_id,
            "partition": self.partition,
            "time": self.time_ms,
            "ends": _runs(self.ends),
        }
        if self.shards:
            fields["shards"] = {
                topic: [[tp.partition, *astuple(self.shards[tp])] for tp in partitions]
                for topic, partitions in _by_topic(self.shards)
            }
        if self.in_read:
            fields["in-read"] = sorted(self.in_read)
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, key: bytes, value: bytes) -> TokenRecord:
        """Reads a record. A record that is not exactly as `encode` writes it is refused, never guessed at.

        Raises:
            NewerVersionError: if the record, or the token in it, has a newer format.
            OperatorError: if the record is damaged.
        """
        try:
            found = parse_json(value)
            version = _whole(found[_FORMAT_KEY])
            if version <= FORMAT:
                return _parsed(key, found)
        except SHAPE_ERRORS as error:
            raise OperatorError(
                f"the record of {_shown(key)} in the token topic is damaged ({error!r}): "
                f"{value[:200].decode(errors='replace')}",
                fix="find out which program writes to the token topic, and let only kafka-eos do so.",
            ) from error
        raise newer_version(f"the record of {_shown(key)} in the token topic", found, version, FORMAT)

    def group_offsets(self) -> dict[TopicPartition, GroupOffset]:
        """Returns the offsets of the group after the transaction, each with its token or mark."""
        mark = Mark.of(self.token).encode()
        full = self.token.encode()
        numbers = Counter(tp.topic for tp in self.shards)  # every transaction names all shards of an operator

        def metadata(tp: TopicPartition) -> str:
            if tp in self.shards:
                # only tokens on source partitions store the number of partitions
                of_shard = replace(self.token, shard=self.shards[tp], shards=numbers[tp.topic])
                return replace(of_shard, partitions=-1, in_read=tp.topic in self.in_read).encode()
            return full if tp == self.anchor else mark

        return {tp: GroupOffset(tp, end, metadata(tp)) for tp, end in self.ends.items()}


def record_batch(record: TokenRecord) -> pa.RecordBatch:
    """Returns the record as rows that `kafka.wire.producer.RecordProducer.send` accepts.

    The batch has one row, so ``producer.enqueued`` grows by 1.
    """
    return _row(record.key, record.encode(), record.partition)


def tombstone_batch(key: bytes, partition: int) -> pa.RecordBatch:
    """Returns a tombstone as rows that `kafka.wire.producer.RecordProducer.send` accepts."""
    return _row(key, None, partition)


def _row(key: bytes, value: bytes | None, partition: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "key": pa.array([key], pa.binary()),
            "value": pa.array([value], pa.binary()),
            "partition": pa.array([partition], pa.int32()),
        }
    )


def _parsed(key: bytes, found: Mapping[str, Any]) -> TokenRecord:
    """Builds the record from its JSON. Any exception means that the record is damaged."""
    if found[_FORMAT_KEY] != FORMAT or not _REQUIRED <= found.keys() <= _REQUIRED | _OPTIONAL:
        raise ValueError(f"format {found[_FORMAT_KEY]} with the keys {sorted(found)}")
    token = Token.decode(_text(found["token"]))
    if token is None:
        raise ValueError("it contains no token")
    if token.application_id.encode() != key:
        raise ValueError(f"its token belongs to application.id={token.application_id!r}")
    topic, partition = found["anchor"]
    record = TokenRecord(
        token=token,
        ends=_ends(found["ends"]),
        anchor=TopicPartition(_text(topic), _whole(partition)),
        group_id=_text(found["group"]),
        topic_id=_text(found["topic-id"]),
        partition=_whole(found["partition"]),
        time_ms=_integer(found["time"]),
        shards=_shards(found.get("shards", {})),
        in_read=_in_read(found["in-read"]) if "in-read" in found else frozenset(),
    )
    if not record.in_read <= {tp.topic for tp in record.shards}:
        raise ValueError("an operator in the read has no shard")
    if not record.shards.keys() <= record.ends.keys():
        raise ValueError("a shard has no offset")
    return record


def _by_topic(partitions: Iterable[TopicPartition]) -> Iterable[tuple[str, list[TopicPartition]]]:
    for topic, own in groupby(sorted(partitions), key=lambda tp: tp.topic):
        yield topic, list(own)


def _runs(ends: Mapping[TopicPartition, int]) -> dict[str, list[list[int]]]:
    """Returns offsets by topic as runs of partitions: the first partition, then one offset for each."""
    found: dict[str, list[list[int]]] = {}
    for topic, partitions in _by_topic(ends):
        runs: list[list[int]] = []
        for tp in partitions:
            if not runs or tp.partition != runs[-1][0] + len(runs[-1]) - 1:
                runs.append([tp.partition])
            runs[-1].append(ends[tp])
        found[topic] = runs
    return found


def _ends(found: Mapping[str, list[list[int]]]) -> dict[TopicPartition, int]:
    ends: dict[TopicPartition, int] = {}
    for topic, runs in found.items():
        for first, *offsets in runs:
            for number, offset in enumerate(offsets, _whole(first)):
                tp = TopicPartition(topic, number)
                if tp in ends:
                    raise ValueError(f"{tp} occurs twice")
                ends[tp] = _whole(offset)
    return ends


def _shards(found: Mapping[str, list[list[Any]]]) -> dict[TopicPartition, ShardProgress]:
    shards: dict[TopicPartition, ShardProgress] = {}
    for topic, rows in found.items():
        for partition, task_attempt_id, time_ms, event_time_ms, counts, log_start in rows:
            tp = TopicPartition(topic, _whole(partition))
            if tp in shards:
                raise ValueError(f"shard {tp} occurs twice")
            shards[tp] = ShardProgress(
                _text(task_attempt_id),
                _integer(time_ms),
                None if event_time_ms is None else _integer(event_time_ms),
                {name: _integer(count) for name, count in counts.items()},
                _whole(log_start),
            )
    return shards


def _in_read(found: list[str]) -> frozenset[str]:
    topics = frozenset(map(_text, found))
    if not topics or found != sorted(topics):
        raise ValueError(f"operators in the read are {found!r}")
    return topics


def _integer(found: object) -> int:
    if type(found) is not int or abs(found) > _LONG_MAX:
        raise ValueError(f"{found!r} is not an integer of 64 bits")
    return found


def _whole(found: object) -> int:
    number = _integer(found)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number


def _string(found: object) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{found!r} is not a string")
    return found


def _shown(key: bytes) -> str:
    return f"application.id={key[:300].decode(errors='replace')!r}"
