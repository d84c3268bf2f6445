"""Verification and completion of multipart uploads. Completing an upload is idempotent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kafka_eos_source.errors import SinkFailedError, SinkRetryableError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.s3.client import Bucket, MissingError, translated
from kafka_eos_source.sinks.s3.uploading import METADATA, StagedObject, parts_of

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
