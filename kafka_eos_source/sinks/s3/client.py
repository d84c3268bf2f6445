"""boto3's client, made once in a process; and what its errors mean for the caller.

Credentials come from boto3's own chain (environment, files, instance role, web identity). This package never
sees them.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kafka_eos_source.errors import KafkaEosError, SinkFailedError, SinkRetryableError
from kafka_eos_source.sinks.registry import require

EXTRA = "s3"

#: Codes that are not told by their status: the request was not carried out, and may be later.
_LATER = frozenset(
    ["SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "ExpiredToken", "OperationAborted", "Throttling"]
)
_FIXES = {
    "NoSuchBucket": "create the bucket, or correct the option 'path'.",
    "AccessDenied": "allow the actions that docs/sink-s3.md lists, to driver and executors.",
    "403": "allow the actions that docs/sink-s3.md lists, to driver and executors.",
    "EntityTooSmall": "raise 'part.bytes': the store wants larger parts.",
}


class MissingError(SinkFailedError):
    """There is no such object or upload, which is an answer to most that ask."""


@dataclass(frozen=True)
class Service:
    """Which store, and how to speak to it.

    Attributes:
        endpoint: URL; None = AWS, or what boto3's configuration says.
        region: None = what boto3's configuration says.
        path_style: the bucket is in the path of the URL, not in its host.
        timeout_seconds: of connecting, and of each wait for bytes.
    """

    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False
    timeout_seconds: float = 30.0


_lock = threading.Lock()
#: Thread-safe each; a hundred ms to make the first time. One session has the parsed service description.
_clients: dict[Service, Any] = {}
_sessions: list[Any] = []
os.register_at_fork(after_in_child=_clients.clear)  # connections are not shared with a child


def client(service: Service) -> Any:
    """Raises: InvalidOptionError: boto3 is not installed. SinkFailedError: no client can be made."""
    boto3 = require("boto3", EXTRA)
    config = require("botocore.config", EXTRA).Config(
        connect_timeout=service.timeout_seconds,
        read_timeout=service.timeout_seconds,
        retries={"mode": "standard", "total_max_attempts": 4},
        max_pool_connections=32,
        s3={"addressing_style": "path" if service.path_style else "auto"},
        # not every store knows the newer checksums; parts carry an MD5
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    with _lock:
        if service not in _clients:
            if not _sessions:
                _sessions.append(boto3.session.Session())
            with translated("make a client"):
                _clients[service] = _sessions[0].client(
                    "s3", endpoint_url=service.endpoint, region_name=service.region, config=config
                )
        return _clients[service]


@contextmanager
def translated(what: str) -> Iterator[None]:
    """boto3's errors as ours.

    Args:
        what: is being done, for the message.

    Raises:
        MissingError: no such object or upload.
        SinkRetryableError: no answer, or one that says "later": whether it was done is not known.
        SinkFailedError: refused.
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
    except errors.BotoCoreError as error:
        raise SinkFailedError(
            f"S3, {what}: {type(error).__name__}: {error}",
            fix="see to boto3's configuration (credentials, region, endpoint) on driver and executors.",
        ) from error


def _of_answer(what: str, response: Mapping[str, Any]) -> KafkaEosError:
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    text = f"S3, {what}: HTTP {status} {code} {response.get('Error', {}).get('Message', '')}".rstrip()
    if code in ("NoSuchUpload", "NoSuchKey", "404"):
        return MissingError(text)
    if status >= 500 or status == 429 or code in _LATER:
        return SinkRetryableError(text)
    return SinkFailedError(text, fix=_FIXES.get(code, ""))


@dataclass(frozen=True)
class Bucket:
    """Whole small objects of one bucket.

    Attributes:
        service: where it is.
        name: of it.
    """

    service: Service
    name: str

    @property
    def client(self) -> Any:
        return client(self.service)

    def get(self, key: str) -> dict[str, Any] | None:
        """A JSON object; None = there is none.

        Raises:
            SinkRetryableError, SinkFailedError: that cannot be told.
        """
        try:
            with translated(f"get {key}"):
                return dict(json.loads(self.client.get_object(Bucket=self.name, Key=key)["Body"].read()))
        except MissingError:
            return None

    def put(self, key: str, content: Mapping[str, Any]) -> None:
        """Whole or not at all: S3 shows no half object."""
        with translated(f"put {key}"):
            body = json.dumps(content, indent=1).encode()
            self.client.put_object(Bucket=self.name, Key=key, Body=body, ContentType="application/json")

    def head(self, key: str) -> Mapping[str, Any] | None:
        """What is known of an object; None = there is none."""
        try:
            with translated(f"head {key}"):
                found: Mapping[str, Any] = self.client.head_object(Bucket=self.name, Key=key)
                return found
        except MissingError:
            return None

    def delete(self, key: str) -> None:
        """An object, if it is there."""
        with translated(f"delete {key}"):
            self.client.delete_object(Bucket=self.name, Key=key)

    def keys(self, prefix: str) -> list[str]:
        """Of all objects that begin with it."""
        with translated(f"list {prefix}"):
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
            return [each["Key"] for page in pages for each in page.get("Contents", ())]
