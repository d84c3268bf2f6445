"""Steps of a query that the tasks of the source run, such as that of `map_in_read`; and packed frames.

Steps nest: a step takes `ReadColumns`, which are columns of the source, or of the rows that another step in
the read makes (`in_read.rows`)::

    source ─▶ RowsInRead ─▶ RowsInRead ─▶ MapInRead, AggregateInRead or OperatorInRead
              (decodes)     (SQL)     └─▶ Spark

Between a Python source and a Python sink, Spark converts every row from Arrow to its own format and back.
*Packed frames* avoid that for rows that Spark itself does not process: the rows travel to the sink in packed
batches, many in one Spark row. These batches, messages of `protocol.packing`, are in the column
`PACKED`, whose metadata contains the schema of the rows.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_eos_source.errors import InvalidOptionError, InvalidRecordError, InvalidSchemaError
from kafka_eos_source.in_read.bad_records import Records
from kafka_eos_source.option_values import invalid
from kafka_eos_source.protocol import packing
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.spark.arrow import arrow_schema, fit, past_packets, read_arrow_schema
from kafka_eos_source.spark.pickled import from_bytes, from_option, to_option
from kafka_eos_source.spark.schema import ONLY_BAD_RECORDS, ORIGIN, ORIGIN_TYPE

if TYPE_CHECKING:
    from kafka_eos_source.in_read.rows import RowsInRead
    from kafka_eos_source.model import ReadTask
    from kafka_eos_source.options.checked import ReadOptions
    from kafka_eos_source.protocol.packing import BadRecordsOfTask

#: A user's function, like that of Spark's ``mapInArrow``.
ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]


#: The column of `ReadColumns.with_origin`.
ORIGIN_FIELD = StructField(ORIGIN, ORIGIN_TYPE)


@dataclass(frozen=True)
class ReadColumn:
    """A column of a frame that comes from one column of the source, or of the rows of a step.

    Attributes:
        name: its name in the frame.
        source: its name in the source, or in the rows of `ReadColumns.before`.
        as_text: whether the frame casts its bytes to a string, as in ``cast(key as string)``.
    """

    name: str
    source: str
    as_text: bool = False


@dataclass(frozen=True)
class ReadColumns:
    """Turns batches of the source into batches of a frame whose columns are only selected and renamed.

    Attributes:
        columns: the columns of the frame.
        before: the step in the read whose rows have these columns; None if the source itself has them.
        with_origin: whether the frame also has the column `schema.ORIGIN`, as its last one. The step before
            must be aligned.
    """

    columns: tuple[ReadColumn, ...]
    before: RowsInRead | None = None
    with_origin: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Pickles only the fields, and not what was computed from them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def of_source(self) -> tuple[str, ...]:
        """Columns to read from the source."""
        own = [each.source for each in self.columns] if self.before is None else self.before.of_source
        return tuple(dict.fromkeys((*own, *(ORIGIN_TYPE.names if self.with_origin else ()))))

    @cached_property
    def given(self) -> pa.Schema:
        """Arrow schema of what the columns are selected from: the source, or the rows of `before`."""
        return read_arrow_schema(True) if self.before is None else arrow_schema(self.before.rows)

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the frame.

        Raises:
            KeyError: if the source has no such column.
        """
        found = [
            pa.field(each.name, pa.string() if each.as_text else self.given.field(each.source).type)
            for each in self.columns
        ]
        return pa.schema([*found, *(arrow_schema(StructType([ORIGIN_FIELD])) if self.with_origin else ())])

    def column_of_source(self, name: str) -> str | None:
        """Returns the column of the source that a column of the frame holds; None if a step computed it."""
        found = next((each.source for each in self.columns if each.name == name), None)
        return found if found is None or self.before is None else self.before.column_of_source(found)

    @property
    def sets_aside(self) -> bool:
        """Whether the step before sets bad records aside, so that `frames` has the column of packets too."""
        return self.before is not None and self.before.sets_aside

    def frames(
        self,
        batches: Iterable[pa.RecordBatch],
        task: ReadTask | None = None,
        bad: BadRecordsOfTask | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yields batches of the frame for the source's batches of one task, with the columns `of_source`.

        Args:
            batches: the source's batches.
            task, bad: as `RowsInRead.selected` takes them.

        Raises:
            InvalidRecordError: as `RowsInRead.traced`.
        """
        if self.before is None:
            return (self.select(each, Records.of([each])) for each in batches)
        return self.before.selected(batches, lambda each: self.select(each.rows, each.records), task, bad)

    def select(self, batch: pa.RecordBatch, records: Records) -> pa.RecordBatch:
        """Returns a batch of the frame.

        Args:
            batch: rows with the columns `given`, or only those that are needed.
            records: the records from which they were made.
        """
        columns = [_as_text(batch.column(each.source), each.as_text) for each in self.columns]
        if self.with_origin:
            columns.append(records.origins())
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def with_column_of_packets(rows: StructType) -> StructType:
    """Returns the schema of rows with the column of packets, which here contain only bad records."""
    packets = StructField(CHANGELOG, BinaryType(), metadata={ONLY_BAD_RECORDS: True})
    return StructType([*rows.fields, packets])


def _as_text(column: pa.Array, as_text: bool) -> pa.Array:
    """Returns the bytes as text. Like Spark's cast, this does not check that they are UTF-8."""
    return column.view(pa.string()) if as_text else column


@dataclass(frozen=True)
class StepInRead(ABC):
    """A step of the query that the tasks of the source run on what they read, before Spark sees a row.

    It travels, pickled, as the option ``step.in.read`` of the source. What the user wrote, such as a
    function, is in it as bytes that are pickled themselves (`spark.pickled.to_bytes`), so that only the tasks
    that run the step unpickle it. Options that may contain passwords are options of the source of their own.

    Attributes:
        columns: columns of the frame that the step takes.
        is_operator: whether it is a stateful operator, which needs options.
    """

    is_operator: ClassVar[bool] = False
    columns: ReadColumns

    @property
    @abstractmethod
    def what(self) -> str:
        """What the step does, for people."""

    @property
    def steps(self) -> tuple[str, ...]:
        """What the steps up to this one do, in the order in which they run."""
        before = self.columns.before
        return (self.what,) if before is None else (*before.steps, self.what)

    @property
    def of_source(self) -> tuple[str, ...]:
        """Columns to read from the source."""
        return self.columns.of_source

    @property
    def sets_aside(self) -> bool:
        """Whether the step passes on packets with bad records, which the rows before it set aside."""
        return self.columns.sets_aside

    @property
    def frame_of_bad_records(self) -> str:
        """Id of the frame that reads, for the packets of bad records; "" if the step sets none aside."""
        return "" if self.columns.before is None else self.columns.before.frame

    @property
    @abstractmethod
    def schema(self) -> StructType:
        """Schema of the frame that Spark gets."""

    def check(self) -> None:
        """Checks that the fields fit together.

        Raises:
            KeyError: if the source has no such column.
            InvalidSchemaError: if the step does not fit its columns.
        """
        _ = self.columns.schema

    def to_option(self) -> str:
        """Returns the value of the option."""
        return to_option(self, f"the step {type(self).__name__}", fix="report this as a bug.")

    def __getstate__(self) -> dict[str, Any]:
        """Pickles only the fields, and not what was computed from them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def step_in_read(options: ReadOptions) -> StepInRead | None:
    """Returns the step that the options of a source carry; None if they carry none.

    Raises:
        InvalidOptionError: if `StepInRead.to_option` did not write the option, or the options of a sink or an
            operator belong to another step.
    """
    from kafka_eos_source.options.table import OPERATOR_IN_READ, SINK_IN_READ, STEP_IN_READ

    written = options.step_in_read
    if written is None:
        return None
    try:
        found = from_option(written)
        assert isinstance(found, StepInRead)
        found.check()
    except Exception as error:  # foreign text can make unpickling raise anything
        raise invalid(
            STEP_IN_READ,
            written,
            "the value that map_in_read, aggregate or a stateful operator with shards='partitions' sets",
        ) from error
    is_for_sink = isinstance(found, MapInRead)
    if found.is_operator != (options.operator is not None) or (options.sink is not None and not is_for_sink):
        raise InvalidOptionError(
            f"option {STEP_IN_READ!r} has a {type(found).__name__}, but options with the prefix "
            f"{SINK_IN_READ!r} or {OPERATOR_IN_READ!r} belong to another step.",
            fix="let map_in_read (write=) or the stateful operator (shards='partitions') set them all.",
        )
    return found


#: Who passes the options of the sink for which the tasks that read stage rows: the argument ``write``.
BY_MAP_IN_READ = "write= of map_in_read"


@dataclass(frozen=True)
class MapInRead(StepInRead):
    """Applies a function to batches of the source.

    Its rows are packed, or the tasks stage them themselves (`staged`).

    Attributes:
        rows: schema of the rows that it returns.
        function: the pickled function; None leaves the rows unchanged.
        frame: id of the frame that `map_in_read` returned; only staged rows need it.
        by: who passed the options of the sink for which the rows are staged, for errors.
    """

    rows: StructType
    function: bytes | None = field(repr=False)  # may contain passwords, as of a schema registry
    frame: str = ""
    by: str = BY_MAP_IN_READ

    @property
    def what(self) -> str:
        return "packs the rows" if self.function is None else "runs the function of map_in_read"

    @cached_property
    def schema(self) -> StructType:
        """Schema of the frame that Spark gets if the rows are packed."""
        return packed_frame_schema(self.rows)

    def __call__(
        self, batches: Iterable[pa.RecordBatch], task: ReadTask | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Returns the packed result of the function for the source's batches of one task.

        Raises:
            InvalidRecordError: as `pack`.
        """
        return pack(self._result(batches, task), self.rows)

    def mapped(
        self, batches: Iterable[pa.RecordBatch], task: ReadTask | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Returns the rows of the function's result, with the declared schema, for one task.

        Raises:
            InvalidRecordError: as `fitted`.
        """
        return fitted(self._result(batches, task), self.rows)

    def _result(self, batches: Iterable[pa.RecordBatch], task: ReadTask | None) -> Iterable[pa.RecordBatch]:
        frames = self.columns.frames(batches, task)
        function = None if self.function is None else from_bytes(self.function)
        if not self.sets_aside:
            return frames if function is None else function(frames)
        own = StructType([each for each in self.rows if each.name != CHANGELOG])

        def fitting(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return fitted(rows if function is None else function(rows), own)

        return past_packets(fitting, arrow_schema(own))(frames)


# ------------------------------------------------------------------ packed frames

#: Column of a packed frame.
PACKED = "__kafka_eos_rows"

#: Key of the rows' schema (JSON of Spark) in the metadata of that column.
_SCHEMA = "kafka_eos.rows"

#: Approximate size of a packed batch, in bytes. Spark holds one in memory and passes a few at a time to
#: Python.
PACKED_BATCH_BYTES = 2 << 20

_FIX = "write the frame that map_in_read returned without changes; do all processing in its function."


def packed_frame_schema(rows: StructType) -> StructType:
    """Returns the schema of a frame that has its rows, of schema ``rows``, in packed batches."""
    return StructType([StructField(PACKED, BinaryType(), metadata={_SCHEMA: json.dumps(rows.jsonValue())})])


def schema_of_packed_rows(schema: StructType) -> StructType | None:
    """Returns the schema of the rows in the packed batches of a frame; None if the frame has none.

    Args:
        schema: schema of the frame.

    Raises:
        InvalidSchemaError: as `only_column`.
    """
    found = only_column(
        schema, PACKED, (_SCHEMA,), "packed batches of rows", "which already contains whole rows"
    )
    return None if found is None else StructType.fromJson(parse_json(found[_SCHEMA]))


def only_column(
    schema: StructType, name: str, keys: Sequence[str], content: str, excludes: str
) -> Mapping[str, str] | None:
    """Returns the metadata of the only column of a frame that `map_in_read` returned; None for other frames.

    Args:
        schema: schema of the frame.
        name: name of the column in the frame that `map_in_read` returned.
        keys: keys in the metadata of the column. Spark keeps the metadata if a query renames the column.
        content: what the column contains, for errors.
        excludes: why the frame can have no other column, for errors.

    Raises:
        InvalidSchemaError: if the frame has other columns as well, or the column has lost the metadata, or
            has another name: its bytes are no records.
    """
    for each in schema.fields:
        if each.name != name and keys[-1] in (each.metadata or {}):
            raise InvalidSchemaError(
                f"column {each.name!r} is column {name!r} of map_in_read under another name. It contains "
                f"{content}, which must not be written as they are.",
                fix=_FIX,
            )
    if name not in schema.names:
        return None
    if schema.names != [name]:
        others = ", ".join(repr(each) for each in schema.names if each != name)
        raise InvalidSchemaError(
            f"the frame has the column(s) {others} in addition to {name!r}, {excludes}.", fix=_FIX
        )
    metadata: Mapping[str, str] = schema.fields[0].metadata or {}
    if not all(key in metadata for key in keys):
        raise InvalidSchemaError(
            f"column {name!r} has no metadata with the schema of its rows; a step of the query removed it.",
            fix=_FIX,
        )
    return metadata


def pack(batches: Iterable[pa.RecordBatch], rows: StructType) -> Iterator[pa.RecordBatch]:
    """Packs the rows that a function returned.

    Each packed batch comes in an Arrow batch of its own, so that Spark receives it before the next one
    exists.

    Args:
        batches: result of the function. Columns are matched by name and cast to the types in ``rows``.
        rows: declared schema of the rows.

    Raises:
        InvalidRecordError: if the result is not an iterable of record batches, a batch has other columns, or
            a value does not fit its type.
    """
    column = pa.schema([pa.field(PACKED, pa.binary())])
    for batch in fitted(batches, rows):
        for rows_of_one in packing.slices(batch, PACKED_BATCH_BYTES):
            packed = packing.column([packing.pack(rows_of_one)])
            yield pa.RecordBatch.from_arrays([packed], schema=column)


def fitted(batches: Iterable[pa.RecordBatch], rows: StructType) -> Iterator[pa.RecordBatch]:
    """Yields the batches that a function returned with the declared schema, without empty ones.

    Args:
        batches: result of the function. Columns are matched by name and cast to the types in ``rows``.
        rows: declared schema of the rows.

    Raises:
        InvalidRecordError: if the result is not an iterable of record batches, a batch has other columns, or
            a value does not fit its type.
    """
    schema = arrow_schema(rows)
    if not isinstance(batches, Iterable):
        raise no_batches(batches)
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise no_batches(batch)
        if batch.num_rows:
            yield fit(batch, schema, "the function of map_in_read returned")


def unpack(packed: Iterable[pa.Buffer], rows: StructType) -> Iterator[pa.RecordBatch]:
    """Returns the rows in packed batches, without copying the buffers.

    Raises:
        InvalidRecordError: if a value is not a packed batch.
    """
    schema = arrow_schema(rows)
    return (packing.unpack(each, schema, f"column {PACKED!r}") for each in packed)


def packed_batches_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Buffer]:
    """Returns the packed batches in the Arrow batches that Spark passes for a packed frame."""
    return (each for batch in batches for each in packing.values(batch.column(0)))


def no_batches(result: object) -> InvalidRecordError:
    """Returns the error for a function that returned something else than record batches."""
    return InvalidRecordError(
        f"the function of map_in_read returned a {type(result).__name__}; expected an iterable of "
        "pyarrow.RecordBatch.",
        fix="yield record batches; for a table, yield from table.to_batches().",
    )
