"""What queries use: `registry_schema` finds a schema; `from_registry` and `to_registry` convert with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from kafka_eos_source.documents.converted import Converted
from kafka_eos_source.errors import InvalidOptionError, InvalidRecordError, InvalidSchemaError
from kafka_eos_source.kafka.schema_registry import (
    HEADER,
    ID_LOCATION,
    PAYLOAD,
    SchemaId,
    StoredSchema,
    id_bytes,
    id_location,
)
from kafka_eos_source.protocol.records import UNDECODABLE
from kafka_eos_source.registry import codec, glue
from kafka_eos_source.registry.catalog import Catalog
from kafka_eos_source.registry.codec import Schema, SchemaFormat
from kafka_eos_source.registry.frames import KEY_HEADER, OF_GLUE, VALUE_HEADER, Naming, headers_naming
from kafka_eos_source.registry.records import Decoding, Encoding
from kafka_eos_source.spark.arrow import arrow_schema
from kafka_eos_source.spark.schema import HEADERS, HEADERS_TYPE, KEY, invalid_record, record_place

if TYPE_CHECKING:
    from pyspark.sql import Column

#: Where the registry is: its URL, or options of its client.
Registry = str | Mapping[str, Any]


@dataclass(frozen=True)
class RegistrySchema:
    """A schema that a query reads or writes with. `registry_schema` returns it.

    Attributes:
        registry: options of the registry.
        schema: the schema with everything that it imports.
        schema_id: its id; None if it is only for reading, and was given as text.
        guid: its GUID; None if the registry has not told it.
        is_key: whether it is for keys, whose schemas other headers name than those of values.
        message: full name of the message type in a Protobuf schema; None = its first.
        is_stored: whether ``schema`` is what the registry has under this id. A schema that was given as text
            may differ, for example in its documentation.
    """

    registry: Mapping[str, Any] = field(repr=False)
    schema: Schema
    schema_id: SchemaId | None
    message: str | None = None
    is_stored: bool = True
    guid: UUID | None = None
    is_key: bool = False

    @cached_property
    def arrow_type(self) -> pa.DataType:
        """Arrow type of the values."""
        return codec.arrow_type(self.schema, self.message)

    @cached_property
    def spark_type(self) -> DataType:
        """Spark type of the values.

        Raises:
            InvalidSchemaError: if Spark has no such type.
        """
        from pyspark.errors import PySparkTypeError
        from pyspark.sql.pandas.types import from_arrow_type

        try:
            return from_arrow_type(self.arrow_type, prefer_timestamp_ntz=True)
        except PySparkTypeError as error:
            raise InvalidSchemaError(
                f"Spark has no type for values of the schema, {self.arrow_type}: {error}.",
                fix="read with a reader schema without the field of that type: schema='…'.",
            ) from error

    def decoding(self, *, is_key: bool = False) -> Decoding:
        """Returns how to decode a column, with this schema as the reader schema.

        Args:
            is_key: whether the column has the keys of records; always if the schema is for keys.
        """
        ids = (self.schema_id, self.guid) if self.is_stored else ()
        known = tuple(each for each in ids if each is not None)
        if glue.is_glue(self.registry):
            naming = OF_GLUE
        else:
            header = None if id_location(self.registry) == PAYLOAD else self._header(is_key)
            naming = Naming(header, id_bytes(self.registry))
        return Decoding(self.registry, self.schema, self.message, self.arrow_type, known, naming)

    def encoding(self, *, is_key: bool = False) -> Encoding:
        """Returns how to encode a column.

        Args:
            is_key: as in `decoding`.

        Raises:
            InvalidOptionError: if the schema has no id, or no GUID for a header.
        """
        if self.schema_id is None:
            raise InvalidOptionError(
                "the schema to write with was given as text, without a subject under which it is registered.",
                fix="name the subject, for example with topic='flights', so that the schema has an id.",
            )
        if glue.is_glue(self.registry):
            return Encoding(
                self.schema_id, self.schema, self.message, glue_compression=glue.compression(self.registry)
            )
        if id_location(self.registry) != HEADER:
            return Encoding(self.schema_id, self.schema, self.message)
        if self.guid is None:
            raise InvalidOptionError(
                f"option {ID_LOCATION!r} of the schema registry is {HEADER!r}, but the registry does not "
                f"tell the GUID of schema id {self.schema_id}.",
                fix=f"leave out {ID_LOCATION!r}; or use a registry that has GUIDs, such as that of Confluent "
                "Platform 8 or Confluent Cloud.",
            )
        return Encoding(self.guid, self.schema, self.message, self._header(is_key))

    def _header(self, is_key: bool) -> str:
        return KEY_HEADER if is_key or self.is_key else VALUE_HEADER


def registry_schema(
    registry: Registry,
    *,
    topic: str | None = None,
    record: str | None = None,
    subject: str | None = None,
    is_key: bool = False,
    version: int | None = None,
    schema_id: int | str | UUID | None = None,
    schema: str | StructType | None = None,
    schema_type: str = "AVRO",
    message: str | None = None,
    register: bool = False,
) -> RegistrySchema:
    """Returns the schema with which a query reads or writes records.

    The subject follows from what is given, like Confluent's strategies: ``topic`` alone is TopicNameStrategy
    (``flights-value``), ``record`` alone RecordNameStrategy, both together TopicRecordNameStrategy. The
    schema is the latest version of the subject, unless ``version``, ``schema_id`` or ``schema`` is given. It
    is looked up now and stays the same until the query is started again.

    Args:
        registry: URL of the registry (several are separated by commas; ``glue://`` and a name for AWS
            Glue's), or options of its client such as ``{"url": …, "basic.auth.user.info": …}``.
        topic: name of the topic.
        record: full name of the record or message type.
        subject: name of the subject, instead of ``topic`` and ``record``.
        is_key: whether the column is the key of the record, for TopicNameStrategy, and for the header that
            may name the schema.
        version: version of the subject.
        schema_id: id of the schema, or its GUID; for AWS Glue, the UUID of a version.
        schema: the schema itself, as text, or as a Spark type from which it is derived. To write with it, it
            must be registered under the subject, or ``register`` be set.
        schema_type: the format of ``schema``: AVRO, PROTOBUF or JSON.
        message: full name of the message type in a Protobuf schema; by default its first.
        register: registers ``schema`` under the subject if it is not there yet.

    Raises:
        InvalidOptionError: if the arguments contradict each other.
        InvalidSchemaError: if the schema is malformed, or Spark has no type for its values.
        SchemaNotFoundError: if the registry has no such schema.
        RegistryUnavailableError: if it does not answer.
    """
    options = {"url": registry} if isinstance(registry, str) else dict(registry)
    if subject is not None and (topic is not None or record is not None):
        raise InvalidOptionError(
            f"subject is {subject!r}, and topic or record is given too; a subject follows from those.",
            fix="give either subject, or topic and record.",
        )
    named_in = glue.schema_name if glue.is_glue(options) else subject_name
    name = subject if subject is not None else named_in(topic=topic, record=record, is_key=is_key)
    if name is not None and name.startswith(":."):
        context = name[1:].partition(":")[0]
        raise InvalidOptionError(
            f"the subject is {name!r}, which names the context {context!r} of the registry; ids in records "
            "do not say to which context they belong.",
            fix=f"give the name without the context, and a URL that ends in /contexts/{context}.",
        )
    given = {"version": version, "schema_id": schema_id, "schema": schema}
    named = [each for each, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidOptionError(
            f"{' and '.join(named)} are given; expected at most one of them.", fix=f"remove {named[0]}."
        )
    if register and (schema is None or name is None):
        raise InvalidOptionError(
            "register is set, but there is no schema, or no subject to register it under.",
            fix="give schema and a subject, for example topic='flights'.",
        )
    catalog = Catalog(options)
    stored: StoredSchema | None = None
    own_id: SchemaId | None = None
    if schema is not None:
        kind = codec.schema_format(schema_type)
        record_name = record or message or re.sub(r"\W", "_", name or "record")
        text = schema if isinstance(schema, str) else _derived(schema, kind, record_name)
        found = Schema(kind, text)
        if name is not None:
            stored = catalog.registered(name, found, register=register)
    elif schema_id is not None:
        own_id = _given_id(schema_id, is_number=not glue.is_glue(options))
        found = catalog.of_id(own_id)
    elif name is not None:
        stored, found = catalog.of_version(name, version)
    else:
        raise InvalidOptionError(
            "no schema is named.",
            fix="give topic, record or subject for a subject's latest version, or schema_id, or schema.",
        )
    guid = own_id if isinstance(own_id, UUID) else None
    if stored is not None:
        own_id, guid = stored.schema_id, stored.guid
    elif isinstance(own_id, int) and id_location(options) == HEADER:
        guid = catalog.guid_of(own_id)
    selected = RegistrySchema(options, found, own_id, message, schema is None, guid, is_key)
    _ = selected.spark_type  # fails now, and not in a task
    return selected


def subject_name(*, topic: str | None, record: str | None, is_key: bool) -> str | None:
    """Returns the subject that follows from arguments of `registry_schema`; None if none does."""
    if topic is not None and record is not None:
        return f"{topic}-{record}"
    if topic is not None:
        return f"{topic}-{'key' if is_key else 'value'}"
    return record


def _given_id(given: object, *, is_number: bool) -> SchemaId:
    """Returns the id that a user has given.

    Args:
        given: a number, or a UUID as such or as text.
        is_number: whether the registry has numbers, too.

    Raises:
        InvalidOptionError: if it is no id.
    """
    if is_number and type(given) is int:
        return given
    try:
        return given if isinstance(given, UUID) else UUID(str(given))
    except ValueError as error:
        kind = "a number or a GUID" if is_number else "the UUID of a schema's version in AWS Glue"
        raise InvalidOptionError(
            f"schema_id is {given!r}; expected {kind}.", fix="copy it from the registry."
        ) from error


def _derived(schema: StructType, kind: SchemaFormat, name: str) -> str:
    """Returns the text of a schema in which rows of a Spark type can be written."""
    return codec.schema_for(pa.struct(list(arrow_schema(schema))), kind, name).text


# -- columns of Spark ----------------------------------------------------------------------------

Mode = Literal["fail", "permissive"]

#: Fields of what the permissive mode returns.
VALUE, ERROR = "value", "error"


def from_registry(
    column: Column | str,
    registry: Registry | RegistrySchema,
    *,
    headers: Column | str | None = None,
    mode: Mode = "fail",
    located: bool = True,
    **schema: Any,
) -> Column:
    """Returns a column with the decoded messages of a column of bytes.

    The id in each message names its writer schema, which is read from the registry once for each process. The
    result has the type of the *reader schema*, which the other arguments choose; writer schemas may change
    while the query runs, as long as they are compatible with it::

        frame.select("key", from_registry("value", "http://registry:8081", topic="flights").alias("flight"))

    Args:
        column: the messages. Null stays null.
        registry: URL or options of the registry, or what `registry_schema` returned.
        headers: the column ``headers`` of the source, which it has with ``includeHeaders=true``. If a record
            has the header ``__value_schema_id`` (of a key: ``__key_schema_id``), this names its schema, and
            else the bytes in front of the payload. None if no headers do. For keys, name the column "key", or
            set ``is_key=True``.
        mode: what an undecodable message does: "fail" makes the query fail; "permissive" makes the column a
            struct of ``value`` and ``error``, of which one is null. See `undecodable_record`.
        located: whether the error of the mode "fail" names topic, partition and offset, from the columns of
            the source. Set False if the frame does not have these columns any more.
        schema: arguments of `registry_schema`.

    Raises:
        InvalidOptionError, InvalidSchemaError, SchemaNotFoundError, RegistryUnavailableError: as
            `registry_schema`, or if this version of PySpark has no Arrow UDFs.
    """
    selected = _selected(registry, schema)
    decoding = selected.decoding(is_key=column == KEY if isinstance(column, str) else False)

    def decode(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        for messages in batches:
            yield from map(_with_errors, decoding.slices(messages))

    def decode_both(batches: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        for messages, own in batches:
            yield from map(_with_errors, decoding.slices(messages, own))

    if headers is None:
        return _column(decode, [column], selected.spark_type, mode, "decoded", located)
    return _column(decode_both, [column, headers], selected.spark_type, mode, "decoded", located)


def to_registry(
    column: Column | str,
    registry: Registry | RegistrySchema,
    *,
    mode: Mode = "fail",
    located: bool = False,
    **schema: Any,
) -> Column:
    """Returns a column of messages with magic byte and schema id, encoded from a column of values.

    The schema is chosen when the column is made, and only then the registry is called::

        late = to_registry(struct("flight", "delay"), "http://registry:8081", topic="late")
        rows.select(late.alias("value"))

    If the registry's option ``schema.id.location`` is ``header``, the result is a struct of ``value`` (of
    ``key`` with ``is_key=True``), which is the payload alone, and of ``headers``, which name its schema::

        rows.select(late.alias("late")).select("late.*")

    Args:
        column: the values; a struct for a record. Null stays null.
        registry: URL or options of the registry, or what `registry_schema` returned.
        mode: what a value does that does not fit the schema: as in `from_registry`.
        located: whether the error of the mode "fail" names topic, partition and offset, from columns of the
            frame with these names.
        schema: arguments of `registry_schema`. With ``schema`` and ``register=True``, the schema is
            registered first.

    Raises:
        InvalidOptionError, InvalidSchemaError, SchemaNotFoundError, RegistryUnavailableError: as
            `registry_schema`, or if this version of PySpark has no Arrow UDFs.
    """
    selected = _selected(registry, schema)
    encoding = selected.encoding()

    def encode(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        for values in batches:
            yield from map(_with_errors, encoding.slices(values))

    if encoding.header is None:
        return _column(encode, [column], BinaryType(), mode, "encoded", located)
    name, header = encoding.name, encoding.header

    def encode_with_header(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        for values in batches:
            for made in encoding.slices(values):
                is_present = made.values.is_valid().to_numpy(zero_copy_only=False)
                both = [made.values, headers_naming(header, name, is_present)]
                record = pa.StructArray.from_arrays(both, type_.names, mask=pa.array(~is_present))
                yield _with_errors(Converted(record, made.errors))

    type_ = StructType(
        [StructField(KEY if selected.is_key else VALUE, BinaryType()), StructField(HEADERS, HEADERS_TYPE)]
    )
    return _column(encode_with_header, [column], type_, mode, "encoded", located)


def undecodable_record(*columns: str) -> Column:
    """Returns the column ``kafka_eos_invalid``, which marks rows that could not be decoded or encoded.

    With the sink's option ``onInvalidRecord``, they become dead letters in the transaction of their batch. As
    with `invalid_record`, the frame must still have the source's columns ``topic``, ``partition`` and
    ``offset``.

    Args:
        columns: names of columns that `from_registry` or `to_registry` made in the mode "permissive".
    """
    from pyspark.sql import functions as f

    if not columns:
        raise InvalidOptionError(
            "undecodable_record got no column.", fix="name the columns that from_registry returned."
        )
    error = f.coalesce(*(f.col(f"{each}.{ERROR}") for each in columns))
    return invalid_record(error.isNotNull(), error, UNDECODABLE)


def _selected(registry: Registry | RegistrySchema, schema: dict[str, Any]) -> RegistrySchema:
    if not isinstance(registry, RegistrySchema):
        return registry_schema(registry, **schema)
    if schema:
        raise InvalidOptionError(
            f"{', '.join(schema)} is given together with a schema that registry_schema returned.",
            fix="give it to registry_schema.",
        )
    return registry


def _column(
    function: Callable[[Iterator[Any]], Iterator[pa.Array]],
    columns: list[Column | str],
    type_: DataType,
    mode: str,
    done: str,
    located: bool,
) -> Column:
    from pyspark.sql import functions as f

    if mode not in ("fail", "permissive"):
        raise InvalidOptionError(
            f"mode is {mode!r}; expected 'fail' or 'permissive'.",
            fix="leave it out to fail on bad records.",
        )
    arrow_udf = getattr(f, "arrow_udf", None)
    if arrow_udf is None:
        import pyspark

        raise InvalidOptionError(
            f"from_registry and to_registry need PySpark 4.1, which has Arrow UDFs; this is "
            f"{pyspark.__version__}.",
            fix="upgrade PySpark, or decode with map_in_read(…, decode=…), which works on PySpark 4.0 too.",
        )
    returned = StructType([StructField(VALUE, type_), StructField(ERROR, StringType())])
    # The function has iterators, because one array of Spark may become several when it is decoded. Spark
    # learns that from the type hints.
    given = (f.col(each) if isinstance(each, str) else each for each in columns)
    result: Column = arrow_udf(function, returned)(*given)
    if mode == "permissive":
        return result
    # The JVM raises the error, and only for rows whose value is used: Spark calls Python functions for all
    # rows, also where they are in a branch of CASE WHEN that the row does not take.
    message = f.concat(
        f.lit(f"[{InvalidRecordError.condition}] the "),
        record_place() if located else f.lit("record"),
        f.lit(f" cannot be {done}: "),
        result[ERROR],
        f.lit(". Fix: repair the producer or the schema; mode='permissive' returns the error instead."),
    )
    return f.when(result[ERROR].isNotNull(), f.raise_error(message)).otherwise(result[VALUE])


def _with_errors(converted: Converted) -> pa.Array:
    """Returns the struct of value and error of each row."""
    rows = len(converted.values)
    if not converted.errors:
        errors = pa.nulls(rows, pa.string())
    else:
        texts: list[str | None] = [None] * rows
        for row, text in converted.errors.items():
            texts[row] = text
        errors = pa.array(texts, pa.string())
    return pa.StructArray.from_arrays([converted.values, errors], [VALUE, ERROR])
