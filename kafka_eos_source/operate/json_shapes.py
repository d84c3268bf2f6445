"""What each command prints with ``--json``: for the documentation, and for the test that compares both."""

from __future__ import annotations

from typing import Any

from kafka_eos_source.operate.json_parts import (
    CHECKPOINT,
    ENTRY,
    FINDING,
    HEADERS,
    KAFKA,
    LETTER,
    LOG,
    RECORD,
    SINK_ACTION,
    TOKEN,
    VIEW,
)
from kafka_eos_source.operate.json_shape import Lines, Optional, OrNull, rendered

#: What a command prints if it fails with exit code 1.
ERROR = {
    "error": {
        "condition": "name of the error condition",
        "message": "what happened",
        "fix": "what to do; null = the message says it",
    }
}

#: What each command prints if it succeeds, by the command's name.
SHAPES: dict[str, Any] = {
    "acls": {
        "looked_up": "whether topics were looked up in the query's group",
        "rights": [
            {
                "principal": "who needs the right, such as `User:sink`",
                "part": "the part of the query, or the command",
                "operation": "Kafka's name of the right",
                "resource": "`topic`, `group`, `transactional id` or `cluster`",
                "name": "name of the resource",
                "prefixed": "whether the name is a prefix",
                "purpose": "what it is for",
                "without": "what happens without it; null = the part ends with an error",
            }
        ],
    },
    "adopt": {
        "adopted": "whether the token was committed",
        "batch": OrNull(
            {"batch_id": "batch that the token names", "query_id": "query that the token names"},
            "there is nothing to commit",
        ),
        "messages": ["a sentence about the situation"],
        "options": {"*": {"*": "value of this option of the query's source or sink"}},
        "refused": OrNull(FINDING, "nothing was refused"),
    },
    "broker": {
        "bootstrap_servers": "address of the brokers; printed once they answer",
        "directory": "folder with the data",
    },
    "completion": {
        "shell": "name of the shell",
        "script": "the script",
        "install": "how to install it",
    },
    "dead-letters list": Lines(LETTER),
    "dead-letters replay": {
        "group_id": "consumer group that remembers what was sent",
        "sent": "whether the records were sent; false = only shown, because of --dry-run",
        "records": "number of records",
        "topics": {"*": "number of records for this topic"},
        "refused": {"*": "number of letters that cannot be sent for this reason"},
        "missing_topics": ["topic that letters name and that does not exist"],
        "unselected": "number of letters that the filters do not select",
        "expired_offsets": "number of offsets that retention deleted before this group read them",
        "waiting_offsets": "number of offsets that wait for an open transaction",
        "new_group": "whether the group had no offsets, so that the replay starts at the first letter",
    },
    "demo": {
        "events": "number of events",
        "batches": "number of micro-batches of the exactly-once query",
        "kills": [{"seconds": "time of the kill, since the start", "cause": "where the driver was killed"}],
        "outputs": {
            "*": {
                "exactly_once": "whether the output is exactly the expected one",
                "expected": "number of rows that should be in the output",
                "found": "number of rows in the output",
                "missing": "rows that are missing",
                "doubled": "rows that are there too often",
                "foreign": "rows that should not be there",
            }
        },
        "picture": "path of the picture",
    },
    "doctor": {
        "severity": "highest severity of all findings: `ok`, `note`, `warning` or `bad`",
        "findings": [
            {
                "check": "name of the check",
                "severity": "`ok`, `note`, `warning` or `bad`",
                "what": "what was found",
                "why": "why it matters; null = nothing is wrong",
                "fix": "what to do; null = nothing",
                "repair": "what --fix does about it; null = nothing",
            }
        ],
        "repairs": [
            {
                "repair": "what --fix did",
                "done": "whether it succeeded",
                "problem": "why it failed; null = it did not",
            }
        ],
    },
    "fence": {
        "application_id": "the transactional id",
        "group_id": "consumer group of the query",
        "fenced": "whether older producers were fenced; false = only shown, because --yes is missing",
        "token": OrNull(TOKEN, "Kafka holds no token"),
        "pending": "whether an unfinished transaction is about to change the group's offsets",
    },
    "flights": {
        "topic": "name of the topic",
        "records": "number of records sent",
        "partitions": "number of partitions",
    },
    "inspect": {
        "application_id": "the transactional id",
        "group_id": "consumer group of the query",
        "checkpoint": OrNull(CHECKPOINT, "no checkpoint was named"),
        "kafka": OrNull(KAFKA, "no brokers were named, or none answered"),
        "staged": [
            {
                "name": "entry of the staging folder",
                "batch_id": "its micro-batch; null = it is none",
                "files": "number of files",
                "bytes": "size of all files",
            }
        ],
        "findings": [FINDING],
    },
    "lag": Lines(
        {
            "group": "the consumer group",
            "at": "when it was measured, ISO 8601",
            "lag": "sum over all partitions",
            "partitions": [
                {
                    "topic": "name of the topic",
                    "partition": "number of the partition",
                    "committed": "next offset that the group reads",
                    "end": "last stable offset",
                    "lag": "offsets between the two",
                    "open_transaction": "whether a transaction is open in the partition",
                }
            ],
        }
    ),
    "metrics": {"url": "where Prometheus finds the metrics"},
    "produce": {"topic": "name of the topic", "records": "number of records sent"},
    "sinks abort": SINK_ACTION,
    "sinks commit": SINK_ACTION,
    "sinks list": [
        {
            "sink": "name of the sink",
            "id": "sink transaction id",
            "application_id": "the query's application.id",
            "cluster_id": "Kafka's id of the cluster that commits the query's transactions",
            "fate": "what the next start of the query does: `commit`, `abort` or `leave`",
            "needs_a_person": "whether no token decides its fate",
        }
    ],
    "state get": Lines(
        {
            "*": "field of the row; `key` and `value` are objects with a field for each column",
        }
    ),
    "state ls": {
        "local": [
            {
                "application_id": "the query",
                "store": "name of the store",
                "shard": "number of the shard",
                "shards": "number of all shards; null = the database cannot be read",
                "path": "folder of the database",
                "batch": "batch whose state it has; null = none",
                "next_offset": "changelog offset from which to continue; null = not recorded",
                "pending": ["batch whose changes wait for their token"],
                "bytes": "size of its files",
                "problem": "why it cannot be read; null = it can",
            }
        ],
        "changelogs": [
            {
                "store": "name of the store",
                "topic": "changelog topic",
                "partition": "number of the shard",
                "earliest": "first offset of the log",
                "stable": "last stable offset",
                "log_end": "end of the log",
                "committed": "committed offset; null = none",
                "lag": "offsets from the committed one to the end",
                "batch": "batch of the committed offset; null = none",
                "problem": "why its token cannot be decoded; null = it can",
            }
        ],
    },
    "state lower-time": {
        "application_id": "the query",
        "store": "name of the store",
        "time_ms": "time of this machine, ms since the epoch",
        "lowered": "whether the command lowered recorded times to it",
        "shards": [
            {
                "shard": "number of a shard whose recorded time was later",
                "recorded_ms": "that time, ms since the epoch",
            }
        ],
    },
    "state rescale": {
        "application_id": "the query",
        "store": "name of the store",
        "shards": "wanted number of shards",
        "next_stage": "`copy`, `remake`, `fill`, `clean`, or `done`",
        "moved": "whether the command moved the state",
        "steps": ["a sentence about a step of the move"],
        "progress": [
            {
                "stage": "`copy` or `fill`",
                "records": "records that this run of the command has committed",
                "bytes": "size of their keys and values",
                "slices": "number of transactions",
                "offsets_done": "offsets that are processed",
                "offsets_total": "all offsets of the stage",
                "seconds": "duration of the stage, s",
                "left_seconds": "estimated remaining duration, s; null = unknown",
            }
        ],
    },
    "state restore": {
        "application_id": "the query",
        "store": "name of the store",
        "shards": [
            {
                "shard": "number of the shard",
                "batch": "batch that Kafka holds; null = none",
                "offset": "committed end of the changelog",
            }
        ],
        "restored": [
            {
                "shard": "number of the shard",
                "batch": "batch whose state it has now",
                "snapshot": "changelog offset of the snapshot with which it began; null = not with one",
                "records": "number of changelog records read",
                "promoted": "whether its pending batch was the committed one",
                "wiped": "why the old database was discarded; null = it was not",
                "ms": "duration, ms",
            }
        ],
    },
    "state verify": [
        {
            "shard": "number of the shard",
            "batch": "batch that was compared; null = none",
            "offset": "changelog offset up to which both were read",
            "entries": "number of entries in the changelog",
            "differing": "number of keys that differ",
            "differences": [{"kind": "how the key differs", "key": "the key, hexadecimal"}],
        }
    ],
    "sweep": {
        "location": "the staging folder",
        "token_batch": "newest batch that Kafka holds; null = not known",
        "why_unknown": "why that batch is not known; null = it is",
        "entries": [
            {
                "name": "name of the entry",
                "batch_id": "its micro-batch; null = it is none",
                "files": "number of files",
                "bytes": "size of all files",
                "delete": "whether it can be deleted",
                "deleted": "whether it was deleted",
                "reason": "why it can be deleted or not, or why deleting it failed",
            }
        ],
    },
    "tail": Lines(
        {
            "topic": "name of the topic",
            "partition": "number of the partition",
            "offset": "offset of the record",
            "timestamp_ms": "its timestamp, ms since 1970; null = none",
            "key": Optional("its key as text; null = no key"),
            "key_base64": Optional("its key, if that is not UTF-8; then `key` is absent"),
            "value": Optional("its value as text; null = a tombstone"),
            "value_base64": Optional("its value, if that is not UTF-8; then `value` is absent"),
            "headers": HEADERS,
            "state": "`committed`, `open` or `aborted`",
        }
    ),
    "token-topic create": {
        "topic": "name of the topic",
        "topic_id": "Kafka's id of the topic; null = it does not exist, and --yes is missing",
        "created": "whether the command created it",
        "warnings": ["a sentence about its configuration"],
    },
    "token-topic describe": {
        "topic": "name of the topic",
        "topic_id": "Kafka's id of the topic",
        "config": {"*": "value of this property"},
        "application_ids": "number of queries with a record",
        "records": "number of records, including outdated ones",
        "bytes": "size of these records",
        "partitions": [LOG],
        "warnings": ["a sentence about its configuration"],
    },
    "token-topic forget": {
        "topic": "name of the topic",
        "records": [ENTRY],
        "deleted": "whether the record was deleted",
    },
    "token-topic restore": {
        "group_id": "consumer group of the query",
        "record": RECORD,
        "restored": "whether the group was changed",
    },
    "token-topic show": [ENTRY],
    "top": Lines(VIEW),
    "topics create": [{"topic": "name of the topic", "created": "false = it existed already"}],
    "topics describe": {
        "topic": "name of the topic",
        "topic_id": "Kafka's id of the topic",
        "replication_factor": "number of replicas of each partition",
        "partitions": [LOG],
        "config": {"*": "value of this property"},
    },
    "topics list": [{"topic": "name of the topic", "partitions": "number of partitions"}],
}


def documentation() -> str:
    """Returns the text of docs/cli-json.md."""
    parts = [
        "<!-- written by python -m kafka_eos_source.operate.json_shapes -->",
        "A command that fails with exit code 1 prints this; with exit code 2, it prints nothing in JSON:",
        rendered(ERROR),
    ]
    for name, shape in sorted(SHAPES.items()):
        lines = isinstance(shape, Lines)
        parts.append(f"**`kafka-eos {name} --json`**{', one document on each line' if lines else ''}")
        parts.append(rendered(shape.shape if isinstance(shape, Lines) else shape))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    (Path(__file__).parents[2] / "docs" / "cli-json.md").write_text(documentation(), encoding="utf-8")
