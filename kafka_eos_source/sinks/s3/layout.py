"""Keys of the objects that an S3 sink writes.

::

    <path>/batch=<application.id>-<cluster>-<sink>.<batch>/part-<task attempt>.parquet  a completed upload
    <path>/_kafka_eos/<owner>/prepared/<id>.json                   lists the uploads of a batch
    <path>/_manifests/<id>.json                                    the same content; written last

A task chooses the key of an upload before the batch has an id. Therefore keys of rows contain Spark's batch
id and the id of the task attempt, which is unique. After somebody restored a checkpoint, two batches may
share a folder, but neither overwrites an object of the other. Only one id of a batch is ever committed, and
only its uploads are ever completed. Spark, Hive and Arrow ignore names that begin with an underscore.
``<owner>`` is `SinkContext.owner`, as in the filesystem sink.

After a restart, the sink believes the ids that it lists, and nothing in a manifest unless its digest is in
the token in Kafka. S3 itself vouches for the parts of an upload: their ETags are in the manifest. Whoever may
write to ``_manifests/`` can pretend that a batch is committed, as whoever may delete objects can remove it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kafka_eos_source import option_values as values
from kafka_eos_source.sinks.contract import SinkContext, SinkTxn
from kafka_eos_source.sinks.filesystem_layout import HIDDEN

MANIFESTS = "_manifests/"
_PART = re.compile(r"[0-9]{1,19}/part-([0-9a-f]{1,64})\.(?:parquet|jsonl|csv)")
_URI = re.compile(r"s3[an]?://([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(?:/(.*))?")


@dataclass(frozen=True)
class Layout:
    """Keys of one sink of one query.

    Attributes:
        bucket: name of the bucket.
        prefix: prefix of every key; empty, or with a slash at the end.
        context: context of the sink.
    """

    bucket: str
    prefix: str
    context: SinkContext

    @property
    def prepared_folder(self) -> str:
        """Prefix of the notes of this sink."""
        return f"{self.prefix}{HIDDEN}/{self.context.owner}/prepared/"

    @property
    def rows_of_sink(self) -> str:
        """Prefix of the keys of all rows of this sink, and of no other sink, query or cluster."""
        own = self.context.txn(0, "")
        return f"{self.prefix}batch={own.application_id}-{own.cluster}-{own.sink}."

    def part(self, batch_id: int, task_attempt_id: str, ending: str) -> str:
        """Returns the key of the rows of one task attempt."""
        return f"{self.rows_of_sink}{batch_id}/part-{task_attempt_id}{ending}"

    def manifest(self, txn: SinkTxn) -> str:
        """Returns the key of the manifest of a committed batch."""
        return f"{self.prefix}{MANIFESTS}{txn}.json"

    def prepared(self, txn: SinkTxn) -> str:
        """Returns the key of the note that lists the uploads of a prepared batch."""
        return f"{self.prepared_folder}{txn}.json"

    def txn(self, key: str) -> SinkTxn | None:
        """Parses the id in a key of `prepared`; returns None if it does not belong to this sink."""
        found = SinkTxn.parse(key.rpartition("/")[2].removesuffix(".json"))
        return found if found is not None and self.context.owns(found) else None

    def task_attempt_of(self, key: str) -> str:
        """Parses the id of the task attempt in a key of `part`.

        Raises:
            ValueError: if the key is none of this sink.
        """
        found = _PART.fullmatch(key.removeprefix(self.rows_of_sink))
        if found is None or not key.startswith(self.rows_of_sink):
            raise ValueError(f"not a key of this sink's rows: {key[:200]!r}")
        return found[1]

    def batch_of(self, key: str) -> int | None:
        """Parses Spark's batch id in a key of `part`; returns None if the key is not this sink's."""
        batch, _, name = key.removeprefix(self.rows_of_sink).partition("/")
        ours = key.startswith(self.rows_of_sink) and batch.isdecimal() and name.startswith("part-")
        return int(batch) if ours else None

    def name_of(self, key: str) -> str:
        """Returns a key without the prefix, as in manifests."""
        return key.removeprefix(self.prefix)


def parse(name: str, value: str) -> tuple[str, str]:
    """Parses the option ``path``.

    Returns:
        Name of the bucket, and prefix of keys in it.

    Raises:
        InvalidOptionError: if the value is not an S3 URI.
    """
    found = _URI.fullmatch(value.strip())
    if found is None or "//" in f"/{found[2] or ''}":
        raise values.invalid(name, value, "s3://bucket or s3://bucket/prefix")
    prefix = (found[2] or "").rstrip("/")
    return found[1], f"{prefix}/" if prefix else ""
