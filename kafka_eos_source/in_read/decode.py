"""Decodes the values of records in the read: their fields become columns, as `App.read` declares them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from pyspark.sql.types import DataType, StructField, StructType

from kafka_eos_source.documents.converted import Converted
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.in_read.bad_records import FAIL, LEAST_OF_TOPIC, NULL, OnBad
from kafka_eos_source.in_read.rows import RowsInRead
from kafka_eos_source.in_read.step import ReadColumn, ReadColumns
from kafka_eos_source.spark.schema import HEADERS, VALUE, read_schema

_log = logging.getLogger(__name__)

#: Prefix of columns that this package adds to frames, such as that of packets.
RESERVED = "__kafka_eos"

#: All columns that the source can have.
SOURCE_COLUMNS = tuple(read_schema(include_headers=True).names)


class ColumnDecoder(Protocol):
    """Decodes a column of bytes, such as `documents.decode.JsonDecoding`. It can be pickled."""

    @property
    def arrow_type(self) -> pa.DataType:
        """Type of the decoded values."""
        ...

    @property
    def takes_headers(self) -> bool:
        """Whether `slices` takes the headers of the records as its second argument."""
        ...

    def slices(self, column: pa.Array, /, *headers: pa.Array) -> Iterator[Converted]:
        """Yields the decoded values slice by slice, each as large as memory allows."""
        ...


@dataclass(frozen=True)
class DecodedValues:
    """Decodes the column ``value``; its fields become columns, behind those that are kept.

    If the decoded values are no structs, they become the column ``value``.

    Attributes:
        rows: schema of the result.
        decoder: decodes the values.
        kept: number of columns of the source at the beginning of the result.
        makes_nulls: whether a value that cannot be decoded is no error: its row is what the decoder made
            (``on_bad="null"``).
    """

    rows: StructType
    decoder: ColumnDecoder
    kept: int
    makes_nulls: bool = False

    def slices(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Mapping[int, str]]]:
        """Yields the rows of consecutive slices of a batch, and why values cannot be decoded, by row."""
        names, at = self.rows.names, 0
        headers = [batch.column(HEADERS)] if self.decoder.takes_headers else []
        for decoded in self.decoder.slices(batch.column(VALUE), *headers):
            count = len(decoded.values)
            kept = [batch.column(name).slice(at, count) for name in names[: self.kept]]
            is_struct = pa.types.is_struct(decoded.values.type)
            fields = decoded.values.flatten() if is_struct else [decoded.values]
            errors = decoded.errors
            if self.makes_nulls:
                if len(errors) == count >= LEAST_OF_TOPIC:
                    self._warn_of_nulls(errors[0])
                errors = {}
            yield pa.RecordBatch.from_arrays([*kept, *fields], names), errors
            at += count

    def _warn_of_nulls(self, reason: str) -> None:
        """Warns once in each process that no value fits, which no later step can know."""
        rows = self.rows.simpleString()
        if rows not in _warned:
            _warned.add(rows)
            _log.warning(
                "None of at least %d records, one after the other, fits the schema of the read, %s; with "
                "on_bad='null', what does not fit is null. The first one: %s. Probably schema= or registry= "
                "is that of another topic.",
                LEAST_OF_TOPIC,
                rows,
                reason,
            )


#: Schemas of rows about which this process has warned.
_warned: set[str] = set()


def decoded_values(
    decoder: ColumnDecoder,
    type_: DataType,
    keep: Sequence[str],
    what: str,
    *,
    on_bad: OnBad = FAIL,
) -> RowsInRead:
    """Returns the step that decodes the values of records.

    Args:
        decoder: decodes the values.
        type_: type of the decoded values.
        keep: columns of the source to keep in front of their fields.
        what: what is decoded, for people.
        on_bad: what becomes of records whose value cannot be decoded.

    Raises:
        InvalidSchemaError: if ``keep`` names no column of the source, or one that the values have too.
    """
    fields = type_.fields if isinstance(type_, StructType) else [StructField(VALUE, type_)]
    check_kept(keep, [each.name for each in fields])
    source = read_schema(include_headers=True)
    nullable = [StructField(each.name, each.dataType) for each in fields]
    rows = StructType([*(source[name] for name in keep), *nullable])
    read = dict.fromkeys((*keep, VALUE, *([HEADERS] if decoder.takes_headers else [])))
    columns = ReadColumns(tuple(ReadColumn(name, name) for name in read))
    transform = DecodedValues(rows, decoder, len(keep), on_bad == NULL)
    copies = {name: name for name in keep}
    return RowsInRead.of(transform, columns, what, copies, on_bad=on_bad)


def check_kept(keep: Sequence[str], fields: Sequence[str]) -> None:
    """Checks the columns of the source that stay beside the fields of the values.

    Raises:
        InvalidSchemaError: if one is no column of the source, or a field has a reserved name, or two columns
            would have one name; its case does not matter to Spark.
    """
    unknown = [name for name in keep if name not in SOURCE_COLUMNS]
    if unknown:
        raise InvalidSchemaError(
            f"keep= names {', '.join(map(repr, unknown))}; expected columns of the source: "
            f"{', '.join(SOURCE_COLUMNS)}.",
            fix="name columns of the record in keep=, and fields of its value in schema=.",
        )
    reserved = [name for name in fields if name.lower().startswith(RESERVED)]
    if reserved:
        raise InvalidSchemaError(
            f"the values have a field {reserved[0]!r}; names that begin with {RESERVED!r} are reserved.",
            fix="leave the field out of the schema.",
        )
    names = [*keep, *fields]
    of_values = {name.lower() for name in fields}
    twice = sorted({name for name in names if names.count(name) > 1 or (name in keep and name in of_values)})
    if twice:
        raise InvalidSchemaError(
            f"{', '.join(map(repr, twice))} would be two columns: one of the record, which keep= names, and "
            "one of its value.",
            fix="leave it out of keep=; or read without schema=, and parse and name the columns yourself.",
        )
