"""Changes to the schema of a state variable: which are allowed, and how older rows are read.

The rules are those of Spark's Avro-encoded state, without the changes that lose data silently. Fields are
matched by name. A new schema may add fields (null in old rows), drop fields, reorder them, and widen their
types. A schema that adds *and* drops fields is refused: it looks like a rename, which would lose the values.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from pyspark.sql import types as t

from kafka_eos_source.errors import StatefulProcessorError
from kafka_eos_source.state.processor.codec import StructCodec, Value

_INTS: tuple[type[t.DataType], ...] = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
_WIDER: dict[type[t.DataType], tuple[type[t.DataType], ...]] = {
    t.ByteType: (*_INTS[1:], t.FloatType, t.DoubleType),
    t.ShortType: (*_INTS[2:], t.FloatType, t.DoubleType),
    t.IntegerType: (t.LongType, t.DoubleType),
    t.FloatType: (t.DoubleType,),
}


def shape(type_: t.DataType) -> str:
    """Returns a type as text, without what does not affect the encoding (nullability, comments)."""
    return type_.simpleString()


def schema_problem(old: t.StructType, new: t.StructType) -> str | None:
    """Returns why rows of ``old`` cannot be read as rows of ``new``; None if they can."""
    was = {field.name: field.dataType for field in old.fields}
    now = {field.name: field.dataType for field in new.fields}
    dropped = [name for name in was if name not in now]
    added = [name for name in now if name not in was]
    if dropped and added:
        return f"{', '.join(dropped)} was dropped and {', '.join(added)} added, which looks like a rename"
    for name in was.keys() & now.keys():
        if not _widens(was[name], now[name]):
            return f"{name} was {shape(was[name])} and is now {shape(now[name])}"
    return None


def row_converter(old: t.StructType, new: t.StructType) -> Callable[[Value], Value]:
    """Returns a function that converts rows of ``old`` to ``new``. Requires that `problem` is None."""
    position = {name: i for i, name in enumerate(old.names)}
    sources = [position.get(name, -1) for name in new.names]
    floats = [isinstance(field.dataType, (t.FloatType, t.DoubleType)) for field in new.fields]

    def convert(row: Value) -> Value:
        extended = tuple(chain(row, (None,)))  # position -1, of a new field, is this null
        return tuple(
            float(extended[i]) if is_float and extended[i] is not None else extended[i]
            for i, is_float in zip(sources, floats, strict=True)
        )

    return convert


class VersionedCodec:
    """Writes rows in the newest schema; reads rows of all schemas and converts them to the newest.

    Args:
        schemas: all schemas, oldest first; the first byte of a row is the position of its schema.

    Attributes:
        encode: encodes a row, see `StructCodec.encode`.
        decode: decodes a row and converts it to the newest schema, see `StructCodec.decode`.
        names: names of the fields in the newest schema.
    """

    def __init__(self, schemas: tuple[t.StructType, ...]) -> None:
        newest = StructCodec(schemas[-1], len(schemas) - 1)
        self.names = newest.names
        self.encode: Callable[[Value], bytes] = newest.encode
        self.decode: Callable[[bytes], Value] = self._decode if len(schemas) > 1 else newest.decode
        self._newest = newest
        self._version = len(schemas) - 1
        self._older = [
            (StructCodec(schema, version), converter(schema, schemas[-1]))
            for version, schema in enumerate(schemas[:-1])
        ]

    def _decode(self, data: bytes) -> Value:
        version = data[0] if data else -1
        if version == self._version:
            return self._newest.decode(data)
        if 0 <= version < self._version:
            codec, convert = self._older[version]
            return convert(codec.decode(data))
        raise StatefulProcessorError(
            f"STATE_STORE_VALUE: {data[:64]!r} has schema version {version}, expected 0 to {self._version}.",
            fix="run the newest version of the processor; if this is the newest, the state is damaged.",
        )


def _widens(old: t.DataType, new: t.DataType) -> bool:
    if isinstance(old, t.DecimalType) and isinstance(new, t.DecimalType):
        return old.scale == new.scale and old.precision <= new.precision
    return shape(old) == shape(new) or type(new) in _WIDER.get(type(old), ())
