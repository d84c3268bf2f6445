"""A folder in the query's checkpoint where a sink keeps prepared work that its system cannot hold.

::

    <checkpointLocation>/kafka-eos/sinks/<name>/<id>.json    a note
    <checkpointLocation>/kafka-eos/sinks/<name>/<id>.arrow   rows, as an Arrow IPC stream

Readers never see a partial file: each is written under a temporary name and then renamed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.file_systems import file_system, fsync, make_folder, new_file
from kafka_eos_source.runtime.json_input import parse_json

_NOTE, _ROWS, _TEMPORARY = ".json", ".arrow", ".new"


@dataclass(frozen=True)
class NotesFolder:
    """Durable notes and rows of one sink of one query.

    Picklable, because each process opens the file system itself.

    Attributes:
        location: URI or path of the folder.
    """

    location: str

    def put(self, name: str, note: Mapping[str, Any]) -> None:
        """Writes a note and replaces an earlier one of the same name.

        Raises:
            OSError: if the file cannot be written.
        """
        self._write(f"{name}{_NOTE}", lambda out: out.write(json.dumps(note).encode()))

    def get(self, name: str) -> dict[str, Any] | None:
        """Reads a note.

        Returns:
            The note, or None if none of that name exists.

        Raises:
            OSError: if the file cannot be read.
        """
        fs, path = file_system(self.location)
        try:
            with fs.open_input_stream(f"{path}/{name}{_NOTE}") as source:
                return dict(parse_json(source.read()))
        except FileNotFoundError:
            return None

    def put_rows(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        """Writes rows and replaces earlier ones of the same name.

        Raises:
            OSError: if the file cannot be written.
        """

        def write(out: pa.NativeFile) -> None:
            with pa.ipc.new_stream(out, schema) as stream:
                for batch in batches:
                    stream.write_batch(batch)

        self._write(f"{name}{_ROWS}", write)

    def rows(self, name: str) -> Iterator[pa.RecordBatch]:
        """Reads the rows of a name.

        Raises:
            FileNotFoundError: if no rows of that name exist.
        """
        fs, path = file_system(self.location)
        with fs.open_input_file(f"{path}/{name}{_ROWS}") as source:
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
