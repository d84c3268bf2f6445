"""The staging folder, on any file system that can hold a checkpoint, and the parts that tasks write there.

::

    <location>/shared-path            shows that executors see the same folder as the driver
    <location>/<batch>/<uuid>.arrow   rows of one task attempt, as an Arrow IPC stream

``<location>`` is ``<checkpointLocation>/kafka-eos/staging``, or a folder per query in ``staging.location``,
because batches of different queries have the same names. Parts are Arrow data; nothing in them is executed or
unpickled.

The driver sends to Kafka what it finds in a part, so it has to know who wrote it. On a disk of its host, only
the user of the query can have written to a file of this user in a folder of this user with mode 0700, and the
driver checks owner and mode of what it opened. Anywhere else (object stores, HDFS, network mounts) the task
computes the SHA-256 of what it writes. The digest travels through Spark in the commit message, and the driver
compares it with that of the bytes that it sends. The checksum finds damage only: anybody can choose bytes
with a given CRC.

The driver receives file names from tasks. It accepts only names that a task can create, and follows no links,
so that it never reads or deletes a file outside of the location.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import IO, Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.errors import InvalidOptionError, StagedPartError, UnavailableError
from kafka_eos_source.kafka.kernel import kernel
from kafka_eos_source.model import StagedPart
from kafka_eos_source.runtime.file_systems import WriteOnlyFile, file_system, names_in, new_file, read_text
from kafka_eos_source.runtime.folders import (
    OWNERS_FOLDER,
    NotOwnError,
    PrivateFolder,
    is_on_this_host,
    make_missing,
    make_private,
    open_own,
)
from kafka_eos_source.secrets import shown_text

PROBE = "shared-path"
_COPY_BYTES = 4 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FORGED = (
    "find out who may write to this folder, and take the right away; or set staging.location to another "
    "folder. Then restart the query, which stages the batch again. Nothing was sent to Kafka."
)

_log = logging.getLogger(__name__)

#: Fix for a part that is not what its task wrote.
RESTART = "restart the query, which stages the batch again. Readers see nothing of it yet."

#: Names of micro-batches or batch writes, and of parts.
BATCH = re.compile(r"[0-9]+|write-[0-9a-f]{32}", re.ASCII)
PART = re.compile(r"[0-9a-f]{32}\.arrow")


class LocalCopies:
    """Local copies of parts that others can change, or that cannot be mapped into memory, with their digests.

    They are in one temporary file without a name, so nobody changes them.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: dict[str, tuple[int, int, str]] = {}

    def map(self, path: str, most_bytes: int, opened: Callable[[], Any]) -> tuple[pa.Buffer, str]:
        """Returns the bytes of a file, which is copied on the first call, and their SHA-256.

        Args:
            path: names the file.
            most_bytes: expected size; little more is copied of a larger file, so its digest is another one.
            opened: opens it for reading.

        Raises:
            UnavailableError: if the copy cannot be written.
            OSError: if the file cannot be read.
        """
        if self._file is None:
            with _copying():
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - stays open as long as this object
        if path not in self._places:
            start, digest = self._file.seek(0, os.SEEK_END), sha256()
            with opened() as source:
                while self._file.tell() - start <= most_bytes and (chunk := source.read(_COPY_BYTES)):
                    digest.update(chunk)
                    with _copying():
                        self._file.write(chunk)
            with _copying():
                self._file.flush()
            self._places[path] = start, self._file.tell() - start, digest.hexdigest()
        start, size, found = self._places[path]
        return _mapped(self._file.fileno(), start, size), found


@contextlib.contextmanager
def _copying() -> Iterator[None]:
    """Raises UnavailableError if the driver's temporary folder cannot hold what is written to it."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"the driver cannot copy staged rows to its temporary folder {tempfile.gettempdir()!r}: {error}.",
            fix="free space there, or set TMPDIR in the driver's environment to a folder with room for the "
            "rows of a batch; or read less per batch (maxOffsetsPerTrigger). Then restart the query. Nothing "
            "was sent to Kafka.",
        ) from error


@dataclass(frozen=True)
class StagingFolder:
    """One staging location. It is picklable, because each method opens the file system.

    Attributes:
        location: URI or absolute path.
        probe: text that the driver wrote to the probe file ``shared-path``; "" = tasks do not check it.
        is_local: whether the folder is on a disk of the driver's host, so that parts need no digest.
        option: names the option or options that decide where the folder is, for errors.
    """

    location: str
    probe: str = ""
    is_local: bool = False
    option: str = "staging.location"

    @classmethod
    def at(cls, location: str, option: str = "staging.location") -> StagingFolder:
        """Creates the folder and its probe file; called on the driver.

        Args:
            location: URI or path.
            option: see the attribute.

        Raises:
            UnavailableError: if the folder cannot be created or written.
            InvalidOptionError: if other users could put another folder in its place.
        """
        absolute = os.path.abspath(location) if not urlsplit(location).scheme else location
        fs, path = file_system(absolute)
        try:
            if isinstance(fs, pafs.LocalFileSystem):
                make_missing(path, option, notices_others=True)
            else:
                fs.create_dir(path, recursive=True)
            probe = read_text(fs, f"{path}/{PROBE}")
            if probe is None:
                probe = uuid.uuid4().hex
                # another query may do the same at this moment; both use the file that was renamed last
                own = f"{path}/{PROBE}.{probe}"
                with new_file(fs, own) as out:
                    out.write(probe.encode())
                fs.move(own, f"{path}/{PROBE}")
                probe = read_text(fs, f"{path}/{PROBE}") or probe
        except OSError as error:
            raise unwritable(absolute, error) from error
        return cls(absolute, probe, isinstance(fs, pafs.LocalFileSystem) and is_on_this_host(path), option)

    def check_shared(self) -> None:
        """Checks that this host sees the driver's folder; called in a task before it writes a file.

        Raises:
            InvalidOptionError: if the folder is not shared, or belongs to another user.
        """
        if not self.probe or (self.location, self.probe) in _seen:
            return
        fs, path = file_system(self.location)
        try:
            found = read_text(fs, f"{path}/{PROBE}")
        except PermissionError as error:
            raise InvalidOptionError(
                f"the staging folder {self.location!r} belongs to another user: the executor on host "
                f"{os.uname().nodename} runs as user id {os.getuid()} and cannot read it.",
                fix="run the driver and the executors as the same user.",
            ) from error
        if found != self.probe:
            raise InvalidOptionError(
                f"the staging folder {self.location!r} is not shared: the executor on host "
                f"{os.uname().nodename} does not find the file that the driver wrote there.",
                fix=f"set {self.option} to storage that the driver and the executors share.",
            )
        _seen.add((self.location, self.probe))

    def create(self, batch: str) -> tuple[str, Any, bool]:
        """Creates a part file for a batch.

        Returns:
            Its name, a stream to write it, and whether the part needs a digest.

        Raises:
            InvalidOptionError: if another user created the folder of the batch.
            UnavailableError: if the file cannot be created.
        """
        name = f"{uuid.uuid4().hex}.arrow"
        fs, path = file_system(self.location)
        needs_digest = True
        try:
            if not isinstance(fs, pafs.LocalFileSystem):
                fs.create_dir(f"{path}/{legal(BATCH, batch)}", recursive=True)
                return name, fs.open_output_stream(f"{path}/{batch}/{name}"), needs_digest
            if is_on_this_host(path):
                needs_digest = not self.is_local
                with _opened_batch(path, legal(BATCH, batch), create=True) as folder:
                    created = open_own(name, _CREATE, within=folder, named=f"{path}/{batch}/{name}")
            else:
                make_private(f"{path}/{legal(BATCH, batch)}", self.option, notices_others=True)
                created = os.open(f"{path}/{batch}/{name}", _CREATE, 0o600)
        except NotOwnError as error:
            raise InvalidOptionError(
                f"the staging folder cannot be used: {error}.",
                fix="remove it, and find out who created it; or set .option('staging.location', …) to a "
                "folder that only this user may write to. Nothing was sent to Kafka.",
            ) from error
        except OSError as error:
            raise unwritable(self.location, error) from error
        return name, open(created, "wb"), needs_digest

    def read(self, batch: str, part: StagedPart, copies: LocalCopies | None = None) -> pa.Buffer:
        """Returns the bytes of a part (an Arrow IPC stream) after verifying that its task wrote them.

        A file is mapped into memory as long as the buffer or a slice of it is in use, without an open file
        descriptor. Nobody can change the bytes afterwards: only this user may write to the file, or it is a
        copy.

        Args:
            batch: name of the batch.
            part: the part, as its task reported it.
            copies: copies of files; None = the file is copied for this call only.

        Raises:
            StagedPartError: if the part is missing or is not what its task wrote.
        """
        what = f"staged part {part.name or '(inline)'} of batch {batch}"
        if part.inline is not None:
            found, digest = pa.py_buffer(part.inline), ""
        else:
            try:
                relative = f"{legal(BATCH, batch)}/{legal(PART, part.name)}"
                found, digest = self._map(relative, part, copies or LocalCopies())
            except NotOwnError as error:
                raise StagedPartError(f"{what} may be forged: {error}.", fix=_FORGED) from error
            except OSError as error:
                raise StagedPartError(
                    f"{what} in {self.location!r} cannot be read: {error}.", fix=RESTART
                ) from error
        checksum = crc32c(found)
        if found.size != part.size_bytes or checksum != part.checksum:
            raise StagedPartError(
                f"{what} is damaged: it has {found.size:,} bytes and CRC-32C {checksum:08x}; "
                f"its task wrote {part.size_bytes:,} bytes with CRC-32C {part.checksum:08x}.",
                fix=RESTART,
            )
        if digest != part.digest:
            raise StagedPartError(
                f"{what} in {self.location!r} is not what its task wrote: size and CRC-32C fit, but it has "
                f"SHA-256 {digest}, and its task reported {part.digest or 'none'}.",
                fix=_FORGED,
            )
        return found

    def remove_parts(self, batch: str, names: Iterable[str]) -> None:
        """Deletes these parts; ignores those that no longer exist."""
        fs, path = file_system(self.location)
        for name in names:
            try:
                relative = f"{legal(BATCH, batch)}/{legal(PART, name)}"
                refuse_links(fs, path, relative)
                fs.delete_file(f"{path}/{relative}")
            except (OSError, StagedPartError) as error:
                _log.debug("staged part %s of batch %s was not deleted: %s", name, batch, error)

    def remove_batch(self, batch: str) -> None:
        """Deletes the folder of one batch. A later sweep deletes what cannot be deleted now."""
        fs, path = file_system(self.location)
        try:
            refuse_links(fs, path, legal(BATCH, batch))
            if fs.get_file_info(f"{path}/{batch}").type == pafs.FileType.Directory:
                fs.delete_dir(f"{path}/{batch}")
        except (OSError, StagedPartError) as error:
            _log.warning(
                "the staged rows of batch %s in %s were not deleted: %s",
                batch,
                shown_text(self.location),
                error,
            )

    def batches(self) -> list[int]:
        """Returns the ids of batches that have a folder here, in ascending order."""
        fs, path = file_system(self.location)
        return sorted(int(name) for name in names_in(fs, path) if name.isdecimal())

    def _map(self, relative: str, part: StagedPart, copies: LocalCopies) -> tuple[pa.Buffer, str]:
        """Returns the bytes of a part, and their digest; "" if owner and mode show who wrote them."""
        fs, path = file_system(self.location)
        whole = f"{path}/{relative}"
        if not isinstance(fs, pafs.LocalFileSystem):
            return copies.map(whole, part.size_bytes, lambda: fs.open_input_stream(whole))
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW  # opening a pipe would wait for a writer
        if part.digest or not is_on_this_host(path):
            refuse_links(fs, path, relative)
            return copies.map(whole, part.size_bytes, lambda: open(os.open(whole, flags), "rb"))
        batch, _, name = relative.partition("/")
        try:
            with _opened_batch(path, batch) as folder:
                descriptor = open_own(name, flags, within=folder, named=whole)
        except NotOwnError:
            refuse_links(fs, path, relative)  # says where a link leads
            raise
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise NotOwnError(f"{whole!r} is not a regular file")
            return _mapped(descriptor, 0, found.st_size), ""
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _opened_batch(path: str, batch: str, *, create: bool = False) -> Iterator[int]:
    """Opens the folder of a batch in a local staging folder, after checking that it is this user's own."""
    location = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(batch, OWNERS_FOLDER, dir_fd=location)
        folder = open_own(batch, os.O_RDONLY | os.O_DIRECTORY, within=location, named=f"{path}/{batch}")
    finally:
        os.close(location)
    try:
        yield folder
    finally:
        os.close(folder)


def _mapped(descriptor: int, start: int, size: int) -> pa.Buffer:
    """Maps a part of a file into memory until the buffer is released. The caller closes the descriptor."""
    if size == 0:
        return pa.py_buffer(b"")  # an empty range cannot be mapped
    with pa.memory_map(f"/dev/fd/{descriptor}") as file:
        file.seek(start)
        return file.read_buffer(size)


#: Locations and probes that this process has already found.
_seen: set[tuple[str, str]] = set()


def crc32c(data: Any, before: int = 0) -> int:
    """Returns the checksum of bytes.

    Args:
        data: the bytes, as an object with a buffer.
        before: the checksum of the bytes before them; 0 = there are none.
    """
    array = np.frombuffer(data, np.uint8)
    return int(kernel().crc32c(before, array.ctypes.data, array.nbytes))


# -- Locations and names ---------------------------------------------------------------------------


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
        "then start the query or the write again. Nothing was sent to Kafka.",
    )


# -- What writes a part ----------------------------------------------------------------------------


class Spool(WriteOnlyFile):
    """A file-like object that moves its bytes to a file if there are many; computes size, CRC and digest.

    Args:
        folder: folder for the file; None = the bytes stay in memory.
        batch: name of the micro-batch in the folder.
        inline_bytes: maximum size in memory.
    """

    def __init__(self, folder: StagingFolder | None, batch: str, inline_bytes: int) -> None:
        self._folder = folder
        self._batch = batch
        self._inline_bytes = inline_bytes
        self._memory: bytearray | None = bytearray()
        self._file: Any = None
        self._digest: Any = None
        self.name = ""
        self.size = 0
        self.checksum = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.size += view.nbytes
        if self._memory is not None:
            if self._folder is None or self.size <= self._inline_bytes:
                self._memory += view
                return view.nbytes
            self._spill(self._folder)
        self._to_file(view)
        return view.nbytes

    def inline(self) -> bytes | None:
        return None if self._memory is None else bytes(self._memory)

    def digest(self) -> str:
        return "" if self._digest is None else str(self._digest.hexdigest())

    def finish(self) -> None:
        if self._memory is not None:
            self.checksum = crc32c(self._memory)
        if self._file is not None and self._folder is not None:
            try:
                self._file.close()
            except OSError as error:
                raise unwritable(self._folder.location, error) from error

    def discard(self) -> None:
        """Deletes the file of a failed task attempt."""
        if self._file is not None and self._folder is not None:
            try:
                self._file.close()
            finally:
                self._folder.remove_parts(self._batch, [self.name])

    def _spill(self, folder: StagingFolder) -> None:
        folder.check_shared()
        self.name, self._file, needs_digest = folder.create(self._batch)
        self._digest = sha256() if needs_digest else None
        head, self._memory = self._memory, None
        self._to_file(head)

    def _to_file(self, data: Any) -> None:
        assert self._file is not None
        assert self._folder is not None
        self.checksum = crc32c(data, self.checksum)
        if self._digest is not None:
            self._digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise unwritable(self._folder.location, error) from error


class PartStage:
    """Stages rows as one part, an Arrow IPC stream; implements `contract.Stage`.

    Args:
        schema: schema of the rows.
        folder: folder for a file; None = the part always stays in memory.
        batch: name of the micro-batch in the folder.
        inline_bytes: maximum size of a part that stays in memory, for the commit message.
    """

    def __init__(
        self,
        schema: pa.Schema,
        folder: StagingFolder | None,
        batch: str,
        inline_bytes: int,
    ) -> None:
        self._spool = Spool(folder, batch, inline_bytes)
        self._stream = pa.ipc.new_stream(pa.PythonFile(self._spool, mode="w"), schema)
        self._rows = 0

    def write(self, batch: pa.RecordBatch, records: int | None = None) -> None:
        """Adds an Arrow batch.

        Args:
            batch: the batch.
            records: number of records in it; None = its number of rows.
        """
        self._stream.write_batch(batch)
        self._rows += batch.num_rows if records is None else records

    def finish(self) -> StagedPart:
        self._stream.close()
        self._spool.finish()
        spool = self._spool
        return StagedPart(
            name=spool.name,
            rows=self._rows,
            size_bytes=spool.size,
            checksum=spool.checksum,
            digest=spool.digest(),
            inline=spool.inline(),
        )

    def discard(self) -> None:
        """Deletes the file of a failed task attempt."""
        self._spool.discard()
