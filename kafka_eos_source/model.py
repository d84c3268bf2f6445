"""Small frozen records that cross a stage or a process. No behaviour beyond arithmetic on themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

#: Names of the formats, as in ``spark.readStream.format(…)``.
FORMAT_NAME = "kafka-eos"
STATE_FORMAT_NAME = "kafka-eos-state"


class TopicPartition(NamedTuple):
    """One partition of one topic. Sorts by topic, then number."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


#: Columns of a read, in their order; ``headers`` only when asked for.
READ_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")

#: Next offset to read, per partition ("end" is excluded, "start" is included, always).
Offsets = Mapping[TopicPartition, int]


@dataclass(frozen=True)
class OffsetRange:
    """Offsets ``start`` (included) to ``end`` (excluded) of one partition.

    The number of *records* in it is at most ``size``: control markers, aborted and compacted-away
    records take offsets too.
    """

    tp: TopicPartition
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class SourceOffsets:
    """What one Kafka source of a micro-batch has read up to, as written in Spark's offset log.

    Attributes:
        end: next offset to read, per partition.
        cluster_id: Kafka's id of the cluster read, or None when the source did not say (Spark's own).
    """

    end: Offsets
    cluster_id: str | None = None


@dataclass(frozen=True)
class GroupOffset:
    """One offset of a consumer group: the next one to read, and what was written beside it.

    Attributes:
        metadata: free text committed atomically with the offset; the token, in our case.
    """

    tp: TopicPartition
    offset: int
    metadata: str = ""


@dataclass(frozen=True)
class ShardReport:
    """What one task attempt of an operator says of its shard, for the commit of the batch.

    Attributes:
        tp: partition of the changelog, whose number is the shard's.
        attempt: the task attempt (UUID, hex).
        shards: how many shards the operator has.
        query_id, batch_id: Spark's.
        next_offset: where the shard's changelog ended before this batch: next offset to read, 0 = empty.
        time_ms: processing time of the batch in this shard, ms since the epoch.
        event_time_ms: largest event time known to the shard; None = none yet.
        packets, records: how many packets and changes there are, this report's packet included.
        sequence: sequence number of the token that the shard's state stands at; -1 = there is no token.
        skipped: the changelog holds the batch already although Kafka has no token, so the shard made nothing.
        accepts_gap: whether the user accepts that batches were committed without their state
            (``onMissingState=changelog``).
        failure: why the processor failed on a batch that may be in Kafka already; "" = it did not.
        pressure: bytes of uncommitted state, as a part of ``statestore.uncommitted.max.bytes``; 0 = no limit.
        counts: what the shard's processor has counted in all batches, this one included.
    """

    tp: TopicPartition
    attempt: str
    shards: int
    query_id: str
    batch_id: int
    next_offset: int
    time_ms: int
    event_time_ms: int | None = None
    packets: int = 0
    records: int = 0
    sequence: int = -1
    skipped: bool = False
    accepts_gap: bool = False
    failure: str = ""
    pressure: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class ShardPart:
    """The packets of one shard that came in one staged part.

    Attributes:
        tp: partition of the changelog.
        attempt: the operator's task attempt that made them.
        packets: their numbers.
        report: when its packet is among them.
    """

    tp: TopicPartition
    attempt: str
    packets: tuple[int, ...]
    report: ShardReport | None = None


@dataclass(frozen=True)
class StagedPart:
    """One task attempt's rows, made durable and invisible to readers.

    Attributes:
        name: file name inside the batch's staging folder, or "" when ``inline`` holds the bytes.
        rows: rows in it.
        size_bytes: length of the Arrow IPC stream.
        crc32: CRC-32 (zlib) of those bytes.
        topics: each output topic in it with the highest partition asked for (-1 = none was).
        inline: the bytes themselves, when there are few.
        run_id: the streaming run that the task belonged to ("" in batch writes).
        shards: changes of operators' state among the rows; None = the frame has no column for them.
        operators: changelog topics of the operators that ran for the batch on the task's machine.
    """

    name: str
    rows: int
    size_bytes: int
    crc32: int
    topics: tuple[tuple[str, int], ...] = ()
    inline: bytes | None = None
    run_id: str = ""
    shards: tuple[ShardPart, ...] | None = None
    operators: tuple[str, ...] = ()
