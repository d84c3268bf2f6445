"""Staging in S3: a task uploads its rows as the parts of a multipart upload, which the commit completes."""

from __future__ import annotations

import base64
import hashlib
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import SinkFailedError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.file_systems import WriteOnlyFile
from kafka_eos_source.sinks import formats
from kafka_eos_source.sinks import manifest as manifests
from kafka_eos_source.sinks.s3.client import Bucket, MissingError, translated
from kafka_eos_source.sinks.s3.layout import Layout

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

    def __init__(self, stream: PartsStream, kind: str, schema: pa.Schema, compression: str) -> None:
        self._stream = stream
        self._out = pa.PythonFile(stream, mode="w")
        self._writer = formats.writer(kind, self._out, schema, compression)
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
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
