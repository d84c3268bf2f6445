"""Turns columns into the keys and values of Kafka records, with Spark's own expressions.

`App.write` does this where the tasks that read cannot (`in_read.records`). It works on plain and on Spark
Connect sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.sql import Column
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    MapType,
    StructType,
    TimestampType,
    VariantType,
)

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.in_read.decode import SOURCE_COLUMNS
from kafka_eos_source.in_read.lineage import Obstacle
from kafka_eos_source.in_read.records import MadeRecords, RecordShape, is_text
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.registry.columns import RegistrySchema, registry_schema, to_registry
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
)
from kafka_eos_source.stage.fanout import ROUTE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from kafka_eos_source.registry.columns import Registry
    from kafka_eos_source.registry.records import Encoding
    from kafka_eos_source.spark.session import SessionRules

#: Columns that travel with the rows beside the data: state changes, and what dead letters need.
_CARRIED = (CHANGELOG, INVALID, ORIGIN)


#: Timestamps within keys. Spark's own formats leave out microseconds, or the offset from UTC, without which
#: an hour has two meanings when daylight saving time ends. So different keys would become the same text.
#: `documents.encode` knows the same formats.
_TIME_OF_KEY = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"
_KEY_FORMATS = {"timestampFormat": f"{_TIME_OF_KEY}XXX", "timestampNTZFormat": _TIME_OF_KEY}


def column(name: str) -> Column:
    """Returns the column with this name, whatever characters the name has."""
    return sf.col(quoted(name))


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
        """Returns the frame for the sink, whose records Spark makes, and which of its columns are the user's.

        Args, Raises: as `shape`.

        Returns:
            The frame; and the columns for sinks outside Kafka, None if these receive all.
        """
        schema = frame.schema
        shape = self.shape(schema, for_sinks=for_sinks, has_timestamp=has_timestamp)
        if shape is None:
            return frame, None
        value, headers = self._value(schema, shape)
        records = [value.alias(VALUE), *headers]
        key = self._key(schema)
        if key is not None:
            records.insert(0, key.alias(KEY))
        result = frame.select(*records, *(column(name) for name in shape.kept))
        return result, columns_of_user(schema, for_sinks=for_sinks) if for_sinks else None

    def check_none(self, why: str) -> None:
        """Checks that nothing says how rows become records.

        Args:
            why: why nothing may say so.

        Raises:
            InvalidOptionError: if something does.
        """
        for name in ("key", "value", "registry", "removed"):
            if getattr(self, name) is not None:
                raise InvalidOptionError(
                    f"{name}= is set, but {why}.",
                    fix=f"leave out {name}=, and return the columns key and value.",
                )

    def in_read(
        self, schema: StructType, shape: RecordShape, session: SessionRules
    ) -> MadeRecords | Obstacle:
        """Returns what makes the same records in the tasks that read, or why they cannot.

        Args:
            schema: schema of the frame.
            shape: what `shape` returned for it.
            session: the settings of the session on which the text of values depends.
        """
        for name, given in (("key", self.key), ("value", self.value)):
            if isinstance(given, Column):
                fix = "compute it in app.sql(…), and name the column"
                return Obstacle(f"{name}=, which is an expression", fix)
        encoding = self._encoding()
        try:
            return MadeRecords.of(schema, shape, session, encoding)
        except InvalidSchemaError as error:
            return Obstacle(f"making the records, because {error.message}", error.fix or "")

    def shape(self, schema: StructType, *, for_sinks: bool, has_timestamp: bool) -> RecordShape | None:
        """Returns which columns become which parts of the records; None if the frame stays as it is.

        A frame that has only columns of Kafka records, such as ``key`` and ``value``, stays as it is, and so
        does one whose rows go only to sinks outside Kafka.

        Args:
            schema: schema of the frame.
            for_sinks: whether sinks outside Kafka receive the rows too, so that all columns must stay.
            has_timestamp: whether the column ``timestamp`` is the record's timestamp (``includeTimestamp``).

        Raises:
            InvalidSchemaError: if a column is missing or has the wrong type, there is nothing to write, or
                two columns would have one name.
            InvalidOptionError: if arguments contradict each other.
        """
        names = columns_of_user(schema, for_sinks=for_sinks)
        self._check_columns(names)
        own = (self.key, self.value, self.registry, self.removed)
        if all(each is None for each in own) and VALUE in names and set(names) <= set(SOURCE_COLUMNS):
            return None
        if self.topic is None and TOPIC not in names:
            if not for_sinks or any(each is not None for each in own):
                raise InvalidSchemaError(
                    "there is no topic to write to: topic= is not set, and the frame has no column 'topic'; "
                    f"it has the columns {_listed(names)}.",
                    fix="set topic=.",
                )
            return None
        self._check_types(schema)
        fields = () if self.value is not None else self._fields(names)
        same = set()
        if isinstance(self.key, str) and self.key == KEY and is_text(schema[KEY].dataType):
            same.add(KEY)
        if isinstance(self.value, str) and self.value == VALUE and self.removed is None:
            same.add(VALUE)
        kept = names if for_sinks else [TIMESTAMP] if has_timestamp and TIMESTAMP in names else []
        if self.topic is None and TOPIC not in kept:
            kept = [*kept, TOPIC]
        if for_sinks:
            self._check_names(set(names) - same, has_timestamp)
        made = {KEY, VALUE} if self.key is not None else {VALUE}
        carried = [name for name in schema.names if name not in names]
        key = None if isinstance(self.key, Column) or self.key is None else self.key
        return RecordShape(
            key=key if key is None or isinstance(key, str) else tuple(key),
            value=self.value if isinstance(self.value, str) else None,
            fields=fields,
            removed=self.removed,
            kept=tuple(name for name in [*kept, *carried] if name not in made),
        )

    def _fields(self, names: Sequence[str]) -> tuple[str, ...]:
        keys = [self.key] if isinstance(self.key, str) else self.key
        apart = {*(keys if isinstance(keys, Sequence) else ()), self.removed}
        if self.topic is None:
            apart.add(TOPIC)
        fields = tuple(name for name in names if name not in apart)
        if not fields:
            raise InvalidSchemaError(
                f"no column is left for the record's value: the frame has the columns {_listed(names)}, and "
                "key= takes them.",
                fix="name the column of the value with value=, or add one.",
            )
        return fields

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

    def _check_types(self, schema: StructType) -> None:
        if self.value is not None and self.registry is not None:
            raise InvalidOptionError(
                "value= and registry= are both set.",
                fix="leave out value= to encode all columns but the key, or encode with to_registry() in "
                "value=.",
            )
        if isinstance(self.value, str) and not is_text(schema[self.value].dataType):
            raise InvalidSchemaError(
                f"value= names column {self.value!r} of type "
                f"{schema[self.value].dataType.simpleString()}; expected string or binary.",
                fix="cast the column, or leave out value= to write all columns but the key as JSON.",
            )
        if self.removed is not None and not isinstance(schema[self.removed].dataType, BooleanType):
            raise InvalidSchemaError(
                f"removed= names column {self.removed!r} of type "
                f"{schema[self.removed].dataType.simpleString()}; expected boolean: true = the record has no "
                "value.",
                fix="name the column 'removed' of an aggregation, or a condition.",
            )

    def _key(self, schema: StructType) -> Column | None:
        if self.key is None or isinstance(self.key, Column):
            return self.key
        if not isinstance(self.key, str):
            return sf.to_json(sf.struct(*(column(name) for name in self.key)), _KEY_FORMATS)
        return as_text(column(self.key), schema[self.key].dataType)

    def _value(self, schema: StructType, shape: RecordShape) -> tuple[Column, list[Column]]:
        """Returns the column of values, and if headers name their schema, that of headers."""
        value = self._without_tombstones(schema, shape)
        if self.removed is not None:
            is_removed = sf.coalesce(column(self.removed), sf.lit(False))
            value = sf.when(is_removed, sf.lit(None)).otherwise(value)
        encoding = self._encoding()
        if encoding is None or encoding.header is None:
            return value, []
        return value[VALUE], [value[HEADERS].alias(HEADERS)]

    def _without_tombstones(self, schema: StructType, shape: RecordShape) -> Column:
        if self.value is not None:
            return self.value if isinstance(self.value, Column) else column(self.value)
        record = sf.struct(*(column(name) for name in shape.fields))
        if self.registry is None:
            return sf.to_json(record)
        encoded = to_registry(record, self._schema)
        if CHANGELOG not in schema.names:
            return encoded
        # The columns of rows with state changes are null, which a schema need not allow.
        return sf.when(column(CHANGELOG).isNull(), encoded)

    def _encoding(self) -> Encoding | None:
        return None if self.registry is None else self._schema.encoding()

    @cached_property
    def _schema(self) -> RegistrySchema:
        """The schema in which values are encoded, which is looked up once."""
        assert self.registry is not None
        if isinstance(self.registry, RegistrySchema):
            return self.registry
        if self.topic is None:
            raise InvalidOptionError(
                "registry= is set, but not topic=, whose subject has the schema.",
                fix="set topic=, or pass what registry_schema() returned as registry=.",
            )
        return registry_schema(self.registry, topic=self.topic)

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


def columns_of_user(schema: StructType, *, for_sinks: bool) -> list[str]:
    """Returns the columns of a frame without those that only travel with its rows to the sink."""
    apart = {*_CARRIED, ROUTE} if for_sinks else {*_CARRIED}
    return [name for name in schema.names if name not in apart]


def as_text(value: Column, type_: DataType) -> Column:
    """Returns a key as string or binary: nested values as JSON, others as Spark casts them to strings.

    A timestamp has its offset from UTC, in the session's time zone.
    """
    if is_text(type_):
        return value
    if isinstance(type_, StructType | ArrayType | MapType | VariantType):
        return sf.to_json(value, _KEY_FORMATS)
    if isinstance(type_, TimestampType):
        return sf.date_format(value, _KEY_FORMATS["timestampFormat"])
    return value.cast("string")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
