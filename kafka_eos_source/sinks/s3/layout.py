"""The keys of an S3 sink, and how readers tell whole batches.

::

    <path>/batch=<application.id>-<batch>/part-<task attempt>.parquet    appears when its upload is completed
    <path>/batch=<application.id>-<batch>/_manifest-<attempt>.json       comes last: the batch is whole
    <path>/_kafka_eos/<application>/prepared/<id>.json                   uploads that are the batch

An upload has its key from its first part on, before the batch has an id: so keys are made of the batch and of
the task's attempt, and the id's own attempt is in the manifest's name. Only one id of a batch is ever
committed, and only its uploads are ever completed. Spark, Hive and Arrow pass over names that begin with an
underscore. ``<application>`` is a hash, as in the filesystem sink.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from kafka_eos_source import option_values as values
from kafka_eos_source.sinks.contract import SinkTxn
from kafka_eos_source.sinks.filesystem.layout import HIDDEN

MANIFEST = re.compile(r"_manifest-[0-9a-f]+\.json")
_URI = re.compile(r"s3[an]?://([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(?:/(.*))?")


@dataclass(frozen=True)
class Layout:
    """Of one sink of one query.

    Attributes:
        bucket: its name.
        prefix: of every key; empty, or with a slash at its end.
        application_id: of the query.
    """

    bucket: str
    prefix: str
    application_id: str

    @property
    def own(self) -> str:
        """What begins the query's hidden keys."""
        return f"{self.prefix}{HIDDEN}/{hashlib.sha256(self.application_id.encode()).hexdigest()[:16]}/"

    @property
    def batches(self) -> str:
        """What begins the keys of the query's rows; also of another's whose name begins alike."""
        return f"{self.prefix}batch={self.application_id}-"

    def part(self, batch_id: int, attempt: str, ending: str) -> str:
        return f"{self.batches}{batch_id}/part-{attempt}{ending}"

    def manifest(self, txn: SinkTxn) -> str:
        return f"{self.batches}{txn.batch_id}/_manifest-{txn.attempt}.json"

    def prepared(self, txn: SinkTxn) -> str:
        return f"{self.own}prepared/{txn}.json"

    def txn(self, key: str) -> SinkTxn | None:
        """The id that a key of `prepared` names; None = none of ours."""
        found = SinkTxn.parse(key.rpartition("/")[2].removesuffix(".json"))
        return found if found is not None and found.application_id == self.application_id else None

    def batch_of(self, key: str) -> int | None:
        """The batch that a part belongs to; None = it is none of this query's."""
        batch, _, name = key.removeprefix(self.batches).partition("/")
        ours = key.startswith(self.batches) and batch.isdecimal() and name.startswith("part-")
        return int(batch) if ours else None


def parse(name: str, value: str) -> tuple[str, str]:
    """Option ``path``: bucket and prefix."""
    found = _URI.fullmatch(value.strip())
    if found is None or "//" in f"/{found[2] or ''}":
        raise values.invalid(name, value, "s3://bucket or s3://bucket/prefix")
    prefix = (found[2] or "").rstrip("/")
    return found[1], f"{prefix}/" if prefix else ""
