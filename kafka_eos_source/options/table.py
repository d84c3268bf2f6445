"""Every option, declared once: its name, where it may be set, parser, default and description.

Names and meanings are those of Spark's own Kafka connector wherever it has the option.
``python -m kafka_eos_source.options`` generates ``docs/options.md`` from this table. The module is long because
it is data: an option is looked up here by its name.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from kafka_eos_source import option_values as values
from kafka_eos_source.protocol.records import (
    LARGEST_MOST_DECOMPRESSED_BYTES,
    MOST_DECOMPRESSED,
    MOST_DECOMPRESSED_BYTES,
)
from kafka_eos_source.sinks.specs import sink_names

STREAM_READ, BATCH_READ = "stream read", "batch read"
STREAM_WRITE, BATCH_WRITE = "stream write", "batch write"
READ, WRITE = (STREAM_READ, BATCH_READ), (STREAM_WRITE, BATCH_WRITE)
OPERATOR = "stateful operator"
STATE = (OPERATOR,)
STATE_READ = "state read"

#: Option that carries a step of the query for the tasks that read (`in_read.step`).
STEP_IN_READ = "step.in.read"

#: The most memory of the engine of SQL in the read in one task, in bytes.
SQL_MEMORY = "sql.memory.bytes"
SQL_MEMORY_BYTES = 256 << 20
LEAST_SQL_MEMORY_BYTES = 32 << 20

#: Digests of the static tables of a query's SQL texts, and what happens if one has changed.
STATIC_TABLES, CHANGED_TABLE = "sql.tables", "onChangedTable"
#: Prefixes of options of a source that carry the options of the sink (``write=`` of `map_in_read`), and those
#: of a stateful operator (``shards="partitions"``). Each is an option of its own, so that Spark masks their
#: secrets by name, as it does for the sink and the operator.
SINK_IN_READ = "step.in.read.write."
OPERATOR_IN_READ = "step.in.read.operator."
#: Prefix of the options of a read that only checks a query before it starts (`datasource.start_checks`).
CHECK = "check.query."


#: Option by which the user states that producers choose the partition by the record's key.
KEYED = "partitioned.by.key"


@dataclass(frozen=True)
class Option:
    """Declaration of one option.

    Attributes:
        name: the documented name; not case-sensitive.
        where: kinds of reads and writes that take the option.
        parse: turns the text of the option into its value.
        kind: type and unit, for the documentation.
        meaning: description, for the documentation.
        default: value if the option is not set.
        shown_default: the default for the documentation; empty if ``default`` can be shown as it is.
        instead: what to do if the option is set on another kind of read or write.
        since: first PySpark version with the interfaces that it needs; empty if all supported versions have
            them.
        idle: kinds of reads and writes that check the option and then ignore it.
    """

    name: str
    where: tuple[str, ...]
    parse: values.Parse[Any]
    kind: str
    meaning: str
    _: KW_ONLY
    default: Any = None
    shown_default: str = ""
    instead: str = ""
    since: str = ""
    idle: tuple[str, ...] = ()


ISOLATION_LEVELS = ("read_committed", "read_uncommitted")

_ONE_OF_THREE = "set exactly one of the three"
_STREAMS_DO_NOT_END = "remove it; to read what is in the topics now and then stop, use Trigger.AvailableNow"
_STREAMS_USE_BATCH_ID = (
    "remove it; a streaming sink recognises a repeated batch by its batch id. Inside foreachBatch, set it "
    "on the batch write"
)

OPTIONS: tuple[Option, ...] = (
    # what to read
    Option(
        "subscribe",
        READ,
        values.topics,
        "topics, comma-separated",
        "Topics to read.",
        shown_default=_ONE_OF_THREE,
    ),
    Option(
        "subscribePattern",
        READ,
        values.pattern,
        "regular expression",
        "Reads every topic whose name contains a match. The source looks for new matching topics before each "
        "micro-batch. Internal topics never match.",
        shown_default=_ONE_OF_THREE,
    ),
    Option(
        "assign",
        READ,
        values.assignment,
        'JSON `{"t":[0,1]}`',
        "Partitions to read. The query does not read partitions that are added to the topic later.",
        shown_default=_ONE_OF_THREE,
    ),
    # where to start and stop
    Option(
        "startingOffsets",
        READ,
        values.text,
        '`earliest`, `latest`, `group`, JSON `{"t":{"0":23,"1":-1}}`',
        "Where a query without a checkpoint starts. In JSON, -1 means latest and -2 means earliest; "
        '`{"t":"earliest"}` covers all partitions of topic `t`, and `{"*":"latest"}` covers all topics that the '
        "JSON does not name. `group` starts at the offsets that the consumer group has committed, and at the "
        "earliest offset of a partition without one.",
        shown_default="`latest` for a stream, `earliest` for a batch read",
    ),
    Option(
        "startingOffsetsByTimestamp",
        READ,
        values.timestamps,
        'JSON `{"t":{"0":ms}}`',
        "Starts each partition at its first record at or after the given time (ms since 1970). Takes "
        "precedence over `startingOffsets`.",
    ),
    Option(
        "startingTimestamp",
        READ,
        values.integer(0),
        "ms since 1970",
        "Starts every partition at its first record at or after this time. Takes precedence over "
        "`startingOffsetsByTimestamp` and `startingOffsets`.",
    ),
    Option(
        "startingOffsetsByTimestampStrategy",
        READ,
        values.choice("error", "latest"),
        "`error`, `latest`",
        "What happens if a partition has no record at or after the starting time: `error` fails the query, "
        "`latest` starts the partition at its end.",
        default="error",
    ),
    Option(
        "endingOffsets",
        (BATCH_READ,),
        values.text,
        "`latest`, JSON",
        "Where a batch read stops. The end offset itself is not read. In JSON, -1 means latest.",
        shown_default="`latest`",
        instead=_STREAMS_DO_NOT_END,
    ),
    Option(
        "endingOffsetsByTimestamp",
        (BATCH_READ,),
        values.timestamps,
        'JSON `{"t":{"0":ms}}`',
        "Stops each partition before its first record at or after the given time (ms since 1970). A "
        "partition without such a record is read to its end. Takes precedence over `endingOffsets`.",
        instead=_STREAMS_DO_NOT_END,
    ),
    Option(
        "endingTimestamp",
        (BATCH_READ,),
        values.integer(0),
        "ms since 1970",
        "Stops every partition before its first record at or after this time. Takes precedence over "
        "`endingOffsetsByTimestamp` and `endingOffsets`.",
        instead=_STREAMS_DO_NOT_END,
    ),
    # how much at a time
    Option(
        "maxOffsetsPerTrigger",
        (STREAM_READ,),
        values.integer(1),
        "offsets",
        "Maximum number of offsets in one micro-batch. Partitions share it in proportion to their backlog.",
        shown_default="no limit",
        since="4.2",
        idle=(BATCH_READ,),
    ),
    Option(
        "minOffsetsPerTrigger",
        (STREAM_READ,),
        values.integer(1),
        "offsets",
        "The source waits until this many offsets are available, or until `maxTriggerDelay` has passed.",
        shown_default="no minimum",
        since="4.2",
        idle=(BATCH_READ,),
    ),
    Option(
        "maxTriggerDelay",
        (STREAM_READ,),
        values.duration_ms,
        "time: `500ms`, `30s`, `15m`",
        "Longest time to wait for `minOffsetsPerTrigger`.",
        default=900_000,
        shown_default="`15m`",
        idle=(BATCH_READ,),
    ),
    Option(
        "token.renewal.interval.ms",
        (STREAM_READ,),
        values.integer(0),
        "ms",
        "If a query has had nothing to read for this long, the source starts an empty micro-batch. Its "
        "commit renews the query's commit token before Kafka deletes it. The source shortens the interval "
        "to a quarter of the brokers' `offsets.retention.minutes` if it can read that setting, and renews "
        "for the first time one minute after the start. There is no renewal with Trigger.Once or "
        "Trigger.AvailableNow. 0 disables it; use 0 if the sink is not `kafka-eos` and must not receive "
        "empty batches.",
        default=3_600_000,
        idle=(BATCH_READ,),
    ),
    Option(
        "timer.batch.interval.ms",
        (STREAM_READ,),
        values.integer(0),
        "ms",
        "If there is nothing to read and something in the state of the query's operators is due (a timer, a "
        "value that expires), the source starts an empty micro-batch. Two such batches begin at least this "
        "long apart. The source needs the option `application.id`. There are none with Trigger.Once or "
        "Trigger.AvailableNow. 0 disables them; due timers then wait for the next record or renewal.",
        default=1000,
        idle=(BATCH_READ,),
    ),
    Option(
        "metrics.port",
        (STREAM_READ,),
        values.port,
        "port",
        "Port at which the driver serves the query's metrics in Prometheus's format, at `/metrics`, as long as the "
        "query runs. 0 = any free port, which the driver logs. If the port is in use, the driver logs a warning and "
        "the query runs without the endpoint. If a query has several sources, set it on one of them.",
        shown_default="no endpoint",
        idle=(BATCH_READ,),
    ),
    Option(
        "metrics.host",
        (STREAM_READ,),
        values.text,
        "address",
        "Address at which `metrics.port` listens. The endpoint has no authentication and shows names of topics and "
        "errors, so by default only this host reaches it. `0.0.0.0` lets others scrape it.",
        default="127.0.0.1",
        idle=(BATCH_READ,),
    ),
    Option(
        "onRolledBackCheckpoint",
        (STREAM_READ,),
        values.choice("read", "jump"),
        "`read`, `jump`",
        "What happens if the checkpoint is older than the offsets that the query has committed to Kafka. "
        "`read`: the source reads the records again, and the sink skips batches that the output already "
        "contains or fails the query. `jump`: the source continues from the committed offsets, and repeats a "
        "batch that Kafka already holds even if its records no longer exist. `jump` needs the "
        "`application.id` of the query's own `kafka-eos` sink; with any other sink, records would be lost.",
        default="read",
        idle=(BATCH_READ,),
    ),
    Option(
        "minPartitions",
        READ,
        values.integer(1),
        "tasks",
        "Approximate minimum number of Spark tasks that read a batch.",
        shown_default="depends on the size of the batch",
    ),
    Option(
        "maxRecordsPerPartition",
        READ,
        values.integer(1),
        "offsets",
        "Maximum number of offsets that one task reads.",
        shown_default="depends on the size of the batch",
    ),
    # how to read
    Option(
        "failOnDataLoss",
        READ,
        values.boolean,
        "boolean",
        "Whether the query fails if records were lost before it read them, for example because retention "
        "removed them, somebody deleted or recreated their topic, or an unclean leader election cut the log. "
        "With `false`, the query logs a warning and continues without them; in a log that was cut, from the "
        "cut on.",
        default=True,
    ),
    Option(
        "skipDamagedRecords",
        READ,
        values.offset_lists,
        'JSON `{"t":{"0":[17]}}`',
        "Damaged record batches to pass over; see [RECORDS_DAMAGED](runbooks.md#records_damaged), whose message "
        "contains the value to set. Each offset names the batch that contains it. The records of the batch are "
        "lost; each task that passes over it logs the offsets as a warning. A batch that is intact is read although "
        "it is named, and a damaged one that is not named stops the query.",
        default={},
        shown_default="none",
    ),
    Option(
        MOST_DECOMPRESSED,
        READ,
        values.integer(1 << 20, LARGEST_MOST_DECOMPRESSED_BYTES),
        "bytes",
        "The most memory that the records of one compressed record batch may need in a task: their decompressed "
        "bytes, and 48 bytes for each record. Brokers limit only the compressed bytes, so that a batch of 30 KB may "
        "hold 1 GiB. A larger one stops the query with [RECORDS_DAMAGED](runbooks.md#records_damaged), unless "
        "`skipDamagedRecords` names it.",
        default=MOST_DECOMPRESSED_BYTES,
    ),
    Option(
        "includeHeaders",
        READ,
        values.boolean,
        "boolean",
        "Adds the column `headers`. A sink needs no option: it always writes the column `headers` if there "
        "is one.",
        default=False,
        idle=WRITE,
    ),
    Option(
        "columns",
        READ,
        values.read_columns,
        "columns, comma-separated",
        "Columns to read, in this order. The source does not build the others. If the list contains "
        "`headers`, `includeHeaders` is not needed.",
        shown_default="all",
    ),
    Option(
        KEYED,
        (STREAM_READ,),
        values.boolean,
        "boolean",
        "States that all producers of the topics choose the partition by the record's key, as Java clients, Spark "
        "and this sink do. A stateful operator that groups by the key then needs no shuffle: without the argument "
        '`shards`, it has `shards="partitions"`; see [state.md](state.md#one-shard-for-each-partition-of-the-input).',
        default=False,
        idle=(BATCH_READ,),
    ),
    Option(
        STEP_IN_READ,
        (STREAM_READ,),
        values.text,
        "pickled",
        "Internal: `map_in_read`, `aggregate` and stateful operators with "
        '`shards="partitions"` set it to the step of the query that the tasks run on what they read, '
        "`step.in.read.write.<option>` to the options in `write` of `map_in_read`, and "
        "`step.in.read.operator.<option>` to those of the operator. Do not set them yourself.",
    ),
    Option(
        SQL_MEMORY,
        (STREAM_READ,),
        values.integer(LEAST_SQL_MEMORY_BYTES),
        "bytes",
        "The most memory that the engine of [SQL in the read](sql.md#memory) may use in one task, and the result of "
        "one call. A batch that needs more is divided; a single record that needs more is a bad record.",
        default=SQL_MEMORY_BYTES,
        idle=(BATCH_READ,),
    ),
    Option(
        "isolation.level",
        READ,
        values.choice(*ISOLATION_LEVELS),
        "`read_committed`, `read_uncommitted`",
        "Which records are read. `read_committed` reads up to the last stable offset (LSO) and skips aborted "
        "transactions. `kafka.isolation.level` means the same.",
        default="read_committed",
    ),
    Option(
        "groupIdPrefix",
        (),
        values.text,
        "text",
        "Spark's prefix of generated consumer groups. Tasks read without a group.",
        idle=READ,
    ),
    Option(
        "fetchOffset.numRetries",
        READ,
        values.integer(0),
        "count",
        "How often the driver retries a failed request for offsets or topic metadata.",
        default=3,
    ),
    Option(
        "fetchOffset.retryIntervalMs",
        READ,
        values.integer(0),
        "ms",
        "Pause between these retries.",
        default=1000,
    ),
    Option(
        "kafkaConsumer.pollTimeoutMs",
        READ,
        values.integer(1),
        "ms",
        "How long a task waits for data from the brokers before it fails.",
        default=120_000,
    ),
    Option(
        "pushFilters",
        (BATCH_READ,),
        values.boolean,
        "boolean",
        "Uses filters on `topic`, `partition`, `offset` and `timestamp` to fetch fewer records. Requires "
        "`spark.sql.python.filterPushdown.enabled=true`.",
        default=False,
        since="4.1",
    ),
    # who
    Option(
        "application.id",
        (*READ, *WRITE, *STATE, STATE_READ),
        values.application_id,
        "text",
        "Identifies the query in Kafka. It is the transactional id and the prefix of changelog topics. The "
        "consumer group is `kafka-eos.` and this id, unless `kafka.group.id` is set. Set the same value on "
        "the sink, on stateful operators and on the stream source. On a source, it also names the group for "
        "`startingOffsets=group`, and lets `onRolledBackCheckpoint=jump` continue a query whose checkpoint "
        "is an old copy (PySpark 4.2 or newer, not with Trigger.Once).",
        shown_default="derived from the query id in the checkpoint; when reading state, the only application in "
        "`state.dir`",
    ),
    # the sink
    Option(
        "topic",
        WRITE,
        values.topic,
        "text",
        "Topic that receives all records. Takes precedence over a column `topic`.",
        shown_default="the column `topic`",
    ),
    Option(
        "processing.guarantee",
        WRITE,
        values.choice("exactly_once", "at_least_once"),
        "`exactly_once`, `at_least_once`",
        "`exactly_once`: tasks stage their rows and the driver commits the batch in one Kafka transaction. "
        "`at_least_once`: tasks write to Kafka directly, so a retry may write a record twice.",
        default="exactly_once",
    ),
    Option(
        "checkpointLocation",
        WRITE,
        values.text,
        "URI",
        "Checkpoint of the query. A streaming sink needs it as an option of `writeStream`; the session "
        "setting is not enough.",
        shown_default="required for a stream write",
        idle=READ,
    ),
    Option(
        "queryName",
        (STREAM_WRITE,),
        values.anything,
        "text",
        "Name of the query. Spark sets it for `writeStream.queryName(…)`.",
        shown_default="none",
        idle=(*READ, BATCH_WRITE),
    ),
    Option(
        "includeTimestamp",
        WRITE,
        values.boolean,
        "boolean",
        "Uses the column `timestamp` as the timestamp of the records. Otherwise Kafka sets it.",
        default=False,
    ),
    Option(
        "txnAppId",
        (BATCH_WRITE,),
        values.text,
        "text",
        "Name under which a batch write records its `txnVersion`. A write whose version is not higher than "
        "the last committed one is skipped. Set both options or neither.",
        shown_default="none",
        instead=_STREAMS_USE_BATCH_ID,
    ),
    Option(
        "txnVersion",
        (BATCH_WRITE,),
        values.integer(0),
        "number",
        "Version of this write; see `txnAppId`. In `foreachBatch`, use the batch id.",
        shown_default="none",
        instead=_STREAMS_USE_BATCH_ID,
    ),
    Option(
        "staging.location",
        WRITE,
        values.text,
        "URI",
        "Folder for rows that wait for the commit. The driver and all executors must share it. Several "
        "queries may use the same location: each creates its own folder there.",
        shown_default="`<checkpointLocation>/kafka-eos/staging`; a local folder for batch writes",
    ),
    Option(
        "onInvalidRecord",
        WRITE,
        values.choice("fail", "drop", "dead-letter"),
        "`fail`, `drop`, `dead-letter`",
        "What happens to a row that the column `kafka_eos_invalid` marks, or that Kafka or a sink outside Kafka cannot "
        "hold (a null topic, a record too large for the topic, a violated constraint of a table, …). `fail` fails the "
        "batch. `drop` drops and counts the row. `dead-letter` writes it to `deadLetter.topic` in the transaction of its "
        "batch. Either way, the row reaches no output. "
        "Needs `processing.guarantee=exactly_once`, unless it is `fail`.",
        default="fail",
    ),
    Option(
        "deadLetter.topic",
        WRITE,
        values.topic,
        "text",
        "Existing topic for dead letters, with `onInvalidRecord=dead-letter`. The query must not read it.",
    ),
    Option(
        "staging.inline.bytes",
        WRITE,
        values.integer(0),
        "bytes",
        "A task whose rows need at most this many bytes sends them to the driver in its commit message. "
        "Larger results go to a file in the staging folder.",
        default=262_144,
    ),
    Option(
        "commitTimeoutMs",
        WRITE,
        values.integer(1000),
        "ms",
        "How long the commit of a batch is retried before the query fails.",
        default=300_000,
    ),
    Option(
        "sinks",
        (STREAM_WRITE,),
        sink_names,
        "names, comma-separated",
        "External systems that also receive each batch, exactly once; see [sinks.md](sinks.md). Configure "
        "each with `sink.<name>.…` options.",
        default=(),
        shown_default="none",
        instead="remove it; only a stream can write to external sinks, because they recognise a repeated batch by "
        "its batch id",
        since="4.1",
    ),
    Option(
        "onMissingToken",
        WRITE,
        values.answer(("fail",), ("assume_committed", "assume_not_committed"), values.batch_number),
        "`fail`, `assume_committed:<batch>`, `assume_not_committed:<batch>`",
        "What happens if Kafka no longer has the commit token of the query, because the consumer group was "
        "deleted or has expired. `fail` fails the query and names the batch. `assume_committed:17` commits a "
        "token for batch 17 but not its records, and `assume_not_committed:17` writes the batch. An answer "
        "has no effect on any other batch.",
        default="fail",
    ),
    Option(
        "onForeignQuery",
        (STREAM_WRITE, *STATE),
        values.answer(("fail", "adopt"), ("adopt_unchecked",), values.anything),
        "`fail`, `adopt`, `adopt_unchecked:<query id>`",
        "What happens if the `application.id` has the commit token of another query. `adopt` continues where "
        "that query stopped, if committed offsets prove that each source of this query starts there and that "
        "the target is the same. `adopt_unchecked` continues the work of the query with this id without a "
        "proof: if a source does not start where that query stopped, records are lost or doubled.",
        default="fail",
    ),
    Option(
        "onMovedOffsets",
        (STREAM_WRITE,),
        values.answer(("fail",), ("overwrite",), values.batch_number),
        "`fail`, `overwrite:<batch>`",
        "What happens if another program, such as Kafka's offset reset tool, has committed offsets to the "
        "query's consumer group, also before the query's first batch. `overwrite:17` lets batch 17 continue from the "
        "checkpoint, or batch 0 begin where the starting options say, and replace those offsets. It has no effect "
        "on any other batch.",
        default="fail",
    ),
    Option(
        STATIC_TABLES,
        (STREAM_WRITE,),
        values.digests,
        'JSON `{"table":"digest"}`',
        "Internal: `App` sets it to a hash of each static table that its SQL texts join. Do not set it yourself.",
        default={},
        shown_default="none",
        idle=(BATCH_WRITE,),
    ),
    Option(
        CHANGED_TABLE,
        (STREAM_WRITE,),
        values.choice("fail", "continue"),
        "`fail`, `continue`",
        "What happens if a static table of [SQL in the read](sql.md#static-tables) has other rows or columns than "
        "when the checkpoint was last used. `continue` uses the new table from the next batch on; a batch that "
        "Spark planned and did not finish is then computed with it, too.",
        default="fail",
    ),
    Option(
        "onMovedCheckpoint",
        (STREAM_WRITE,),
        values.answer(("fail", "fork"), ("continue",), values.text),
        "`fail`, `continue:<former URI>`, `fork`",
        "What happens if the checkpoint ran at another location before. `continue:file:/data/old` continues the "
        "query that ran at `file:/data/old`, where nothing may run any more. `fork` makes the copy a query of its "
        "own with a new `application.id`; it begins at the offsets of the checkpoint.",
        default="fail",
    ),
    Option(
        "source.cluster",
        (STREAM_WRITE,),
        values.choice("auto", "same", "other"),
        "`auto`, `same`, `other`",
        "Whether Spark's built-in Kafka source reads from the cluster that the sink writes to. `auto` "
        "assumes so if its topics exist there. A `kafka-eos` source reports its cluster itself.",
        default="auto",
    ),
    Option(
        "anchor.topic",
        WRITE,
        values.topic,
        "text",
        "Topic whose partition 0 carries the commit token, as metadata of an offset in the consumer group.",
        shown_default="`topic`, otherwise `__consumer_offsets`",
    ),
    Option(
        "token.topic",
        WRITE,
        values.topic,
        "text",
        "Compacted topic that also stores the commit token. The token then survives the loss of the "
        "consumer group; see [token-topic.md](token-topic.md). A batch write with this option also needs "
        "`txnAppId`.",
        shown_default="none",
    ),
    # state
    Option(
        "state.dir",
        (*STATE, STATE_READ),
        values.text,
        "local path",
        "Folder where each executor stores the databases of its shards. They stay there between runs. If "
        "they are lost, tasks restore them from the changelog topic.",
        shown_default="`kafka-eos-state-<user id>` in the system's temporary folder",
    ),
    Option(
        "statestore.uncommitted.max.bytes",
        STATE,
        values.minus_one_or_positive,
        "bytes",
        "How much memory the uncommitted state changes of a process may take; its shards share it. Changes "
        "beyond it go to disk, under `state.dir`, until the micro-batch commits. -1 keeps all changes in "
        "memory (KIP-892).",
        default=64 << 20,
    ),
    Option(
        "state.changelog.replication.factor",
        STATE,
        values.minus_one_or_positive,
        "number",
        "Replication factor of the changelog topics that the query creates. -1 uses the default of the "
        "brokers. Use 3 in production.",
        default=-1,
    ),
    Option(
        "state.changelog.min.insync.replicas",
        STATE,
        values.integer(1),
        "number",
        "`min.insync.replicas` of the changelog topics that the query creates. Use 2 in production.",
        shown_default="the default of the brokers",
    ),
    Option(
        "state.changelog.delete.retention.ms",
        STATE,
        values.integer(60_000),
        "ms",
        "`delete.retention.ms` of the changelog topics that the query creates: how long a deleted key leaves a "
        "record behind. A copy of a shard's state that is behind and older than half of it is not caught up, but "
        "restored as a whole. Records of deleted keys make the changelog longer.",
        shown_default="the default of the brokers, usually 24 hours",
    ),
    Option(
        "state.snapshot.location",
        (*STATE, STATE_READ),
        values.text,
        "path or URI",
        "Folder on storage that all executors share, such as `s3a://…` or a network file system. Workers upload "
        "the state of their shards there, and a host that has no state of a shard begins with the newest snapshot "
        "and reads only the rest of the changelog. So does a read of the changelog.",
        shown_default="no snapshots",
    ),
    Option(
        "state.snapshot.interval.ms",
        STATE,
        values.integer(1000),
        "ms",
        "Least time between two snapshots of a shard.",
        shown_default="`600000`",
    ),
    Option(
        "state.wal.sync",
        STATE,
        values.boolean,
        "boolean",
        "Whether each commit of local state waits until the data is on disk. Without it, a task has to "
        "restore a few batches from the changelog after a power failure.",
        default=False,
    ),
    Option(
        "state.event.time.max.ahead",
        STATE,
        values.duration_ms,
        "time: `30s`, `15m`, `36h`",
        "How far an event time may be ahead of the time of its micro-batch and still advance the watermark, so "
        "that one record with a wrong time in the far future does not close all windows. A row that is further "
        "ahead is processed like any other, but the watermark ignores it; the metric `future_rows` counts it.",
        default=86_400_000,
        shown_default="`24h`",
    ),
    Option(
        "state.aggregate.max.values",
        STATE,
        values.integer(1),
        "integer",
        "How many distinct values, or entries of a list, `count_distinct`, `collect_set` and `collect_list` may keep "
        "of one group. A group with more fails the micro-batch with `KAFKA_EOS.AGGREGATE_LIMIT`. Each micro-batch "
        "that changes a group reads and rewrites all values that it keeps: 10,000 integers are 80 kB.",
        default=10_000,
    ),
    Option(
        "state.clock.max.ahead",
        STATE,
        values.duration_ms,
        "time: `30s`, `15m`, `36h`",
        "How far the processing time of a batch may be ahead of the clock of the driver when it commits the batch. "
        "If the clock of an executor's host is further ahead, the batch fails and names the host, because the "
        "processing time of later batches could never be earlier, and their timers would not fire.",
        default=60_000,
        shown_default="`1m`",
    ),
    Option(
        "state.lock.timeout.ms",
        STATE,
        values.integer(0),
        "ms",
        "How long a task waits for the database of a shard while another process has it open.",
        default=30_000,
    ),
    Option(
        "state.timeout.ms",
        (*STATE, STATE_READ),
        values.integer(1000),
        "ms",
        "How long a task waits for Kafka before it fails, including the time to restore state.",
        default=600_000,
    ),
    Option(
        "onMissingState",
        STATE,
        values.answer(("fail",), ("changelog", "new"), values.batch_number),
        "`fail`, `changelog:<batch>`, `new:<batch>`",
        "What happens if state of the operator is missing: Kafka holds no commit token for its changelog topic, or "
        "one that is too old, or the beginning of the changelog was removed. `fail` fails the query and names the "
        "batch. `changelog:17` lets batch 17 continue with the state that the changelog contains. `new:17` lets "
        "the operator begin with an empty state in batch 17, in place of one that the query no longer has. An "
        "answer has no effect on any other batch.",
        default="fail",
    ),
    # reading state
    Option(
        "storeName",
        (STATE_READ,),
        values.text,
        "text",
        "Name of the state store, as passed to the operator.",
        shown_default="the only store in `state.dir`",
    ),
    Option(
        "stateVarName",
        (STATE_READ,),
        values.text,
        "text",
        "State variable to read, by the name that the processor's `init` method gave it.",
        shown_default="the only variable of the store",
    ),
    Option(
        "readRegisteredTimers",
        (STATE_READ,),
        values.boolean,
        "boolean",
        "Reads the registered timers of the processor instead of a state variable.",
        default=False,
    ),
    Option(
        "flattenCollectionTypes",
        (STATE_READ,),
        values.boolean,
        "boolean",
        "`true` returns one row for each list element or map entry. `false` returns one row for each key, "
        "with an array or a map.",
        default=True,
    ),
    Option(
        "raw",
        (STATE_READ,),
        values.boolean,
        "boolean",
        "Returns every entry of the store in its stored form: the binary columns `key` and `value`.",
        default=False,
    ),
    Option(
        "batchId",
        (STATE_READ,),
        values.integer(0),
        "number",
        "Micro-batch whose state to read. Only the state of the newest one exists, so any other value is an "
        "error.",
        shown_default="the newest one",
    ),
)

BY_NAME = {option.name.lower(): option for option in OPTIONS}
