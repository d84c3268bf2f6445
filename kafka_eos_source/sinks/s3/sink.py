"""The sink: tasks upload parts, a note prepares the uploads, the commit completes them and says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import SinkFailedError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Outcome,
    SinkContext,
    SinkTxn,
    Stage,
    StageContext,
    Staged,
    TwoPhaseSink,
)
from kafka_eos_source.sinks.filesystem import formats
from kafka_eos_source.sinks.options import SinkOption
from kafka_eos_source.sinks.registry import require
from kafka_eos_source.sinks.s3 import layout
from kafka_eos_source.sinks.s3.client import EXTRA, Bucket, Service, translated
from kafka_eos_source.sinks.s3.completing import at_once, complete, verify
from kafka_eos_source.sinks.s3.uploading import (
    LEAST_PART_BYTES,
    MOST_PART_BYTES,
    ObjectStage,
    PartsStream,
    StagedObject,
    abort,
)
from kafka_eos_source.sinks.targets import location

_MOST_THREADS = 64


def _path(name: str, value: str) -> str:
    layout.parse(name, value)
    return value.strip()


def _endpoint(name: str, value: str) -> str:
    text = value.strip()
    if not text.startswith(("http://", "https://")) or "@" in text:
        shown = text if "@" not in text else "(not shown: there may be a password in it)"
        raise values.invalid(name, shown, "http://host:port or https://…, without user and password")
    return text


def _part_bytes(name: str, value: str) -> int:
    found = values.integer(LEAST_PART_BYTES)(name, value)
    if found > MOST_PART_BYTES:
        raise values.invalid(name, value, f"{LEAST_PART_BYTES} to {MOST_PART_BYTES}, S3's limits")
    return found


def _threads(name: str, value: str) -> int:
    found = values.integer(1)(name, value)
    if found > _MOST_THREADS:
        raise values.invalid(name, value, f"a whole number, 1 to {_MOST_THREADS}")
    return found


def _timeout_ms(name: str, value: str) -> int:
    found = values.duration_ms(name, value)
    if found < 1:
        raise values.invalid(name, value, "a time, 1ms or more")
    return found


class S3Sink(TwoPhaseSink):
    """``type=s3``. Credentials come from boto3's own chain.

    Args:
        path: ``s3://bucket/prefix``.
        format: ``parquet``, ``json`` (lines) or ``csv``.
        compression: of Parquet's pages.
        endpoint: URL of a store other than AWS.
        region: of the bucket.
        path_style: the bucket is in the path of the URL.
        part_bytes: of each part of an upload but the last.
        upload_threads: parts of one task under way.
        timeout: ms, of connecting and of each wait for an answer.
    """

    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption("path", _path, None, "URI", "`s3://bucket/prefix`.", required=True),
        SinkOption(
            "format",
            values.choice(*formats.FORMATS),
            "parquet",
            "`parquet`, `json`, `csv`",
            "Of the objects. `json` is one object a line.",
        ),
        SinkOption(
            "compression",
            values.choice(*formats.COMPRESSIONS),
            "default",
            "`none`, `snappy`, `zstd`, `gzip`, `lz4`",
            "Of Parquet's pages.",
            "snappy",
        ),
        SinkOption("endpoint", _endpoint, None, "URL", "A store other than AWS.", "boto3's configuration"),
        SinkOption("region", values.text, None, "text", "Of the bucket.", "boto3's configuration"),
        SinkOption(
            "path.style",
            values.boolean,
            False,
            "boolean",
            "The bucket is in the URL's path, not in its host.",
        ),
        SinkOption(
            "part.bytes",
            _part_bytes,
            8 << 20,
            "bytes",
            "Of each part of an upload but the last: 5 MiB or more. A task's object has 10,000 at most.",
            "`8388608`",
        ),
        SinkOption(
            "upload.threads",
            _threads,
            4,
            "count",
            "Parts that one task uploads at a time; as many and one more are in its memory.",
        ),
        SinkOption(
            "timeout", _timeout_ms, 30_000, "time", "Of connecting, and of each wait for an answer.", "`30s`"
        ),
    )

    def __init__(
        self,
        path: str,
        format: str = "parquet",
        compression: str = "default",
        endpoint: str | None = None,
        region: str | None = None,
        path_style: bool = False,
        part_bytes: int = 8 << 20,
        upload_threads: int = 4,
        timeout: int = 30_000,
    ) -> None:
        self.path = path
        self.format = format
        self.compression = compression
        self.service = Service(endpoint, region, path_style, timeout / 1000)
        self.part_bytes = part_bytes
        self.upload_threads = upload_threads

    def open(self, context: SinkContext) -> None:
        """Raises: InvalidOptionError: the path is none, or boto3 is not installed."""
        super().open(context)
        require("boto3", EXTRA)
        name, prefix = layout.parse("path", self.path)
        self._at = layout.Layout(name, prefix, context)
        self._bucket = Bucket(self.service, name)

    def target(self) -> str | None:
        name, prefix = layout.parse("path", self.path)
        return location(f"s3://{name}/{prefix}") + (
            f" at {self.service.endpoint}" if self.service.endpoint else ""
        )

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        """Raises: InvalidSchemaError, SinkFailedError, SinkRetryableError: it cannot be, or not be told."""
        formats.check(self.format, schema)
        self._notes()

    def stage(self, context: StageContext) -> Stage:
        key = self._at.part(context.batch_id, context.attempt, formats.ENDINGS[self.format])
        stream = PartsStream(self._bucket, key, context.attempt, self.part_bytes, self.upload_threads)
        return ObjectStage(stream, key, context.attempt, self.format, context.schema, self.compression)

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        if self._is_committed(txn):
            return OK
        if self._bucket.head(self._at.prepared(txn)) is not None:
            return OK
        tokens: Sequence[StagedObject] = staged.tokens
        # the note comes before the look at the uploads: `tidy` spares those that a note names
        self._bucket.put(
            self._at.prepared(txn),
            {
                "id": str(txn),
                "application": txn.application_id,
                "sink": txn.sink,
                "sequence": txn.sequence,
                "rows": staged.rows,
                "schema": {field.name: str(field.type) for field in staged.schema},
                "uploads": [asdict(each) for each in tokens],
            },
        )
        try:
            at_once(partial(verify, self._bucket, deadline), tokens)
        except SinkFailedError:
            self._bucket.delete(self._at.prepared(txn))
            raise
        return OK

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        """Complete, say so, forget: a kill between two of them is gone on from."""
        note = self._bucket.get(self._at.prepared(txn))
        if note is None:
            return OK if self._is_committed(txn) else Fatal(f"nothing is prepared under {txn} in {self.path}")
        if not self._is_committed(txn):
            at_once(partial(complete, self._bucket, deadline), map(_staged, note["uploads"]))
            failpoints.reach("sink.s3.before_manifest")
            self._bucket.put(self._at.manifest(txn), self._manifest(note))
        self._bucket.delete(self._at.prepared(txn))
        return OK

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        """The uploads stay: they may be prepared under another id, and end when the batch is finished."""
        self._bucket.delete(self._at.prepared(txn))
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        return sorted(txn for txn in self._notes() if not self._ended(txn))

    def tidy(self, batch_id: int, deadline: Deadline) -> None:
        """Aborts the uploads that were left behind, by tasks and drivers that died too: one list a batch.

        Spares the uploads of what is prepared: see `TwoPhaseSink.tidy`.
        """
        with translated("list uploads"):
            pages = self._bucket.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket.name, Prefix=self._at.rows_of_query
            )
            uploads = [(each["Key"], each["UploadId"]) for page in pages for each in page.get("Uploads", ())]
        batches = [(self._at.batch_of(key), key, upload_id) for key, upload_id in uploads]
        over = [
            (key, upload_id) for batch, key, upload_id in batches if batch is not None and batch <= batch_id
        ]
        if not over:
            return
        notes = [self._bucket.get(self._at.prepared(txn)) for txn in self._notes()]
        kept = {each["upload_id"] for note in notes if note is not None for each in note["uploads"]}
        for key, upload_id in over:
            if upload_id not in kept:
                abort(self._bucket, key, upload_id)

    def _notes(self) -> list[SinkTxn]:
        """The ids that are noted as prepared."""
        keys = [key for folder in self._at.prepared_folders for key in self._bucket.keys(folder)]
        return [txn for txn in map(self._at.txn, keys) if txn is not None]

    def _is_committed(self, txn: SinkTxn) -> bool:
        keys = [self._at.manifest(txn), *([self._at.old_manifest(txn)] if txn.is_old else [])]
        return any(self._bucket.head(key) is not None for key in keys)

    def _ended(self, txn: SinkTxn) -> bool:
        """Committed, and its preparation not yet forgotten: it is now."""
        if not self._is_committed(txn):
            return False
        self._bucket.delete(self._at.prepared(txn))
        return True

    def _manifest(self, note: Mapping[str, Any]) -> dict[str, Any]:
        """As the filesystem sink's; names are relative to the path."""
        files = [
            {
                "name": self._at.name_of(each["key"]),
                "rows": each["rows"],
                "bytes": each["size_bytes"],
            }
            for each in note["uploads"]
        ]
        return {**{name: value for name, value in note.items() if name != "uploads"}, "files": files}


def _staged(upload: Mapping[str, Any]) -> StagedObject:
    return StagedObject(**{**upload, "etags": tuple(upload["etags"])})
