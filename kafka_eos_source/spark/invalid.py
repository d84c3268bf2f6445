"""`invalid_record` and `record_origin`: columns that tell the sink about rows that cannot become records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafka_eos_source.spark.schema import INVALID, ORIGIN, ORIGIN_TYPE

if TYPE_CHECKING:
    from pyspark.sql import Column


def invalid_record(condition: Column | str, message: Column | str, error: str = "InvalidRecord") -> Column:
    """Returns the column ``kafka_eos_invalid``, which marks rows for the option ``onInvalidRecord``.

    The column also names where the row was read, so the frame must still have the source's columns ``topic``,
    ``partition``, ``offset`` and ``timestamp``. Key and value of a marked row must be those of the record
    that was read, because ``kafka-eos dead-letters replay`` sends them to that topic again::

        frame.select("key", "value", invalid_record("parsed IS NULL", "the value is not JSON"))

    Args:
        condition: which rows are invalid, as a column or as SQL. Null counts as false.
        message: why, as text, or as a column of strings.
        error: class of the error, for people who look for dead letters of one kind.
    """
    from pyspark.sql import functions as f

    when = f.expr(condition) if isinstance(condition, str) else condition
    why = f.lit(message) if isinstance(message, str) else message
    mark = f.struct(
        f.lit(error).alias("error"),
        why.cast("string").alias("message"),
        *(f.col(name) for name in ORIGIN_TYPE.names),
        f.lit(None).cast("string").alias("holds"),  # the record that was read
    )
    return f.when(when, mark).alias(INVALID)


def record_origin() -> Column:
    """Returns the column ``kafka_eos_origin``: where the record was read from which the row is made.

    If a row breaks a rule of the sink and becomes a dead letter, the letter then names that record, as that
    of a row which `invalid_record` marks does. Add the column where the frame still has the source's columns
    ``topic``, ``partition``, ``offset`` and ``timestamp``, and keep it::

        frame.select("key", upper("value").alias("value"), record_origin())
    """
    from pyspark.sql import functions as f

    return f.struct(*(f.col(name) for name in ORIGIN_TYPE.names)).alias(ORIGIN)
