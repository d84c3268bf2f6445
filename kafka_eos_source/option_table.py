"""Every option, declared once: name, where it may stand, type, default, check and meaning.

Names and meanings are those of Spark's own connector wherever it has the option. ``docs/options.md`` is made
from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kafka_eos_source import option_values as values
from kafka_eos_source.kafka import config
from kafka_eos_source.sinks import registry
from kafka_eos_source.sinks.options import COMMON, SinkOption
from kafka_eos_source.sinks.registry import sink_names

STREAM_READ, BATCH_READ = "stream read", "batch read"
STREAM_WRITE, BATCH_WRITE = "stream write", "batch write"
READ, WRITE = (STREAM_READ, BATCH_READ), (STREAM_WRITE, BATCH_WRITE)
OPERATOR = "stateful operator"
STATE = (OPERATOR,)
STATE_READ = "state read"

ISOLATION_LEVELS = ("read_committed", "read_uncommitted")


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: as documented; matched in any letter case.
        where: which reads and writes take it.
        parse: from text to value.
        default: when it is not set.
        kind: type and unit, for people.
        meaning: for people.
        shown_default: for people, where ``default`` does not say it.
        instead: what to do where it may not stand.
        since: first PySpark in which it can work; "" = any that is supported.
        idle: reads and writes that accept it, checked and without effect.
    """

    name: str
    where: tuple[str, ...]
    parse: values.Parse[Any]
    default: Any
    kind: str
    meaning: str
    shown_default: str = ""
    instead: str = ""
    since: str = ""
    idle: tuple[str, ...] = ()


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
        "Fail when offsets not yet read are gone (aged out, topic deleted or made anew); false = warn and go on.",
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
        "a read the group of `startingOffsets=group`. The same on an operator as on its sink.",
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
    # state
    Option(
        "state.dir",
        (*STATE, STATE_READ),
        values.text,
        None,
        "local path",
        "Where each executor keeps its shards' databases. Kept between runs; what is lost comes from the changelog.",
        "`kafka-eos-state-<user id>` in the system's temporary folder",
    ),
    Option(
        "statestore.uncommitted.max.bytes",
        STATE,
        values.minus_one_or_positive,
        64 << 20,
        "bytes",
        "Changes of one shard in one micro-batch that are kept in memory; beyond it a warning, beyond four times "
        "of it an error that names the batch size that fits. -1 = no limit (KIP-892).",
    ),
    Option(
        "state.changelog.replication.factor",
        STATE,
        values.minus_one_or_positive,
        -1,
        "number",
        "Of changelog topics that are created; -1 = the broker's default. Three in production.",
    ),
    Option(
        "state.changelog.min.insync.replicas",
        STATE,
        values.integer(1),
        None,
        "number",
        "Of changelog topics that are created. Two in production.",
        "the broker's default",
    ),
    Option(
        "state.wal.sync",
        STATE,
        values.boolean,
        False,
        "boolean",
        "Wait for the disk at each commit of local state. Without it a power cut costs a restore of some batches.",
    ),
    Option(
        "state.lock.timeout.ms",
        STATE,
        values.integer(0),
        30_000,
        "ms",
        "How long a task waits for a shard's database that another process has open.",
    ),
    Option(
        "state.timeout.ms",
        (*STATE, STATE_READ),
        values.integer(1000),
        600_000,
        "ms",
        "How long a task waits for Kafka, restoring state included, before it fails.",
    ),
    Option(
        "onMissingState",
        STATE,
        values.choice("fail", "changelog"),
        "fail",
        "`fail`, `changelog`",
        "When a query that has run finds no token on its changelog, or an older one: `changelog` goes on with what "
        "the changelog holds. Needed once for an operator that is new to a query.",
    ),
    # reading state
    Option(
        "storeName",
        (STATE_READ,),
        values.text,
        None,
        "text",
        "Name of the store within its query, as it was given to the operator.",
        "the only one in `state.dir`",
    ),
    Option(
        "stateVarName",
        (STATE_READ,),
        values.text,
        None,
        "text",
        "The state variable to read, as the processor's `init` named it.",
        "the only one of the store",
    ),
    Option(
        "readRegisteredTimers",
        (STATE_READ,),
        values.boolean,
        False,
        "boolean",
        "The registered timers of the processor, in place of a variable.",
    ),
    Option(
        "flattenCollectionTypes",
        (STATE_READ,),
        values.boolean,
        True,
        "boolean",
        "A row for each element of a list, or entry of a map; false = one for each key, with an array or a map.",
    ),
    Option(
        "raw",
        (STATE_READ,),
        values.boolean,
        False,
        "boolean",
        "Every entry of the store as it is kept: `key` and `value` binary.",
    ),
    Option(
        "batchId",
        (STATE_READ,),
        values.integer(0),
        None,
        "number",
        "The micro-batch whose state is wanted. Only that of the newest is kept: any other is an error.",
        "the newest",
    ),
)

BY_NAME = {option.name.lower(): option for option in OPTIONS}


def documentation() -> str:
    """``docs/options.md``."""
    lines = [
        "# Options",
        "",
        "Made from `kafka_eos_source/option_table.py` by `./dev docs`; do not edit. Names are matched in any letter "
        "case. An unknown option is refused, with the nearest names.",
        "",
        "Every `kafka.*` option goes to librdkafka without its prefix; `kafka.bootstrap.servers` is required, "
        "`kafka.group.id` names the consumer group. Names that only Java's client has are translated or refused, "
        "with librdkafka's way named.",
    ]
    for title, where in (
        ("Source", READ),
        ("Sink", WRITE),
        ("Stateful operator", STATE),
        ("State, read", (STATE_READ,)),
    ):
        lines += [
            "",
            f"## {title}",
            "",
            "| option | for | value | default | meaning |",
            "|---|---|---|---|---|",
        ]
        for option in OPTIONS:
            here = [each for each in option.where if each in where]
            if here:
                default = option.shown_default or ("" if option.default is None else f"`{option.default}`")
                which = "both" if len(here) == len(where) else here[0].split()[0]
                default = default.replace("`True`", "`true`").replace("`False`", "`false`")
                meaning = option.meaning + (f" PySpark {option.since} or newer." if option.since else "")
                lines.append(f"| `{option.name}` | {which} | {option.kind} | {default} | {meaning} |")
        idle = [f"`{option.name}`" for option in OPTIONS if set(option.idle) & set(where)]
        lines += ["", f"Accepted where they have no effect: {', '.join(idle)}."] if idle else []
    return "\n".join([*lines, *_sinks(), "", *config.documentation(), ""])


def _sinks() -> list[str]:
    """Tables of the options that each type of sink outside Kafka has."""
    lines = [
        "",
        "## Sinks outside Kafka",
        "",
        "For each name in `sinks`, as `sink.<name>.<option>`. Every type takes:",
        *_sink_table(COMMON),
    ]
    for name, kind in sorted(registry.TYPES.items()):
        extra = f" `pip install 'kafka-eos-source[{kind.extra}]'`." if kind.extra else ""
        lines += [
            "",
            f"### `type={name}`",
            "",
            kind.summary + extra,
            *_sink_table(registry.sink_class("x", name).OPTIONS),
        ]
    return lines


def _sink_table(options: tuple[SinkOption, ...]) -> list[str]:
    if not options:
        return []
    lines = ["", "| option | value | default | meaning |", "|---|---|---|---|"]
    for option in options:
        default = option.shown_default or ("" if option.default is None else f"`{option.default}`")
        default = (
            "required"
            if option.required
            else default.replace("`True`", "`true`").replace("`False`", "`false`")
        )
        lines.append(f"| `{option.name}` | {option.kind} | {default} | {option.meaning} |")
    return lines
