"""Makes keys and values of Kafka records in the read, byte for byte as `app.records` makes them in Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from kafka_eos_source.documents.encode import JsonEncoding, KeyEncoding
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.frames import headers_naming
from kafka_eos_source.registry.records import Encoding
from kafka_eos_source.spark.schema import HEADERS, HEADERS_TYPE, KEY, VALUE
from kafka_eos_source.spark.session import SessionRules


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

    def rows(self, frame: StructType) -> StructType:
        """Returns the schema of the records that are made of rows of a frame."""
        made = []
        if self.key is not None:
            own = frame[self.key].dataType if isinstance(self.key, str) else BinaryType()
            made.append(StructField(KEY, own if is_text(own) else BinaryType()))
        same = frame[self.value].dataType if self.value is not None else BinaryType()
        made.append(StructField(VALUE, same))
        return StructType([*made, *(frame[name] for name in self.kept)])


def is_text(type_: DataType) -> bool:
    """Returns whether values of a type become keys and values as they are."""
    return isinstance(type_, StringType | BinaryType)


@dataclass(frozen=True)
class MadeRecords:
    """Makes records of rows.

    Attributes:
        rows: schema of the records, see `RecordShape.rows`.
        shape: which column becomes what.
        key: writes the key; None if there is no key, or it is a column as it is.
        value: writes the value; None if it is a column as it is.
    """

    rows: StructType
    shape: RecordShape
    key: KeyEncoding | None
    value: JsonEncoding | Encoding | None

    @classmethod
    def of(
        cls, frame: StructType, shape: RecordShape, session: SessionRules, encoding: Encoding | None
    ) -> MadeRecords:
        """Returns what makes records of the rows of a frame.

        Args:
            frame: schema of the rows.
            shape: which column becomes what.
            session: the settings of the session on which the text of values depends.
            encoding: encodes the values with a schema registry; None = as JSON objects.

        Raises:
            InvalidSchemaError: if only Spark can make text of a column, or writes it in another way.
        """
        key: KeyEncoding | None = None
        own: DataType | None = None
        if isinstance(shape.key, tuple):
            own = _struct(frame, shape.key)
        elif shape.key is not None and not is_text(frame[shape.key].dataType):
            own = frame[shape.key].dataType
        if own is not None:
            key = KeyEncoding(own, session.time_zone, session.is_ansi, session.has_nulls)
        value: JsonEncoding | Encoding | None = None
        if shape.value is None:
            fields = _struct(frame, shape.fields)
            value = encoding or JsonEncoding(fields, session.time_zone, session.has_nulls)
        if session.has_legacy_times and (key is not None or isinstance(value, JsonEncoding)):
            raise InvalidSchemaError(
                "spark.sql.legacy.timeParserPolicy is LEGACY, and only Spark writes times in its old way.",
                fix="set it to CORRECTED.",
            )
        rows = shape.rows(frame)
        if encoding is not None and encoding.header is not None:
            rows = rows.add(HEADERS, HEADERS_TYPE)
        return cls(rows, shape, key, value)

    def slices(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Mapping[int, str]]]:
        """Yields the records of consecutive slices of a batch, and why rows cannot be encoded, by row."""
        shape, at = self.shape, 0
        for value, errors in self._values(batch):
            rows = batch.slice(at, len(value))
            at += len(value)
            if shape.removed is not None:
                removed = pc.fill_null(rows.column(shape.removed), False)
                value = pc.if_else(removed, pa.scalar(None, value.type), value)
                errors = {row: text for row, text in errors.items() if not removed[row].as_py()}
            made = {VALUE: value, **{name: rows.column(name) for name in shape.kept}}
            if isinstance(self.value, Encoding) and self.value.header is not None:
                is_present = value.is_valid().to_numpy(zero_copy_only=False)
                made[HEADERS] = headers_naming(self.value.header, self.value.name, is_present)
            if shape.key is not None:
                made[KEY] = self._key(rows, shape.key)
            yield pa.record_batch({name: made[name] for name in self.rows.names}), errors

    def _values(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.Array, Mapping[int, str]]]:
        if self.value is None:
            yield batch.column(self.shape.value), {}
        elif isinstance(self.value, JsonEncoding):
            for made in self.value.slices(batch.select(list(self.shape.fields))):
                yield made, {}
        else:
            columns = [batch.column(name) for name in self.shape.fields]
            for found in self.value.slices(pa.StructArray.from_arrays(columns, list(self.shape.fields))):
                yield found.values, found.errors

    def _key(self, rows: pa.RecordBatch, key: str | tuple[str, ...]) -> pa.Array:
        column = rows.column(key) if isinstance(key, str) else rows.select(list(key))
        return column if self.key is None else pa.concat_arrays(self.key.slices(column))


def _struct(frame: StructType, names: Sequence[str]) -> StructType:
    return StructType([frame[name] for name in names])
