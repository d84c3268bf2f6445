"""Data files of an Iceberg table: how a task writes them, and how notes describe them as JSON."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.sinks import manifest as manifests
from kafka_eos_source.sinks.row_checks import RowRule
from kafka_eos_source.sinks.table_columns import conform, without_extensions
from kafka_eos_source.sinks.table_format import BufferedStage

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.partitioning import PartitionField, PartitionKey
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table, WriteTask
    from pyiceberg.typedef import Record
    from pyiceberg.types import PrimitiveType

_ROW = "row"
#: Longest path of a partition. A name in a folder has at most 255 bytes, and a key in S3 has at most 1024.
_MOST_PATH_CHARACTERS = 255
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
        rules: rules of the table for rows that the task has not checked.
        task_attempt_id: unique id of the task attempt, used in file names.
        buffer_bytes: size of the buffered rows at which files are written.
    """

    def __init__(
        self,
        table: Table,
        schema: pa.Schema,
        rules: Iterable[RowRule],
        task_attempt_id: str,
        buffer_bytes: int,
    ) -> None:
        super().__init__(schema, rules, buffer_bytes)
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
        from pyiceberg.io.pyarrow import bin_pack_arrow_table
        from pyiceberg.table import TableProperties, WriteTask
        from pyiceberg.utils.concurrent import ExecutorFactory
        from pyiceberg.utils.properties import property_as_int

        size: Any = property_as_int(
            self._table.properties,
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES,
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES_DEFAULT,
        )
        number, schema = count(len(self._files)), self._table.schema()
        plain = [field.with_type(without_extensions(field.type)) for field in arrow_schema(schema)]
        tasks = (
            WriteTask(self._uuid, next(number), schema, batches, partition_key=key)
            for key, part in _by_partition(conform(rows, pa.schema(plain)), self._table)
            for batches in bin_pack_arrow_table(part, size)
        )
        for each in ExecutorFactory.get_or_create().map(partial(_write, self._table), tasks):
            self._files.append(each)  # one by one, so that `discard` knows these files if the next one fails


def _write(table: Table, task: WriteTask) -> DataFile:
    """Writes a data file.

    pyiceberg's own function makes empty lists and maps of those that are null, if they contain structs.
    """
    from pyiceberg.io.pyarrow import ParquetFormatModel, schema_to_pyarrow
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.schema import sanitize_column_names
    from pyiceberg.table.locations import load_location_provider
    from pyiceberg.typedef import Record

    schema, kind, properties = sanitize_column_names(task.schema), ParquetFormatModel(), table.properties
    rows = conform(pa.Table.from_batches(task.record_batches), schema_to_pyarrow(schema), by_position=True)
    name, key = task.generate_data_file_filename(kind.file_extension()), task.partition_key
    path = load_location_provider(table.location(), properties).new_data_location(name, key)
    out = table.io.new_output(path)
    with kind.create_writer(out, schema, properties) as writer:
        writer.write(rows)
    written: DataFile = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record() if key is None else key.partition,
        file_size_in_bytes=len(out),
        sort_order_id=None,
        spec_id=table.spec().spec_id,
        equality_ids=None,
        key_metadata=None,
        **writer.result().to_serialized_dict(),
    )
    return written


def arrow_schema(schema: Schema) -> pa.Schema:
    """Returns the Arrow schema of a table's rows."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    found: pa.Schema = schema_to_pyarrow(schema, include_field_ids=False)
    return found


# -- partitions ------------------------------------------------------------------------------------


def unwritable_partitions(table: Table) -> list[str]:
    """Returns the partition fields of the table that pyiceberg cannot write, or not read back.

    These are fields with an unknown transform, and those whose source column was dropped.
    """
    from pyiceberg.transforms import UnknownTransform

    fields = table.spec().fields
    unknown = [each.name for each in fields if isinstance(each.transform, UnknownTransform)]
    return unknown + unknown_partitions(table, table.spec().spec_id)


def _by_partition(rows: pa.Table, table: Table) -> Iterator[tuple[PartitionKey | None, pa.Table]]:
    """Yields the key and the rows of each partition.

    pyiceberg's own function compares values: it loses rows whose value is NaN, and doubles those with 0.0 and
    -0.0. It refuses two partition fields of one column.

    Args:
        rows: rows with all columns of the table, in its order.
        table: table.
    """
    from pyiceberg.partitioning import PartitionFieldValue

    spec, schema = table.spec(), table.schema()
    if spec.is_unpartitioned():
        yield None, rows
        return
    keys = pa.table({str(at): _partition_values(rows, schema, field) for at, field in enumerate(spec.fields)})
    names = keys.column_names
    keys = keys.append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    groups = keys.group_by(names, use_threads=False).aggregate([(_ROW, "list")])
    for group in range(groups.num_rows):
        values = [
            PartitionFieldValue(field, groups[name][group].as_py())
            for name, field in zip(names, spec.fields, strict=True)
        ]
        yield _key_class()(values, spec, schema), rows.take(groups[f"{_ROW}_list"][group].values)


def _partition_values(rows: pa.Table, schema: Schema, field: PartitionField) -> pa.ChunkedArray:
    place = schema.accessor_for_field(field.source_id)
    column, inner = rows.column(place.position), place.inner
    while inner is not None:
        column, inner = pc.struct_field(column, [inner.position]), inner.inner
    return field.transform.pyarrow_transform(schema.find_field(field.source_id).field_type)(column)


@lru_cache(maxsize=1)
def _key_class() -> type[PartitionKey]:
    from pyiceberg.partitioning import PartitionKey, partition_record_value
    from pyiceberg.typedef import Record

    class Key(PartitionKey):
        """Key of a partition. The folder of a key whose text is too long is named by a hash of it."""

        @cached_property
        def partition(self) -> Record:
            values = self.field_values
            return Record(*(partition_record_value(each.field, each.value, self.schema) for each in values))

        def to_path(self) -> str:
            path: str = super().to_path()
            is_long = len(path) > _MOST_PATH_CHARACTERS
            return f"partition-{hashlib.sha256(path.encode()).hexdigest()}" if is_long else path

    return Key


# -- notes -----------------------------------------------------------------------------------------


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
