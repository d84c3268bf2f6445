"""Turns the values of Kafka records into columns, and columns into the keys and values of records.

`App` reads and writes with these functions. Both work on plain and on Spark Connect sessions, because they
only build Spark's own expressions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import Column
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from kafka_eos_source.errors import InvalidOptionError, InvalidRecordError, InvalidSchemaError
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.registry.columns import RegistrySchema, from_registry, to_registry
from kafka_eos_source.spark.schema import (
    HEADERS,
    INVALID,
    KEY,
    NAMES,
    ORIGIN,
    PARTITION,
    TIMESTAMP,
    TOPIC,
    VALUE,
    quoted,
    read_schema,
    record_place,
)
from kafka_eos_source.stage.fanout import ROUTE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from kafka_eos_source.registry.columns import Registry

#: All columns that the source can have.
SOURCE_COLUMNS = tuple(read_schema(include_headers=True).names)
#: Columns that travel with the rows beside the data: state changes, and what dead letters need.
_CARRIED = (CHANGELOG, INVALID, ORIGIN)
#: Field in which Spark's ``from_json`` returns a document that does not fit the schema.
_MALFORMED = "__kafka_eos_malformed"
_PARSED = "__kafka_eos_parsed"
#: Field of an array with the whole value as its element: ``from_json`` ignores what follows a document.
_DOCUMENTS = "__kafka_eos_documents"
#: Timestamps within keys. Spark's own formats leave out microseconds, or the offset from UTC, without which
#: an hour has two meanings when daylight saving time ends. So different keys would become the same text.
_TIME_OF_KEY = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"
_KEY_FORMATS = {"timestampFormat": f"{_TIME_OF_KEY}XXX", "timestampNTZFormat": _TIME_OF_KEY}


def column(name: str) -> Column:
    """Returns the column with this name, whatever characters the name has."""
    return sf.col(quoted(name))


# -- reading -------------------------------------------------------------------------------------


def from_json_values(frame: DataFrame, schema: StructType, keep: Sequence[str]) -> DataFrame:
    """Parses the value of each record as a JSON object and returns its fields as columns.

    A record whose value is no JSON object, or has a field of another type, fails the batch with
    `InvalidRecordError`, which names the record. In a record without a value, all fields are null.

    Args:
        frame: the source, with all its columns.
        schema: columns to take from the JSON objects; fields that an object lacks are null.
        keep: columns of the source to keep in front of them.

    Raises:
        InvalidSchemaError: if ``keep`` names no column of the source, or one that ``schema`` has too.
    """
    _check_kept(keep, schema.names)
    value = sf.col(VALUE).cast("string")
    parsed = sf.from_json(
        sf.concat(sf.lit(f'{{"{_DOCUMENTS}":['), value, sf.lit("]}")),
        StructType(
            [
                StructField(_DOCUMENTS, ArrayType(schema)),
                StructField(_MALFORMED, StringType()),
            ]
        ),
        {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _MALFORMED},
    )
    error = sf.concat(
        sf.lit(f"[{InvalidRecordError.condition}] the value of the "),
        record_place(),
        sf.lit(f" is no JSON object with the schema {schema.simpleString()}: "),
        sf.substring(value, 1, 200),
        sf.lit(
            ". Fix: correct the producer or the schema; to set such records aside as dead letters, read "
            "without schema=, parse with from_json, and mark them with invalid_record()."
        ),
    )
    parsed_rows = frame.withColumn(_PARSED, parsed)
    documents = sf.col(f"{_PARSED}.{_DOCUMENTS}")
    document = sf.get(documents, sf.lit(0))
    is_wrong = sf.col(f"{_PARSED}.{_MALFORMED}").isNotNull() | (sf.size(documents) != 1) | document.isNull()
    checked = sf.when(sf.col(VALUE).isNotNull() & is_wrong, sf.raise_error(error)).otherwise(document)
    rows = parsed_rows.withColumn(_PARSED, checked)
    return rows.select(*(column(name) for name in keep), *_fields(schema.names))


def from_registry_values(frame: DataFrame, registry: RegistrySchema, keep: Sequence[str]) -> DataFrame:
    """Decodes the value of each record with a schema registry and returns its fields as columns.

    If the schema is no record, the column ``value`` holds the decoded value.

    Args:
        frame: the source, with all its columns.
        registry: the schema to read with.
        keep: columns of the source to keep in front of the fields.

    Raises:
        InvalidSchemaError: if ``keep`` names no column of the source, or one that the schema has too.
    """
    type_ = registry.spark_type
    names = type_.names if isinstance(type_, StructType) else [VALUE]
    _check_kept(keep, names)
    rows = frame.withColumn(_PARSED, from_registry(VALUE, registry))
    kept = [column(name) for name in keep]
    if not isinstance(type_, StructType):
        return rows.select(*kept, sf.col(_PARSED).alias(VALUE))
    return rows.select(*kept, *_fields(names))


def _fields(names: Sequence[str]) -> list[Column]:
    return [sf.col(quoted(_PARSED, name)).alias(name) for name in names]


def _check_kept(keep: Sequence[str], fields: Sequence[str]) -> None:
    unknown = [name for name in keep if name not in SOURCE_COLUMNS]
    if unknown:
        raise InvalidSchemaError(
            f"keep= names {', '.join(map(repr, unknown))}; expected columns of the source: "
            f"{', '.join(SOURCE_COLUMNS)}.",
            fix="name columns of the record in keep=, and fields of its value in schema=.",
        )
    twice = [name for name in keep if name in fields]
    if twice:
        raise InvalidSchemaError(
            f"{', '.join(map(repr, twice))} would be two columns: one of the record, which keep= names, and "
            "one of its value.",
            fix="leave it out of keep=; or read without schema=, and parse and name the columns yourself.",
        )


# -- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """How rows become records: the arguments of `App.write` that decide this.

    Attributes:
        topic: topic of all records; None = the column ``topic``, or no records if there is none.
        key: column of the record's key, several columns, or an expression; None = no key.
        value: column of the record's value, or an expression; None = a JSON object of the other columns.
        registry: schema to encode the value with, or the registry in which the topic's schema is.
        removed: boolean column; a row in which it is true becomes a record without a value (a tombstone).
    """

    topic: str | None = None
    key: str | Sequence[str] | Column | None = None
    value: str | Column | None = None
    registry: Registry | RegistrySchema | None = None
    removed: str | None = None

    def of(
        self, frame: DataFrame, *, for_sinks: bool, has_timestamp: bool
    ) -> tuple[DataFrame, list[str] | None]:
        """Returns the frame for the sink, and which of its columns are the user's.

        A frame that has only columns of Kafka records, such as ``key`` and ``value``, stays as it is.

        Args:
            frame: the rows.
            for_sinks: whether sinks outside Kafka receive the rows too, so that all columns must stay.
            has_timestamp: whether the column ``timestamp`` is the record's timestamp (``includeTimestamp``).

        Returns:
            The frame; and the columns for sinks outside Kafka, None if these receive all.

        Raises:
            InvalidSchemaError: if a column is missing or has the wrong type, there is nothing to write, or
                two columns would have one name.
        """
        apart = {*_CARRIED, ROUTE} if for_sinks else {*_CARRIED}
        names = [name for name in frame.columns if name not in apart]
        self._check_columns(names)
        own = (self.key, self.value, self.registry, self.removed)
        if all(each is None for each in own) and VALUE in names and set(names) <= set(SOURCE_COLUMNS):
            return frame, None
        if self.topic is None and TOPIC not in names:
            if not for_sinks or any(each is not None for each in own):
                raise InvalidSchemaError(
                    "there is no topic to write to: topic= is not set, and the frame has no column 'topic'; "
                    f"it has the columns {_listed(names)}.",
                    fix="set topic=.",
                )
            return frame, None
        schema = frame.schema
        records = [self._value(schema, names).alias(VALUE)]
        key = self._key(schema)
        if key is not None:
            records.insert(0, key.alias(KEY))
        same = set()
        if isinstance(self.key, str) and self.key == KEY and _is_text(schema[KEY].dataType):
            same.add(KEY)
        if isinstance(self.value, str) and self.value == VALUE and self.removed is None:
            same.add(VALUE)
        kept = names if for_sinks else [TIMESTAMP] if has_timestamp and TIMESTAMP in names else []
        if self.topic is None and TOPIC not in kept:
            kept = [*kept, TOPIC]
        if for_sinks:
            self._check_names(set(names) - same, has_timestamp)
        made = {KEY, VALUE} if key is not None else {VALUE}
        carried = [name for name in frame.columns if name in apart]
        result = frame.select(*records, *(column(name) for name in [*kept, *carried] if name not in made))
        return result, names if for_sinks else None

    def _check_columns(self, names: Sequence[str]) -> None:
        """Raises `InvalidSchemaError` if an argument names a column that the frame does not have once."""
        keys = [self.key] if isinstance(self.key, str) else self.key
        used = {
            "key=": list(keys) if isinstance(keys, Sequence) else [],
            "value=": [self.value] if isinstance(self.value, str) else [],
            "removed=": [self.removed] if self.removed is not None else [],
        }
        for argument, columns in used.items():
            missing = [each for each in columns if each not in names]
            if missing:
                raise InvalidSchemaError(
                    f"{argument} names {_listed(missing)}, which the frame does not have; it has the columns "
                    f"{_listed(names)}.",
                    fix="name a column of the frame.",
                )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidSchemaError(
                f"the frame has several columns named {_listed(twice)}.", fix="rename or drop all but one."
            )

    def _key(self, schema: StructType) -> Column | None:
        if self.key is None or isinstance(self.key, Column):
            return self.key
        if not isinstance(self.key, str):
            return sf.to_json(sf.struct(*(column(name) for name in self.key)), _KEY_FORMATS)
        return as_text(column(self.key), schema[self.key].dataType)

    def _value(self, schema: StructType, names: Sequence[str]) -> Column:
        value = self._without_tombstones(schema, names)
        if self.removed is None:
            return value
        if not isinstance(schema[self.removed].dataType, BooleanType):
            raise InvalidSchemaError(
                f"removed= names column {self.removed!r} of type "
                f"{schema[self.removed].dataType.simpleString()}; expected boolean: true = the record has no "
                "value.",
                fix="name the column 'removed' of an aggregation, or a condition.",
            )
        return sf.when(sf.coalesce(column(self.removed), sf.lit(False)), sf.lit(None)).otherwise(value)

    def _without_tombstones(self, schema: StructType, names: Sequence[str]) -> Column:
        if self.value is not None and self.registry is not None:
            raise InvalidOptionError(
                "value= and registry= are both set.",
                fix="leave out value= to encode all columns but the key, or encode with to_registry() in "
                "value=.",
            )
        if isinstance(self.value, Column):
            return self.value
        if self.value is not None:
            if not _is_text(schema[self.value].dataType):
                raise InvalidSchemaError(
                    f"value= names column {self.value!r} of type "
                    f"{schema[self.value].dataType.simpleString()}; expected string or binary.",
                    fix="cast the column, or leave out value= to write all columns but the key as JSON.",
                )
            return column(self.value)
        keys = [self.key] if isinstance(self.key, str) else self.key
        apart = {*(keys if isinstance(keys, Sequence) else ()), self.removed}
        if self.topic is None:
            apart.add(TOPIC)
        fields = [column(name) for name in names if name not in apart]
        if not fields:
            raise InvalidSchemaError(
                f"no column is left for the record's value: the frame has the columns {_listed(names)}, and "
                "key= takes them.",
                fix="name the column of the value with value=, or add one.",
            )
        if self.registry is None:
            return sf.to_json(sf.struct(*fields))
        encoded = self._encoded(sf.struct(*fields))
        if CHANGELOG not in schema.names:
            return encoded
        # The columns of rows with state changes are null, which a schema need not allow.
        return sf.when(column(CHANGELOG).isNull(), encoded)

    def _encoded(self, record: Column) -> Column:
        assert self.registry is not None
        if isinstance(self.registry, RegistrySchema):
            return to_registry(record, self.registry)
        if self.topic is None:
            raise InvalidOptionError(
                "registry= is set, but not topic=, whose subject has the schema.",
                fix="set topic=, or pass what registry_schema() returned as registry=.",
            )
        return to_registry(record, self.registry, topic=self.topic)

    def _check_names(self, names: Collection[str], has_timestamp: bool) -> None:
        """Raises `InvalidSchemaError` if a sink outside Kafka would get a part of the record for a column."""
        parts = {KEY, VALUE, PARTITION, HEADERS}
        if has_timestamp:
            parts.add(TIMESTAMP)
        both = sorted(parts.intersection(names))
        if both:
            raise InvalidSchemaError(
                f"column {both[0]!r} of the frame has the name of a part of the Kafka record "
                f"({', '.join(NAMES)}), so the sinks outside Kafka cannot receive it.",
                fix=f"rename it with .withColumnRenamed({both[0]!r}, …).",
            )


def as_text(value: Column, type_: DataType) -> Column:
    """Returns a key as string or binary: nested values as JSON, others as Spark casts them to strings.

    A timestamp has its offset from UTC, in the session's time zone.
    """
    if _is_text(type_):
        return value
    if isinstance(type_, StructType | ArrayType | MapType | VariantType):
        return sf.to_json(value, _KEY_FORMATS)
    if isinstance(type_, TimestampType):
        return sf.date_format(value, _KEY_FORMATS["timestampFormat"])
    return value.cast("string")


def _is_text(type_: DataType) -> bool:
    return isinstance(type_, StringType | BinaryType)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
