"""The staging folder: where parts lie, on whatever file system the checkpoint is on.

::

    <location>/shared-path            proof that executors see what the driver sees
    <location>/<batch>/<uuid>.arrow   one task attempt's rows, an Arrow IPC stream

``<location>`` is ``<checkpointLocation>/kafka-eos/staging``, or a folder of the query's own in the option
``staging.location``: batches of two queries have the same names.

On local file systems only their owner may read what is staged: folders are made with mode 0700, files with
0600. Elsewhere the store's own rules decide. Names come from tasks, so each must be one that a task makes,
and a file is opened only where it lies: nothing outside the location is ever read or deleted. Parts are Arrow
data, proved by their checksum; nothing in them is executed or unpickled.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import stat
import tempfile
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.errors import InvalidOptionError, StagedPartError, UnavailableError
from kafka_eos_source.model import StagedPart

PROBE = "shared-path"
_COPY_BYTES = 4 << 20
_OWNERS_FOLDER, _OWNERS_FILE = 0o700, 0o600

#: What a micro-batch or a batch write is called, and a part of it.
_BATCH = re.compile(r"[0-9]+|write-[0-9a-f]{32}", re.ASCII)
_PART = re.compile(r"[0-9a-f]{32}\.arrow")

_log = logging.getLogger(__name__)

#: Hadoop's names for a store → pyarrow's.
_SCHEMES = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasb": "abfs", "wasbs": "abfs"}


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


@dataclass(frozen=True)
class StagingFolder:
    """One staging location. Picklable: file systems are opened where they are used.

    Attributes:
        location: URI or path, made absolute on the driver.
        probe: text of the probe file, written by the driver; "" = nothing to check.
    """

    location: str
    probe: str = ""

    @classmethod
    def at(cls, location: str) -> StagingFolder:
        """Called on the driver: makes the folder, and the probe that tasks look for.

        Raises:
            UnavailableError: the folder cannot be made or written.
        """
        absolute = os.path.abspath(location) if not urlsplit(location).scheme else location
        fs, path = file_system(absolute)
        try:
            _make_folder(fs, path)
            probe = _read_text(fs, f"{path}/{PROBE}")
            if probe is None:
                probe = uuid.uuid4().hex
                # another query may write here at this moment: whoever is renamed last is believed
                own = f"{path}/{PROBE}.{probe}"
                with _new_file(fs, own) as out:
                    out.write(probe.encode())
                fs.move(own, f"{path}/{PROBE}")
                probe = _read_text(fs, f"{path}/{PROBE}") or probe
        except OSError as error:
            raise unwritable(absolute, error) from error
        return cls(absolute, probe)

    def check_shared(self) -> None:
        """Called in a task before it writes a file.

        Raises:
            InvalidOptionError: this machine does not see the driver's folder.
        """
        if not self.probe or (self.location, self.probe) in _seen:
            return
        fs, path = file_system(self.location)
        try:
            found = _read_text(fs, f"{path}/{PROBE}")
        except PermissionError as error:
            raise InvalidOptionError(
                f"the staging folder {self.location!r} belongs to another user: this executor "
                f"({os.uname().nodename}) runs as user id {os.getuid()}, and may not read it.",
                fix="run driver and executors as one user.",
            ) from error
        if found != self.probe:
            raise InvalidOptionError(
                f"the staging folder {self.location!r} is not shared: this executor ({os.uname().nodename}) "
                "does not find there what the driver wrote.",
                fix="put checkpointLocation (or the option staging.location) on storage that driver and "
                "executors share.",
            )
        _seen.add((self.location, self.probe))

    def create(self, batch: str) -> tuple[str, pa.NativeFile]:
        """A new part file of a batch: its name, and the stream to write it with."""
        name = f"{uuid.uuid4().hex}.arrow"
        fs, path = file_system(self.location)
        try:
            _make_folder(fs, f"{path}/{_legal(_BATCH, batch)}")
            return name, _new_file(fs, f"{path}/{batch}/{name}")
        except OSError as error:
            raise unwritable(self.location, error) from error

    def read(self, batch: str, part: StagedPart) -> pa.Buffer:
        """The bytes of a part, length and checksum proved. Large ones stay on disk (memory map).

        Raises:
            StagedPartError: the part is missing, or is not what its task wrote.
        """
        what = f"staged part {part.name or '(inline)'} of batch {batch}"
        if part.inline is not None:
            buffer = pa.py_buffer(part.inline)
        else:
            try:
                buffer = self._map(f"{_legal(_BATCH, batch)}/{_legal(_PART, part.name)}")
            except OSError as error:
                raise StagedPartError(
                    f"{what} in {self.location!r} cannot be read: {error}.",
                    fix="restart the query: the batch is staged anew. Nothing was sent to Kafka.",
                ) from error
        if buffer.size != part.size_bytes or _crc32(buffer) != part.crc32:
            raise StagedPartError(
                f"{what} is damaged: {buffer.size:,} bytes, checksum {_crc32(buffer):08x}; "
                f"its task wrote {part.size_bytes:,} bytes, {part.crc32:08x}.",
                fix="restart the query: the batch is staged anew. Nothing was sent to Kafka.",
            )
        return buffer

    def remove_parts(self, batch: str, names: Iterable[str]) -> None:
        """Deletes these files, whatever became of them already."""
        fs, path = file_system(self.location)
        for name in names:
            try:
                relative = f"{_legal(_BATCH, batch)}/{_legal(_PART, name)}"
                _refuse_links(fs, path, relative)
                fs.delete_file(f"{path}/{relative}")
            except (OSError, StagedPartError) as error:
                _log.debug("staged part %s/%s: %s", batch, name, error)

    def remove_batch(self, batch: str) -> None:
        """Deletes all of one batch. What cannot be deleted now is swept later: it is never read again."""
        fs, path = file_system(self.location)
        try:
            _refuse_links(fs, path, _legal(_BATCH, batch))
            if fs.get_file_info(f"{path}/{batch}").type == pafs.FileType.Directory:
                fs.delete_dir(f"{path}/{batch}")
        except (OSError, StagedPartError) as error:
            _log.warning("staging of batch %s in %s was not removed: %s", batch, self.location, error)

    def batches(self) -> list[int]:
        """Batch ids that have a folder here, ascending."""
        fs, path = file_system(self.location)
        found = fs.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return sorted(int(each.base_name) for each in found if each.base_name.isdigit())

    def _map(self, relative: str) -> pa.Buffer:
        fs, path = file_system(self.location)
        _refuse_links(fs, path, relative)
        if isinstance(fs, pafs.LocalFileSystem):
            if os.path.getsize(f"{path}/{relative}") == 0:
                return pa.py_buffer(b"")
            return pa.memory_map(f"{path}/{relative}").read_buffer()
        with tempfile.TemporaryFile() as copy, fs.open_input_stream(f"{path}/{relative}") as source:
            while chunk := source.read(_COPY_BYTES):
                copy.write(chunk)
            copy.flush()
            if copy.tell() == 0:
                return pa.py_buffer(b"")
            return pa.py_buffer(mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ))


#: Probes this process has found already.
_seen: set[tuple[str, str]] = set()


def _legal(kind: re.Pattern[str], name: str) -> str:
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


def _refuse_links(fs: pafs.FileSystem, path: str, relative: str) -> None:
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


def _make_folder(fs: pafs.FileSystem, path: str) -> None:
    """One that only its owner may look into, unless it is there already; those above it as usual."""
    if isinstance(fs, pafs.LocalFileSystem):
        os.makedirs(path, mode=_OWNERS_FOLDER, exist_ok=True)
    else:
        fs.create_dir(path, recursive=True)


def _new_file(fs: pafs.FileSystem, path: str) -> pa.NativeFile:
    """One that only its owner may read, from its first byte on."""
    if isinstance(fs, pafs.LocalFileSystem):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _OWNERS_FILE))
    return fs.open_output_stream(path)


def _read_text(fs: pafs.FileSystem, path: str) -> str | None:
    try:
        with fs.open_input_stream(path) as source:
            return str(source.read().decode())
    except FileNotFoundError:
        return None


def _crc32(buffer: pa.Buffer) -> int:
    return zlib.crc32(memoryview(buffer))


def unwritable(location: str, error: OSError) -> UnavailableError:
    return UnavailableError(
        f"the staging folder {location!r} cannot be written: {error}.",
        fix="free space there or allow writing, or set .option('staging.location', …); "
        "then restart the query. Nothing was sent to Kafka.",
    )
