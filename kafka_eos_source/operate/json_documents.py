"""What each command prints with ``--json``: for the documentation, and for the test that compares both.

A text describes a value. ``[shape]`` is an array. A dict is an object with exactly these keys; a dict with
the key ``*`` is an object with any keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Lines:
    """Several JSON documents, one on each line.

    Attributes:
        shape: shape of each document.
    """

    shape: Any


@dataclass(frozen=True)
class OrNull:
    """A value that may be null.

    Attributes:
        shape: shape of the value.
        when: when it is null.
    """

    shape: Any
    when: str


@dataclass(frozen=True)
class Optional:
    """A field that may be absent.

    Attributes:
        shape: shape of the value.
    """

    shape: Any


def mismatches(shape: Any, value: Any, at: str = "$") -> Iterator[str]:
    """Yields where a value differs from its shape.

    Args:
        shape: a shape, see the module.
        value: a parsed JSON document.
        at: path of the value, for the messages.
    """
    if isinstance(shape, OrNull):
        if value is not None:
            yield from mismatches(shape.shape, value, at)
    elif isinstance(shape, Optional):
        yield from mismatches(shape.shape, value, at)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{at}: {value!r} is not an array"
            return
        for number, each in enumerate(value):
            yield from mismatches(shape[0], each, f"{at}[{number}]")
    elif isinstance(shape, dict):
        yield from _mismatches_of_object(shape, value, at)
    elif isinstance(value, (list, dict)):
        yield f"{at}: {value!r} is not a simple value"


def _mismatches_of_object(shape: dict[str, Any], value: Any, at: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{at}: {value!r} is not an object"
    elif "*" in shape:
        for name, each in value.items():
            if not isinstance(shape["*"], str):
                yield from mismatches(shape["*"], each, f"{at}.{name}")
    else:
        required = {name for name, each in shape.items() if not isinstance(each, Optional)}
        yield from (f"{at}.{name} is missing" for name in sorted(required - set(value)))
        yield from (f"{at}.{name} is not documented" for name in sorted(set(value) - set(shape)))
        for name in shape.keys() & value.keys():
            yield from mismatches(shape[name], value[name], f"{at}.{name}")


def rendered(shape: Any) -> str:
    """Returns a shape as a Markdown block."""
    return "```text\n" + _rendered(shape, "") + "\n```"


def _rendered(shape: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(shape, OrNull):
        return f"null if {shape.when}, else {_rendered(shape.shape, indent)}"
    if isinstance(shape, Optional):
        return f"may be absent: {_rendered(shape.shape, indent)}"
    if isinstance(shape, list):
        return f"[{_rendered(shape[0], indent)}, …]"
    if isinstance(shape, dict):
        fields = (
            f"{inner}{'…' if name == '*' else json.dumps(name)}: {_rendered(each, inner)}"
            for name, each in shape.items()
        )
        return "{\n" + "\n".join(fields) + f"\n{indent}}}"
    return str(shape)


# -- parts that several commands use, or that are long

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


# -- what each command prints

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
                "other_cluster": "whether it is needed on the cluster of the topics read, not on the sink's",
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
        "<!-- written by python -m kafka_eos_source.operate.json_documents -->",
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
