"""A folder of the query's own for what a sink has prepared and has no better place for.

::

    <checkpointLocation>/kafka-eos/sinks/<name>/<id>.json    a note
    <checkpointLocation>/kafka-eos/sinks/<name>/<id>.arrow   rows, an Arrow IPC stream

Each file is there whole or not at all: written under another name, then renamed.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.file_systems import file_system, make_folder, new_file

_NOTE, _ROWS, _HALF = ".json", ".arrow", ".new"


@dataclass(frozen=True)
class NotesFolder:
    """Picklable: the file system is opened where it is used.

    Attributes:
        location: URI or path.
    """

    location: str

    def put(self, name: str, note: Mapping[str, Any]) -> None:
        """Writes a note, in place of an older one.

        Raises:
            OSError: it cannot.
        """
        self._write(f"{name}{_NOTE}", lambda out: out.write(json.dumps(note).encode()))

    def get(self, name: str) -> dict[str, Any] | None:
        """The note; None = there is none.

        Raises:
            OSError: that cannot be told.
        """
        fs, path = file_system(self.location)
        try:
            with fs.open_input_stream(f"{path}/{name}{_NOTE}") as source:
                return dict(json.loads(source.read()))
        except FileNotFoundError:
            return None

    def put_rows(self, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        """Writes rows, in place of older ones.

        Raises:
            OSError: it cannot.
        """

        def write(out: pa.NativeFile) -> None:
            with pa.ipc.new_stream(out, schema) as stream:
                for batch in batches:
                    stream.write_batch(batch)

        self._write(f"{name}{_ROWS}", write)

    def rows(self, name: str) -> Iterator[pa.RecordBatch]:
        """The rows.

        Raises:
            FileNotFoundError: there are none.
        """
        fs, path = file_system(self.location)
        with fs.open_input_file(f"{path}/{name}{_ROWS}") as source:
            yield from pa.ipc.open_stream(source)

    def has_rows(self, name: str) -> bool:
        fs, path = file_system(self.location)
        return bool(fs.get_file_info(f"{path}/{name}{_ROWS}").type == pafs.FileType.File)

    def remove(self, name: str) -> None:
        """Note and rows, if they are there.

        Raises:
            OSError: they are, and stay.
        """
        fs, path = file_system(self.location)
        for ending in (_ROWS, _NOTE):
            try:
                fs.delete_file(f"{path}/{name}{ending}")
            except FileNotFoundError:
                continue

    def names(self) -> list[str]:
        """Of everything that has a note or rows here."""
        fs, path = file_system(self.location)
        found = fs.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        endings = (_NOTE, _ROWS)
        return sorted(
            {each.base_name.rpartition(".")[0] for each in found if each.base_name.endswith(endings)}
        )

    def sweep(self) -> None:
        """Deletes what a process that was killed had half written. Called when a batch is finished.

        Raises:
            OSError: it cannot.
        """
        fs, path = file_system(self.location)
        for each in fs.get_file_info(pafs.FileSelector(path, allow_not_found=True)):
            if each.base_name.endswith(_HALF):
                fs.delete_file(each.path)

    def _write(self, name: str, write: Callable[[pa.NativeFile], object]) -> None:
        fs, path = file_system(self.location)
        make_folder(fs, path)
        own = f"{path}/{name}.{uuid.uuid4().hex}{_HALF}"
        try:
            with new_file(fs, own) as out:
                write(out)
            if isinstance(fs, pafs.LocalFileSystem):
                _to_disk(own)
            failpoints.reach("sink.store.before_rename")
            fs.move(own, f"{path}/{name}")
        except BaseException:
            if fs.get_file_info(own).type == pafs.FileType.File:
                fs.delete_file(own)
            raise


def _to_disk(path: str) -> None:
    """What was promised as prepared outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
