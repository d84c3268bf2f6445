"""Opens the file systems of Hadoop-style URIs, and creates files that only their owner may read."""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.secrets import bare_url

#: Modes of local folders and files that only their owner may access.
OWNERS_FOLDER, _OWNERS_FILE = 0o700, 0o600

#: Hadoop's name for an object store → PyArrow's name.
_SCHEMES = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasb": "abfs", "wasbs": "abfs"}


def arrow_scheme(scheme: str) -> str:
    """Returns PyArrow's name for a URI scheme of Hadoop's, such as ``s3`` for ``s3a``."""
    return _SCHEMES.get(scheme, scheme)


def without_secrets(uri: str) -> str:
    """Returns a URI without user, password and query, which may hold secrets, for messages."""
    return bare_url(uri) if "://" in uri else uri


@lru_cache(maxsize=32)
def file_system(uri: str) -> tuple[pafs.FileSystem, str]:
    """Returns the file system of a Hadoop-style URI or local path, and the path within it.

    Raises:
        InvalidOptionError: if PyArrow cannot open a file system for the URI.
    """
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        return pafs.LocalFileSystem(), os.path.abspath(unquote(parts.path) if parts.scheme else uri)
    if parts.scheme == "dbfs" and os.path.isdir("/dbfs"):
        return pafs.LocalFileSystem(), "/dbfs" + parts.path
    ours = uri.replace(parts.scheme, arrow_scheme(parts.scheme), 1)
    try:
        found: tuple[pafs.FileSystem, str] = pafs.FileSystem.from_uri(ours)
    except (ValueError, OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidOptionError(
            f"PyArrow cannot open the file system of {without_secrets(uri)!r}: "
            f"{str(error).replace(ours, without_secrets(ours))}.",
            fix="correct the option that names this location: checkpointLocation, staging.location, "
            "state.snapshot.location or the path of a sink. PyArrow can open file:/…, hdfs://…, s3a://… and gs://….",
        ) from error
    return found


def make_folder(fs: pafs.FileSystem, path: str) -> None:
    """Creates a folder that only its owner may open, unless it exists.

    Missing parent folders get the usual permissions.
    """
    if isinstance(fs, pafs.LocalFileSystem):
        os.makedirs(path, mode=OWNERS_FOLDER, exist_ok=True)
    else:
        fs.create_dir(path, recursive=True)


def make_private(path: str | os.PathLike[str]) -> None:
    """Creates a local folder that only its owner may open, or takes the rights of others on it away.

    Missing parent folders get the usual permissions. A folder of another user is left as it is.
    """
    os.makedirs(path, mode=OWNERS_FOLDER, exist_ok=True)
    found = os.stat(path)
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        os.chmod(path, OWNERS_FOLDER)


def refuse_folder_of_others(location: str, folder: str) -> None:
    """Raises PermissionError if other users may change the files of a local folder.

    Every folder from the location on has to belong to this user, to root or to the owner of the location, and
    must not be a link. Other users must not be able to write to it. The location itself may be like /tmp,
    where they cannot replace the folders of others. The group may write: an administrator decides who is in
    it.

    Args:
        location: folder that an option names. It may be a link, and need not exist.
        folder: the location, or a folder below it, which need not exist.
    """
    steps = [location]
    for name in os.path.relpath(folder, location).split(os.sep):
        steps += [os.path.join(steps[-1], name)] if name != os.curdir else []
    owners = {0, os.geteuid()}
    for step in steps:
        try:
            found = os.stat(step, follow_symlinks=step is location)
        except FileNotFoundError:
            return
        if step is location:
            owners.add(found.st_uid)
        if stat.S_ISLNK(found.st_mode) or found.st_uid not in owners:
            raise PermissionError(
                f"{step} is a link or belongs to another user (user id {found.st_uid}), who could replace "
                "its files. Name a location where only the query's user may create folders"
            )
        is_like_tmp = step is location and found.st_mode & stat.S_ISVTX
        if found.st_mode & stat.S_IWOTH and not is_like_tmp:
            raise PermissionError(
                f"every user of this host may change the files in {step} (mode "
                f"{stat.S_IMODE(found.st_mode):04o}). Run chmod o-w on it, or mount the file system with a "
                "mode that denies that"
            )


def open_regular_file(path: str) -> BinaryIO:
    """Opens a local file for reading. Raises OSError if it is a link, a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")


def new_file(fs: pafs.FileSystem, path: str) -> pa.NativeFile:
    """Creates a file that only its owner may read, and opens it for writing."""
    if isinstance(fs, pafs.LocalFileSystem):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _OWNERS_FILE))
    return fs.open_output_stream(path)


class WriteOnlyFile:
    """The methods besides ``write`` that pyarrow requires of a Python file object that it writes to."""

    closed = False

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def names_in(fs: pafs.FileSystem, folder: str) -> list[str]:
    """Returns the names in a folder; none if the folder does not exist.

    PyArrow would also ask a local file system for size and time of every file, which takes ten times as long.
    """
    if isinstance(fs, pafs.LocalFileSystem):
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []
    return [each.base_name for each in fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))]


def fsync(path: str) -> None:
    """Flushes a local file or folder to disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(fs: pafs.FileSystem, path: str) -> str | None:
    """Returns the text of a file; None if the file does not exist."""
    try:
        with fs.open_input_stream(path) as source:
            return str(source.read().decode())
    except FileNotFoundError:
        return None
