"""boto3 clients, created once per process, and the translation of boto3's errors.

boto3 finds credentials by itself (environment, files, instance role, web identity). This package never sees
them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kafka_eos_source.errors import KafkaEosError, SinkFailedError, SinkRetryableError
from kafka_eos_source.sinks.manifest import LARGEST_BYTES, refused
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
