"""The keys of an S3 sink, and how readers tell whole batches.

::

    <path>/batch=<application.id>-<sink>.<batch>/part-<task attempt>.parquet   an upload that was completed
    <path>/_manifests/<id>.json                                               comes last: the batch is whole
    <path>/_kafka_eos/<sink>/prepared/<id>.json                               uploads that are the batch

An upload has its key from its first part on, before the batch has an id. So keys of rows are made of Spark's
batch id and the task attempt, which is unique: after a checkpoint was restored, two batches may share a
folder, and neither overwrites an object of the other. Only one id of a batch is ever committed, and only its
uploads are ever completed. Spark, Hive and Arrow pass over names that begin with an underscore. ``<sink>`` is
a hash of the application id and the name of the sink, as in the filesystem sink.

Old ids (`SinkTxn.is_old`) have other keys::

    <path>/batch=<application.id>-<batch>/part-<task attempt>.parquet
    <path>/batch=<application.id>-<batch>/_manifest-<attempt>.json
    <path>/_kafka_eos/<application>/prepared/<id>.json
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kafka_eos_source import option_values as values
from kafka_eos_source.sinks.contract import SinkContext, SinkTxn
from kafka_eos_source.sinks.filesystem.layout import HIDDEN, hashed

MANIFESTS = "_manifests/"
_OLD_MANIFEST = re.compile(r"_manifest-[0-9a-f]+\.json")
_URI = re.compile(r"s3[an]?://([a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(?:/(.*))?")


@dataclass(frozen=True)
class Layout:
    """The keys of one sink of one query.

    Attributes:
        bucket: its name.
        prefix: of every key; empty, or with a slash at its end.
        context: of the sink.
    """

    bucket: str
    prefix: str
    context: SinkContext

    @property
    def prepared_folders(self) -> tuple[str, str]:
        """Prefixes of the notes of this sink: those of this version, and those of old ids."""
        application_id, name = self.context.application_id, self.context.name
        return (
            f"{self.prefix}{HIDDEN}/{hashed(application_id, name)}/prepared/",
            f"{self.prefix}{HIDDEN}/{hashed(application_id)}/prepared/",
        )

    @property
    def rows_of_query(self) -> str:
        """A prefix of all keys of the query's rows; also of another query whose name begins alike."""
        return f"{self.prefix}batch={self.context.application_id}-"

    def part(self, batch_id: int, attempt: str, ending: str) -> str:
        return f"{self.rows_of_query}{self.context.name}.{batch_id}/part-{attempt}{ending}"

    def manifest(self, txn: SinkTxn) -> str:
        return f"{self.prefix}{MANIFESTS}{txn}.json"

    def old_manifest(self, txn: SinkTxn) -> str:
        """Where an older version wrote the manifest of an old id."""
        return f"{self.rows_of_query}{txn.sequence}/_manifest-{txn.attempt}.json"

    def prepared(self, txn: SinkTxn) -> str:
        return f"{self.prepared_folders[txn.is_old]}{txn}.json"

    def txn(self, key: str) -> SinkTxn | None:
        """The id in a key of `prepared`; None if it is not one of this sink."""
        found = SinkTxn.parse(key.rpartition("/")[2].removesuffix(".json"))
        return found if found is not None and self.context.owns(found) else None

    def batch_of(self, key: str) -> int | None:
        """Spark's id of the batch that a part belongs to; None if it is not a part of this sink."""
        folder, _, name = key.removeprefix(self.rows_of_query).partition("/")
        batch = folder.removeprefix(f"{self.context.name}.")  # an old key has the batch alone
        ours = key.startswith(self.rows_of_query) and batch.isdecimal() and name.startswith("part-")
        return int(batch) if ours else None

    def name_of(self, key: str) -> str:
        """A key as manifests have it: without the prefix."""
        return key.removeprefix(self.prefix)


def keys_of(key: str, manifest: Mapping[str, Any], prefix: str) -> list[str]:
    """The keys that a manifest names; an old one names them by their last part."""
    folder = key.rpartition("/")[0] + "/" if is_old_manifest(key) else prefix
    return [f"{folder}{each['name']}" for each in manifest["files"]]


def is_old_manifest(key: str) -> bool:
    return _OLD_MANIFEST.fullmatch(key.rpartition("/")[2]) is not None


def parse(name: str, value: str) -> tuple[str, str]:
    """Option ``path``: bucket and prefix."""
    found = _URI.fullmatch(value.strip())
    if found is None or "//" in f"/{found[2] or ''}":
        raise values.invalid(name, value, "s3://bucket or s3://bucket/prefix")
    prefix = (found[2] or "").rstrip("/")
    return found[1], f"{prefix}/" if prefix else ""
