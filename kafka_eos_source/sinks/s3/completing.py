"""An upload becomes its object: completed once, however often it is asked for."""

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

#: Requests of one commit under way at a time: each waits for S3, which takes its time over a completion.
_AT_ONCE = 16

_GONE = (
    "see whether a lifecycle rule of the bucket aborts uploads too soon, or somebody did; the rows are in "
    "Kafka's topic, and in the source."
)


def at_once(act: Callable[[T], object], each_of: Iterable[T]) -> None:
    """Acts on all, some at a time; the first error is raised when all have ended."""
    todo = list(each_of)
    if len(todo) < 2:
        for each in todo:
            act(each)
        return
    with ThreadPoolExecutor(min(_AT_ONCE, len(todo)), "kafka-eos-s3") as pool:
        for _ in pool.map(act, todo):
            pass


def verify(bucket: Bucket, deadline: Deadline, staged: StagedObject) -> None:
    """The upload is there, with the parts that its task sent.

    Raises:
        SinkFailedError: it is not.
        SinkRetryableError: that cannot be told, or not in time.
    """
    _refuse_late(deadline, staged)
    try:
        etags, size_bytes = parts_of(bucket, staged.key, staged.upload_id)
    except MissingError as error:
        raise SinkFailedError(f"the upload of {staged.key} is gone: {error.message}", fix=_GONE) from error
    if not etags:  # stores that are not S3 itself say so of one that is gone
        raise SinkFailedError(f"the upload of {staged.key} is gone: it has no parts", fix=_GONE)
    if etags != staged.etags or size_bytes != staged.size_bytes:
        raise SinkFailedError(
            f"the upload of {staged.key} has {len(etags)} parts with {size_bytes} bytes; its task sent "
            f"{len(staged.etags)} with {staged.size_bytes}.",
            fix="restart the query: the batch is staged anew.",
        )


def complete(bucket: Bucket, deadline: Deadline, staged: StagedObject) -> None:
    """Makes it the object. Any answer but a yes is looked up in the object: lost, gone, refused.

    Raises:
        SinkRetryableError: it is not known yet, or was not begun in time.
        SinkFailedError: there is neither the upload nor its object.
    """
    _refuse_late(deadline, staged)
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
        # a refusal too: where another completes it at this moment, some stores miss the parts
        if not _is_there(bucket, staged):
            if isinstance(error, MissingError):
                raise SinkFailedError(
                    f"the upload of {staged.key} is gone, and there is no object: {error.message}", fix=_GONE
                ) from error
            raise
    failpoints.reach("sink.s3.after_complete")


def _refuse_late(deadline: Deadline, staged: StagedObject) -> None:
    """Between two requests: one that is under way has its own time-out."""
    if deadline.expired:
        raise SinkRetryableError(
            f"S3: {deadline.budget_seconds:.0f} s were not enough; {staged.key} was to come next"
        )


def _is_there(bucket: Bucket, staged: StagedObject) -> bool:
    """Whether the object is this upload's.

    Raises:
        SinkFailedError: it is another's.
    """
    found = bucket.head(staged.key)
    if found is None:
        return False
    said: dict[str, Any] = {name.lower(): value for name, value in found.get("Metadata", {}).items()}
    if found["ContentLength"] != staged.size_bytes or said.get(METADATA) != staged.attempt:
        raise SinkFailedError(
            f"the object {staged.key} has {found['ContentLength']} bytes of attempt {said.get(METADATA)!r}; "
            f"expected {staged.size_bytes} of {staged.attempt!r}.",
            fix="find out who wrote it: no two tasks have one key.",
        )
    return True
