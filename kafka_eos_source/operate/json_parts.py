"""Parts of the shapes in `json_shapes` that several commands use, or that are long."""

from __future__ import annotations

from kafka_eos_source.operate.json_shape import Optional, OrNull

FINDING = {
    "condition": "name of the error condition, as in docs/runbooks.md; null = no error",
    "text": "what was found",
    "fix": "what to do; null = nothing",
}
TOKEN = {"*": "field of the token; `batch`, `sequence` and `rows` are numbers"}
LOG = {
    "partition": "number of the partition",
    "earliest": "first offset of the log",
    "stable": "last stable offset: what read_committed consumers can read up to",
    "end": "end of the log",
}
RECORD = {
    "token": OrNull(TOKEN, "the record cannot be decoded"),
    "time_ms": "when the record was written, ms since 1970",
    "group_id": "consumer group of the query",
    "topic_id": "topic id of the token topic when the record was written",
    "anchor": "anchor partition of the query",
    "offsets": OrNull({"*": "next offset of this partition"}, "the record cannot be decoded"),
}
ENTRY = {
    "application_id": "the query",
    "partition": "partition of its record",
    "offset": "offset of its record",
    "problem": "why the record cannot be decoded; null = it can",
    **RECORD,
}
CHECKPOINT = {
    "location": "the checkpoint",
    "query_id": "Spark's id of the query",
    "planned": "newest batch of the offset log; null = none",
    "planned_at_seconds": "when it was planned, seconds since 1970",
    "committed": "newest batch of the commit log; null = none",
    "next_batch": "batch that a restart runs",
    "replays": "whether a restart repeats a planned batch",
    "identity_file": OrNull(
        {
            "application_id": "the query's application.id",
            "query_id": "Spark's id of the query",
            "first_batch": "first batch for which Kafka holds a token",
            "location": "where the checkpoint was when a batch was committed last",
            "unproven_since": "first batch without a token, because of at_least_once; null = none",
        },
        "no batch was committed",
    ),
}
KAFKA = {
    "cluster_id": "Kafka's id of the cluster",
    "token": OrNull(TOKEN, "Kafka holds no token"),
    "pending": "whether an unfinished transaction is about to change the group's offsets",
    "partitions": [
        {
            "topic": "name of the topic",
            "partition": "number of the partition",
            "start": "first offset of the next batch; null = not read",
            "end": "end of the next batch; null = not planned",
            "group": "committed offset of the group; null = none",
            "token_batch": "batch of the token in that offset; null = none",
            "earliest": "first offset of the log; null = no such partition",
            "stable": "last stable offset",
            "log_end": "end of the log",
            "transaction_since": "first offset of an open transaction; null = none is open",
        }
    ],
    "losses": [{"kind": "kind of the loss, as in docs/runbooks.md, DATA_LOSS", "text": "what was lost"}],
}
HEADERS = Optional(
    [
        {
            "key": "name of the header",
            "value": Optional("its value as text"),
            "value_base64": Optional("its value, if that is not UTF-8"),
        }
    ]
)
LETTER = {
    "topic": "the dead-letter topic",
    "partition": "number of the partition",
    "offset": "offset of the letter",
    "timestamp_ms": "when it was written, ms since 1970",
    "error": "class of the error; null = the record is no dead letter",
    "message": "the reason",
    "origin_topic": "topic from which the record was read; null = not known",
    "origin_partition": "its partition there; null = not known",
    "origin_offset": "its offset there; null = not known",
    "origin_timestamp_ms": "its timestamp, ms since 1970; null = not known",
    "application_id": "the query",
    "batch": "micro-batch that wrote the letter; null = a batch write",
    "holds": "`input`: key and value of the record that was read; `output`: of a row that the query made",
    "target_topic": "topic for which the row was meant; null = none was named",
    "target_partition": "partition for which the row was meant; null = none was named",
    "value_bytes": "original size of a value of which the letter has the beginning; null = it is complete",
    "key": Optional("its key as text; null = no key"),
    "key_base64": Optional("its key, if that is not UTF-8; then `key` is absent"),
    "value": Optional("its value as text; null = a tombstone"),
    "value_base64": Optional("its value, if that is not UTF-8; then `value` is absent"),
    "headers": HEADERS,
}
SINK_ACTION = {
    "sink": "name of the sink",
    "id": "sink transaction id",
    "application_id": "the query's application.id",
    "cluster_id": "Kafka's id of the cluster that commits the query's transactions",
    "action": "`commit` or `abort`",
    "done": "whether the sink did it; false = only shown, because --yes is missing",
}

VIEW = {
    "application_id": "the transactional id; empty = not known",
    "query_id": "Spark's id of the query; empty = no batch was committed",
    "run_id": "Spark's id of the run",
    "at": "when the view was made, ISO 8601",
    "status": "`running`, `waiting for data`, `waiting`, `retrying`, `failed`, `stopped`, `not on this host`",
    "status_since": "since when, ISO 8601; null = not known",
    "status_text": "what it waits for, or why it failed",
    "read_per_second": "offsets read per second, over the last minute",
    "records_per_second": "records written per second, over the last minute",
    "lag": {
        "*": {
            "offsets": "offsets behind in this topic",
            "seconds": "how long the oldest of them has been there, s",
            "at_least": "whether it may have been there longer",
            "partitions": {"*": "offsets behind in this partition"},
        }
    },
    "sources": ["what a source reads"],
    "batches": [
        {
            "batch_id": "Spark's id of the batch",
            "outcome": "how its commit ended",
            "ended_at": "when, ISO 8601",
            "seconds": {"*": "duration of this group of steps, s"},
            "offsets_read": "offsets read",
            "records": "records written",
            "changes": "changes of the state",
            "retried": "number of tries that failed",
        }
    ],
    "totals": {"*": "sum over this run"},
    "totals_since": "when its first batch began, ISO 8601; null = no batch",
    "sinks": {"*": {"*": "sum over this run"}},
    "token_at": "when the newest transaction was committed, ISO 8601; null = not known",
    "sequence": "sequence number of the newest token; null = not known",
    "pressure": "uncommitted state of the fullest shard, as a fraction of its limit",
    "processor_counts": {"*": "what stateful processors counted, such as `late_rows`"},
    "events": [{"at": "when, ISO 8601", "kind": "kind of the event", "text": "what happened"}],
}
