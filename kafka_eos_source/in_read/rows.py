"""Steps in the read that make plain rows: decoded documents, and the result of a SQL text.

Spark takes the rows of such a step as ordinary columns, and other steps in the read take them too
(`ReadColumns.before`). A step applies one *transform* to batches of rows. There are two kinds:

- a `RowTransform`, such as SQL, makes any number of rows of a batch;
- an `AlignedTransform`, such as the decoder of a document, makes one row of each row.

A transform returns an error for each row that it cannot process. Through aligned transforms, the step knows
from which record of Kafka such a row comes, so it can name the record, or set it aside
(`in_read.bad_records`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.in_read.bad_records import (
    DEAD_LETTER,
    FAIL,
    FIX,
    FIX_OF_SQL,
    PLACE,
    OnBad,
    Records,
    bad_record,
    bad_records,
    columns_to_read,
    place_of,
)
from kafka_eos_source.in_read.step import ReadColumns, StepInRead, with_column_of_packets
from kafka_eos_source.model import ReadTask
from kafka_eos_source.protocol import packing
from kafka_eos_source.protocol.packing import BadRecordsOfTask
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.spark.arrow import arrow_schema, fit
from kafka_eos_source.spark.packet_senders import record_sender, sender_of_read
from kafka_eos_source.spark.pickled import from_bytes, to_bytes
from kafka_eos_source.spark.schema import VALUE
from kafka_eos_source.spark.worker import running_task

#: An engine pays for each call. So small batches of the source become one of about this size.
MOST_ROWS, ENOUGH_BYTES = 40_000, 16 << 20

#: The most characters of a bad row that an error quotes.
_SHOWN = 200

T = TypeVar("T")


class RowTransform(Protocol):
    """Makes rows of another schema from a batch of rows. It can be pickled."""

    @property
    def rows(self) -> StructType:
        """Schema of the result."""
        ...

    def __call__(
        self, batch: pa.RecordBatch, *, only_first: bool = False
    ) -> tuple[pa.RecordBatch, Mapping[int, str]]:
        """Returns the result, and an error for each row of the batch that is bad.

        Bad rows contribute nothing to the result. With ``only_first``, the first error is enough, and the
        result may then be incomplete.
        """
        ...


class AlignedTransform(Protocol):
    """Makes one row of another schema from each row of a batch. It can be pickled."""

    @property
    def rows(self) -> StructType:
        """Schema of the result."""
        ...

    def slices(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Mapping[int, str]]]:
        """Yields the results of consecutive slices of a batch, each as large as memory allows.

        A result has a row for each row of its slice, and the errors have the number of the row in the slice.
        The row of an error is ignored.
        """
        ...


@dataclass(frozen=True)
class Traced:
    """Rows, and the records from which they were made.

    Attributes:
        rows: the rows.
        records: the records.
        aligned: whether record ``i`` made row ``i``. Otherwise all that is known is that the rows come from
            some of these records.
    """

    rows: pa.RecordBatch
    records: Records
    aligned: bool


@dataclass(frozen=True)
class RowsInRead(StepInRead):
    """Applies a transform to batches of the source, or of the rows of another step in the read.

    Attributes:
        rows: schema of the rows that it makes.
        transform: the pickled transform.
        does: what it does, for people: ``decodes JSON``, ``runs SQL``.
        copies: columns of the result that are columns of the input, unchanged: names in the result and in
            the input.
        on_bad: what becomes of records that this step or one before it cannot process.
        frame: id of the frame that reads (`model.ReadTask`).
        is_aligned: whether it is known which record each row was made from: neither this step nor one before
            it has a `RowTransform`.
    """

    rows: StructType
    transform: bytes = field(repr=False)  # may contain passwords, as of a schema registry
    does: str
    copies: Mapping[str, str] = field(default_factory=dict)
    on_bad: OnBad = FAIL
    frame: str = ""
    is_aligned: bool = False

    @classmethod
    def of(
        cls,
        transform: RowTransform | AlignedTransform,
        columns: ReadColumns,
        does: str,
        copies: Mapping[str, str] | None = None,
        *,
        on_bad: OnBad = FAIL,
    ) -> RowsInRead:
        """Returns the step that applies a transform to columns of the source, or of another step.

        Args:
            transform, columns, does, copies: as the attributes.
            on_bad: as the attribute, for the first step after the source. Later steps take over what is set
                there.

        Raises:
            InvalidOptionError: if the transform cannot be pickled.
        """
        pickled = to_bytes(transform, f"what {does}", fix="report this as a bug.")
        before, frame = columns.before, uuid.uuid4().hex
        if before is not None:
            on_bad, frame = before.on_bad, before.frame
        is_aligned = hasattr(transform, "slices") and (before is None or before.is_aligned)
        return cls(columns, transform.rows, pickled, does, dict(copies or {}), on_bad, frame, is_aligned)

    @property
    def what(self) -> str:
        """What the step does, for people."""
        is_first = self.columns.before is None
        return f"{self.does} and sets bad records aside" if is_first and self.sets_aside else self.does

    @property
    def schema(self) -> StructType:
        """Columns of the frame that Spark gets: those of the rows, and that of packets if it sets aside."""
        return with_column_of_packets(self.rows) if self.sets_aside else self.rows

    @property
    def sets_aside(self) -> bool:
        """Whether bad records go to the sink in packets."""
        return self.on_bad == DEAD_LETTER

    @property
    def frame_of_bad_records(self) -> str:
        """Id of the frame that reads."""
        return self.frame

    @property
    def of_source(self) -> tuple[str, ...]:
        """Columns to read from the source, with those that a bad record's error or packet needs."""
        return tuple(dict.fromkeys((*self.columns.of_source, *columns_to_read(self.on_bad))))

    def column_of_source(self, name: str) -> str | None:
        """Returns the column of the source that a column of the rows holds; None if it was computed."""
        return self.columns.column_of_source(self.copies[name]) if name in self.copies else None

    def __call__(
        self, batches: Iterable[pa.RecordBatch], task: ReadTask | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows for the source's batches of one task, with the columns of `schema`.

        Raises:
            InvalidRecordError: as `traced`.
        """
        return self.selected(batches, lambda each: each.rows, task)

    def selected(
        self,
        batches: Iterable[pa.RecordBatch],
        select: Callable[[Traced], pa.RecordBatch],
        task: ReadTask | None,
        bad: BadRecordsOfTask | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yields columns of the rows; and if the step sets bad records aside, also packets.

        Args:
            batches: the source's batches of one task.
            select: returns the columns to yield of some rows.
            task: the reading task; only a step that sets bad records aside needs it.
            bad: packs the bad records of the task; None makes one.

        Raises:
            InvalidRecordError: as `traced`.
        """
        if not self.sets_aside:
            for each in self.traced(batches):
                if each.rows.num_rows:
                    yield select(each)
            return
        running = running_task()
        if running is not None:
            record_sender(running, sender_of_read(self.frame))
        if bad is None:
            assert task is not None, "only a task of a source reads with on_bad='dead-letter'"
            bad = BadRecordsOfTask(task)
        schema = select(Traced(_no_rows(arrow_schema(self.rows)), Records.of([]), aligned=True)).schema
        found: list[pa.Buffer] = []
        for each in self.traced(batches, lambda records: found.extend(bad.packets(records))):
            if each.rows.num_rows:
                yield packing.with_packets(select(each))
            if found:
                yield packing.rows_of_packets(packing.column(found), schema)
                found.clear()
        yield packing.rows_of_packets(packing.column([bad.report()]), schema)

    def traced(
        self,
        batches: Iterable[pa.RecordBatch],
        set_aside: Callable[[pa.RecordBatch], None] | None = None,
    ) -> Iterator[Traced]:
        """Yields the rows for the source's batches of one task, in batches that may be empty.

        Args:
            batches: the source's batches of one task.
            set_aside: takes bad records, as `spark.arrow.BAD_RECORDS`; None = they are an error.

        Raises:
            InvalidRecordError: if the transform cannot process a row, which names the record.
        """
        transform = from_bytes(self.transform)
        schema = arrow_schema(self.rows)
        columns, is_aligned = self.columns, hasattr(transform, "slices")
        before = columns.before
        given: Iterator[Traced]
        if before is None:
            read = ((each, Records.of([each])) for each in batches)
            given = (Traced(columns.select(*each), each[1], aligned=True) for each in read)
        else:
            made_before = before.traced(batches, set_aside)
            given = (
                Traced(columns.select(each.rows, each.records), each.records, each.aligned)
                for each in made_before
            )
        for each in given if is_aligned else joined(given):
            rows = each.rows
            if not rows.num_rows:
                yield Traced(_no_rows(schema), each.records, each.aligned)
            elif is_aligned:
                yield from self._aligned(transform, rows, each, schema, set_aside)
            else:
                result, errors = transform(rows, only_first=set_aside is None)
                failpoints.reach("read.after_transform")
                if errors:
                    self._set_aside(rows, each, errors, set_aside)
                yield Traced(fit(result, schema, f"{self.does} made"), each.records, aligned=False)

    def _aligned(
        self,
        transform: AlignedTransform,
        rows: pa.RecordBatch,
        given: Traced,
        schema: pa.Schema,
        set_aside: Callable[[pa.RecordBatch], None] | None,
    ) -> Iterator[Traced]:
        at = 0
        for result, errors in transform.slices(rows):
            count = result.num_rows
            records = given.records.slice(at, count) if given.aligned else given.records
            made = fit(result, schema, f"{self.does} made")
            if errors:
                of_slice = Traced(rows.slice(at, count), records, given.aligned)
                self._set_aside(of_slice.rows, of_slice, errors, set_aside)
                made = made.take(good_rows(count, errors))
                records = records.without(list(errors))
            at += count
            yield Traced(made, records, given.aligned)

    def _set_aside(
        self,
        rows: pa.RecordBatch,
        given: Traced,
        errors: Mapping[int, str],
        set_aside: Callable[[pa.RecordBatch], None] | None,
    ) -> None:
        """Sets the records of bad rows aside.

        Raises:
            InvalidRecordError: if they are not to be set aside, or it is not known which they are.
        """
        if given.aligned:
            reasons = {row: f"{text} (the read {self.does})" for row, text in errors.items()}
            bad = bad_records(given.records, reasons)
            if set_aside is None:
                has_value = VALUE in given.records.batches[0].schema.names
                is_decoded = self.columns.before is not None or hasattr(from_bytes(self.transform), "slices")
                raise bad_record(bad, FIX if is_decoded else FIX_OF_SQL, has_value=has_value)
            set_aside(bad)
            return
        row = min(errors)
        ends = given.records.take([0, len(given.records) - 1])
        first, last = map(place_of, ends.select(list(PLACE)).to_pylist())
        raise InvalidRecordError(
            f"the read {self.does}, which failed on a row that was made of a record between {first} and "
            f"{last}: {errors[row]}. The row is {_shown(rows, row)}.",
            fix="correct the text, or combine it with the SQL before it, so that it is known which record "
            "made the row.",
        )


def _shown(rows: pa.RecordBatch, row: int) -> str:
    """Returns the beginning of a row, for errors. It may have values that Python cannot hold."""
    found: dict[str, object] = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        try:
            found[name] = column[row].as_py()
        except UnicodeDecodeError:
            is_text = pa.types.is_string(column.type)
            found[name] = column[row].cast(pa.binary()).as_py() if is_text else "… (not UTF-8)"
        except (ArithmeticError, ValueError):  # a year after 9999
            found[name] = "… (out of range)"
    return str(found)[:_SHOWN]


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


@dataclass(frozen=True)
class MappedRows:
    """Applies a transform as the function of ``mapInArrow`` or `map_in_read`.

    Attributes:
        transform: the transform.
        columns: schema of the rows that it takes.
    """

    transform: RowTransform
    columns: StructType

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the result for the batches of one task.

        Raises:
            InvalidRecordError: if the transform cannot process a row. It shows the row.
        """
        given, made = arrow_schema(self.columns), arrow_schema(self.transform.rows)
        fitting = (fit(each, given, "Spark passed") for each in batches)
        for group in _grouped(fitting, lambda each: each.num_rows, lambda each: each.nbytes):
            batch = concatenated(group)
            result, errors = self.transform(batch, only_first=True)
            if errors:
                row = min(errors)
                raise InvalidRecordError(
                    f"the SQL fails on a row: {errors[row]}. The row is {_shown(batch, row)}.",
                    fix="correct the rows before it, or let the SQL return null: try_cast(… AS …), nullif().",
                )
            if result.num_rows:
                yield fit(result, made, "the SQL returned")


def joined(given: Iterable[Traced]) -> Iterator[Traced]:
    """Yields rows in fewer batches of about `MOST_ROWS` rows, or made of records of `ENOUGH_BYTES`.

    Decoded rows are much smaller than their documents. An engine therefore gets rows that were joined after
    they were decoded: their copy costs little.
    """

    def size(each: Traced) -> int:
        return sum(batch.nbytes for batch in each.records.batches)

    for parts in _grouped(given, lambda each: each.rows.num_rows, size):
        rows = concatenated([each.rows for each in parts])
        records = Records.joined([each.records for each in parts])
        yield Traced(rows, records, aligned=all(each.aligned for each in parts))


def _grouped(
    items: Iterable[T], rows_of: Callable[[T], int], bytes_of: Callable[[T], int]
) -> Iterator[list[T]]:
    """Yields consecutive items in groups of at most `MOST_ROWS` rows, or as soon as they have `ENOUGH_BYTES`.

    An item that has more rows makes a group of its own.
    """
    waiting: list[T] = []
    rows = size = 0
    for each in items:
        if waiting and rows + rows_of(each) > MOST_ROWS:
            yield waiting
            waiting, rows, size = [], 0, 0
        waiting.append(each)
        rows += rows_of(each)
        size += bytes_of(each)
        if size >= ENOUGH_BYTES:
            yield waiting
            waiting, rows, size = [], 0, 0
    if waiting:
        yield waiting


def concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Returns the rows of batches with one schema in one batch."""
    if len(batches) == 1:
        return batches[0]
    found = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return found[0] if found else batches[0]


def good_rows(rows: int, errors: Mapping[int, str]) -> pa.Array:
    """Returns the numbers of the rows without an error."""
    good = np.ones(rows, bool)
    good[list(errors)] = False
    return pa.array(np.flatnonzero(good))
