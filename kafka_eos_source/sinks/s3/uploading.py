"""One task attempt's rows: a multipart upload that nobody completes before the commit."""

from __future__ import annotations

import base64
import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import SinkFailedError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.sinks.filesystem import formats
from kafka_eos_source.sinks.s3.client import Bucket, MissingError, translated

#: S3's own limits: of every part but the last, and of how many there may be.
LEAST_PART_BYTES = 5 << 20
MOST_PART_BYTES = 5 << 30
MOST_PARTS = 10_000
#: In the object's metadata: the attempt that wrote it. An ETag would not do: with KMS it is no MD5.
METADATA = "kafka-eos-attempt"


@dataclass(frozen=True)
class StagedObject:
    """A task attempt's token: an upload with all its parts.

    Attributes:
        key: of the object that it becomes.
        upload_id: S3's.
        etags: of the parts, from number 1.
        attempt: of the task, as in the object's metadata.
        rows, size_bytes: in it.
    """

    key: str
    upload_id: str
    etags: tuple[str, ...]
    attempt: str
    rows: int
    size_bytes: int


class PartsStream:
    """What pyarrow writes a file into: cuts it in parts and uploads them, some at a time, beside the writing.

    Args:
        bucket: where.
        key: of the object.
        attempt: of the task.
        part_bytes: of each part but the last.
        threads: parts under way; as many and one more are in memory.
    """

    def __init__(self, bucket: Bucket, key: str, attempt: str, part_bytes: int, threads: int) -> None:
        self._bucket = bucket
        self._key = key
        self._part_bytes = part_bytes
        self._threads = threads
        self._buffer = bytearray()
        self._under_way: deque[Future[str]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._numbered = 0
        self.etags: list[str] = []
        self.size = 0
        self.closed = False
        self._dropped = False
        with translated(f"begin the upload of {key}"):
            begun = bucket.client.create_multipart_upload(
                Bucket=bucket.name, Key=key, Metadata={METADATA: attempt}
            )
        self.upload_id: str = begun["UploadId"]
        failpoints.reach("sink.s3.after_create")

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._dropped:
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
        """Every part is at S3."""
        if self._buffer or not self._numbered:
            self._send()
        while self._under_way:
            self.etags.append(self._under_way.popleft().result())
        self._stop()

    def drop(self) -> None:
        """What comes from now on, such as a file's footer, goes nowhere."""
        self._dropped = True

    def discard(self) -> None:
        """Leaves no upload behind."""
        self._stop()
        abort(self._bucket, self._key, self.upload_id)

    def _send(self) -> None:
        """The buffer becomes the next part."""
        if self._numbered == MOST_PARTS:
            raise SinkFailedError(
                f"S3, upload of {self._key}: more than {MOST_PARTS} parts of {self._part_bytes} bytes.",
                fix="raise 'part.bytes', or have more tasks or smaller batches.",
            )
        if len(self._under_way) == self._threads:
            self.etags.append(self._under_way.popleft().result())
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "kafka-eos-s3")
        part, self._buffer = self._buffer, bytearray()
        self._numbered += 1
        self._under_way.append(self._pool.submit(self._upload, self._numbered, part))

    def _upload(self, number: int, part: bytearray) -> str:
        summed = base64.b64encode(hashlib.md5(part, usedforsecurity=False).digest()).decode()
        with translated(f"upload part {number} of {self._key}"):
            answer = self._bucket.client.upload_part(
                Bucket=self._bucket.name,
                Key=self._key,
                UploadId=self.upload_id,
                PartNumber=number,
                Body=part,
                ContentMD5=summed,
            )
        return str(answer["ETag"])

    def _stop(self) -> None:
        self.closed = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    # what pyarrow asks of a Python file
    def tell(self) -> int:
        return self.size

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


class ObjectStage:
    """`contract.Stage` over such a stream."""

    def __init__(
        self, stream: PartsStream, key: str, attempt: str, kind: str, schema: pa.Schema, compression: str
    ) -> None:
        self._stream = stream
        self._key = key
        self._attempt = attempt
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
            self._key, stream.upload_id, tuple(stream.etags), self._attempt, self._rows, stream.size
        )

    def discard(self) -> None:
        self._stream.drop()
        try:
            self._writer.close()
        finally:
            self._stream.discard()


def abort(bucket: Bucket, key: str, upload_id: str) -> None:
    """Ends an upload, if there is one."""
    try:
        with translated(f"abort the upload of {key}"):
            bucket.client.abort_multipart_upload(Bucket=bucket.name, Key=key, UploadId=upload_id)
    except MissingError:
        return


def parts_of(bucket: Bucket, key: str, upload_id: str) -> tuple[tuple[str, ...], int]:
    """ETags of the parts that S3 has, by number, and their bytes together.

    Raises:
        MissingError: there is no such upload.
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
