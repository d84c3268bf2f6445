"""Query steps that run inside the read tasks: a stateful operator or its first step, or a user's function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.in_read.step import ReadColumns
from kafka_eos_source.option_values import invalid
from kafka_eos_source.options.table import STEPS_IN_READ
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS

if TYPE_CHECKING:
    from kafka_eos_source.in_read.step import MapInRead
    from kafka_eos_source.state.operator.in_read import OperatorInRead


_MAP, _OPERATOR = "map.in.read", "operator.in.read"
_MALFORMED = (*SHAPE_ERRORS, InvalidSchemaError)


class StepInRead(Protocol):
    """A query step that runs in the tasks that read Kafka.

    Attributes:
        columns: columns of the source to read.
        schema: schema of the result.
    """

    @property
    def columns(self) -> ReadColumns: ...
    @property
    def schema(self) -> StructType: ...


class Step(StepInRead, Protocol):
    """Turns the source's batches of one task into the batches that Spark gets."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]: ...


def step(option: str, written: str) -> Step:
    """Returns the step that an option carries.

    Args:
        option: name of the option.
        written: its value.

    Raises:
        InvalidOptionError: if the value is malformed.
    """
    if option == _MAP:
        return map_step(written)
    try:  # imports only the step that is used, because most reads have none
        from kafka_eos_source.state.vector.in_read import AggregateInRead

        return AggregateInRead.from_json(written)
    except _MALFORMED as error:
        raise invalid(option, written, f"the value that {STEPS_IN_READ[option]} sets") from error


def operator_step(written: str) -> OperatorInRead:
    """Returns the operator that the option ``operator.in.read`` carries; raises as `step`."""
    from kafka_eos_source.state.operator.in_read import OperatorInRead

    try:
        return OperatorInRead.from_json(written)
    except _MALFORMED as error:
        raise invalid(_OPERATOR, written, f"the value that {STEPS_IN_READ[_OPERATOR]} sets") from error


def declared(option: str, written: str) -> StepInRead:
    """Returns the step that an option carries, for its columns and schema; raises as `step`."""
    return operator_step(written) if option == _OPERATOR else step(option, written)


def map_step(written: str) -> MapInRead:
    """Returns the step that the option ``map.in.read`` carries; raises as `step`."""
    from kafka_eos_source.in_read.step import MapInRead

    try:
        return MapInRead.from_json(written)
    except _MALFORMED as error:
        raise invalid(_MAP, written, f"the value that {STEPS_IN_READ[_MAP]} sets") from error
