"""Data files: how a task writes them, and what the add actions say of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.sinks.delta.statistics import statistics

if TYPE_CHECKING:
    from deltalake.transaction import AddAction

_ROW = "__kafka_eos_row"


@dataclass(frozen=True)
class AddedFile:
    """One file, as JSON has it too.

    Attributes:
        path: below the table's folder.
        bytes, rows: in it.
        partition: values by column, in the text form of PROTOCOL.md; None = null.
        stats: JSON.
    """

    path: str
    bytes: int
    rows: int
    partition: Mapping[str, str | None]
    stats: str

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> AddedFile:
        return cls(**told)

    def told(self) -> dict[str, Any]:
        return asdict(self)

    def action(self) -> AddAction:
        from deltalake.transaction import AddAction

        now_ms = int(time.time() * 1000)
        return AddAction(self.path, self.bytes, dict(self.partition), now_ms, True, self.stats)


@dataclass(frozen=True)
class StagedFiles:
    """A task attempt's token.

    Attributes:
        table_id: of the table that the files lie in: one that is dropped and made anew has another.
        partition_by: its columns.
        files: those of the attempt.
    """

    table_id: str
    partition_by: tuple[str, ...]
    files: tuple[AddedFile, ...]


@dataclass(frozen=True)
class Folder:
    """The table's folder, as files are written there: locally by Arrow, elsewhere by delta-rs, which has the
    credentials.

    Attributes:
        uri: of the table.
        storage: options of delta-rs.
    """

    uri: str
    storage: Mapping[str, str] = field(repr=False)

    def open(self) -> tuple[pafs.FileSystem, str]:
        """A file system, and what paths there begin with."""
        if urlsplit(self.uri).scheme in ("", "file"):
            fs, root = file_system(self.uri)
            return fs, f"{root.rstrip('/')}/"
        from deltalake.fs import DeltaStorageHandler

        return pafs.PyFileSystem(DeltaStorageHandler(self.uri, dict(self.storage))), ""


class TaskFiles:
    """`contract.Stage`: rows are held until there are enough for a file, then written, a file for each
    partition.

    Args:
        folder: of the table.
        token: what the token says beside the files.
        own: schema of the table.
        schema: of the rows.
        attempt: of the task, in the names of its files.
        compression: of Parquet's pages.
        most_bytes: of rows that are held.
    """

    def __init__(
        self,
        folder: Folder,
        token: Callable[[tuple[AddedFile, ...]], StagedFiles],
        own: pa.Schema,
        schema: pa.Schema,
        partition_by: Sequence[str],
        attempt: str,
        compression: str,
        most_bytes: int,
    ) -> None:
        self._fs, self._root = folder.open()
        self._token = token
        self._schema = pa.schema([own.field(name) for name in own.names if name in schema.names])
        self._required = [field.name for field in self._schema if not field.nullable]
        self._partition_by = list(partition_by)
        self._attempt = attempt
        self._compression = compression
        self._most_bytes = most_bytes
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._files: list[AddedFile] = []
        self._paths: list[str] = []

    def write(self, batch: pa.RecordBatch) -> None:
        for name in self._required:  # every column of a frame may hold nulls, as Spark has it
            if batch.column(name).null_count:
                raise InvalidRecordError(
                    f"column {name!r} is null in a row; the Delta table requires a value.",
                    fix="filter such rows, or fill them with coalesce().",
                )
        self._held.append(batch)
        self._held_bytes += batch.nbytes
        if self._held_bytes >= self._most_bytes:
            self._flush()

    def finish(self) -> StagedFiles:
        self._flush()
        return self._token(tuple(self._files))

    def discard(self) -> None:
        """What a task that dies leaves behind is for `VACUUM`, as of any writer of the table."""
        self._held = []
        while self._paths:
            try:
                self._fs.delete_file(self._paths.pop())
            except FileNotFoundError:
                continue

    def _flush(self) -> None:
        if not self._held:
            return
        rows = pa.Table.from_batches(self._held).select(self._schema.names).cast(self._schema)
        self._held, self._held_bytes = [], 0
        for partition, own in _by_partition(rows, self._partition_by):
            self._files.append(self._write(own, partition))

    def _write(self, rows: pa.Table, partition: Mapping[str, str | None]) -> AddedFile:
        name = f"part-{len(self._paths):05d}-{self._attempt}.{self._compression}.parquet"
        path = f"{self._root}{name}"
        self._paths.append(path)
        # a dictionary of numbers costs half of the time and is given up as soon as they are many
        texts = [field.name for field in rows.schema if pa.types.is_string(field.type)]
        with self._fs.open_output_stream(path) as out:
            with pq.ParquetWriter(
                out, rows.schema, compression=self._compression, use_dictionary=texts
            ) as writer:
                writer.write_table(rows)
            metadata = writer.writer.metadata
        if isinstance(self._fs, pafs.LocalFileSystem):
            _to_disk(path)
        size = self._fs.get_file_info(path).size
        return AddedFile(name, int(size), rows.num_rows, partition, statistics(metadata, rows.schema))


def _by_partition(rows: pa.Table, columns: list[str]) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    """The rows of each partition, without its columns: these are in the log alone."""
    if not columns:
        yield {}, rows
        return
    keys = pa.table({name: _text(rows[name]) for name in columns})
    keys = keys.append_column(_ROW, pa.array(range(rows.num_rows), pa.int64()))
    groups = keys.group_by(columns, use_threads=False).aggregate([(_ROW, "list")])
    kept = rows.drop_columns(columns)
    for group in range(groups.num_rows):
        partition = {name: groups[name][group].as_py() for name in columns}
        yield partition, kept.take(groups[f"{_ROW}_list"][group].values)


def _text(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """PROTOCOL.md, Partition Value Serialization: an empty string stands for null there."""
    if pa.types.is_timestamp(values.type):
        return pc.strftime(values, format="%Y-%m-%d %H:%M:%S")
    text = values.cast(pa.string())
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)


def _to_disk(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
