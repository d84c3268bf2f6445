"""Paths of staged data: their file system, where a query's lie, who may look, and which names are believed.

On local file systems only their owner may read what is staged: folders are made with mode 0700, files with
0600. Elsewhere the store's own rules decide. Names come from tasks, so each must be one that a task makes,
and a file is opened only where it lies: nothing outside the location is ever read or deleted.
"""

from __future__ import annotations

import hashlib
import os
import re

import pyarrow.fs as pafs

from kafka_eos_source.errors import InvalidOptionError, StagedPartError, UnavailableError
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.runtime.private_folders import ForeignFolderError, PrivateFolder

#: What to do about a part that is not what its task wrote.
RESTART = "restart the query: the batch is staged anew; nothing of it is visible to readers."

#: What a micro-batch or a batch write is called, and a part of it.
BATCH = re.compile(r"[0-9]+|write-[0-9a-f]{32}", re.ASCII)
PART = re.compile(r"[0-9a-f]{32}\.arrow")


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
    """Where ``df.write`` stages its rows without ``staging.location``: a folder of this user on this host.

    Raises:
        InvalidOptionError: another user owns the folder, and could exchange what is staged in it.
        UnavailableError: the folder cannot be created.
    """
    folder = PrivateFolder.of_user("kafka-eos-staging")
    try:
        return folder.create()
    except ForeignFolderError as error:
        raise InvalidOptionError(
            f"the staging folder {error}.",
            fix="set .option('staging.location', …) to a folder that driver and executors share.",
        ) from error
    except OSError as error:
        raise unwritable(folder.path, error) from error


def legal(kind: re.Pattern[str], name: str) -> str:
    """``name``, which came from elsewhere and is to become a part of a path.

    Raises:
        StagedPartError: it is not of this kind: it might lead out of the folder.
    """
    if not kind.fullmatch(name):
        raise StagedPartError(
            f"the name {name!r} is none of a staged batch or part; expected {kind.pattern}.",
            fix=RESTART,
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
                fix="find out who put it there and remove it; then restart the query. Nothing of the batch "
                "is visible to readers.",
            )


def unwritable(location: str, error: OSError) -> UnavailableError:
    return UnavailableError(
        f"the staging folder {location!r} cannot be written: {error}.",
        fix="free space there or allow writing, or set .option('staging.location', …); "
        "then restart the query. Nothing was sent to Kafka.",
    )
