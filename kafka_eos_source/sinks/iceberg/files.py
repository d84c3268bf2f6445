"""Data files: how a task writes them, and how what is known of them travels as JSON."""

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
    """A task attempt's token.

    Attributes:
        table_uuid: of the table that the files lie in: one that is dropped and made anew has another.
        files: each as `described`.
    """

    table_uuid: str
    files: tuple[Mapping[str, Any], ...]


class TaskFiles:
    """`contract.Stage`: rows are held until there are enough for a file, then written where the table's spec
    and location say.

    Args:
        table: as the task found it.
        schema: of the rows.
        attempt: of the task, in the names of its files.
        most_bytes: of rows that are held.
    """

    def __init__(self, table: Table, schema: pa.Schema, attempt: str, most_bytes: int) -> None:
        self._table = table
        self._schema = schema
        self._uuid = uuid.UUID(attempt)
        self._most_bytes = most_bytes
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._files: list[DataFile] = []
        self._required = [each.name for each in table.schema().fields if each.required]

    def write(self, batch: pa.RecordBatch) -> None:
        for name in self._required:  # every column of a frame may hold nulls, as Spark has it
            if name in self._schema.names and batch.column(name).null_count:
                raise InvalidRecordError(
                    f"column {name!r} is null in a row; the Iceberg table {'.'.join(self._table.name())!r} "
                    "requires a value.",
                    fix="filter such rows, or fill them with coalesce().",
                )
        self._held.append(batch)
        self._held_bytes += batch.nbytes
        if self._held_bytes >= self._most_bytes:
            self._flush()

    def finish(self) -> StagedFiles:
        self._flush()
        return StagedFiles(
            str(self._table.metadata.table_uuid), tuple(described(self._table, each) for each in self._files)
        )

    def discard(self) -> None:
        """What a task that dies leaves behind is an orphan file, as of any writer of the table."""
        self._held = []
        while self._files:
            self._table.io.delete(self._files.pop().file_path)

    def _flush(self) -> None:
        """Readers know of no file that is in no snapshot."""
        from itertools import count

        from pyiceberg.io.pyarrow import _dataframe_to_data_files

        if not self._held:
            return
        rows = pa.Table.from_batches(self._held, self._schema)
        self._held, self._held_bytes = [], 0
        written = _dataframe_to_data_files(
            self._table.metadata, rows, self._table.io, self._uuid, count(len(self._files))
        )
        for each in written:
            self._files.append(each)  # one by one: what is there when another fails can be discarded


def described(table: Table, file: DataFile) -> dict[str, Any]:
    """A data file of the table's present spec as JSON has it; partition values in Iceberg's binary form."""
    from pyiceberg.conversions import to_bytes

    spec = table.spec()  # by which it was written: pyiceberg tells only once the file is in a snapshot
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


def data_file(table: Table, told: Mapping[str, Any]) -> DataFile:
    """What `described` described. The table must have its partition spec, which may be an older one."""
    from pyiceberg.conversions import from_bytes
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.typedef import Record

    values = [
        None if text is None else from_bytes(kind, base64.b64decode(text))
        for kind, text in zip(_partition_types(table, told["spec"]), told["partition"], strict=True)
    ]
    by_column: dict[str, Any] = {
        name: {int(column): each for column, each in told[name].items()} for name in _COUNTS
    }
    for name in _BOUNDS:
        by_column[name] = {int(column): base64.b64decode(each) for column, each in told[name].items()}
    found: DataFile = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=told["path"],
        file_format=FileFormat(told["format"]),
        partition=Record(*values),
        record_count=told["rows"],
        file_size_in_bytes=told["bytes"],
        split_offsets=told["splits"],
        sort_order_id=None,
        equality_ids=None,
        key_metadata=None,
        **by_column,
    )
    found.spec_id = told["spec"]
    return found


def unknown_partitions(table: Table, spec_id: int) -> list[str]:
    """Names of the partition fields of a spec whose column the table has no more."""
    from pyiceberg.types import UnknownType

    fields = table.specs()[spec_id].partition_type(table.schema()).fields
    return [each.name for each in fields if isinstance(each.field_type, UnknownType)]


def _partition_types(table: Table, spec_id: int) -> list[PrimitiveType]:
    fields = table.specs()[spec_id].partition_type(table.schema()).fields
    return [cast("PrimitiveType", each.field_type) for each in fields]


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
