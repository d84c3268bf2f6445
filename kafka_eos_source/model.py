"""Small immutable records that packages and processes exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

#: Names of the formats, as in ``spark.readStream.format(…)``.
FORMAT_NAME = "kafka-eos"
STATE_FORMAT_NAME = "kafka-eos-state"


class TopicPartition(NamedTuple):
    """One partition of one topic. Sorts by topic, then by number."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


#: Columns of a read, in their order. ``headers`` is present only with ``includeHeaders=true``.
READ_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")

#: Next offset to read, per partition. A "start" offset is included in a range, an "end" offset is not.
Offsets = Mapping[TopicPartition, int]

#: The leader epoch (KIP-320) that belongs to an offset, per partition: the log of the leader with this epoch
#: contains all records before the offset. So they have this epoch or a lower one, unless the log was cut.
Epochs = Mapping[TopicPartition, int]


class LogEnd(NamedTuple):
    """The end of a partition's log, and the epoch of the leader that named it; -1 = unknown."""

    offset: int
    epoch: int = -1


@dataclass(frozen=True)
class OffsetRange:
    """The offsets of one partition from ``start`` (included) to ``end`` (excluded).

    The range holds at most ``size`` *records*: control records, aborted records and records that compaction
    removed take up offsets too.

    Attributes:
        tp, start, end: the offsets.
        epoch: leader epoch that belongs to ``end``; -1 = unknown.
    """

    tp: TopicPartition
    start: int
    end: int
    epoch: int = -1

    @property
    def size(self) -> int:
        """Number of offsets in the range."""
        return self.end - self.start


#: What to do if the partitions of the input of an operator with ``shards="partitions"`` have changed.
OTHER_INPUT = (
    "create a topic with the new number of partitions and copy the records to it by key; then start over "
    "with that topic, a new application.id and a new checkpoint, so that the state is computed again."
)
#: A shard of a stateful operator that runs in the read, and the ranges of its records; there may be none.
ShardRanges = tuple[int, tuple[OffsetRange, ...]]


@dataclass(frozen=True)
class GroupOffset:
    """One committed offset of a consumer group.

    Attributes:
        tp: the partition.
        offset: the next offset to read.
        metadata: text that was committed together with the offset: a token or mark of this package, or the
            text of another program.
        epoch: leader epoch that belongs to the offset; -1 = unknown. It is not compared: records of the token
            topic and other programs do not keep it.
    """

    tp: TopicPartition
    offset: int
    metadata: str = ""
    epoch: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class StagedRead:
    """What one attempt of a reading task covers, if it staged its rows itself (``write=`` of `map_in_read`).

    Attributes:
        frame: id of the frame, different for each call of `map_in_read`.
        plan: id of the plan of the batch, different for each time that the source is asked for its tasks.
        position: digest of the source's position at the end of the batch.
        task: number of the task in the plan, from 0.
        tasks: number of tasks in the plan.
        task_attempt_id: id of the task attempt (UUID, hex).
        ranges: the offsets that the task read.
        lossy: whether the source accepted lost records when it planned the task (``failOnDataLoss=false``).
            The position says only whether it did when it planned the batch for the first time.
    """

    frame: str
    plan: str
    position: str
    task: int
    tasks: int
    task_attempt_id: str
    ranges: tuple[OffsetRange, ...]
    lossy: bool = False


@dataclass(frozen=True)
class ShardReport:
    """The report of one task attempt of an operator about its shard, for the commit of the batch.

    Attributes:
        tp: partition of the changelog; its number is the number of the shard.
        task_attempt_id: id of the task attempt (UUID, hex).
        shards: number of shards of the operator.
        application_id, store: the owner of the changelog, as the operator's options name it.
        group_id: consumer group in which the operator looks for the token.
        host: host name of the task.
        clock_max_ahead_ms: how far ``time_ms`` may be ahead of the clock of the driver.
        log_start: as in `ShardProgress`.
        query_id, batch_id: Spark's ids of the query and the batch.
        next_offset: end offset of the shard's changelog before this batch; 0 if the changelog is empty.
        time_ms: processing time of the batch in this shard, in ms since the epoch.
        event_time_ms: largest event time that the shard has seen; None if there is none.
        due_ms: earliest processing time at which the shard needs a batch, even without rows; None if it needs
            none (`state.model.BatchContext.request_batch_at`).
        packets: number of packets, including the packet of this report.
        records: number of state changes.
        sequence: sequence number of the token from whose state the shard started; -1 if there is no token.
        skipped: whether the shard changed nothing because its changelog already holds a batch with this id,
            although Kafka has no token of it.
        base_digest: if there is no token, `BatchRecord.end_digest` of the state from which the shard started,
            which proves what the state contains; "" = the state was empty.
        missing_state: what the user says about state that is missing in this batch (``onMissingState``):
            ``fail``, ``changelog`` or ``new``.
        failure: why the processor failed on a batch that Kafka may already hold; "" if it did not fail.
        pressure: bytes of uncommitted state as a fraction of ``statestore.uncommitted.max.bytes``; 0 if there
            is no limit.
        counts: the counters of the shard's processor over all batches, including this one.
        in_read: whether the tasks that read Kafka run the operator (``shards="partitions"``).
        topic_id: Kafka's id of the changelog topic on the operator's cluster; "" = not known.
        brokers: option ``kafka.bootstrap.servers`` of the operator, for messages.
        measured: what the task attempt measured, for metrics only: ``keys`` and ``bytes`` (estimates of the
            state on disk), ``uncommitted_bytes``, ``spilled_bytes``, ``restores``, ``restored_records`` and
            ``restore_seconds``.
    """

    tp: TopicPartition
    task_attempt_id: str
    shards: int
    query_id: str
    batch_id: int
    next_offset: int
    time_ms: int
    event_time_ms: int | None = None
    due_ms: int | None = None
    packets: int = 0
    records: int = 0
    sequence: int = -1
    skipped: bool = False
    base_digest: str = ""
    missing_state: str = "fail"
    failure: str = ""
    pressure: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict, hash=False)
    in_read: bool = False
    application_id: str = ""
    group_id: str = ""
    store: str = ""
    host: str = ""
    clock_max_ahead_ms: int = 60_000
    log_start: int = 0
    topic_id: str = ""
    brokers: str = ""
    measured: Mapping[str, float] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True)
class ShardPart:
    """The packets of one shard in one staged part.

    Attributes:
        tp: partition of the changelog.
        task_attempt_id: id of the operator's task attempt that created the packets.
        packets: numbers of the packets.
        report: the shard's report, if its packet is among them.
    """

    tp: TopicPartition
    task_attempt_id: str
    packets: tuple[int, ...]
    report: ShardReport | None = None


@dataclass(frozen=True)
class ReadTask:
    """One reading task of a batch whose source sets bad records aside (`protocol.packing.BadRecords`).

    Attributes:
        frame: id of the frame that reads, the same in all batches of a run.
        plan: id of the plan of the batch, different for each time that the source is asked for its tasks.
        task: number of the task in the plan, from 0.
        tasks: number of tasks in the plan.
        records: how many records the attempt has read, by topic, which `read.fetch.read_ranges` counts; only
            the attempt itself knows that.
    """

    frame: str
    plan: str
    task: int
    tasks: int
    records: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class TopicRecords:
    """How many records of a topic one task read, or received as marked rows, and how many of them are bad.

    Attributes:
        topic: the topic; "" = the marks of the rows do not name it.
        records: number of records; of marked rows only these.
        bad: number of bad ones.
        reason: why the first bad one is bad; "" if there is none.
    """

    topic: str
    records: int
    bad: int
    reason: str = ""


@dataclass(frozen=True)
class ReadPart:
    """The packets of one attempt of a reading task that one task of the sink received.

    Attributes:
        task: the reading task.
        task_attempt_id: id of its attempt (UUID, hex).
        packets: numbers of the packets.
        total: number of packets of the attempt; None if its last packet, which says so, is not among them.
        topics: what the attempt read of each topic, if its last packet is among them.
    """

    task: ReadTask
    task_attempt_id: str
    packets: tuple[int, ...]
    total: int | None = None
    topics: tuple[TopicRecords, ...] = ()


@dataclass(frozen=True)
class TaskFigures:
    """What a writing task measured, for metrics only.

    Attributes:
        seconds: from the request for the first row until all rows were staged or sent.
        staging_seconds: of these, the time that it took to stage or send them.
        topics: number of records, and bytes of their keys and values, per output topic.
        traceparent: header ``traceparent`` of the first record; "" if it has none.
    """

    seconds: float = 0.0
    staging_seconds: float = 0.0
    topics: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    traceparent: str = ""


@dataclass(frozen=True)
class WrittenPart:
    """The rows of one task attempt that it wrote to Kafka itself (``at_least_once``).

    Attributes:
        records: number of records.
        query_id, run_id: Spark's ids of the query and the run; "" in batch writes.
        measured: what the task measured.
    """

    records: int
    query_id: str
    run_id: str
    measured: TaskFigures


@dataclass(frozen=True)
class StagedPart:
    """The rows of one task attempt, stored durably where readers of Kafka cannot see them.

    Attributes:
        name: file name in the staging folder of the batch; "" if ``inline`` holds the bytes.
        rows: number of records: rows, and records in sealed batches.
        size_bytes: length of the Arrow IPC stream.
        checksum: CRC-32C of that stream.
        topics: each output topic with the highest partition that a row names (-1 if no row names one).
        inline: the bytes of the stream, if they are few.
        run_id: Spark's id of the streaming run; "" in batch writes.
        shards: state changes of operators among the rows; None if the frame has no column for them.
        reads: packets of reading tasks among the rows.
        senders: names of what ran for the batch on the host of the task and sends packets
            (`spark.packet_senders`).
        dead_letters: number of dead letters, if the part holds these: all of its rows, or 0.
        dropped: number of invalid rows that the task dropped besides.
        marked: rows that the frame marked as invalid, by the topic from which their records were read.
        unmarked: number of the other rows, if the sink sets invalid rows aside.
        sealed_partitions: partitions of the topic when the task sealed rows for it; 0 if it did not.
        measured: what the task measured while it staged the part.
        digest: SHA-256 of the stream; "" if only this user can write to the file, or it is inline.
    """

    name: str
    rows: int
    size_bytes: int
    checksum: int
    topics: tuple[tuple[str, int], ...] = ()
    inline: bytes | None = None
    run_id: str = ""
    shards: tuple[ShardPart, ...] | None = None
    reads: tuple[ReadPart, ...] = ()
    senders: tuple[str, ...] = ()
    dead_letters: int = 0
    dropped: int = 0
    marked: tuple[TopicRecords, ...] = ()
    unmarked: int = 0
    sealed_partitions: int = 0
    measured: TaskFigures = field(default=TaskFigures(), compare=False)
    digest: str = ""
