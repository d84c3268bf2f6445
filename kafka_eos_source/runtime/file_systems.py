"""Opens the file systems of Hadoop-style URIs, and creates files that only their owner may read."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.runtime.folders import OWNERS_FILE, OWNERS_FOLDER
from kafka_eos_source.secrets import bare_url

#: Hadoop's name for an object store → PyArrow's name.
_SCHEMES = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasb": "abfs", "wasbs": "abfs"}
#: Mode of missing folders above one for the owner only.
_PARENTS = 0o775


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

    Missing parent folders get the usual permissions, but not everybody can write to them, whatever the umask.
    """
    if isinstance(fs, pafs.LocalFileSystem):
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for each in reversed(missing):
            mode = OWNERS_FOLDER if each is missing[0] else _PARENTS
            with suppress(FileExistsError):  # another process created it at the same moment
                os.mkdir(each, mode)
    else:
        fs.create_dir(path, recursive=True)


def new_file(fs: pafs.FileSystem, path: str) -> pa.NativeFile:
    """Creates a file that only its owner may read, and opens it for writing."""
    if isinstance(fs, pafs.LocalFileSystem):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, OWNERS_FILE))
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
