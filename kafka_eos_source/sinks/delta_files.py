"""Data files of a Delta table: how a task writes them, their add actions, and the statistics in these.

A bound that is too narrow makes readers skip rows. Therefore only types whose bounds are certain have bounds
(PROTOCOL.md, Per-file Statistics): integers, dates, timestamps (widened to whole milliseconds, as Spark reads
them) and short strings. Floats have none, because bounds do not cover NaN.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from kafka_eos_source.runtime.file_systems import file_system, fsync
from kafka_eos_source.sinks import manifest as manifests
from kafka_eos_source.sinks.row_checks import RowRule
from kafka_eos_source.sinks.table_columns import conform, matching
from kafka_eos_source.sinks.table_format import BufferedStage

if TYPE_CHECKING:
    from deltalake.transaction import AddAction

_ROW = "__kafka_eos_row"
_PATH = re.compile(r"part-[0-9]{5,9}-[0-9a-f]{1,64}\.[a-z]+\.parquet")


@dataclass(frozen=True)
class AddedFile:
    """A data file that a task wrote, with what its add action needs.

    Attributes:
        path: path below the table's folder.
        bytes, rows: size of the file, and number of rows.
        partition: partition values by column, serialised as in Delta's PROTOCOL.md; None for null.
        stats: statistics as JSON.
    """

    path: str
    bytes: int
    rows: int
    partition: Mapping[str, str | None]
    stats: str

    @classmethod
    def from_json(cls, description: Mapping[str, Any]) -> AddedFile:
        """Returns the file that `to_json` described.

        Raises:
            ValueError, KeyError, TypeError: if it is none that a task of a Delta sink wrote.
        """
        path, stats, partition = description["path"], description["stats"], dict(description["partition"])
        if not (isinstance(path, str) and _PATH.fullmatch(path)):
            raise ValueError(f"not the name of a data file: {str(path)[:100]!r}")
        if not all(isinstance(each, str) for each in (stats, *filter(None, partition.values()))):
            raise ValueError("statistics or partition values are no texts")
        size, rows = manifests.count(description["bytes"]), manifests.count(description["rows"])
        return cls(path, size, rows, partition, stats)

    def to_json(self) -> dict[str, Any]:
        """Describes the file as a JSON object, for the note of a prepared batch."""
        return asdict(self)

    def action(self) -> AddAction:
        """Returns the add action that makes the file part of the table."""
        from deltalake.transaction import AddAction

        now_ms = int(time.time() * 1000)
        return AddAction(self.path, self.bytes, dict(self.partition), now_ms, True, self.stats)


@dataclass(frozen=True)
class StagedFiles:
    """Token of a task attempt: the files that it wrote.

    Attributes:
        table_id: id of the table. A table that is dropped and created again gets another one.
        partition_by: partition columns of the table.
        files: files of the task attempt.
    """

    table_id: str
    partition_by: tuple[str, ...]
    files: tuple[AddedFile, ...]


@dataclass(frozen=True)
class Folder:
    """Folder of a table.

    Files in a local folder are written by Arrow; others by delta-rs, which has the credentials.

    Attributes:
        uri: URI of the table.
        storage: storage options of delta-rs.
    """

    uri: str
    storage: Mapping[str, str] = field(repr=False)

    def open(self) -> tuple[pafs.FileSystem, str]:
        """Opens the folder.

        Returns:
            A file system, and the prefix of paths in it.
        """
        if urlsplit(self.uri).scheme in ("", "file"):
            fs, root = file_system(self.uri)
            return fs, f"{root.rstrip('/')}/"
        from deltalake.fs import DeltaStorageHandler

        return pafs.PyFileSystem(DeltaStorageHandler(self.uri, dict(self.storage))), ""


class TaskFiles(BufferedStage):
    """Stage that writes buffered rows to one file per partition.

    Args:
        folder: folder of the table.
        token: function that creates the token from the written files.
        table_schema: schema of the table.
        schema: schema of the rows.
        rules: rules of the table for rows that the task has not checked.
        partition_by: partition columns of the table.
        task_attempt_id: unique id of the task attempt, used in file names.
        compression: compression of Parquet's pages.
        buffer_bytes: size of the buffered rows at which files are written.
    """

    def __init__(
        self,
        folder: Folder,
        receipt: Callable[[tuple[AddedFile, ...]], StagedFiles],
        table_schema: pa.Schema,
        schema: pa.Schema,
        rules: Iterable[RowRule],
        partition_by: Sequence[str],
        task_attempt_id: str,
        compression: str,
        buffer_bytes: int,
    ) -> None:
        self._fs, self._root = folder.open()
        self._receipt = receipt
        names = {*matching(schema.names, table_schema.names)[0].values(), *partition_by}
        self._schema = pa.schema([field for field in table_schema if field.name in names])
        super().__init__(schema, rules, buffer_bytes)
        self._partition_by = list(partition_by)
        self._task_attempt_id = task_attempt_id
        self._compression = compression
        self._files: list[AddedFile] = []
        self._paths: list[str] = []

    def finish(self) -> StagedFiles:
        self.flush()
        return self._receipt(tuple(self._files))

    def delete_files(self) -> None:
        while self._paths:
            try:
                self._fs.delete_file(self._paths.pop())
            except FileNotFoundError:
                continue

    def write_files(self, rows: pa.Table) -> None:
        for partition, own in _by_partition(conform(rows, self._schema), self._partition_by):
            self._files.append(self._write(own, partition))

    def _write(self, rows: pa.Table, partition: Mapping[str, str | None]) -> AddedFile:
        name = f"part-{len(self._paths):05d}-{self._task_attempt_id}.{self._compression}.parquet"
        path = f"{self._root}{name}"
        self._paths.append(path)
        # only for strings: dictionaries of numbers take half of the writing time and are soon given up
        texts = [field.name for field in rows.schema if pa.types.is_string(field.type)]
        with self._fs.open_output_stream(path) as out:
            with pq.ParquetWriter(
                out, rows.schema, compression=self._compression, use_dictionary=texts
            ) as writer:
                writer.write_table(rows)
            metadata = writer.writer.metadata
        if isinstance(self._fs, pafs.LocalFileSystem):
            fsync(path)
        size = self._fs.get_file_info(path).size
        return AddedFile(name, int(size), rows.num_rows, partition, statistics(metadata, rows.schema))


def _by_partition(rows: pa.Table, columns: list[str]) -> Iterator[tuple[dict[str, str | None], pa.Table]]:
    """Yields the values and rows of each partition. Delta's files do not contain the partition columns."""
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
    """Serialises partition values as in PROTOCOL.md, where an empty string means null.

    A point in time has its zone, because Spark reads a text without one in the zone of its session.
    """
    if pa.types.is_timestamp(values.type):
        return pc.strftime(values, format="%Y-%m-%dT%H:%M:%SZ" if values.type.tz else "%Y-%m-%d %H:%M:%S")
    text = values.cast(pa.string())
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)


# -- statistics ----------------------------------------------------------------------------------

_EPOCH = datetime.datetime(1970, 1, 1)
#: Longest string bound, as in Delta for Spark (``DataSkippingReader.MAX_STRING_PREFIX_LENGTH``).
_MAX_CHARACTERS = 32
#: Number of columns that have statistics; the default of ``delta.dataSkippingNumIndexedCols``.
_MAX_COLUMNS = 32


def statistics(metadata: pq.FileMetaData, schema: pa.Schema) -> str:
    """Returns the statistics of a file as JSON.

    Args:
        metadata: metadata of the file.
        schema: schema of the file.
    """
    lower: dict[str, Any] = {}
    upper: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    chunks = _chunks(metadata)
    for column in list(schema)[:_MAX_COLUMNS]:
        # the path of a column whose name has a dot may be that of a nested field, too
        found = None if "." in column.name else chunks.get(column.name)
        if found is None or not all(each is not None and each.has_null_count for each in found):
            continue
        nulls[column.name] = sum(each.null_count for each in found)
        filled = [each for each in found if each.num_values]
        if filled and _bounded(column.type) and all(each.has_min_max for each in filled):
            low = _bound(min(each.min_raw for each in filled), column.type, is_upper=False)
            high = _bound(max(each.max_raw for each in filled), column.type, is_upper=True)
            lower.update({} if low is None else {column.name: low})
            upper.update({} if high is None else {column.name: high})
    return json.dumps(
        {"numRecords": metadata.num_rows, "minValues": lower, "maxValues": upper, "nullCount": nulls},
        ensure_ascii=False,
    )


def _chunks(metadata: pq.FileMetaData) -> dict[str, list[Any]]:
    """Returns the statistics of all row groups, by column path."""
    found: dict[str, list[Any]] = {}
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for at in range(row_group.num_columns):
            chunk = row_group.column(at)
            found.setdefault(chunk.path_in_schema, []).append(chunk.statistics)
    return found


def _bounded(kind: pa.DataType) -> bool:
    known = (pa.types.is_signed_integer, pa.types.is_date32, pa.types.is_timestamp, pa.types.is_string)
    return any(each(kind) for each in known)


def _bound(raw: Any, kind: pa.DataType, *, is_upper: bool) -> Any:
    """Returns a bound as in PROTOCOL.md; None if it has no text: a date after the year 9999.

    Args:
        raw: value as Parquet stores it: a number, or bytes.
        kind: type of the column.
        is_upper: whether no value of the file is greater, or none is smaller.
    """
    if pa.types.is_string(kind):
        text = raw.decode(errors="replace")
        if len(text) > _MAX_CHARACTERS:
            return None if is_upper else text[:_MAX_CHARACTERS]
        return None if "\ufffd" in text else text
    try:
        if pa.types.is_date32(kind):
            return (_EPOCH + datetime.timedelta(days=raw)).date().isoformat()
        if pa.types.is_timestamp(kind):
            millis = -(-raw // 1000) if is_upper else raw // 1000
            text = (_EPOCH + datetime.timedelta(milliseconds=millis)).isoformat(timespec="milliseconds")
            return f"{text}Z" if kind.tz else text
    except OverflowError:
        return None
    return raw
