"""Steps that a query leaves to its reads: which there are, and what a read must know of them."""

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
    """From batches of the source's rows, of one task, to batches of what Spark gets.

    Attributes:
        columns: of the source; no others are read.
        schema: of what Spark gets.
    """

    @property
    def columns(self) -> ReadColumns: ...
    @property
    def schema(self) -> StructType: ...
    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]: ...


def step(option: str, written: str) -> Step:
    """The step that an option has. Few reads have one: it is imported here.

    Raises:
        InvalidOptionError: it is not what is set there.
    """
    try:
        if option == "map.in.read":
            from kafka_eos_source.in_read.mapping import MapInRead

            return MapInRead.from_json(written)
        from kafka_eos_source.state.vector.in_read import AggregateInRead

        return AggregateInRead.from_json(written)
    except (ValueError, TypeError, KeyError, InvalidSchemaError) as error:
        raise invalid(option, written, f"what {STEPS_IN_READ[option]} sets there") from error
