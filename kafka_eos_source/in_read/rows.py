"""Steps in the read that make plain rows: decoded documents, and the result of a SQL text.

Spark takes the rows of such a step as ordinary columns, and other steps in the read take them too
(`ReadColumns.before`). A step applies one *transform* to batches of rows. There are two kinds:

- a `RowTransform`, such as SQL, makes any number of rows of a batch;
- an `AlignedTransform`, such as the decoder of a document, makes one row of each row.

A transform returns an error for each row that it cannot process. Through aligned transforms, the step knows
from which record of Kafka such a row comes, and names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.in_read.step import ReadColumns, StepInRead
from kafka_eos_source.spark.arrow import arrow_schema, fit
from kafka_eos_source.spark.pickled import from_bytes, to_bytes

#: Columns of the source that say which record a row comes from.
PLACE = ("topic", "partition", "offset")

#: An engine pays for each call. So small batches of the source become one of about this size.
MOST_ROWS, ENOUGH_BYTES = 40_000, 16 << 20

#: So many bytes of a bad value are in the error.
_SHOWN = 200


class RowTransform(Protocol):
    """Makes rows of another schema from a batch of rows. It can be pickled.

    Attributes:
        rows: schema of the result.
    """

    rows: StructType

    def __call__(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Mapping[int, str]]:
        """Returns the result, and an error for each row of the batch that is bad.

        Bad rows contribute nothing to the result.
        """
        ...


class AlignedTransform(Protocol):
    """Makes one row of another schema from each row of a batch. It can be pickled.

    Attributes:
        rows: schema of the result.
    """

    rows: StructType

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
        records: the records, with the columns that the step reads from the source.
        aligned: whether record ``i`` made row ``i``. Otherwise all that is known is that the rows come from
            some of these records.
    """

    rows: pa.RecordBatch
    records: pa.RecordBatch
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
    """

    rows: StructType
    transform: bytes = field(repr=False)  # may contain passwords, as of a schema registry
    does: str
    copies: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        transform: RowTransform | AlignedTransform,
        columns: ReadColumns,
        does: str,
        copies: Mapping[str, str] | None = None,
    ) -> RowsInRead:
        """Returns the step that applies a transform to columns of the source, or of another step.

        Raises:
            InvalidOptionError: if the transform cannot be pickled.
        """
        pickled = to_bytes(transform, f"what {does}", fix="report this as a bug.")
        return cls(columns, transform.rows, pickled, does, dict(copies or {}))

    @property
    def what(self) -> str:
        return self.does

    @property
    def schema(self) -> StructType:
        """Columns of the rows."""
        return self.rows

    @property
    def of_source(self) -> tuple[str, ...]:
        """Columns to read from the source: also those that name a bad record."""
        return tuple(dict.fromkeys((*self.columns.of_source, *PLACE)))

    def column_of_source(self, name: str) -> str | None:
        """Returns the column of the source that a column of the rows holds; None if it was computed."""
        return self.columns.column_of_source(self.copies[name]) if name in self.copies else None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the rows for the source's batches of one task.

        Raises:
            InvalidRecordError: as `traced`.
        """
        return (each.rows for each in self.traced(batches))

    def traced(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Traced]:
        """Yields the rows for the source's batches of one task, in batches that are not empty.

        Raises:
            InvalidRecordError: if the transform cannot process a row. It names the record.
        """
        transform = from_bytes(self.transform)
        schema = arrow_schema(self.rows)
        before = self.columns.before
        given = (
            (Traced(each, each, aligned=True) for each in joined(batches))
            if before is None
            else before.traced(batches)
        )
        for each in given:
            rows = self.columns.select(each.rows)
            if hasattr(transform, "slices"):
                at = 0
                for result, errors in transform.slices(rows):
                    count = result.num_rows
                    records = each.records.slice(at, count) if each.aligned else each.records
                    if errors:
                        self._fail(rows.slice(at, count), records, errors, aligned=each.aligned)
                    at += count
                    if count:
                        yield Traced(fit(result, schema, f"{self.what} made"), records, each.aligned)
            else:
                result, errors = transform(rows)
                if errors:
                    self._fail(rows, each.records, errors, aligned=each.aligned)
                if result.num_rows:
                    yield Traced(fit(result, schema, f"{self.what} made"), each.records, aligned=False)

    def _fail(
        self, rows: pa.RecordBatch, records: pa.RecordBatch, errors: Mapping[int, str], *, aligned: bool
    ) -> NoReturn:
        row = min(errors)
        if aligned:
            place = _place(records, row)
        else:
            place = f"a record between {_place(records, 0)} and {_place(records, records.num_rows - 1)}"
        raise InvalidRecordError(
            f"{self.what}: {place} cannot be processed: {errors[row]}. "
            f"{_shown(records if aligned else rows, row)}",
            fix="correct the producer, the schema or the text.",
        )


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
        for batch in joined(fit(each, given, "Spark passed") for each in batches):
            result, errors = self.transform(batch)
            if errors:
                row = min(errors)
                shown = str(batch.slice(row, 1).to_pylist()[0])
                raise InvalidRecordError(
                    f"the SQL fails on a row: {errors[row]}. The row is {shown[:_SHOWN]}",
                    fix="correct the rows before it, or let the SQL return null: try_cast(… AS …), nullif().",
                )
            if result.num_rows:
                yield fit(result, made, "the SQL returned")


def joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the rows in fewer batches, of about `MOST_ROWS` rows or `ENOUGH_BYTES`."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if waiting and rows + batch.num_rows > MOST_ROWS:
            yield _one(waiting)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if size >= ENOUGH_BYTES:
            yield _one(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _one(waiting)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    (found,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return found


def _place(records: pa.RecordBatch, row: int) -> str:
    topic, partition, offset = (records.column(name)[row].as_py() for name in PLACE)
    return f"the record of topic {topic}, partition {partition}, offset {offset}"


def _shown(rows: pa.RecordBatch, row: int) -> str:
    """Returns the beginning of the value of a record, or of a row."""
    if "value" in rows.schema.names:
        value = rows.column("value")[row].as_py()
        return f"The value is {value[:_SHOWN]!r}" if value is not None else "It has no value"
    return f"The row is {str(rows.slice(row, 1).to_pylist()[0])[:_SHOWN]}"


def good_rows(rows: int, errors: Mapping[int, str]) -> pa.Array:
    """Returns the numbers of the rows without an error."""
    good = np.ones(rows, bool)
    good[list(errors)] = False
    return pa.array(np.flatnonzero(good))
