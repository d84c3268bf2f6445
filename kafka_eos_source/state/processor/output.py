"""Converts what a processor returns, rows or pandas frames, to Arrow batches of the output schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import Row

from kafka_eos_source.errors import InvalidSchemaError, StatefulProcessorError
from kafka_eos_source.state.processor.rows import RowStyle

if TYPE_CHECKING:
    import pandas as pd

#: Approximate number of rows in an output batch.
BATCH_ROWS = 16_384


class Output:
    """Collects the results of many keys until they fill a batch.

    Args:
        schema: output schema.
        style: whether the processor returns rows or pandas frames.
        timezone: time zone of naive timestamps in pandas frames: that of the Spark session. Naive timestamps
            in rows are UTC, as in Spark.
    """

    def __init__(self, schema: pa.Schema, style: RowStyle, timezone: str) -> None:
        self._schema = schema
        self._names: list[str] = schema.names
        self._style = style
        self._timezone = timezone
        self._fields: Any = ()
        self._parts: list[Any] = []
        self._rows = 0

    @property
    def is_full(self) -> bool:
        """Whether the results fill a batch, so that `take` should be called."""
        return self._rows >= BATCH_ROWS

    def add(self, results: Iterable[Any] | None, method: str) -> None:
        """Adds the results of one call of the processor.

        Args:
            results: what the processor returned.
            method: name of the processor's method, for errors.

        Raises:
            StatefulProcessorError: if the processor returned None, or results of another style.
        """
        if results is None:
            raise StatefulProcessorError(
                f"{method} returned None, expected an iterator of {self._expected}.",
                fix="yield the results; to return nothing, return iter([]).",
            )
        if self._style == "rows":
            self._parts.extend(results)
            self._rows = len(self._parts)
            return
        for frame in results:
            self._parts.append(self._in_order(frame, method))
            self._rows += len(frame)

    def take(self) -> Iterator[pa.RecordBatch]:
        """Yields the results since the last call as one batch, if there are any.

        Raises:
            StatefulProcessorError: if a result does not have the style.
            InvalidSchemaError: if values do not match the output schema.
        """
        parts, rows, self._parts, self._rows = self._parts, self._rows, [], 0
        if rows:
            yield self._from_rows(parts) if self._style == "rows" else self._from_frames(parts)

    @property
    def _expected(self) -> str:
        return "pandas.DataFrame" if self._style == "pandas" else "pyspark.sql.Row"

    def _from_rows(self, rows: list[Any]) -> pa.RecordBatch:
        values = [row if self._is_in_order(row) else self._by_name(row) for row in rows]
        columns = []
        for field, column in zip(self._schema, zip(*values, strict=True), strict=True):
            nested = _is_nested(field.type)
            columns.append(
                _output_array([_nested(value, field.type) for value in column] if nested else column, field)
            )
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _is_in_order(self, row: Any) -> bool:
        fields = getattr(row, "__fields__", None)
        if fields is not self._fields:
            if fields != self._names and (fields is None or list(fields) != self._names):
                return False
            self._fields = fields  # all rows made by one Row(*names) share this object
        return True

    def _by_name(self, row: Any) -> tuple[Any, ...]:
        """Returns the values of a row in schema order. Missing fields are null, as in Spark."""
        fields = getattr(row, "__fields__", None)
        if isinstance(row, Row) and fields is not None:
            by_name = dict(zip(fields, row, strict=True))
            return tuple(by_name.get(name) for name in self._names)
        if isinstance(row, tuple) and len(row) == len(self._names):
            return row
        raise StatefulProcessorError(
            f"the processor returned {type(row).__name__} {row!r}, expected a {self._expected} with fields "
            f"{self._names}.",
            fix="return rows with the field names of the output schema.",
        )

    def _in_order(self, frame: Any, method: str) -> pd.DataFrame:
        """Returns the frame with the output columns, matched by name; by position if they have no names."""
        import pandas as pd

        if not isinstance(frame, pd.DataFrame):
            raise StatefulProcessorError(
                f"{method} returned {type(frame).__name__}, expected an iterator of {self._expected}.",
                fix="yield pandas frames, or set style='rows' on the operator.",
            )
        if any(isinstance(name, str) for name in frame.columns):
            missing = [name for name in self._names if name not in frame.columns]
            if missing:
                raise InvalidSchemaError(
                    f"{method} returned a frame without {', '.join(missing)}; it has {list(frame.columns)}.",
                    fix="name the columns as in the output schema.",
                )
            return frame[self._names]
        if len(frame.columns) != len(self._names):
            raise InvalidSchemaError(
                f"{method} returned a frame of {len(frame.columns)} columns, expected {len(self._names)}.",
                fix="return the columns of the output schema.",
            )
        return frame.set_axis(self._names, axis="columns")

    def _from_frames(self, frames: list[pd.DataFrame]) -> pa.RecordBatch:
        import pandas as pd

        whole = pd.concat([frame for frame in frames if len(frame)], ignore_index=True)
        columns = []
        for field in self._schema:
            column = whole[field.name]
            if pa.types.is_timestamp(field.type) and field.type.tz and column.dtype.kind == "M":
                column = column.dt.tz_localize(self._timezone)
            if _is_nested(field.type):
                column = [_nested(value, field.type) for value in column]
            columns.append(_output_array(column, field))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _output_array(values: Any, field: pa.Field) -> pa.Array:
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InvalidSchemaError(
            f"output column {field.name!r} is {field.type}, but the processor returned something else: "
            f"{error}.",
            fix="return values of the types in the output schema.",
        ) from error


def _is_nested(type_: pa.DataType) -> bool:
    return bool(pa.types.is_nested(type_))


def _nested(value: Any, type_: pa.DataType) -> Any:
    """Returns a nested value in the form that Arrow accepts: structs as dicts, maps as pairs."""
    if value is None:
        return None
    if pa.types.is_struct(type_):
        names = [type_.field(i).name for i in range(type_.num_fields)]
        if isinstance(value, tuple):
            value = dict(zip(getattr(value, "__fields__", names), value, strict=True))
        return {name: _nested(value.get(name), type_.field(i).type) for i, name in enumerate(names)}
    if pa.types.is_map(type_):
        pairs = value.items() if isinstance(value, dict) else value
        return [(_nested(key, type_.key_type), _nested(item, type_.item_type)) for key, item in pairs]
    if pa.types.is_list(type_):
        return [_nested(item, type_.value_type) for item in value]
    return value
