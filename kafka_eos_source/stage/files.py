"""The staging folder: where parts lie, on whatever file system the checkpoint is on.

::

    <location>/shared-path            proof that executors see what the driver sees
    <location>/<batch>/<uuid>.arrow   one task attempt's rows, an Arrow IPC stream

``<location>`` is ``<checkpointLocation>/kafka-eos/staging``, or a folder of the query's own in the option
``staging.location``: batches of two queries have the same names. Parts are Arrow data, proved by their
checksum; nothing in them is executed or unpickled.
"""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.errors import InvalidOptionError, StagedPartError
from kafka_eos_source.model import StagedPart
from kafka_eos_source.runtime.file_systems import file_system, make_folder, new_file, read_text
from kafka_eos_source.stage.paths import BATCH, PART, RESTART, legal, refuse_links, unwritable

PROBE = "shared-path"
_COPY_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class LocalCopies:
    """Copies of parts from a file system that cannot be mapped into memory, in one nameless local file."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: dict[str, tuple[int, int]] = {}

    def map(self, fs: pafs.FileSystem, path: str) -> pa.Buffer:
        """The bytes of a file, fetched when they are first asked for."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
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
            make_folder(fs, path)
            probe = read_text(fs, f"{path}/{PROBE}")
            if probe is None:
                probe = uuid.uuid4().hex
                # another query may write here at this moment: whoever is renamed last is believed
                own = f"{path}/{PROBE}.{probe}"
                with new_file(fs, own) as out:
                    out.write(probe.encode())
                fs.move(own, f"{path}/{PROBE}")
                probe = read_text(fs, f"{path}/{PROBE}") or probe
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
            found = read_text(fs, f"{path}/{PROBE}")
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
            make_folder(fs, f"{path}/{legal(BATCH, batch)}")
            return name, new_file(fs, f"{path}/{batch}/{name}")
        except OSError as error:
            raise unwritable(self.location, error) from error

    def read(self, batch: str, part: StagedPart, copies: LocalCopies | None = None) -> pa.Buffer:
        """The bytes of a part, an Arrow IPC stream, with length and checksum proved.

        A file stays on disk: its bytes are mapped into memory while the buffer or a slice of it is in use,
        and no file descriptor is held meanwhile.

        Args:
            batch: name of the part's batch.
            part: as its task reported it.
            copies: where copies of remote files are kept; None = they are fetched for this call only.

        Raises:
            StagedPartError: the part is missing, or is not what its task wrote.
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
        crc32 = zlib.crc32(memoryview(found))
        if found.size != part.size_bytes or crc32 != part.crc32:
            raise StagedPartError(
                f"{what} is damaged: {found.size:,} bytes, checksum {crc32:08x}; "
                f"its task wrote {part.size_bytes:,} bytes, {part.crc32:08x}.",
                fix=RESTART,
            )
        return found

    def remove_parts(self, batch: str, names: Iterable[str]) -> None:
        """Deletes these files, whatever became of them already."""
        fs, path = file_system(self.location)
        for name in names:
            try:
                relative = f"{legal(BATCH, batch)}/{legal(PART, name)}"
                refuse_links(fs, path, relative)
                fs.delete_file(f"{path}/{relative}")
            except (OSError, StagedPartError) as error:
                _log.debug("staged part %s/%s: %s", batch, name, error)

    def remove_batch(self, batch: str) -> None:
        """Deletes all of one batch. What cannot be deleted now is swept later: it is never read again."""
        fs, path = file_system(self.location)
        try:
            refuse_links(fs, path, legal(BATCH, batch))
            if fs.get_file_info(f"{path}/{batch}").type == pafs.FileType.Directory:
                fs.delete_dir(f"{path}/{batch}")
        except (OSError, StagedPartError) as error:
            _log.warning("staging of batch %s in %s was not removed: %s", batch, self.location, error)

    def batches(self) -> list[int]:
        """Batch ids that have a folder here, ascending."""
        fs, path = file_system(self.location)
        found = fs.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return sorted(int(each.base_name) for each in found if each.base_name.isdigit())

    def _map(self, relative: str, copies: LocalCopies) -> pa.Buffer:
        fs, path = file_system(self.location)
        refuse_links(fs, path, relative)
        if isinstance(fs, pafs.LocalFileSystem):
            return _mapped(f"{path}/{relative}", 0, os.path.getsize(f"{path}/{relative}"))
        return copies.map(fs, f"{path}/{relative}")


def _mapped(path: str, start: int, size: int) -> pa.Buffer:
    """A part of a file, mapped into memory until the buffer is dropped; the file is closed at once."""
    if size == 0:
        return pa.py_buffer(b"")  # nothing can be mapped
    with pa.memory_map(path) as file:
        file.seek(start)
        return file.read_buffer(size)


#: Probes this process has found already.
_seen: set[tuple[str, str]] = set()
