"""Makes keys and values of Kafka records in the read, byte for byte as `app.records` makes them in Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from kafka_eos_source.documents.encode import JsonEncoding, key_text
from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.registry.records import Encoding
from kafka_eos_source.spark.arrow import arrow_schema
from kafka_eos_source.spark.schema import KEY, VALUE

#: Timestamps within keys. Spark's own formats leave out microseconds, or the offset from UTC, without which
#: an hour has two meanings when daylight saving time ends. So different keys would become the same text.
TIME_OF_KEY = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"
KEY_FORMATS = {"timestampFormat": f"{TIME_OF_KEY}XXX", "timestampNTZFormat": TIME_OF_KEY}

#: So many rows become records in one call.
_MOST_ROWS = 40_000


@dataclass(frozen=True)
class RecordShape:
    """Which columns of a frame become which parts of its records.

    Attributes:
        key: the column of the key as text, or several columns as a JSON object; None = no key.
        value: the column of the value as it is; None = `fields`.
        fields: columns of the value, as a JSON object or encoded with a registry.
        removed: boolean column that is true for records without a value; None = each has one.
        kept: columns that stay beside the key and the value.
    """

    key: str | tuple[str, ...] | None
    value: str | None
    fields: tuple[str, ...]
    removed: str | None
    kept: tuple[str, ...]

    def rows(self, frame: StructType, encoding: Encoding | None) -> StructType:
        """Returns the schema of the records that are made of rows of a frame."""
        made = []
        if self.key is not None:
            is_same = isinstance(self.key, str) and is_text(frame[self.key].dataType)
            made.append(StructField(KEY, frame[self.key].dataType if is_same else StringType()))
        same = frame[self.value].dataType if self.value is not None else None
        made.append(StructField(VALUE, same or (StringType() if encoding is None else BinaryType())))
        return StructType([*made, *(frame[name] for name in self.kept)])


def is_text(type_: DataType) -> bool:
    """Returns whether values of a type become keys and values as they are."""
    return isinstance(type_, StringType | BinaryType)


@dataclass(frozen=True)
class MadeRecords:
    """Makes records of rows.

    Attributes:
        rows: schema of the records, see `RecordShape.rows`.
        frame: schema of the rows that they are made of.
        shape: which column becomes what.
        time_zone: time zone of the session.
        encoding: encodes the values with a schema registry; None = as JSON.
    """

    rows: StructType
    frame: StructType
    shape: RecordShape
    time_zone: str
    encoding: Encoding | None

    @classmethod
    def of(
        cls, frame: StructType, shape: RecordShape, time_zone: str, encoding: Encoding | None
    ) -> MadeRecords:
        """Returns what makes records of the rows of a frame."""
        return cls(shape.rows(frame, encoding), frame, shape, time_zone, encoding)

    def check(self) -> str | None:
        """Returns why the read cannot make such records, although Spark can; None if it can."""
        empty = pa.RecordBatch.from_pylist([], schema=arrow_schema(self.frame))
        try:
            for _ in self._made(empty):
                pass
        except KafkaEosError as error:
            return error.message
        return None

    def slices(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Mapping[int, str]]]:
        """Yields the records of consecutive slices of a batch, and why rows cannot be encoded, by row."""
        for at in range(0, batch.num_rows, _MOST_ROWS):
            yield from self._made(batch.slice(at, _MOST_ROWS))

    def _made(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Mapping[int, str]]]:
        at = 0
        for value, errors in self._values(batch):
            part = batch.slice(at, len(value))
            at += len(value)
            removed = (
                None if self.shape.removed is None else pc.fill_null(part.column(self.shape.removed), False)
            )
            if removed is not None:
                value = pc.if_else(removed, pa.scalar(None, value.type), value)
                errors = {row: text for row, text in errors.items() if not removed[row].as_py()}
            columns = {VALUE: value, **{name: part.column(name) for name in self.shape.kept}}
            if self.shape.key is not None:
                columns[KEY] = self._key(part, self.shape.key)
            yield pa.record_batch({name: columns[name] for name in self.rows.names}), errors

    def _values(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.Array, Mapping[int, str]]]:
        shape = self.shape
        if shape.value is not None:
            yield batch.column(shape.value), {}
        elif self.encoding is None:
            yield self._json(batch, shape.fields, {}), {}
        else:
            columns = [batch.column(name) for name in shape.fields]
            for found in self.encoding.slices(pa.StructArray.from_arrays(columns, list(shape.fields))):
                yield found.values, found.errors

    def _key(self, batch: pa.RecordBatch, key: str | Sequence[str]) -> pa.Array:
        if not isinstance(key, str):
            return self._json(batch, key, KEY_FORMATS)
        column, type_ = batch.column(key), self.frame[key].dataType
        return column if is_text(type_) else key_text(column, type_, self.time_zone)

    def _json(self, batch: pa.RecordBatch, names: Sequence[str], formats: Mapping[str, str]) -> pa.Array:
        encoding = JsonEncoding(StructType([self.frame[name] for name in names]), self.time_zone, formats)
        return encoding.encode(batch.select(list(names)))
