"""Options of stateful operators and of reading their state; part of `options.table`."""

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
        "Folder where each executor stores the databases of its shards. They stay there between runs. If "
        "they are lost, tasks restore them from the changelog topic.",
        "`kafka-eos-state-<user id>` in the system's temporary folder",
    ),
    Option(
        "statestore.uncommitted.max.bytes",
        STATE,
        values.minus_one_or_positive,
        64 << 20,
        "bytes",
        "How much memory the uncommitted state changes of a process may take; its shards share it. Changes "
        "beyond it go to disk, under `state.dir`, until the micro-batch commits. -1 keeps all changes in "
        "memory (KIP-892).",
    ),
    Option(
        "state.changelog.replication.factor",
        STATE,
        values.minus_one_or_positive,
        -1,
        "number",
        "Replication factor of the changelog topics that the query creates. -1 uses the default of the "
        "brokers. Use 3 in production.",
    ),
    Option(
        "state.changelog.min.insync.replicas",
        STATE,
        values.integer(1),
        None,
        "number",
        "`min.insync.replicas` of the changelog topics that the query creates. Use 2 in production.",
        "the default of the brokers",
    ),
    Option(
        "state.changelog.delete.retention.ms",
        STATE,
        values.integer(60_000),
        None,
        "ms",
        "`delete.retention.ms` of the changelog topics that the query creates: how long a deleted key leaves a "
        "record behind. A copy of a shard's state that is behind and older than half of it is not caught up, but "
        "restored as a whole. Records of deleted keys make the changelog longer.",
        "the default of the brokers, usually 24 hours",
    ),
    Option(
        "state.snapshot.location",
        (*STATE, STATE_READ),
        values.text,
        None,
        "path or URI",
        "Folder on storage that all executors share, such as `s3a://…` or a network file system. Workers upload "
        "the state of their shards there, and a host that has no state of a shard begins with the newest snapshot "
        "and reads only the rest of the changelog. So does a read of the changelog.",
        "no snapshots",
    ),
    Option(
        "state.snapshot.interval.ms",
        STATE,
        values.integer(1000),
        None,
        "ms",
        "Least time between two snapshots of a shard.",
        "`600000`",
    ),
    Option(
        "state.wal.sync",
        STATE,
        values.boolean,
        False,
        "boolean",
        "Whether each commit of local state waits until the data is on disk. Without it, a task has to "
        "restore a few batches from the changelog after a power failure.",
    ),
    Option(
        "state.event.time.max.ahead",
        STATE,
        values.duration_ms,
        86_400_000,
        "time: `30s`, `15m`, `36h`",
        "How far an event time may be ahead of the time of its micro-batch and still advance the watermark, so "
        "that one record with a wrong time in the far future does not close all windows. A row that is further "
        "ahead is processed like any other, but the watermark ignores it; the metric `future_rows` counts it.",
        "`24h`",
    ),
    Option(
        "state.clock.max.ahead",
        STATE,
        values.duration_ms,
        60_000,
        "time: `30s`, `15m`, `36h`",
        "How far the processing time of a batch may be ahead of the clock of the driver when it commits the batch. "
        "If the clock of an executor's host is further ahead, the batch fails and names the host, because the "
        "processing time of later batches could never be earlier, and their timers would not fire.",
        "`1m`",
    ),
    Option(
        "state.lock.timeout.ms",
        STATE,
        values.integer(0),
        30_000,
        "ms",
        "How long a task waits for the database of a shard while another process has it open.",
    ),
    Option(
        "state.timeout.ms",
        (*STATE, STATE_READ),
        values.integer(1000),
        600_000,
        "ms",
        "How long a task waits for Kafka before it fails, including the time to restore state.",
    ),
    Option(
        "onMissingState",
        STATE,
        values.answer(("fail",), ("changelog", "new"), values.batch_number),
        "fail",
        "`fail`, `changelog:<batch>`, `new:<batch>`",
        "What happens if state of the operator is missing: Kafka holds no commit token for its changelog topic, or "
        "one that is too old, or the beginning of the changelog was removed. `fail` fails the query and names the "
        "batch. `changelog:17` lets batch 17 continue with the state that the changelog contains. `new:17` lets "
        "the operator begin with an empty state in batch 17, in place of one that the query no longer has. An "
        "answer has no effect on any other batch.",
    ),
    # reading state
    Option(
        "storeName",
        (STATE_READ,),
        values.text,
        None,
        "text",
        "Name of the state store, as passed to the operator.",
        "the only store in `state.dir`",
    ),
    Option(
        "stateVarName",
        (STATE_READ,),
        values.text,
        None,
        "text",
        "State variable to read, by the name that the processor's `init` method gave it.",
        "the only variable of the store",
    ),
    Option(
        "readRegisteredTimers",
        (STATE_READ,),
        values.boolean,
        False,
        "boolean",
        "Reads the registered timers of the processor instead of a state variable.",
    ),
    Option(
        "flattenCollectionTypes",
        (STATE_READ,),
        values.boolean,
        True,
        "boolean",
        "`true` returns one row for each list element or map entry. `false` returns one row for each key, "
        "with an array or a map.",
    ),
    Option(
        "raw",
        (STATE_READ,),
        values.boolean,
        False,
        "boolean",
        "Returns every entry of the store in its stored form: the binary columns `key` and `value`.",
    ),
    Option(
        "batchId",
        (STATE_READ,),
        values.integer(0),
        None,
        "number",
        "Micro-batch whose state to read. Only the state of the newest one exists, so any other value is an "
        "error.",
        "the newest one",
    ),
)
