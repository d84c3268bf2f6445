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
import mmap
import os
import tempfile
import uuid
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.errors import InvalidOptionError, StagedPartError
from kafka_eos_source.model import StagedPart
from kafka_eos_source.runtime.file_systems import file_system, make_folder, new_file, read_text
from kafka_eos_source.stage.paths import BATCH, PART, legal, refuse_links, unwritable

PROBE = "shared-path"
_COPY_BYTES = 4 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartBytes:
    """The bytes of one staged part, proved.

    Attributes:
        buffer: an Arrow IPC stream.
        mapped: the file's mapping that it lies in; None = it lies in memory.
    """

    buffer: pa.Buffer
    mapped: mmap.mmap | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All of its Arrow batches; its pages go when the last one was taken. May be called again."""
        yield from pa.ipc.open_stream(self.buffer)
        self.let_go()

    def let_go(self) -> None:
        """Takes its pages out of this process's memory; they come back when they are read again.

        Else a process that reads a batch from end to end has all of it, as far as ``ps`` and limits that
        count mapped files can see.
        """
        if self.mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED)


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

    def read(self, batch: str, part: StagedPart) -> PartBytes:
        """The bytes of a part, length and checksum proved. Large ones stay on disk (memory map).

        Raises:
            StagedPartError: the part is missing, or is not what its task wrote.
        """
        what = f"staged part {part.name or '(inline)'} of batch {batch}"
        if part.inline is not None:
            found = PartBytes(pa.py_buffer(part.inline))
        else:
            try:
                found = self._map(f"{legal(BATCH, batch)}/{legal(PART, part.name)}")
            except OSError as error:
                raise StagedPartError(
                    f"{what} in {self.location!r} cannot be read: {error}.",
                    fix="restart the query: the batch is staged anew. Nothing was sent to Kafka.",
                ) from error
        buffer = found.buffer
        if buffer.size != part.size_bytes or _crc32(buffer) != part.crc32:
            raise StagedPartError(
                f"{what} is damaged: {buffer.size:,} bytes, checksum {_crc32(buffer):08x}; "
                f"its task wrote {part.size_bytes:,} bytes, {part.crc32:08x}.",
                fix="restart the query: the batch is staged anew. Nothing was sent to Kafka.",
            )
        found.let_go()
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

    def _map(self, relative: str) -> PartBytes:
        fs, path = file_system(self.location)
        refuse_links(fs, path, relative)
        if isinstance(fs, pafs.LocalFileSystem):
            with open(f"{path}/{relative}", "rb") as local:
                return _mapped(local.fileno(), os.fstat(local.fileno()).st_size)
        with tempfile.TemporaryFile() as copy, fs.open_input_stream(f"{path}/{relative}") as source:
            while chunk := source.read(_COPY_BYTES):
                copy.write(chunk)
            copy.flush()
            return _mapped(copy.fileno(), copy.tell())


def _mapped(descriptor: int, size: int) -> PartBytes:
    if size == 0:
        return PartBytes(pa.py_buffer(b""))
    found = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    return PartBytes(pa.py_buffer(found), found)


#: Probes this process has found already.
_seen: set[tuple[str, str]] = set()


def _crc32(buffer: pa.Buffer) -> int:
    return zlib.crc32(memoryview(buffer))
