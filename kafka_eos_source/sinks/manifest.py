"""Manifests: small JSON files that list what a prepared batch consists of. A sink believes them by a digest.

A sink writes a manifest at prepare, and another process may read it at commit, perhaps days later. Whoever
may write to the storage can edit it meanwhile. So `prepare` returns the manifest's digest (`contract.Ok`),
the token in Kafka holds that digest, and `commit` reads nothing of a manifest that has another one.

No digest is known when a sink lists or deletes what is prepared, and when a person decides that a batch is
committed (``kafka-eos sinks commit``). Therefore each sink also validates what it reads, before it acts on
any of it: names lead to no other place than that of its own staged files.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyarrow.fs as pafs

from kafka_eos_source.errors import SinkFailedError
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json

#: Size of the largest manifest. One of 100,000 files has about 50 MB.
LARGEST_BYTES = 256 << 20
#: Hex digits of SHA-256 in a digest: 128 bits, for which nobody can make a second manifest. Short, because a
#: token holds those of all sinks.
_DIGITS = 32
#: O_NONBLOCK: without it, opening a named pipe would wait for a writer.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SHOWN = 100
#: What `refused` says of a batch that readers see while another one of the same id is prepared.
NOT_PREPARED = "is not the one that was prepared"

T = TypeVar("T")


def encode(content: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a manifest.

    Raises:
        SinkFailedError: if it is too large to be read again.
    """
    data = json.dumps(content, indent=1).encode()
    if len(data) > LARGEST_BYTES:
        raise SinkFailedError(
            f"the manifest of the batch has {len(data)} bytes; expected at most {LARGEST_BYTES}.",
            fix="read less per batch (option maxOffsetsPerTrigger of the source), or use fewer tasks.",
        )
    return data


def digest(data: bytes) -> str:
    """Returns the digest of a manifest, for `contract.Ok` and `SinkTxn.digest`."""
    return shortened(hashlib.sha256(data))


def shortened(sha256: hashlib._Hash) -> str:
    """Returns the digest of data that was hashed piece by piece."""
    return sha256.hexdigest()[:_DIGITS]


def stored(fs: pafs.FileSystem, path: str) -> bytes:
    """Reads a manifest of a file system.

    Raises:
        FileNotFoundError: if it does not exist.
        SinkFailedError: if it is too large; of a local one, also if it is a link or no regular file.
        OSError: if it cannot be read.
    """
    if not isinstance(fs, pafs.LocalFileSystem):
        with fs.open_input_file(path) as source:
            if source.size() > LARGEST_BYTES:
                raise refused(f"the manifest {path}", f"has {source.size()} bytes")
            return bytes(source.read())
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except OSError as error:
        if os.path.islink(path):
            raise refused(f"the manifest {path}", "is a symbolic link") from error
        raise
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_BYTES:
            raise refused(f"the manifest {path}", f"is not a regular file of at most {LARGEST_BYTES} bytes")
        return file.read(found.st_size)


def parsed(data: bytes, wanted: str, where: str, read: Callable[[Mapping[str, Any]], T]) -> T:
    """Checks the digest of a manifest, and then parses it.

    Args:
        data: the bytes that the storage returned.
        wanted: `SinkTxn.digest`; empty if nobody vouches for the manifest, so that it is only validated.
        where: place of the manifest, for the message.
        read: returns the manifest's content; raises ``ValueError``, ``KeyError`` or ``TypeError`` if a value
            in it is not what the sink writes.

    Raises:
        SinkFailedError: if the manifest is another one than the token names, or damaged.
    """
    check(digest(data), wanted, where)
    try:
        return read(objects([parse_json(data)])[0])
    except SHAPE_ERRORS as error:
        text = f"{type(error).__name__}: {error}"
        raise refused(where, f"is damaged: {text[:_SHOWN]!r}") from error


def check(found: str, wanted: str, where: str) -> None:
    """Checks a digest.

    Raises:
        SinkFailedError: if a digest is wanted, and another one was found.
    """
    if wanted and found != wanted:
        raise refused(
            where,
            f"was changed after the batch was prepared: its digest is {found}, but Kafka holds {wanted}",
        )


def refused(where: str, what: str) -> SinkFailedError:
    """Returns the error for a manifest, or a file of a batch, that must not be believed."""
    return SinkFailedError(
        f"{where} {what}. No row of the batch was published.",
        fix="find out who wrote to that place, and take the right away from whoever should not have it. Put "
        "the file back as it was, for example from a backup, and restart the query, which then continues. "
        "Without it, see SINK_FAILED in docs/runbooks.md: the rows of the batch are in Kafka's topic.",
    )


def relative_name(value: object) -> str:
    """Returns a name in a manifest if it leads to a place below the sink's own folder.

    Raises:
        ValueError: if it is absolute, a URI, or has empty parts, ``.``, ``..`` or control characters.
    """
    if not isinstance(value, str) or not value.isprintable() or "\\" in value or "://" in value:
        raise ValueError(f"not the name of a file below the folder: {str(value)[:_SHOWN]!r}")
    if any(part in ("", ".", "..") for part in value.split("/")):
        raise ValueError(f"the name leads out of the folder: {value[:_SHOWN]!r}")
    return value


def count(value: object) -> int:
    """Returns a number of rows or bytes.

    Raises:
        ValueError: if it is none.
    """
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"not a count: {str(value)[:_SHOWN]!r}")
    return value


def objects(value: object) -> list[Mapping[str, Any]]:
    """Returns a list of JSON objects.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"not a list of objects: {str(value)[:_SHOWN]!r}")
    return value
