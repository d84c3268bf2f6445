"""A folder in the query's checkpoint where a sink keeps prepared work that its system cannot hold.

::

    <checkpointLocation>/kafka-eos/sinks/<name>/<id>.json    a note
    <checkpointLocation>/kafka-eos/sinks/<name>/<id>.arrow   rows, as an Arrow IPC stream

Readers never see a partial file: each is written under a temporary name and then renamed. Both kinds have a
digest (`sinks.manifest`), which a sink returns from `prepare`, so that `commit` believes nothing else.
Whoever may write to the checkpoint can hide that something is prepared, or pretend that it is done.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.file_systems import WriteOnlyFile, file_system, fsync, make_folder, new_file
from kafka_eos_source.sinks import manifest as manifests

_NOTE, _ROWS, _TEMPORARY = ".json", ".arrow", ".new"
_PIECE_BYTES = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class NotesFolder:
    """Durable notes and rows of one sink of one query.

    Picklable, because each process opens the file system itself.

    Attributes:
        location: URI or path of the folder.
    """

    location: str

    def put(self, name: str, note: Mapping[str, Any]) -> str:
        """Writes a note and replaces an earlier one of the same name.

        Returns:
            The digest of the note.

        Raises:
            OSError: if the file cannot be written.
        """
        data = manifests.encode(note)
        self._write(f"{name}{_NOTE}", lambda out: out.write(data))
        return manifests.digest(data)

    def get(self, name: str, digest: str, read: Callable[[Mapping[str, Any]], T]) -> T | None:
        """Reads a note.

        Args:
            name: name of the note.
            digest: digest that the note must have; empty if nobody vouches for it.
            read: see `manifest.parsed`.

        Returns:
            What ``read`` returned, or None if no note of that name exists.

        Raises:
            SinkFailedError: if it is another note than the one with the digest, or damaged.
            OSError: if the file cannot be read.
        """
        fs, path = self._file(f"{name}{_NOTE}")
        try:
            return manifests.parsed(manifests.stored(fs, path), digest, f"the note {path}", read)
        except FileNotFoundError:
            return None

    def digest(self, name: str) -> str | None:
        """Returns the digest of a note, whatever is in it; None if none of that name exists."""
        fs, path = self._file(f"{name}{_NOTE}")
        try:
            return manifests.digest(manifests.stored(fs, path))
        except FileNotFoundError:
            return None

    def put_rows(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> str:
        """Writes rows and replaces earlier ones of the same name.

        Returns:
            The digest of the rows.

        Raises:
            OSError: if the file cannot be written.
        """
        found = hashlib.sha256()

        def write(out: pa.NativeFile) -> None:
            with pa.ipc.new_stream(_Hashed(out, found), schema) as stream:
                for batch in batches:
                    stream.write_batch(batch)

        self._write(f"{name}{_ROWS}", write)
        return manifests.shortened(found)

    def rows(self, name: str, digest: str) -> Iterator[pa.RecordBatch]:
        """Reads the rows of a name.

        Args:
            name: name of the rows.
            digest: digest that they must have; empty if nobody vouches for them. It is checked before the
                first batch, and takes a second read of the file.

        Raises:
            FileNotFoundError: if no rows of that name exist.
            SinkFailedError: if they have another digest.
        """
        fs, path = self._file(f"{name}{_ROWS}")
        with fs.open_input_file(path) as source:
            if digest:
                found = hashlib.sha256()
                while piece := source.read(_PIECE_BYTES):
                    found.update(piece)
                manifests.check(manifests.shortened(found), digest, f"the file of rows {path}")
                source.seek(0)
            yield from pa.ipc.open_stream(source)

    def has_rows(self, name: str) -> bool:
        """Returns whether rows of that name exist."""
        fs, path = file_system(self.location)
        return bool(fs.get_file_info(f"{path}/{name}{_ROWS}").type == pafs.FileType.File)

    def remove(self, name: str) -> None:
        """Deletes the note and the rows of a name, if they exist.

        Raises:
            OSError: if an existing file cannot be deleted.
        """
        fs, path = file_system(self.location)
        for ending in (_ROWS, _NOTE):
            try:
                fs.delete_file(f"{path}/{name}{ending}")
            except FileNotFoundError:
                continue

    def names(self) -> list[str]:
        """Lists the names of all notes and rows."""
        fs, path = file_system(self.location)
        found = fs.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        endings = (_NOTE, _ROWS)
        return sorted(
            {each.base_name.rpartition(".")[0] for each in found if each.base_name.endswith(endings)}
        )

    def sweep(self) -> None:
        """Deletes temporary files that a killed process left. The driver calls this when a batch is finished.

        Raises:
            OSError: if a file cannot be deleted.
        """
        fs, path = file_system(self.location)
        for each in fs.get_file_info(pafs.FileSelector(path, allow_not_found=True)):
            if each.base_name.endswith(_TEMPORARY):
                fs.delete_file(each.path)

    def _file(self, name: str) -> tuple[pafs.FileSystem, str]:
        fs, path = file_system(self.location)
        return fs, f"{path}/{name}"

    def _write(self, name: str, write: Callable[[pa.NativeFile], object]) -> None:
        fs, path = file_system(self.location)
        make_folder(fs, path)
        temporary = f"{path}/{uuid.uuid4().hex}{_TEMPORARY}"  # an id may be nearly as long as a file name may
        try:
            with new_file(fs, temporary) as out:
                write(out)
            # prepared work must survive a power cut
            if isinstance(fs, pafs.LocalFileSystem):
                fsync(temporary)
            failpoints.reach("sink.store.before_rename")
            fs.move(temporary, f"{path}/{name}")
        except BaseException:
            if fs.get_file_info(temporary).type == pafs.FileType.File:
                fs.delete_file(temporary)
            raise


class _Hashed(WriteOnlyFile):
    """File that hashes what is written to it."""

    def __init__(self, out: pa.NativeFile, sha256: hashlib._Hash) -> None:
        self._out = out
        self._sha256 = sha256

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        self._out.write(data)
        return len(data)
