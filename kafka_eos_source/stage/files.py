"""The staging folder, on any file system that can hold a checkpoint.

::

    <location>/shared-path            shows that executors see the same folder as the driver
    <location>/<batch>/<uuid>.arrow   rows of one task attempt, as an Arrow IPC stream

``<location>`` is ``<checkpointLocation>/kafka-eos/staging``, or a folder per query in ``staging.location``,
because batches of different queries have the same names. Parts are Arrow data, verified by a checksum.
Nothing in them is executed or unpickled.
"""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.errors import InvalidOptionError, StagedPartError
from kafka_eos_source.model import StagedPart
from kafka_eos_source.runtime.file_systems import file_system, make_folder, names_in, new_file, read_text
from kafka_eos_source.secrets import shown_text
from kafka_eos_source.stage.checksum import crc32c
from kafka_eos_source.stage.paths import BATCH, PART, RESTART, legal, refuse_links, unwritable

PROBE = "shared-path"
_COPY_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class LocalCopies:
    """Local copies of remote parts, which cannot be mapped into memory, in one unnamed temporary file."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: dict[str, tuple[int, int]] = {}

    def map(self, fs: pafs.FileSystem, path: str) -> pa.Buffer:
        """Returns the bytes of a file, which is copied on the first call."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - stays open as long as this object
        if path not in self._places:
            start = self._file.seek(0, os.SEEK_END)
            with fs.open_input_stream(path) as source:
                while chunk := source.read(_COPY_BYTES):
                    self._file.write(chunk)
            self._file.flush()
            self._places[path] = start, self._file.tell() - start
        return _mapped(f"/dev/fd/{self._file.fileno()}", *self._places[path])


@dataclass(frozen=True)
class StagingFolder:
    """One staging location. It is picklable, because each method opens the file system.

    Attributes:
        location: URI or absolute path.
        probe: text that the driver wrote to the probe file ``shared-path``; "" = tasks do not check it.
    """

    location: str
    probe: str = ""

    @classmethod
    def at(cls, location: str) -> StagingFolder:
        """Creates the folder and its probe file; called on the driver.

        Raises:
            UnavailableError: if the folder cannot be created or written.
        """
        absolute = os.path.abspath(location) if not urlsplit(location).scheme else location
        fs, path = file_system(absolute)
        try:
            make_folder(fs, path)
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
        return cls(absolute, probe)

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
                fix="set checkpointLocation or staging.location to storage that the driver and the "
                "executors share.",
            )
        _seen.add((self.location, self.probe))

    def create(self, batch: str) -> tuple[str, pa.NativeFile]:
        """Creates a part file for a batch; returns its name and a stream to write it."""
        name = f"{uuid.uuid4().hex}.arrow"
        fs, path = file_system(self.location)
        try:
            make_folder(fs, f"{path}/{legal(BATCH, batch)}")
            return name, new_file(fs, f"{path}/{batch}/{name}")
        except OSError as error:
            raise unwritable(self.location, error) from error

    def read(self, batch: str, part: StagedPart, copies: LocalCopies | None = None) -> pa.Buffer:
        """Returns the bytes of a part (an Arrow IPC stream) after verifying length and checksum.

        A file is mapped into memory as long as the buffer or a slice of it is in use, without an open file
        descriptor.

        Args:
            batch: name of the batch.
            part: the part, as its task reported it.
            copies: copies of remote files; None = the file is copied for this call only.

        Raises:
            StagedPartError: if the part is missing or is not what its task wrote.
        """
        what = f"staged part {part.name or '(inline)'} of batch {batch}"
        if part.inline is not None:
            found = pa.py_buffer(part.inline)
        else:
            try:
                found = self._map(f"{legal(BATCH, batch)}/{legal(PART, part.name)}", copies or LocalCopies())
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

    def _map(self, relative: str, copies: LocalCopies) -> pa.Buffer:
        fs, path = file_system(self.location)
        refuse_links(fs, path, relative)
        if isinstance(fs, pafs.LocalFileSystem):
            return _mapped(f"{path}/{relative}", 0, os.path.getsize(f"{path}/{relative}"))
        return copies.map(fs, f"{path}/{relative}")


def _mapped(path: str, start: int, size: int) -> pa.Buffer:
    """Maps a part of a file into memory until the buffer is released; closes the file at once."""
    if size == 0:
        return pa.py_buffer(b"")  # an empty range cannot be mapped
    with pa.memory_map(path) as file:
        file.seek(start)
        return file.read_buffer(size)


#: Locations and probes that this process has already found.
_seen: set[tuple[str, str]] = set()
