"""The options of stateful operators, and of reads of their state: a part of `option_table`."""

from __future__ import annotations

from kafka_eos_source import option_values as values
from kafka_eos_source.options.option import STATE, STATE_READ, Option

OPTIONS_OF_STATE: tuple[Option, ...] = (
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
