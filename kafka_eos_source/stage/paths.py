"""Locations and file names of staged data, and checks that protect them.

On a local file system, only the owner can read staged data: folders have mode 0700 and files 0600. On
other file systems, their own access rules apply. The driver receives file names from tasks. It accepts only
names that a task can create, and follows no links, so that it never reads or deletes a file outside of the
location.
"""

from __future__ import annotations

import hashlib
import os
import re

import pyarrow.fs as pafs

from kafka_eos_source.errors import InvalidOptionError, StagedPartError, UnavailableError
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.runtime.folders import NotOwnError, PrivateFolder

#: Fix for a part that is not what its task wrote.
RESTART = "restart the query, which stages the batch again. Readers see nothing of it yet."

#: Names of micro-batches or batch writes, and of parts.
BATCH = re.compile(r"[0-9]+|write-[0-9a-f]{32}", re.ASCII)
PART = re.compile(r"[0-9a-f]{32}\.arrow")


def location_of_query(checkpoint: str, staging_location: str | None) -> str:
    """Returns where the rows of a streaming query are staged.

    Args:
        checkpoint: option ``checkpointLocation``.
        staging_location: option ``staging.location``; None if it is not set.
    """
    if staging_location is None:
        return f"{checkpoint.rstrip('/')}/kafka-eos/staging"
    fs, path = file_system(checkpoint)
    own = hashlib.sha256(f"{fs.type_name}:{path.rstrip('/')}".encode()).hexdigest()[:16]
    return f"{staging_location.rstrip('/')}/query-{own}"


def location_of_batch_writes() -> str:
    """Returns where ``df.write`` stages rows by default: a folder of this user on this host.

    Raises:
        InvalidOptionError: if another user owns the folder, who could replace the staged data.
        UnavailableError: if the folder cannot be created.
    """
    folder = PrivateFolder.of_user("kafka-eos-staging")
    try:
        return folder.create()
    except NotOwnError as error:
        raise InvalidOptionError(
            f"the staging folder {error}.",
            fix="set .option('staging.location', …) to a folder that the driver and the executors share.",
        ) from error
    except OSError as error:
        raise unwritable(folder.path, error) from error


def legal(kind: re.Pattern[str], name: str) -> str:
    """Returns ``name``, which another process sent, after checking that it is safe in a path.

    Raises:
        StagedPartError: if the name does not match ``kind``, and might therefore lead out of the folder.
    """
    if not kind.fullmatch(name):
        raise StagedPartError(
            f"{name!r} is not the name of a staged batch or part; expected {kind.pattern}.",
            fix=RESTART,
        )
    return name


def refuse_links(fs: pafs.FileSystem, path: str, relative: str) -> None:
    """Checks that ``relative`` in the local folder ``path`` contains no symbolic link.

    Raises:
        StagedPartError: if it contains a link.
    """
    if isinstance(fs, pafs.LocalFileSystem):
        expected, found = f"{os.path.realpath(path)}/{relative}", os.path.realpath(f"{path}/{relative}")
        if found != expected:
            raise StagedPartError(
                f"the staged file {relative!r} is a link to {found!r}, outside of its folder {path!r}.",
                fix="find out who created the link, remove it and restart the query. Readers see nothing of "
                "the batch yet.",
            )


def unwritable(location: str, error: OSError) -> UnavailableError:
    """Returns the error for a staging folder that cannot be written."""
    return UnavailableError(
        f"the staging folder {location!r} cannot be written: {error}.",
        fix="free space there, grant write access, or set .option('staging.location', …); "
        "then restart the query. Nothing was sent to Kafka.",
    )
