"""Data files of an Iceberg table: how a task writes them, and how notes describe them as JSON."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from kafka_eos_source.errors import InvalidRecordError

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table
    from pyiceberg.types import PrimitiveType

_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
_BOUNDS = ("lower_bounds", "upper_bounds")


@dataclass(frozen=True)
class StagedFiles:
    """Token of a task attempt: the files that it wrote.

    Attributes:
        table_uuid: UUID of the table. A table that is dropped and created again gets another one.
        files: files of the task attempt, as `to_json` describes them.
    """

    table_uuid: str
    files: tuple[Mapping[str, Any], ...]


class TaskFiles:
    """`contract.Stage` that buffers rows and writes data files, by the table's spec, when the buffer is full.

    Args:
        table: table, as the task loaded it.
        schema: schema of the rows.
        attempt: unique id of the task attempt, used in file names.
        buffer_bytes: size of buffered rows at which files are written.
    """

    def __init__(self, table: Table, schema: pa.Schema, attempt: str, buffer_bytes: int) -> None:
        self._table = table
        self._schema = schema
        self._uuid = uuid.UUID(attempt)
        self._buffer_bytes = buffer_bytes
        self._buffered: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._files: list[DataFile] = []
        self._required = [each.name for each in table.schema().fields if each.required]

    def write(self, batch: pa.RecordBatch) -> None:
        for name in self._required:  # Spark declares every column as nullable, so only the rows can show it
            if name in self._schema.names and batch.column(name).null_count:
                raise InvalidRecordError(
                    f"column {name!r} is null in a row; the Iceberg table {'.'.join(self._table.name())!r} "
                    "requires a value.",
                    fix="filter such rows, or fill the column with coalesce().",
                )
        self._buffered.append(batch)
        self._buffered_bytes += batch.nbytes
        if self._buffered_bytes >= self._buffer_bytes:
            self._flush()

    def finish(self) -> StagedFiles:
        self._flush()
        return StagedFiles(
            str(self._table.metadata.table_uuid), tuple(to_json(self._table, each) for each in self._files)
        )

    def discard(self) -> None:
        """Deletes the written files. If the process dies instead, they become orphan files."""
        self._buffered = []
        while self._files:
            self._table.io.delete(self._files.pop().file_path)

    def _flush(self) -> None:
        """Writes the buffered rows to files, which readers do not see because no snapshot contains them."""
        from itertools import count

        from pyiceberg.io.pyarrow import _dataframe_to_data_files

        if not self._buffered:
            return
        rows = pa.Table.from_batches(self._buffered, self._schema)
        self._buffered, self._buffered_bytes = [], 0
        written = _dataframe_to_data_files(
            self._table.metadata, rows, self._table.io, self._uuid, count(len(self._files))
        )
        for each in written:
            self._files.append(each)  # one by one, so that `discard` knows these files if the next one fails


def to_json(table: Table, file: DataFile) -> dict[str, Any]:
    """Describes a data file, written by the table's current spec, as JSON.

    Partition values and bounds are in Iceberg's binary form, base64-encoded.
    """
    from pyiceberg.conversions import to_bytes

    spec = table.spec()  # pyiceberg sets the spec of a file only when a snapshot contains it
    partition = [
        None if file.partition[at] is None else _text(to_bytes(kind, file.partition[at]))
        for at, kind in enumerate(_partition_types(table, spec.spec_id))
    ]
    return {
        "path": file.file_path,
        "format": str(file.file_format.value),
        "rows": file.record_count,
        "bytes": file.file_size_in_bytes,
        "spec": spec.spec_id,
        "partition": partition,
        "splits": file.split_offsets,
        **{name: dict(getattr(file, name) or {}) for name in _COUNTS},
        **{
            name: {column: _text(bound) for column, bound in (getattr(file, name) or {}).items()}
            for name in _BOUNDS
        },
    }


def from_json(table: Table, description: Mapping[str, Any]) -> DataFile:
    """Returns the data file that `to_json` described. The table must still have the file's partition spec."""
    from pyiceberg.conversions import from_bytes
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.typedef import Record

    values = [
        None if text is None else from_bytes(kind, base64.b64decode(text))
        for kind, text in zip(
            _partition_types(table, description["spec"]), description["partition"], strict=True
        )
    ]
    by_column: dict[str, Any] = {
        name: {int(column): each for column, each in description[name].items()} for name in _COUNTS
    }
    for name in _BOUNDS:
        by_column[name] = {int(column): base64.b64decode(each) for column, each in description[name].items()}
    found: DataFile = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=description["path"],
        file_format=FileFormat(description["format"]),
        partition=Record(*values),
        record_count=description["rows"],
        file_size_in_bytes=description["bytes"],
        split_offsets=description["splits"],
        sort_order_id=None,
        equality_ids=None,
        key_metadata=None,
        **by_column,
    )
    found.spec_id = description["spec"]
    return found


def unknown_partitions(table: Table, spec_id: int) -> list[str]:
    """Returns the partition fields of a spec whose source column was dropped from the table."""
    from pyiceberg.types import UnknownType

    fields = table.specs()[spec_id].partition_type(table.schema()).fields
    return [each.name for each in fields if isinstance(each.field_type, UnknownType)]


def _partition_types(table: Table, spec_id: int) -> list[PrimitiveType]:
    fields = table.specs()[spec_id].partition_type(table.schema()).fields
    return [cast("PrimitiveType", each.field_type) for each in fields]


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
