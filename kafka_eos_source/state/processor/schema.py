"""Schemas of Spark as Arrow schemas, the same way for every version of PySpark; and a parser of DDL."""

from __future__ import annotations

import difflib
import re

import pyarrow as pa
from pyspark.sql import types as t

from kafka_eos_source.errors import InvalidSchemaError

_ARROW_TYPES: dict[type[t.DataType], pa.DataType] = {
    t.BooleanType: pa.bool_(),
    t.ByteType: pa.int8(),
    t.ShortType: pa.int16(),
    t.IntegerType: pa.int32(),
    t.LongType: pa.int64(),
    t.FloatType: pa.float32(),
    t.DoubleType: pa.float64(),
    t.StringType: pa.string(),
    t.CharType: pa.string(),
    t.VarcharType: pa.string(),
    t.BinaryType: pa.binary(),
    t.DateType: pa.date32(),
    t.TimestampNTZType: pa.timestamp("us"),
    t.DayTimeIntervalType: pa.duration("us"),
    t.NullType: pa.null(),
}


def arrow_schema(schema: t.StructType, timezone: str = "UTC") -> pa.Schema:
    """Returns the Arrow schema of a frame with this Spark schema.

    Args:
        schema: Spark schema of the frame.
        timezone: time zone of timestamps, which have microseconds.

    Raises:
        InvalidSchemaError: if the operator does not support the type of a column.
    """
    return pa.schema([_field(field, timezone) for field in schema.fields])


def _field(field: t.StructField, timezone: str) -> pa.Field:
    return pa.field(field.name, _type(field.dataType, field.name, timezone), field.nullable)


def _type(type_: t.DataType, name: str, timezone: str) -> pa.DataType:
    if isinstance(type_, t.TimestampType):
        return pa.timestamp("us", timezone)
    if type(type_) in _ARROW_TYPES:
        return _ARROW_TYPES[type(type_)]
    if isinstance(type_, t.DecimalType):
        return pa.decimal128(type_.precision, type_.scale)
    if isinstance(type_, t.StructType):
        return pa.struct([_field(field, timezone) for field in type_.fields])
    if isinstance(type_, t.ArrayType):
        return pa.list_(_type(type_.elementType, name, timezone))
    if isinstance(type_, t.MapType):
        return pa.map_(_type(type_.keyType, name, timezone), _type(type_.valueType, name, timezone))
    raise InvalidSchemaError(
        f"column {name!r} has type {type_.simpleString()}, which stateful operators do not support.",
        fix="cast the column to a supported type before the operator, or in the output schema.",
    )


# -- DDL, such as "count LONG, tags ARRAY<STRING>", without a JVM
#
# A processor's `init` runs in Python workers, which have no DDL parser: Spark's own handle asks the JVM. This
# parser supports the types that state can hold (`codec`), in Spark's grammar: names may be in backticks, a
# colon may separate name and type, and COMMENT '…' and COLLATE are ignored.

_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)*`)|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(\w+)|(.))", re.DOTALL)

_DDL_TYPES: dict[str, t.DataType] = {
    "BOOLEAN": t.BooleanType(),
    "BYTE": t.ByteType(),
    "TINYINT": t.ByteType(),
    "SHORT": t.ShortType(),
    "SMALLINT": t.ShortType(),
    "INT": t.IntegerType(),
    "INTEGER": t.IntegerType(),
    "LONG": t.LongType(),
    "BIGINT": t.LongType(),
    "FLOAT": t.FloatType(),
    "REAL": t.FloatType(),
    "DOUBLE": t.DoubleType(),
    "STRING": t.StringType(),
    "BINARY": t.BinaryType(),
    "DATE": t.DateType(),
    "TIMESTAMP": t.TimestampType(),
    "TIMESTAMP_LTZ": t.TimestampType(),
    "TIMESTAMP_NTZ": t.TimestampNTZType(),
}
_DECIMALS = ("DECIMAL", "DEC", "NUMERIC")
_INTERVAL_UNITS = ("DAY", "HOUR", "MINUTE", "SECOND")


def as_struct(schema: t.StructType | str, what: str) -> t.StructType:
    """Returns a schema that the user passed as a `StructType` or as DDL.

    Args:
        schema: the schema.
        what: describes the schema in errors, for example ``state variable 'n'``.

    Raises:
        InvalidSchemaError: if it is neither, or the DDL is invalid or has types that state cannot hold.
    """
    if isinstance(schema, t.StructType):
        return schema
    if not isinstance(schema, str):
        raise InvalidSchemaError(f"the schema of {what} is {schema!r}, expected a StructType or DDL.")
    return _Parser(schema, what).whole()


class _Parser:
    """A recursive descent parser of one schema."""

    def __init__(self, text: str, what: str) -> None:
        self._text = text
        self._what = what
        self._tokens = [m.group().strip() for m in _TOKEN.finditer(text.strip())]
        self._at = 0

    def whole(self) -> t.StructType:
        tokens = [token.upper() for token in self._tokens[:2]]
        if tokens == ["STRUCT", "<"]:  # as StructType.simpleString() writes it
            parsed = self._type()
            struct = parsed if isinstance(parsed, t.StructType) else t.StructType()
        else:
            struct = self._fields(end=None)
        if self._at < len(self._tokens):
            raise self._error(f"{self._tokens[self._at]!r} is unexpected")
        return struct

    def _fields(self, end: str | None) -> t.StructType:
        fields: list[t.StructField] = []
        if end is not None and self._peek() == end:
            self._at += 1
            return t.StructType(fields)
        while True:
            fields.append(self._field())
            token = self._next() if self._at < len(self._tokens) else None
            if token == end:
                return t.StructType(fields)
            if token != ",":
                raise self._error(f"{token!r} after field {fields[-1].name!r} is unexpected")

    def _field(self) -> t.StructField:
        name = self._next()
        if name.startswith("`"):
            name = name[1:-1].replace("``", "`")
        elif not re.fullmatch(r"\w+", name):
            raise self._error(f"{name!r} is not a field name")
        if self._peek() == ":":
            self._at += 1
        type_ = self._type()
        nullable = True
        if self._peek() == "NOT":
            self._at += 1
            self._expect("NULL")
            nullable = False
        if self._peek() == "COMMENT":
            self._at += 2
        return t.StructField(name, type_, nullable)

    def _type(self) -> t.DataType:
        name = self._next().upper()
        if name in _DDL_TYPES:
            if name == "STRING" and self._peek() == "COLLATE":
                self._at += 2
            return _DDL_TYPES[name]
        if name in _DECIMALS:
            sizes = self._sizes()
            return t.DecimalType(*sizes) if sizes else t.DecimalType()
        if name in ("CHAR", "VARCHAR"):
            self._sizes()
            return t.StringType()
        if name == "ARRAY":
            self._expect("<")
            element = self._type()
            self._expect(">")
            return t.ArrayType(element)
        if name == "MAP":
            self._expect("<")
            key = self._type()
            self._expect(",")
            value = self._type()
            self._expect(">")
            return t.MapType(key, value)
        if name == "STRUCT":
            self._expect("<")
            return self._fields(end=">")
        if name == "INTERVAL":
            return self._interval()
        known = [*_DDL_TYPES, *_DECIMALS, "VARCHAR", "ARRAY", "MAP", "STRUCT", "INTERVAL"]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
        raise self._error(f"{name!r} is not a type; {hint}")

    def _interval(self) -> t.DataType:
        start = self._unit()
        end = start
        if self._peek() == "TO":
            self._at += 1
            end = self._unit()
        return t.DayTimeIntervalType(start, end)

    def _unit(self) -> int:
        unit = self._next().upper()
        if unit not in _INTERVAL_UNITS:
            raise self._error(
                f"{unit!r} is not an interval unit, expected one of {', '.join(_INTERVAL_UNITS)}"
            )
        return _INTERVAL_UNITS.index(unit)

    def _sizes(self) -> list[int]:
        sizes: list[int] = []
        if self._peek() != "(":
            return sizes
        self._at += 1
        while True:
            size = self._next()
            if not size.isdigit():
                raise self._error(f"{size!r} is not a size")
            sizes.append(int(size))
            token = self._next()
            if token == ")":
                return sizes
            if token != ",":
                raise self._error(f"{token!r} after size {size!r} is unexpected")

    def _peek(self) -> str | None:
        return self._tokens[self._at].upper() if self._at < len(self._tokens) else None

    def _next(self) -> str:
        if self._at >= len(self._tokens):
            raise self._error("the schema is incomplete")
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, token: str) -> None:
        actual = self._next()
        if actual.upper() != token:
            raise self._error(f"expected {token!r}, not {actual!r}")

    def _error(self, problem: str) -> InvalidSchemaError:
        return InvalidSchemaError(
            f"the schema of {self._what} is {self._text!r}, which is not valid DDL: {problem}.",
            fix="write it as 'name TYPE, name TYPE', or pass a StructType.",
        )
