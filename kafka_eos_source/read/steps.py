"""Query steps that run inside the read tasks: an aggregation's first step, or a user's function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import pyarrow as pa
from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.in_read.columns import ReadColumns
from kafka_eos_source.option_values import invalid
from kafka_eos_source.options.option import STEPS_IN_READ


class Step(Protocol):
    """Turns the source's batches of one task into the batches that Spark gets.

    Attributes:
        columns: columns of the source to read.
        schema: schema of the result.
    """

    @property
    def columns(self) -> ReadColumns: ...
    @property
    def schema(self) -> StructType: ...
    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]: ...


def step(option: str, written: str) -> Step:
    """Returns the step that an option carries.

    Args:
        option: name of the option.
        written: its value.

    Raises:
        InvalidOptionError: if the value is malformed.
    """
    try:  # imports only the step that is used, because most reads have none
        if option == "map.in.read":
            from kafka_eos_source.in_read.mapping import MapInRead

            return MapInRead.from_json(written)
        from kafka_eos_source.state.vector.in_read import AggregateInRead

        return AggregateInRead.from_json(written)
    except (ValueError, TypeError, KeyError, InvalidSchemaError) as error:
        raise invalid(option, written, f"the value that {STEPS_IN_READ[option]} sets") from error
