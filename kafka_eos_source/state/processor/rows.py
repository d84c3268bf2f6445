"""Converts rows: input for processors, their output to Arrow, and the entries of a store for readers.

Grouping holds the rows in memory twice: in order of arrival and in order of their keys. `rows_by_key` divides
those of a large micro-batch first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import Row

from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError, StatefulProcessorError
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.encoding.layout import KeyCodec
from kafka_eos_source.state.processor.codec import StructCodec, Value, VersionedCodec, make_row
from kafka_eos_source.state.processor.registry import TIMERS, Registry, VariableInfo
from kafka_eos_source.state.processor.schema import arrow_schema
from kafka_eos_source.state.processor.variables import EXPIRY_BYTES, POSITION, WINDOW_KEYS, time_of

if TYPE_CHECKING:
    import pandas as pd

RowStyle = Literal["rows", "pandas"]
Key = tuple[Any, ...]

#: Number of rows that are converted to Python objects at a time; a key may have more.
SLICE_ROWS = 16_384


@dataclass(frozen=True)
class Groups:
    """Rows in order of their keys; the rows of a key are in order of arrival.

    Attributes:
        table: the rows.
        group_keys: the distinct encoded keys, in order of arrival of their first rows.
        keys: the same keys as the processor receives them.
        edges: the rows of key ``i`` are ``edges[i]`` to ``edges[i + 1]`` (exclusive).
    """

    table: pa.Table
    group_keys: pa.BinaryArray
    keys: list[Key]
    edges: list[int]

    def windows(self) -> Iterator[tuple[int, int]]:
        """Yields the ranges of keys that form a window.

        A window has at most `WINDOW_KEYS` keys, and at most `SLICE_ROWS` rows unless it has a single key.
        """
        start, count = 0, len(self.keys)
        while start < count:
            end = int(np.searchsorted(self.edges, self.edges[start] + SLICE_ROWS, "right")) - 1
            end = min(max(end, start + 1), start + WINDOW_KEYS)
            yield start, end
            start = end


class KeyColumns:
    """The grouping columns of a shard: encodes the keys of rows, and decodes them for the processor.

    Args:
        schema: schema of the grouping columns.
        style: whether the processor takes rows or pandas frames.
    """

    def __init__(self, schema: pa.Schema, style: RowStyle) -> None:
        self._schema = schema
        self._style = style
        self.codec = KeyCodec(schema)

    def group(self, table: pa.Table) -> Groups:
        """Sorts the rows by key."""
        # The cast is needed because Spark may send another time zone, or strings with 64-bit offsets.
        columns = [_whole(table.column(field.name).cast(field.type)) for field in self._schema]
        encoded = self.codec.encode(columns).dictionary_encode()
        codes = encoded.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        counts = np.bincount(codes, minlength=len(encoded.dictionary))
        edges = np.concatenate([[0], np.cumsum(counts)])
        first = pa.array(order[edges[:-1]])
        keys = self._tuples([column.take(first) for column in columns])
        ordered = table if _is_sorted(codes) else table.take(pa.array(order))
        return Groups(ordered, encoded.dictionary, keys, edges.tolist())

    def keys(self, group_keys: pa.BinaryArray) -> list[Key]:
        """Returns encoded keys as the processor receives them."""
        return self._tuples(self.codec.decode(group_keys))

    def values(self, groups: Groups, start: int, end: int) -> Iterator[Iterator[Any]]:
        """Yields the rows of each key from ``start`` to ``end`` (exclusive), as the processor takes them."""
        first, last = groups.edges[start], groups.edges[end]
        if end - start == 1 and last - first > SLICE_ROWS:
            yield self._lazily(groups.table.slice(first, last - first))
            return
        part = groups.table.slice(first, last - first)
        edges = [edge - first for edge in groups.edges[start : end + 1]]
        if self._style == "pandas":
            frame = to_pandas(part)
            yield from (iter([_cut(frame, low, high)]) for low, high in pairwise(edges))
        else:
            rows = to_rows(part)
            yield from (iter(rows[low:high]) for low, high in pairwise(edges))

    def _lazily(self, table: pa.Table) -> Iterator[Any]:
        for start in range(0, table.num_rows, SLICE_ROWS):
            part = table.slice(start, SLICE_ROWS)
            if self._style == "pandas":
                yield to_pandas(part)
            else:
                yield from to_rows(part)

    def _tuples(self, columns: Sequence[pa.Array]) -> list[Key]:
        if self._style == "pandas":
            table = pa.Table.from_arrays(list(columns), names=[str(i) for i in range(len(columns))])
            return list(to_pandas(table).itertuples(index=False, name=None))
        return list(zip(*map(_objects, self._schema.names, columns), strict=True))


def to_rows(table: pa.Table) -> list[Any]:
    """Returns each row as a `Row` with all columns, converted by Arrow's ``as_py`` as in Spark's worker.

    Raises:
        InvalidRecordError: if Python has no object for a value, such as a time after the year 9999.
    """
    names = table.column_names
    return [make_row(names, values) for values in zip(*map(_objects, names, table.columns), strict=True)]


def _objects(name: str, column: pa.Array | pa.ChunkedArray) -> list[Any]:
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except (OverflowError, ValueError) as error:
        raise InvalidRecordError(
            f"column {name!r} ({column.type}) has a value for which Python has no object ({error}), such as "
            "a time after the year 9999, which Spark can hold.",
            fix="before the operator, filter such rows out or set the value to null. The timestamp of a "
            "record is such a time if its producer sets microseconds.",
        ) from error


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """Returns a pandas frame of all columns. Timestamps are naive, in the time zone of their column."""
    frame = table.to_pandas(date_as_object=True)
    for name, field in zip(frame.columns, table.schema, strict=True):
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            frame[name] = frame[name].dt.tz_localize(None)
    return frame


def _cut(whole: pd.DataFrame, low: int, high: int) -> pd.DataFrame:
    part = whole.iloc[low:high].copy()  # the processor may change its frame
    part.index = range(high - low)
    return part


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def _is_sorted(codes: NDArray[Any]) -> bool:
    return bool((codes[1:] >= codes[:-1]).all())


# -- what a processor returns

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


# -- the entries of a store, for readers that do not run the processor
#
# The store and its changelog have the same keys and values, so this works for both.

TIMER_NAME = "$timers"
_BATCH = 4096


class StateEntry(NamedTuple):
    """One row of a variable, or one timer.

    Attributes:
        variable: name of the variable; `TIMER_NAME` for a timer.
        key: values of the grouping columns.
        map_key: key in a map state; None otherwise.
        position: position in a list state, increasing in list order; None otherwise.
        value: the row; () for a timer.
        expiry_ms: when the row expires or the timer fires, in ms since the epoch; None for never.
    """

    variable: str
    key: tuple[Any, ...]
    map_key: Value | None
    position: int | None
    value: Value
    expiry_ms: int | None


def read_entries(registry: Registry, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[StateEntry]:
    """Yields the rows and timers among these keys and values, in their order, and skips all other entries.

    This includes expired rows that are not removed yet: compare ``expiry_ms`` with the time of the batch.

    Raises:
        StatefulProcessorError: if a value is not a row of its variable.
    """
    readers = {variable.table: _Reader(variable) for variable in registry.variables}
    columns = KeyColumns(arrow_schema(registry.key), "rows")
    pairs = iter(pairs)
    while batch := list(islice(pairs, _BATCH)):
        entries = [
            (entry, value)
            for entry, value in ((layout.split(key), value) for key, value in batch if key[0])
            if entry.table == TIMERS or (entry.table in readers and readers[entry.table].is_row(entry))
        ]
        keys = columns.keys(pa.array([entry.group_key for entry, _ in entries], pa.binary()))
        for key, (entry, value) in zip(keys, entries, strict=True):
            if entry.table == TIMERS:
                yield StateEntry(TIMER_NAME, key, None, None, (), time_of(entry.rest))
            else:
                yield readers[entry.table].read(key, entry, value)


class _Reader:
    """Decodes the entries of one variable."""

    def __init__(self, variable: VariableInfo) -> None:
        self._variable = variable
        self._codec = VersionedCodec(variable.schemas)
        self._map_keys = None if variable.map_key is None else StructCodec(variable.map_key)

    def is_row(self, entry: layout.Entry) -> bool:
        """Whether the entry is a row, and not the head of a list."""
        return self._variable.kind != "list" or bool(entry.rest)

    def read(self, key: tuple[Any, ...], entry: layout.Entry, value: bytes) -> StateEntry:
        expiry_ms = None
        if self._variable.ttl:
            expiry_ms = time_of(value[:EXPIRY_BYTES])
            value = value[EXPIRY_BYTES:]
        map_key = None if self._map_keys is None else self._map_keys.decode(entry.rest)
        position = POSITION.unpack(entry.rest)[0] if self._variable.kind == "list" else None
        return StateEntry(self._variable.name, key, map_key, position, self._codec.decode(value), expiry_ms)
