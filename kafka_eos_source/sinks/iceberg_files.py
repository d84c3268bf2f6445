"""Data files of an Iceberg table: how a task writes them, and how notes describe them as JSON."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from kafka_eos_source.sinks import manifest as manifests
from kafka_eos_source.sinks.table_format import BufferedStage

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


class TaskFiles(BufferedStage):
    """Stage that writes buffered rows to data files, as the table's partition spec and location require.

    Args:
        table: table, as the task loaded it.
        schema: schema of the rows.
        task_attempt_id: unique id of the task attempt, used in file names.
        buffer_bytes: size of the buffered rows at which files are written.
    """

    def __init__(self, table: Table, schema: pa.Schema, task_attempt_id: str, buffer_bytes: int) -> None:
        required = [
            each.name for each in table.schema().fields if each.required and each.name in schema.names
        ]
        super().__init__(".".join(table.name()), schema, required, buffer_bytes)
        self._table = table
        self._uuid = uuid.UUID(task_attempt_id)
        self._files: list[DataFile] = []

    def finish(self) -> StagedFiles:
        self.flush()
        return StagedFiles(
            str(self._table.metadata.table_uuid), tuple(to_json(self._table, each) for each in self._files)
        )

    def delete_files(self) -> None:
        while self._files:
            self._table.io.delete(self._files.pop().file_path)

    def write_files(self, rows: pa.Table) -> None:
        from itertools import count

        from pyiceberg.io.pyarrow import _dataframe_to_data_files

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


def check(description: Mapping[str, Any]) -> None:
    """Checks that a description has the shape that `to_json` gives it.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: if it has another one, or names no location.
    """
    path, splits = description["path"], description["splits"]
    if not isinstance(path, str) or ".." in path.split("/"):
        raise ValueError(f"not the location of a data file: {str(path)[:100]!r}")
    if description["format"] != "PARQUET":
        raise ValueError(f"not the format of a data file: {str(description['format'])[:100]!r}")
    numbers = [description[name] for name in ("bytes", "rows", "spec")]
    bounds = [each for each in description["partition"] if each is not None]
    for name in (*_COUNTS, *_BOUNDS):
        numbers += [int(column) for column in description[name]]
    for name in _COUNTS:
        numbers += description[name].values()
    for name in _BOUNDS:
        bounds += description[name].values()
    for number in (*numbers, *(splits or ())):
        manifests.count(number)
    for bound in bounds:
        base64.b64decode(bound, validate=True)


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
