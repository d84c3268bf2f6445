"""Paths of staged data: their file system, where a query's lie, who may look, and which names are believed.

On local file systems only their owner may read what is staged: folders are made with mode 0700, files with
0600. Elsewhere the store's own rules decide. Names come from tasks, so each must be one that a task makes,
and a file is opened only where it lies: nothing outside the location is ever read or deleted.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from functools import lru_cache
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.errors import InvalidOptionError, StagedPartError, UnavailableError

#: What a micro-batch or a batch write is called, and a part of it.
BATCH = re.compile(r"[0-9]+|write-[0-9a-f]{32}", re.ASCII)
PART = re.compile(r"[0-9a-f]{32}\.arrow")

_OWNERS_FOLDER, _OWNERS_FILE = 0o700, 0o600

#: Hadoop's names for a store → pyarrow's.
_SCHEMES = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasb": "abfs", "wasbs": "abfs"}


@lru_cache(maxsize=32)
def file_system(uri: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a Hadoop-style URI or local path, and the path in it.

    Raises:
        InvalidOptionError: no file system for the URI's scheme.
    """
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        return pafs.LocalFileSystem(), os.path.abspath(unquote(parts.path) if parts.scheme else uri)
    if parts.scheme == "dbfs" and os.path.isdir("/dbfs"):
        return pafs.LocalFileSystem(), "/dbfs" + parts.path
    ours = uri.replace(parts.scheme, _SCHEMES.get(parts.scheme, parts.scheme), 1)
    try:
        found: tuple[pafs.FileSystem, str] = pafs.FileSystem.from_uri(ours)
    except (ValueError, OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidOptionError(
            f"the staging folder {uri!r} is on a file system that pyarrow cannot open: {error}.",
            fix="set .option('staging.location', …) to a folder that driver and executors share, "
            "such as file:/…, hdfs://…, s3a://… or gs://….",
        ) from error
    return found


def location_of_query(checkpoint: str, staging_location: str | None) -> str:
    """Where the rows of a streaming query are staged.

    Args:
        checkpoint: option ``checkpointLocation``.
        staging_location: option ``staging.location``; None = not given.
    """
    if staging_location is None:
        return f"{checkpoint.rstrip('/')}/kafka-eos/staging"
    fs, path = file_system(checkpoint)
    own = hashlib.sha256(f"{fs.type_name}:{path.rstrip('/')}".encode()).hexdigest()[:16]
    return f"{staging_location.rstrip('/')}/query-{own}"


def location_of_batch_writes() -> str:
    """Where ``df.write`` stages its rows without ``staging.location``: a folder of this user on this machine.

    Raises:
        InvalidOptionError: somebody else made the folder: he could exchange what is staged in it.
        UnavailableError: it cannot be made.
    """
    location = os.path.join(tempfile.gettempdir(), f"kafka-eos-staging-{os.getuid()}")
    try:
        os.makedirs(location, mode=_OWNERS_FOLDER, exist_ok=True)
        found = os.stat(location, follow_symlinks=False)
    except OSError as error:
        raise unwritable(location, error) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise InvalidOptionError(
            f"the staging folder {location!r} is not this user's own (user id {os.getuid()}): it belongs to "
            f"user id {found.st_uid}, or is a link.",
            fix="set .option('staging.location', …) to a folder that driver and executors share.",
        )
    return location


def legal(kind: re.Pattern[str], name: str) -> str:
    """``name``, which came from elsewhere and is to become a part of a path.

    Raises:
        StagedPartError: it is not of this kind: it might lead out of the folder.
    """
    if not kind.fullmatch(name):
        raise StagedPartError(
            f"the name {name!r} is none of a staged batch or part; expected {kind.pattern}.",
            fix="restart the query: the batch is staged anew. Nothing was sent to Kafka.",
        )
    return name


def refuse_links(fs: pafs.FileSystem, path: str, relative: str) -> None:
    """What is named in the folder ``path`` lies there, and not where a link in it leads.

    Raises:
        StagedPartError: it does not.
    """
    if isinstance(fs, pafs.LocalFileSystem):
        stated, found = f"{os.path.realpath(path)}/{relative}", os.path.realpath(f"{path}/{relative}")
        if found != stated:
            raise StagedPartError(
                f"staged {relative!r} is a link to {found!r}, outside its folder {path!r}.",
                fix="find out who put it there and remove it; then restart the query. Nothing was sent to "
                "Kafka.",
            )


def make_folder(fs: pafs.FileSystem, path: str) -> None:
    """One that only its owner may look into, unless it is there already; those above it as usual."""
    if isinstance(fs, pafs.LocalFileSystem):
        os.makedirs(path, mode=_OWNERS_FOLDER, exist_ok=True)
    else:
        fs.create_dir(path, recursive=True)


def new_file(fs: pafs.FileSystem, path: str) -> pa.NativeFile:
    """One that only its owner may read, from its first byte on."""
    if isinstance(fs, pafs.LocalFileSystem):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _OWNERS_FILE))
    return fs.open_output_stream(path)


def read_text(fs: pafs.FileSystem, path: str) -> str | None:
    try:
        with fs.open_input_stream(path) as source:
            return str(source.read().decode())
    except FileNotFoundError:
        return None


def unwritable(location: str, error: OSError) -> UnavailableError:
    return UnavailableError(
        f"the staging folder {location!r} cannot be written: {error}.",
        fix="free space there or allow writing, or set .option('staging.location', …); "
        "then restart the query. Nothing was sent to Kafka.",
    )
