"""Every option, declared once: name, where it may stand, type, default, check and meaning.

Names and meanings are those of Spark's own connector wherever it has the option. ``docs/options.md`` is made
from this table (`option_docs`).
"""

from __future__ import annotations

from kafka_eos_source import option_values as values
from kafka_eos_source.options.option import (
    BATCH_READ,
    BATCH_WRITE,
    READ,
    STATE,
    STATE_READ,
    STREAM_READ,
    STREAM_WRITE,
    WRITE,
    Option,
)
from kafka_eos_source.options.state_table import OPTIONS_OF_STATE
from kafka_eos_source.sinks.registry import sink_names

ISOLATION_LEVELS = ("read_committed", "read_uncommitted")

_ONE_OF_THREE = "exactly one of the three"

OPTIONS: tuple[Option, ...] = (
    # what to read
    Option("subscribe", READ, values.topics, None, "topics, comma list", "Topics to read.", _ONE_OF_THREE),
    Option(
        "subscribePattern",
        READ,
        values.pattern,
        None,
        "regular expression",
        "Topics whose name contains a match, looked up again for every batch. Internal topics never belong.",
        _ONE_OF_THREE,
    ),
    Option(
        "assign",
        READ,
        values.assignment,
        None,
        'JSON `{"t":[0,1]}`',
        "Partitions to read; partitions added later are not.",
        _ONE_OF_THREE,
    ),
    # where to start and stop
    Option(
        "startingOffsets",
        READ,
        values.text,
        None,
        '`earliest`, `latest`, `group`, JSON `{"t":{"0":23,"1":-1}}`',
        "Where a query without a checkpoint starts: -1 = latest, -2 = earliest in JSON, a whole topic may have "
        '`"earliest"` or `"latest"`, and `"*"` stands for all that is not named. `group` = where the consumer group stands, earliest where it has no offset.',
        "latest on a stream, earliest on a batch read",
    ),
    Option(
        "startingOffsetsByTimestamp",
        READ,
        values.timestamps,
        None,
        'JSON `{"t":{"0":ms}}`',
        "Start at the first record at or after a time, by partition. Wins over `startingOffsets`.",
    ),
    Option(
        "startingTimestamp",
        READ,
        values.integer(0),
        None,
        "ms since 1970",
        "The same time for all partitions. Wins over both.",
    ),
    Option(
        "startingOffsetsByTimestampStrategy",
        READ,
        values.choice("error", "latest"),
        "error",
        "`error`, `latest`",
        "When no record is at or after the time: fail, or start at the end.",
    ),
    Option(
        "endingOffsets",
        (BATCH_READ,),
        values.text,
        None,
        "`latest`, JSON",
        "Where a batch read stops (not included); -1 = latest.",
        "latest",
        "a stream has no end; stop it with Trigger.AvailableNow",
    ),
    Option(
        "endingOffsetsByTimestamp",
        (BATCH_READ,),
        values.timestamps,
        None,
        'JSON `{"t":{"0":ms}}`',
        "Stop before the first record at or after a time; no such record = latest.",
        "",
        "a stream has no end; stop it with Trigger.AvailableNow",
    ),
    Option(
        "endingTimestamp",
        (BATCH_READ,),
        values.integer(0),
        None,
        "ms since 1970",
        "The same time for all partitions. Wins over both.",
        "",
        "a stream has no end; stop it with Trigger.AvailableNow",
    ),
    # how much at a time
    Option(
        "maxOffsetsPerTrigger",
        (STREAM_READ,),
        values.integer(1),
        None,
        "offsets",
        "Most offsets in one micro-batch, shared in proportion to what waits in each partition.",
        since="4.2",
        idle=(BATCH_READ,),
    ),
    Option(
        "minOffsetsPerTrigger",
        (STREAM_READ,),
        values.integer(1),
        None,
        "offsets",
        "Wait for this many, or for `maxTriggerDelay`.",
        since="4.2",
        idle=(BATCH_READ,),
    ),
    Option(
        "maxTriggerDelay",
        (STREAM_READ,),
        values.duration_ms,
        900_000,
        "time: `500ms`, `30s`, `15m`",
        "Longest wait for `minOffsetsPerTrigger`.",
        "15m",
        idle=(BATCH_READ,),
    ),
    Option(
        "token.renewal.interval.ms",
        (STREAM_READ,),
        values.integer(0),
        3_600_000,
        "ms",
        "After this long without anything to read, the source causes an empty micro-batch, which renews the query's "
        "token before Kafka forgets it: at the latest after a quarter of the brokers' `offsets.retention.minutes`, if "
        "they tell it, and for the first time one minute after the start. Never with Trigger.Once or AvailableNow. "
        "0 = never; set it if the sink is not `kafka-eos` and must not see empty batches.",
        idle=(BATCH_READ,),
    ),
    Option(
        "onRolledBackCheckpoint",
        (STREAM_READ,),
        values.choice("read", "jump"),
        "read",
        "`read`, `jump`",
        "When the checkpoint is older than the offsets that the query committed in Kafka: `read` reads them again, and "
        "the sink skips or refuses what the output holds; `jump` continues from the committed offsets. `jump` needs the "
        "`application.id` of the query's own `kafka-eos` sink: with any other sink it would lose records.",
        idle=(BATCH_READ,),
    ),
    Option(
        "minPartitions",
        READ,
        values.integer(1),
        None,
        "tasks",
        "At least about this many tasks.",
        "as many as fit the size of the batch",
    ),
    Option(
        "maxRecordsPerPartition", READ, values.integer(1), None, "offsets", "Most offsets read by one task."
    ),
    # how to read
    Option(
        "failOnDataLoss",
        READ,
        values.boolean,
        True,
        "boolean",
        "Fail when records were lost before they were read (aged out, or their topic was deleted or created again); "
        "false = warn and continue without them.",
    ),
    Option(
        "includeHeaders",
        READ,
        values.boolean,
        False,
        "boolean",
        "Adds the column `headers`. (A sink always writes that column.)",
        idle=WRITE,
    ),
    Option(
        "columns",
        READ,
        values.read_columns,
        None,
        "columns, comma list",
        "Only these columns, in this order: the others are not made. `headers` among them needs no `includeHeaders`.",
        "all",
    ),
    Option(
        "aggregate.in.read",
        (STREAM_READ,),
        values.text,
        None,
        "JSON",
        "Set by `aggregate_with_changelog_state`, not by hand: the first step of the aggregation, done by the read itself.",
    ),
    Option(
        "map.in.read",
        (STREAM_READ,),
        values.text,
        None,
        "JSON",
        "Set by `map_in_read`, not by hand: a function that the read calls, pickled.",
    ),
    Option(
        "isolation.level",
        READ,
        values.choice(*ISOLATION_LEVELS),
        "read_committed",
        "`read_committed`, `read_uncommitted`",
        "Which records are read; also as `kafka.isolation.level`. Committed reads end at the last stable offset.",
    ),
    Option("groupIdPrefix", READ, values.text, "spark-kafka-eos", "text", "Start of made-up group ids."),
    Option(
        "fetchOffset.numRetries",
        READ,
        values.integer(0),
        3,
        "times",
        "How often the driver asks the brokers again.",
    ),
    Option("fetchOffset.retryIntervalMs", READ, values.integer(0), 1000, "ms", "Pause before it asks again."),
    Option(
        "kafkaConsumer.pollTimeoutMs",
        READ,
        values.integer(1),
        120_000,
        "ms",
        "Longest silence of the brokers before a task fails.",
    ),
    Option(
        "pushFilters",
        (BATCH_READ,),
        values.boolean,
        False,
        "boolean",
        "Filters on `partition`, `offset` and `timestamp` narrow what is fetched. Needs "
        "`spark.sql.python.filterPushdown.enabled=true`.",
        since="4.1",
    ),
    # who
    Option(
        "application.id",
        (*READ, *WRITE, *STATE, STATE_READ),
        values.application_id,
        None,
        "text",
        "Names the transactional id, the changelogs and, unless `kafka.group.id` is set, the consumer group; on "
        "a read the group of `startingOffsets=group`. The same on an operator as on its sink. On a stream read, it "
        "must be that of the query's own sink: a source whose checkpoint is an old copy then continues from the "
        "offsets that this application committed (from PySpark 4.2; never with Trigger.Once).",
        "from the checkpoint's query id; of a read of state: the only one in `state.dir`",
    ),
    # the sink
    Option(
        "topic",
        WRITE,
        values.topic,
        None,
        "text",
        "Topic of all records; wins over a column `topic`.",
        "the column",
    ),
    Option(
        "processing.guarantee",
        WRITE,
        values.choice("exactly_once", "at_least_once"),
        "exactly_once",
        "`exactly_once`, `at_least_once`",
        "`at_least_once` lets tasks write to Kafka themselves.",
    ),
    Option(
        "checkpointLocation",
        WRITE,
        values.text,
        None,
        "URI",
        "The query's checkpoint. On a streaming sink it must be an option, not only a session setting.",
        "required on a stream write",
        idle=READ,
    ),
    Option(
        "queryName",
        (STREAM_WRITE,),
        values.anything,
        None,
        "text",
        "Spark's own name of the query.",
        idle=(*READ, BATCH_WRITE),
    ),
    Option(
        "includeTimestamp",
        WRITE,
        values.boolean,
        False,
        "boolean",
        "The column `timestamp` becomes the time of the records.",
    ),
    Option(
        "txnAppId",
        (BATCH_WRITE,),
        values.text,
        None,
        "text",
        "With `txnVersion`: a write whose version is not above the last one committed is skipped.",
        "",
        "a streaming sink has the batch id for that; use it inside foreachBatch",
    ),
    Option(
        "txnVersion",
        (BATCH_WRITE,),
        values.integer(0),
        None,
        "number",
        "See `txnAppId`; the batch id in `foreachBatch`.",
        "",
        "a streaming sink has the batch id for that; use it inside foreachBatch",
    ),
    Option(
        "staging.location",
        WRITE,
        values.text,
        None,
        "URI",
        "Where rows wait for the commit; driver and executors must share it. Queries may share one: each has its folder in it.",
        "`<checkpointLocation>/kafka-eos/staging`; a local folder for batch writes",
    ),
    Option(
        "staging.inline.bytes",
        WRITE,
        values.integer(0),
        262_144,
        "bytes",
        "A task's rows up to this size travel in its commit message instead of a file.",
    ),
    Option(
        "commitTimeoutMs",
        WRITE,
        values.integer(1000),
        300_000,
        "ms",
        "How long the commit of a batch is tried again before the query fails.",
    ),
    Option(
        "sinks",
        (STREAM_WRITE,),
        sink_names,
        (),
        "names, comma list",
        "Systems outside Kafka that take each batch with it, once: see [sinks.md](sinks.md). Each has its own "
        "`sink.<name>.…` options.",
        "none",
        "two-phase sinks belong to a stream: its batch ids tell a replay",
        since="4.1",
    ),
    Option(
        "onMissingToken",
        (STREAM_WRITE,),
        values.choice("fail", "assume_committed", "assume_not_committed"),
        "fail",
        "`fail`, `assume_committed`, `assume_not_committed`",
        "When Kafka forgot what it holds (the group was deleted or expired) and a batch is replayed.",
    ),
    Option(
        "onForeignQuery",
        (STREAM_WRITE, *STATE),
        values.choice("fail", "adopt"),
        "fail",
        "`fail`, `adopt`",
        "When the `application.id` carries another query's token: `adopt` goes on where that one stopped.",
    ),
    Option(
        "onMovedOffsets",
        (STREAM_WRITE,),
        values.choice("fail", "overwrite"),
        "fail",
        "`fail`, `overwrite`",
        "When another program, such as Kafka's reset tool, committed offsets in the query's consumer group: "
        "`overwrite` continues from the checkpoint.",
    ),
    Option(
        "source.cluster",
        (STREAM_WRITE,),
        values.choice("auto", "same", "other"),
        "auto",
        "`auto`, `same`, `other`",
        "Whether Spark's own Kafka source reads the cluster that is written (ours says so itself).",
        "auto: same, if its topics are there",
    ),
    Option(
        "anchor.topic",
        WRITE,
        values.topic,
        None,
        "text",
        "Topic whose partition 0 carries the token in the group's offsets.",
        "`topic`, else `__consumer_offsets`",
    ),
    Option(
        "token.topic",
        WRITE,
        values.topic,
        None,
        "text",
        "Compacted topic that also holds the token, and outlives the consumer group: see "
        "[token-topic.md](token-topic.md). A batch write needs `txnAppId` with it.",
        "none",
    ),
    *OPTIONS_OF_STATE,
)

BY_NAME = {option.name.lower(): option for option in OPTIONS}
