"""`from_registry` and `to_registry`: columns that decode and encode records with a schema registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from kafka_eos_source.errors import InvalidOptionError, InvalidRecordError
from kafka_eos_source.registry.codec import Converted
from kafka_eos_source.registry.selected import Registry, RegistrySchema, registry_schema
from kafka_eos_source.spark.schema import invalid_record

if TYPE_CHECKING:
    from pyspark.sql import Column

Mode = Literal["fail", "permissive"]

#: Fields of what the permissive mode returns.
VALUE, ERROR = "value", "error"
#: Class of the error of dead letters of records that could not be decoded or encoded.
UNDECODABLE = "UndecodableRecord"


def from_registry(
    column: Column | str,
    registry: Registry | RegistrySchema,
    *,
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
        column: the messages, with the magic byte and the schema id in front. Null stays null.
        registry: URL or options of the registry, or what `registry_schema` returned.
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
    decoding = selected.decoding()

    def decode(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        for messages in batches:
            yield from map(_with_errors, decoding.slices(messages))

    return _column(decode, column, selected.spark_type, mode, "decoded", located)


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
    encoding = _selected(registry, schema).encoding()

    def encode(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        for values in batches:
            yield from map(_with_errors, encoding.slices(values))

    return _column(encode, column, BinaryType(), mode, "encoded", located)


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
    function: Callable[[Iterator[pa.Array]], Iterator[pa.Array]],
    column: Column | str,
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
    result: Column = arrow_udf(function, returned)(f.col(column) if isinstance(column, str) else column)
    if mode == "permissive":
        return result
    # The JVM raises the error, and only for rows whose value is used: Spark calls Python functions for all
    # rows, also where they are in a branch of CASE WHEN that the row does not take.
    where = [f.lit("the record")]
    if located:
        for name in ("topic", "partition", "offset"):
            where += [f.lit(f" of {name} "), f.coalesce(f.col(name).cast("string"), f.lit("null"))]
    message = f.concat(
        f.lit(f"[{InvalidRecordError.condition}] "),
        *where,
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
