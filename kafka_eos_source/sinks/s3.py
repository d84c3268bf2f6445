"""`S3Sink`: tasks upload parts, a note lists the uploads, the commit completes them and adds a manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import SinkFailedError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import ALLOW_HTTP, shown_url
from kafka_eos_source.sinks import formats, s3_uploads
from kafka_eos_source.sinks import manifest as manifests
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Ok,
    Outcome,
    SinkContext,
    SinkTxn,
    Stage,
    StageContext,
    Staged,
    TwoPhaseSink,
)
from kafka_eos_source.sinks.row_checks import RowRule
from kafka_eos_source.sinks.s3_uploads import (
    EXTRA,
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    Bucket,
    ObjectStage,
    PartsStream,
    Service,
    StagedObject,
    abort,
    complete,
    concurrently,
    translated,
    verify,
)
from kafka_eos_source.sinks.sink_options import ALLOW_HTTP_OPTION, SinkOption
from kafka_eos_source.sinks.specs import require
from kafka_eos_source.sinks.targets import location

_MAX_THREADS = 64
#: Longest wait for one answer during a check.
_CHECK_SECONDS = 2.0


def _path(name: str, value: str) -> str:
    s3_uploads.parse_path(name, value)
    return value.strip()


def _endpoint(name: str, value: str) -> str:
    text = value.strip()
    if not text.startswith(("http://", "https://")) or "@" in text:
        raise values.invalid(
            name, shown_url(text), "http://host:port or https://…, without user and password"
        )
    return text


def _part_bytes(name: str, value: str) -> int:
    found = values.integer(MIN_PART_BYTES)(name, value)
    if found > MAX_PART_BYTES:
        raise values.invalid(
            name, value, f"a number of bytes from {MIN_PART_BYTES} to {MAX_PART_BYTES}, which are S3's limits"
        )
    return found


def _threads(name: str, value: str) -> int:
    found = values.integer(1)(name, value)
    if found > _MAX_THREADS:
        raise values.invalid(name, value, f"a whole number from 1 to {_MAX_THREADS}")
    return found


def _timeout_ms(name: str, value: str) -> int:
    found = values.duration_ms(name, value)
    if found < 1:
        raise values.invalid(name, value, "a time of 1ms or more")
    return found


class S3Sink(TwoPhaseSink):
    """``type=s3``: writes Parquet, JSON lines or CSV objects. boto3 finds the credentials.

    Made from its `OPTIONS`, which describe the arguments; `constructors.s3` is for users.
    """

    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption("path", _path, None, "URI", "Bucket and prefix: `s3://bucket/prefix`.", required=True),
        formats.FORMAT,
        formats.COMPRESSION,
        SinkOption(
            "endpoint", _endpoint, None, "URL", "URL of a store other than AWS.", "boto3's configuration"
        ),
        ALLOW_HTTP_OPTION,
        SinkOption("region", values.text, None, "text", "Region of the bucket.", "boto3's configuration"),
        SinkOption(
            "path.style",
            values.boolean,
            False,
            "boolean",
            "Whether the bucket is in the path of URLs instead of the host name.",
        ),
        SinkOption(
            "part.bytes",
            _part_bytes,
            8 << 20,
            "bytes",
            "Size of each part of an upload except the last: 5 MiB or more. An object can have 10,000 parts.",
            "`8388608`",
        ),
        SinkOption(
            "upload.threads",
            _threads,
            4,
            "count",
            "Number of parts that one task uploads at the same time. These and one more are in its memory.",
        ),
        SinkOption(
            "timeout",
            _timeout_ms,
            30_000,
            "time",
            "Time limit for connecting, and for each wait for an answer.",
            "`30s`",
        ),
    )

    def __init__(
        self,
        *,
        path: str,
        format: str,
        compression: str,
        endpoint: str | None,
        region: str | None,
        path_style: bool,
        part_bytes: int,
        upload_threads: int,
        timeout: int,
        allow_http: bool,
    ) -> None:
        if endpoint is not None:
            sent = "signed requests, session tokens and rows"
            values.refuse_plain_http("endpoint", endpoint, sent, ALLOW_HTTP, allowed=allow_http)
        self.path = path
        self.format = format
        self.compression = compression
        self.service = Service(endpoint, region, path_style, timeout / 1000)
        self.part_bytes = part_bytes
        self.upload_threads = upload_threads

    def open(self, context: SinkContext) -> None:
        """Prepares the sink for use, without connecting.

        Raises:
            InvalidOptionError: if the path is malformed, or boto3 is not installed.
        """
        super().open(context)
        require("boto3", EXTRA)
        name, prefix = s3_uploads.parse_path("path", self.path)
        self._at = s3_uploads.Layout(name, prefix, context)
        self._bucket = Bucket(self.service, name)

    def target(self) -> str | None:
        name, prefix = s3_uploads.parse_path("path", self.path)
        return location(f"s3://{name}/{prefix}", self.service.endpoint)

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        """Checks that the format can hold the rows, and that the driver may list the bucket.

        Raises:
            InvalidSchemaError: if the format cannot hold the rows.
            SinkFailedError, SinkRetryableError: if the store refuses the request or does not answer.
        """
        formats.check(self.format, schema)
        impatient = replace(self.service, timeout_seconds=min(self.service.timeout_seconds, _CHECK_SECONDS))
        Bucket(impatient, self._bucket.name).keys(self._at.prepared_folder)

    def row_rules(self, schema: pa.Schema, deadline: Deadline) -> Sequence[RowRule]:
        return formats.row_rules(self.format, schema)

    def stage(self, context: StageContext) -> Stage:
        key = self._at.part(context.batch_id, context.task_attempt_id, formats.ENDINGS[self.format])
        stream = PartsStream(self._bucket, key, context.task_attempt_id, self.part_bytes, self.upload_threads)
        rules = formats.unchecked_rules(self.format, context)
        return ObjectStage(stream, self.format, context.schema, rules, self.compression)

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        if self._is_committed(txn):
            return OK
        found = self._bucket.get(self._at.prepared(txn))
        if found is not None:
            return Ok(manifests.digest(found))
        receipts: Sequence[StagedObject] = staged.receipts
        data = manifests.encode(
            {
                "id": str(txn),
                "application": txn.application_id,
                "cluster": txn.cluster,
                "sink": txn.sink,
                "sequence": txn.sequence,
                "rows": staged.rows,
                "schema": {field.name: str(field.type) for field in staged.schema},
                "files": [each.to_json(self._at) for each in receipts],
            }
        )
        # write the note before checking the uploads: from then on `tidy` does not abort them
        self._bucket.put(self._at.prepared(txn), data)
        try:
            concurrently(partial(verify, self._bucket, deadline), receipts)
        except SinkFailedError:
            self._bucket.delete(self._at.prepared(txn))
            raise
        return Ok(manifests.digest(data))

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        """Completes the uploads, copies the note as the manifest, deletes it. Resumes after a kill."""
        note = self._read(self._at.prepared(txn), txn)
        manifest = self._read(self._at.manifest(txn), txn)
        if note is None:
            return OK if manifest else Fatal(f"nothing is prepared under {txn} in {self.path}")
        if manifest is not None and manifest != note:
            raise manifests.refused(f"the object {self._at.manifest(txn)}", manifests.NOT_PREPARED)
        if manifest is None:
            data, uploads = note
            concurrently(partial(complete, self._bucket, deadline), uploads)
            failpoints.reach("sink.s3.before_manifest")
            self._bucket.put(self._at.manifest(txn), data)
        self._bucket.delete(self._at.prepared(txn))
        return OK

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        """Deletes the note only. The driver may prepare the uploads again; `tidy` aborts unused ones."""
        self._bucket.delete(self._at.prepared(txn))
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        return sorted(txn for txn in self._prepared_ids() if not self._clean_up_if_committed(txn))

    def tidy(self, batch_id: int, deadline: Deadline) -> None:
        """Aborts uploads that tasks and drivers left behind, except those of prepared batches.

        Needs one list request per batch; see `TwoPhaseSink.tidy`.
        """
        with translated("list uploads"):
            pages = self._bucket.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket.name, Prefix=self._at.rows_of_sink
            )
            uploads = [(each["Key"], each["UploadId"]) for page in pages for each in page.get("Uploads", ())]
        batches = [(self._at.batch_of(key), key, upload_id) for key, upload_id in uploads]
        finished = [
            (key, upload_id) for batch, key, upload_id in batches if batch is not None and batch <= batch_id
        ]
        if not finished:
            return
        notes = [self._read(self._at.prepared(txn), txn) for txn in self._prepared_ids()]
        prepared = {each.upload_id for note in notes if note is not None for each in note[1]}
        for key, upload_id in finished:
            if upload_id not in prepared:
                abort(self._bucket, key, upload_id)

    def _prepared_ids(self) -> list[SinkTxn]:
        """Lists the ids that have a note."""
        keys = self._bucket.keys(self._at.prepared_folder)
        return [txn for txn in map(self._at.txn, keys) if txn is not None]

    def _is_committed(self, txn: SinkTxn) -> bool:
        return self._bucket.head(self._at.manifest(txn)) is not None

    def _clean_up_if_committed(self, txn: SinkTxn) -> bool:
        """Returns whether the batch is committed; if so, deletes the note that a killed commit left.

        A manifest that is no copy of the note proves nothing: `commit` compares both with the token's digest.
        """
        manifest = self._bucket.get(self._at.manifest(txn))
        if manifest is None or manifest != self._bucket.get(self._at.prepared(txn)):
            return False
        self._bucket.delete(self._at.prepared(txn))
        return True

    def _read(self, key: str, txn: SinkTxn) -> tuple[bytes, list[StagedObject]] | None:
        """Reads a note or manifest; returns its bytes and uploads, or None if the object does not exist.

        Raises:
            SinkFailedError: if it is not the one that was prepared (`SinkTxn.digest`), or is damaged.
        """
        data = self._bucket.get(key)
        if data is None:
            return None

        def uploads(content: Mapping[str, Any]) -> list[StagedObject]:
            if content["id"] != str(txn):
                raise ValueError(f"it belongs to another batch, {str(content['id'])[:200]!r}")
            return [StagedObject.from_json(each, self._at) for each in manifests.objects(content["files"])]

        where = f"the object {key} in the bucket {self._bucket.name}"
        return data, manifests.parsed(data, txn.digest, where, uploads)


# -- readers -------------------------------------------------------------------------------------


def committed_files(
    path: str, *, endpoint: str | None = None, region: str | None = None, path_style: bool = False
) -> list[str]:
    """Lists the objects of all committed batches under a sink's path, batch by batch, as ``s3://`` URIs.

    Args:
        path: value of the option ``sink.<name>.path``.
        endpoint, region, path_style: values of these options of the sink.

    Raises:
        InvalidOptionError: if the path is malformed, or boto3 is not installed.
        SinkFailedError, SinkRetryableError: if the store refuses a request or does not answer.
    """
    name, prefix = s3_uploads.parse_path("path", path)
    bucket = Bucket(Service(endpoint, region, path_style), name)
    found: dict[SinkTxn, list[str]] = {}
    for key in bucket.keys(f"{prefix}{s3_uploads.MANIFESTS}"):
        txn, data = SinkTxn.parse(key.rpartition("/")[2].removesuffix(".json")), bucket.get(key)
        if txn is not None and data is not None:
            names = manifests.parsed(data, "", f"the object {key}", _names)
            found[txn] = [f"s3://{name}/{prefix}{each}" for each in names]
    in_order = sorted(
        found, key=lambda txn: (txn.application_id, txn.cluster, txn.sequence, txn.sink, txn.attempt)
    )
    return [file for txn in in_order for file in found[txn]]


def _names(content: Mapping[str, Any]) -> list[str]:
    return [manifests.relative_name(each["name"]) for each in manifests.objects(content["files"])]
