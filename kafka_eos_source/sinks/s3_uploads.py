"""Multipart uploads of an S3 sink: the client, the keys, how tasks upload, how the commit completes.

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

boto3 finds credentials by itself (environment, files, instance role, web identity). This package never sees
them.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import KafkaEosError, SinkFailedError, SinkRetryableError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.file_systems import WriteOnlyFile
from kafka_eos_source.sinks import formats
from kafka_eos_source.sinks import manifest as manifests
from kafka_eos_source.sinks.contract import SinkContext, SinkTxn
from kafka_eos_source.sinks.filesystem_layout import HIDDEN
from kafka_eos_source.sinks.manifest import LARGEST_BYTES, refused
from kafka_eos_source.sinks.row_checks import RowRule, check_rules
from kafka_eos_source.sinks.specs import require

EXTRA = "s3"

#: Error codes of requests that were not carried out and may succeed later, although the HTTP status is 4xx.
_RETRYABLE_CODES = frozenset(
    ["SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "ExpiredToken", "OperationAborted", "Throttling"]
)
#: Of a text that the store answers with.
_SHOWN_CHARACTERS = 500
_FIXES = {
    "NoSuchBucket": "create the bucket, or correct the option 'path'.",
    "AccessDenied": "grant driver and executors the actions that docs/sink-s3.md lists.",
    "403": "grant driver and executors the actions that docs/sink-s3.md lists.",
    "EntityTooSmall": "increase the option 'part.bytes', because the store requires larger parts.",
}


class MissingError(SinkFailedError):
    """The object or upload does not exist. Most callers handle this as a normal answer."""


@dataclass(frozen=True)
class Service:
    """An object store with the S3 protocol, and how to connect to it.

    Attributes:
        endpoint: URL of the store; None for the endpoint in boto3's configuration, or AWS.
        region: region; None for the one in boto3's configuration.
        path_style: whether the bucket is in the path of URLs instead of the host name.
        timeout_seconds: time limit for connecting, and for each wait for bytes.
    """

    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False
    timeout_seconds: float = 30.0


_lock = threading.Lock()
#: Clients are thread-safe. Creating the first one takes 100 ms, so all share one session, which caches
#: boto3's parsed service description.
_clients: dict[Service, Any] = {}
_sessions: list[Any] = []
os.register_at_fork(after_in_child=_clients.clear)  # a forked process must not share connections


def client(service: Service) -> Any:
    """Returns the client of a store; creates it at the first call.

    Raises:
        InvalidOptionError: if boto3 is not installed.
        SinkFailedError: if boto3 cannot create the client.
    """
    boto3 = require("boto3", EXTRA)
    config = require("botocore.config", EXTRA).Config(
        connect_timeout=service.timeout_seconds,
        read_timeout=service.timeout_seconds,
        retries={"mode": "standard", "total_max_attempts": 4},
        max_pool_connections=32,
        s3={"addressing_style": "path" if service.path_style else "auto"},
        # not every compatible store supports the newer checksums; parts carry an MD5 instead
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    with _lock:
        if service not in _clients:
            if not _sessions:
                _sessions.append(boto3.session.Session())
            with translated("create a client"):
                _clients[service] = _sessions[0].client(
                    "s3", endpoint_url=service.endpoint, region_name=service.region, config=config
                )
        return _clients[service]


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Translates boto3's errors in the block to errors of this package.

    Args:
        what: description of the request, for the message.

    Raises:
        MissingError: if the object or upload does not exist.
        SinkRetryableError: if no answer came, or if the store asks to retry later. The request may have been
            carried out.
        SinkFailedError: if the store refused the request.
    """
    errors = require("botocore.exceptions", EXTRA)
    try:
        yield
    except errors.ClientError as error:
        raise _of_answer(what, error.response) from error
    except (
        errors.HTTPClientError,
        errors.ConnectionError,
        errors.CredentialRetrievalError,
        errors.MetadataRetrievalError,
        errors.IncompleteReadError,
    ) as error:
        raise SinkRetryableError(f"S3, {what}: {type(error).__name__}: {error}") from error
    except RecursionError:  # boto3 asks where the bucket is, and that answer is a redirect too
        raise SinkFailedError(
            f"S3, {what}: the store answers every request with a redirect, which is not followed",
            fix="correct the options 'endpoint' and 'region'.",
        ) from None
    except errors.BotoCoreError as error:
        raise SinkFailedError(
            f"S3, {what}: {type(error).__name__}: {error}",
            fix="correct boto3's configuration (credentials, region, endpoint) on driver and executors.",
        ) from error


def _of_answer(what: str, response: Mapping[str, Any]) -> KafkaEosError:
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    message = str(response.get("Error", {}).get("Message", ""))[:_SHOWN_CHARACTERS]
    message = "".join(each if each.isprintable() else " " for each in message)
    text = f"S3, {what}: HTTP {status} {code[:_SHOWN_CHARACTERS]} {message}".rstrip()
    if code in ("NoSuchUpload", "NoSuchKey", "404"):
        return MissingError(text)
    if status >= 500 or status == 429 or code in _RETRYABLE_CODES:
        return SinkRetryableError(text)
    return SinkFailedError(text, fix=_FIXES.get(code, ""))


@dataclass(frozen=True)
class Bucket:
    """Small objects of one bucket, read and written as a whole.

    Attributes:
        service: store that contains the bucket.
        name: name of the bucket.
    """

    service: Service
    name: str

    @property
    def client(self) -> Any:
        """boto3's client of the store."""
        return client(self.service)

    def get(self, key: str) -> bytes | None:
        """Reads a manifest.

        Returns:
            Its bytes, or None if the object does not exist.

        Raises:
            SinkRetryableError, SinkFailedError: if the object cannot be read, or is too large.
        """
        try:
            with translated(f"get {key}"):
                answer = self.client.get_object(Bucket=self.name, Key=key)
                with answer["Body"] as body:
                    if answer["ContentLength"] > LARGEST_BYTES:
                        raise refused(f"the object {key}", f"has {answer['ContentLength']} bytes")
                    return bytes(body.read())
        except MissingError:
            return None

    def put(self, key: str, data: bytes) -> None:
        """Writes a manifest. S3 never shows a partial object to readers."""
        with translated(f"put {key}"):
            self.client.put_object(Bucket=self.name, Key=key, Body=data, ContentType="application/json")

    def head(self, key: str) -> Mapping[str, Any] | None:
        """Returns the metadata of an object, or None if the object does not exist."""
        try:
            with translated(f"head {key}"):
                found: Mapping[str, Any] = self.client.head_object(Bucket=self.name, Key=key)
                return found
        except MissingError:
            return None

    def delete(self, key: str) -> None:
        """Deletes an object, if it exists."""
        with translated(f"delete {key}"):
            self.client.delete_object(Bucket=self.name, Key=key)

    def keys(self, prefix: str) -> list[str]:
        """Lists the keys of all objects with a prefix."""
        with translated(f"list {prefix}"):
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
            return [each["Key"] for page in pages for each in page.get("Contents", ())]


# -- keys ----------------------------------------------------------------------------------------

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
        return self.context.own(key.rpartition("/")[2].removesuffix(".json"))

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


def parse_path(name: str, value: str) -> tuple[str, str]:
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


# -- staging -------------------------------------------------------------------------------------

#: Limits of S3: size of every part except the last, and number of parts.
MIN_PART_BYTES = 5 << 20
MAX_PART_BYTES = 5 << 30
MAX_PARTS = 10_000
#: Metadata of an object that contains the id of the task attempt. It identifies the object; an ETag does not,
#: because it is not an MD5 if KMS encrypts the object.
METADATA = "kafka-eos-attempt"


@dataclass(frozen=True)
class StagedObject:
    """Token of a task attempt: a multipart upload with all its parts.

    Attributes:
        key: key of the object that the upload becomes.
        upload_id: S3's id of the upload.
        etags: ETags of the parts, beginning with part 1.
        task_attempt_id: id of the task attempt, as in the object's metadata.
        rows, size_bytes: number of rows, and size of the object.
    """

    key: str
    upload_id: str
    etags: tuple[str, ...]
    task_attempt_id: str
    rows: int
    size_bytes: int

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], at: Layout) -> StagedObject:
        """Returns the upload of an entry in a manifest.

        Raises:
            ValueError, KeyError: if the entry is not one that `to_json` wrote, or its key is not one that a
                task of this sink chose.
        """
        key, texts = f"{at.prefix}{entry['name']}", [entry["upload_id"], *entry["etags"]]
        if not all(isinstance(each, str) and each.isprintable() for each in texts):
            raise ValueError("an id or ETag of S3 is not a text")
        task_attempt_id = at.task_attempt_of(key)
        rows, size_bytes = manifests.count(entry["rows"]), manifests.count(entry["bytes"])
        return cls(key, texts[0], tuple(texts[1:]), task_attempt_id, rows, size_bytes)

    def to_json(self, at: Layout) -> dict[str, Any]:
        """Describes the upload for a manifest. Readers of the manifest use name, rows and bytes."""
        return {
            "name": at.name_of(self.key),
            "rows": self.rows,
            "bytes": self.size_bytes,
            "upload_id": self.upload_id,
            "etags": self.etags,
        }


class PartsStream(WriteOnlyFile):
    """Output stream for pyarrow that uploads a file in parts, while pyarrow is still writing it.

    Args:
        bucket: bucket of the object.
        key: key of the object.
        task_attempt_id: id of the task attempt.
        part_bytes: size of each part except the last.
        threads: number of parts that are uploaded at the same time. These and one more are in memory.
    """

    def __init__(self, bucket: Bucket, key: str, task_attempt_id: str, part_bytes: int, threads: int) -> None:
        self.key = key
        self.task_attempt_id = task_attempt_id
        self._bucket = bucket
        self._part_bytes = part_bytes
        self._threads = threads
        self._buffer = bytearray()
        self._in_flight: deque[Future[str]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._part_count = 0
        self.etags: list[str] = []
        self.size = 0
        self._ignoring_writes = False
        with translated(f"begin the upload of {key}"):
            begun = bucket.client.create_multipart_upload(
                Bucket=bucket.name, Key=key, Metadata={METADATA: task_attempt_id}
            )
        self.upload_id: str = begun["UploadId"]
        failpoints.reach("sink.s3.after_create")

    def write(self, data: Any) -> int:
        """Appends bytes, and uploads each part that is complete."""
        view = memoryview(data).cast("B")
        if self._ignoring_writes:
            return len(view)
        self.size += len(view)
        done = 0
        while done < len(view):
            taken = view[done : done + self._part_bytes - len(self._buffer)]
            self._buffer += taken
            done += len(taken)
            if len(self._buffer) == self._part_bytes:
                self._send()
        return len(view)

    def finish(self) -> None:
        """Uploads the last part and waits until S3 has all parts."""
        if self._buffer or not self._part_count:
            self._send()
        while self._in_flight:
            self.etags.append(self._in_flight.popleft().result())
        self._stop()

    def ignore_writes(self) -> None:
        """Ignores all further writes, such as a file's footer."""
        self._ignoring_writes = True

    def discard(self) -> None:
        """Aborts the upload."""
        self._stop()
        abort(self._bucket, self.key, self.upload_id)

    def _send(self) -> None:
        """Starts the upload of the buffer as the next part."""
        if self._part_count == MAX_PARTS:
            raise SinkFailedError(
                f"the upload of {self.key} to S3 needs more than {MAX_PARTS} parts of {self._part_bytes} "
                "bytes, which is the limit of S3.",
                fix="increase the option 'part.bytes', or use more tasks or smaller batches.",
            )
        if len(self._in_flight) == self._threads:
            self.etags.append(self._in_flight.popleft().result())
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "kafka-eos-s3")
        part, self._buffer = self._buffer, bytearray()
        self._part_count += 1
        self._in_flight.append(self._pool.submit(self._upload, self._part_count, part))

    def _upload(self, number: int, part: bytearray) -> str:
        checksum = base64.b64encode(hashlib.md5(part, usedforsecurity=False).digest()).decode()
        with translated(f"upload part {number} of {self.key}"):
            answer = self._bucket.client.upload_part(
                Bucket=self._bucket.name,
                Key=self.key,
                UploadId=self.upload_id,
                PartNumber=number,
                Body=part,
                ContentMD5=checksum,
            )
        return str(answer["ETag"])

    def _stop(self) -> None:
        self.closed = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def tell(self) -> int:
        return self.size


class ObjectStage:
    """`contract.Stage` that writes the rows of one task attempt to a `PartsStream`."""

    def __init__(
        self,
        stream: PartsStream,
        kind: str,
        schema: pa.Schema,
        rules: Sequence[RowRule],
        compression: str,
    ) -> None:
        self._rules = rules
        self._stream = stream
        self._out = pa.PythonFile(stream, mode="w")
        self._writer = formats.writer(kind, self._out, schema, compression)
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        check_rules(self._rules, batch)
        self._writer.write_batch(batch)
        self._rows += batch.num_rows

    def finish(self) -> StagedObject:
        self._writer.close()
        self._stream.finish()
        failpoints.reach("sink.s3.after_parts")
        stream = self._stream
        return StagedObject(
            stream.key, stream.upload_id, tuple(stream.etags), stream.task_attempt_id, self._rows, stream.size
        )

    def discard(self) -> None:
        self._stream.ignore_writes()
        try:
            self._writer.close()
        finally:
            self._stream.discard()


def abort(bucket: Bucket, key: str, upload_id: str) -> None:
    """Aborts an upload, if it exists."""
    try:
        with translated(f"abort the upload of {key}"):
            bucket.client.abort_multipart_upload(Bucket=bucket.name, Key=key, UploadId=upload_id)
    except MissingError:
        return


def parts_of(bucket: Bucket, key: str, upload_id: str) -> tuple[tuple[str, ...], int]:
    """Lists the parts of an upload.

    Returns:
        ETags of the parts in order, and their total size in bytes.

    Raises:
        MissingError: if the upload does not exist.
    """
    with translated(f"list the parts of {key}"):
        pages = bucket.client.get_paginator("list_parts").paginate(
            Bucket=bucket.name, Key=key, UploadId=upload_id
        )
        found = sorted(
            (part["PartNumber"], part["ETag"], part["Size"])
            for page in pages
            for part in page.get("Parts", ())
        )
    return tuple(etag for _, etag, _ in found), sum(size for _, _, size in found)


# -- committing ----------------------------------------------------------------------------------

T = TypeVar("T")

#: Concurrent requests of one commit. S3 needs long for a completion.
_MAX_CONCURRENT = 16

_GONE = (
    "check whether a lifecycle rule of the bucket, or another program, aborts uploads too early. The rows of "
    "the batch are in Kafka's topic and in the source."
)


def concurrently(act: Callable[[T], object], items: Iterable[T]) -> None:
    """Calls a function for each item in several threads. Raises the first error after all calls returned."""
    todo = list(items)
    if len(todo) < 2:
        for each in todo:
            act(each)
        return
    with ThreadPoolExecutor(min(_MAX_CONCURRENT, len(todo)), "kafka-eos-s3") as pool:
        for _ in pool.map(act, todo):
            pass


def verify(bucket: Bucket, deadline: Deadline, staged: StagedObject) -> None:
    """Checks that an upload exists and has exactly the parts that its task sent.

    Raises:
        SinkFailedError: if it does not.
        SinkRetryableError: if the store does not answer, or the deadline has passed.
    """
    _raise_if_late(deadline, staged)
    try:
        etags, size_bytes = parts_of(bucket, staged.key, staged.upload_id)
    except MissingError as error:
        raise SinkFailedError(f"the upload of {staged.key} is gone: {error.message}.", fix=_GONE) from error
    if not etags:  # for a missing upload, some compatible stores return an empty list instead of an error
        raise SinkFailedError(f"the upload of {staged.key} is gone: it has no parts.", fix=_GONE)
    if etags != staged.etags or size_bytes != staged.size_bytes:
        raise SinkFailedError(
            f"the upload of {staged.key} has {len(etags)} parts with {size_bytes} bytes, but its task sent "
            f"{len(staged.etags)} parts with {staged.size_bytes} bytes.",
            fix="restart the query; it then stages the batch again.",
        )


def complete(bucket: Bucket, deadline: Deadline, staged: StagedObject) -> None:
    """Completes an upload. After any answer but success, checks whether the object already exists.

    Raises:
        SinkRetryableError: if the outcome is unknown, or the deadline has passed.
        SinkFailedError: if neither the upload nor its object exists.
    """
    _raise_if_late(deadline, staged)
    parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(staged.etags, 1)]
    try:
        with translated(f"complete the upload of {staged.key}"):
            bucket.client.complete_multipart_upload(
                Bucket=bucket.name,
                Key=staged.key,
                UploadId=staged.upload_id,
                MultipartUpload={"Parts": parts},
            )
    except (SinkRetryableError, SinkFailedError) as error:
        # Checks after a refusal too: if another process completes the upload at the same time, some stores
        # answer that parts are missing.
        if not _exists(bucket, staged):
            if isinstance(error, MissingError):
                raise SinkFailedError(
                    f"the upload of {staged.key} is gone, and there is no object: {error.message}.", fix=_GONE
                ) from error
            raise
    failpoints.reach("sink.s3.after_complete")


def _raise_if_late(deadline: Deadline, staged: StagedObject) -> None:
    """Raises if the deadline has passed. Called between requests, which have their own timeout."""
    if deadline.expired:
        raise SinkRetryableError(
            f"S3: the deadline of {deadline.budget_seconds:.0f} s passed before the request for {staged.key}"
        )


def _exists(bucket: Bucket, staged: StagedObject) -> bool:
    """Returns whether the object exists.

    Raises:
        SinkFailedError: if an object with this key exists that this upload did not create.
    """
    found = bucket.head(staged.key)
    if found is None:
        return False
    metadata: dict[str, Any] = {name.lower(): value for name, value in found.get("Metadata", {}).items()}
    if found["ContentLength"] != staged.size_bytes or metadata.get(METADATA) != staged.task_attempt_id:
        raise SinkFailedError(
            f"the object {staged.key} has {found['ContentLength']} bytes and was written by task attempt "
            f"{metadata.get(METADATA)!r}; expected {staged.size_bytes} bytes by {staged.task_attempt_id!r}.",
            fix="find out which program wrote the object, because no two tasks have one key.",
        )
    return True
