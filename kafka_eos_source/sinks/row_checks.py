"""Rules for the rows of a frame that follow from the schema of a sink's table, checked by tasks.

A sink says its rules on the driver (`contract.TwoPhaseSink.row_rules`), and the tasks check every row against
the rules of all outputs before they stage anything. So a row that a table cannot hold is found where its
origin is known, and it leaves all outputs of the batch together.

A rule looks at one column, or at a value nested in it, and at whole Arrow arrays: no rule runs Python code
for each row, except for rows that may be bad. Rules accept every Arrow type that Spark or a user's function
may produce for a column: dictionary, large, view and run-end encoded arrays, and slices of arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidRecordError

#: Steps of a path into lists and maps; the names are those of Iceberg and Parquet.
ELEMENT, KEY, VALUE = "element", "key", "value"

#: The row number of each value of an array that was taken out of a column; None = value i is of row i.
_Rows = npt.NDArray[np.int64] | None

_EXACT = Context(prec=100)


@dataclass(frozen=True, kw_only=True)
class RowRule(ABC):
    """One rule for the values of a column. Picklable.

    Attributes:
        column: name of the column in the frame.
        path: steps to a value that is nested in the column: the name of a struct's field, `ELEMENT` of a
            list, `KEY` or `VALUE` of a map. Rules look at a nested value only where everything around it is
            not null.
        of: what in the target requires this, such as "varchar(10) of table 'orders'", for messages.
        fix: what the user can do, as a sentence; "" = the fix of all invalid rows.
    """

    column: str
    path: tuple[str, ...] = ()
    of: str = ""
    fix: str = ""

    @property
    @abstractmethod
    def what(self) -> str:
        """What a value does that breaks the rule, such as "is longer than 10 characters"."""

    @property
    def text(self) -> str:
        """What is wrong with a row that breaks the rule, and what requires that, without the column."""
        return f"{self.what} ({self.of})" if self.of else self.what

    def message(self, type_: pa.DataType) -> str:
        """Describes what is wrong with a row: the column, the kind of its value, and the rule.

        Args:
            type_: type of the column.
        """
        name = ".".join((self.column, *self.path))
        return f"column {name!r} ({kind_of(_nested(type_, self.path))}) {self.text}"

    def broken(self, column: pa.Array) -> pa.Array:
        """Returns which rows break the rule, as booleans without null.

        Args:
            column: the column `column` of a batch of rows.
        """
        values, rows = _inner(_plain(column), self.path)
        return _of_rows(pc.fill_null(self.wrong(values), False), rows, len(column))

    @abstractmethod
    def wrong(self, values: pa.Array) -> pa.Array:
        """Returns which values break the rule; null counts as false.

        Args:
            values: values of the column or, with a path, those nested in it. Not encoded as a dictionary.
        """


@dataclass(frozen=True, kw_only=True)
class NotNull(RowRule):
    """The value must not be null."""

    @property
    def what(self) -> str:
        return "is null"

    def broken(self, column: pa.Array) -> pa.Array:
        if not self.path and column.null_count == 0 and not _is_encoded(column.type):
            return _none(len(column))
        return super().broken(column)

    def wrong(self, values: pa.Array) -> pa.Array:
        return values.is_null() if values.null_count else _none(len(values))


@dataclass(frozen=True, kw_only=True)
class _Texts(RowRule):
    """A rule for every text in the column, also in structs, lists and maps; or for its bytes."""

    def broken(self, column: pa.Array) -> pa.Array:
        values, rows = _inner(_plain(column), self.path)
        found = _none(len(column))
        inside = _texts_in(values, rows) if _is_text_or_nested(values.type) else [(values, rows)]
        for texts, rows_of_texts in inside:
            bad = pc.fill_null(self.wrong(texts), False)
            if pc.any(bad).as_py():
                found = pc.or_(found, _of_rows(bad, rows_of_texts, len(column)))
        return found


@dataclass(frozen=True, kw_only=True)
class WithoutNul(_Texts):
    """No text in the column may contain the character U+0000, which Postgres cannot store."""

    @property
    def what(self) -> str:
        return "contains the character U+0000"

    def wrong(self, values: pa.Array) -> pa.Array:
        if not _has_zero_byte(values):
            return _none(len(values))
        return pc.match_substring(as_binary(values), b"\0")


@dataclass(frozen=True, kw_only=True)
class Utf8(_Texts):
    """Every text in the column must be valid UTF-8. Spark does not check what it takes for text."""

    @property
    def what(self) -> str:
        return "is not valid UTF-8"

    def wrong(self, values: pa.Array) -> pa.Array:
        return _none(len(values)) if _are_utf8(values) else pc.invert(is_utf8(values))


@dataclass(frozen=True, kw_only=True)
class LongestText(RowRule):
    """A text, or bytes, must not be longer than this.

    Attributes:
        most: the greatest length.
        unit: what the length counts: code points, or bytes (of the text in UTF-8).
        spaces_count: whether spaces at the end of a text count. Postgres cuts them off.
    """

    most: int
    unit: Literal["characters", "bytes"] = "characters"
    spaces_count: bool = True

    @property
    def what(self) -> str:
        return f"is longer than {self.most:,} {self.unit}"

    def wrong(self, values: pa.Array) -> pa.Array:
        lengths = pc.binary_length(values)
        if (pc.max(lengths).as_py() or 0) <= self.most:  # a text has no more characters than bytes
            return _none(len(values))
        if _is_text(values.type):
            # the kernel for ASCII accepts texts that are not UTF-8 too, and spaces are ASCII
            counted = values if self.spaces_count else pc.ascii_rtrim(values, " ")
            lengths = pc.utf8_length(counted) if self.unit == "characters" else pc.binary_length(counted)
        return pc.greater(lengths, self.most)


@dataclass(frozen=True, kw_only=True)
class FixedBytes(RowRule):
    """Bytes, or a text in UTF-8, must have exactly this length.

    Attributes:
        length: the length in bytes.
    """

    length: int

    @property
    def what(self) -> str:
        return f"does not have exactly {self.length:,} bytes"

    def wrong(self, values: pa.Array) -> pa.Array:
        return pc.not_equal(pc.binary_length(values), self.length)


@dataclass(frozen=True, kw_only=True)
class IntegerRange(RowRule):
    """An integer must be in a range.

    Attributes:
        low, high: least and greatest value.
    """

    low: int
    high: int

    @property
    def what(self) -> str:
        return f"is outside of {self.low} to {self.high}"

    def wrong(self, values: pa.Array) -> pa.Array:
        return _outside(values, self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class DecimalFits(RowRule):
    """A number must fit into a decimal number.

    Attributes:
        precision: number of digits.
        scale: number of digits after the decimal point.
        rounds: whether the target rounds a number with more digits after the point, as databases do.
    """

    precision: int
    scale: int = 0
    rounds: bool = True

    @property
    def what(self) -> str:
        digits = f"{self.precision - self.scale} digits before the decimal point"
        return f"has more than {digits}" + (
            "" if self.rounds else f", or more than {self.scale} digits after it"
        )

    def wrong(self, values: pa.Array) -> pa.Array:
        bound = Decimal(1).scaleb(self.precision - self.scale, _EXACT)
        if self.rounds:
            bound = _EXACT.subtract(bound, Decimal(5).scaleb(-self.scale - 1, _EXACT))
        kind = values.type
        if pa.types.is_integer(kind):
            whole = int(bound.to_integral_value(ROUND_CEILING))
            return _outside(values, 1 - whole, whole - 1)
        if pa.types.is_floating(kind):
            return pc.greater_equal(pc.abs(values), float(bound))
        bound = bound.quantize(Decimal(1).scaleb(-kind.scale), ROUND_CEILING, _EXACT)
        too_large = _none(len(values))
        if bound < Decimal(1).scaleb(kind.precision - kind.scale):
            too_large = pc.greater_equal(pc.abs(values), pa.scalar(bound, kind))
        if self.rounds or kind.scale <= self.scale:
            return too_large
        return pc.or_kleene(too_large, pc.not_equal(pc.round(values, self.scale), values))


@dataclass(frozen=True, kw_only=True)
class FloatRange(RowRule):
    """A number must be finite, or must not be larger than a smaller type of number can hold.

    Attributes:
        most: the largest absolute value of finite numbers; None = any.
        finite: whether NaN and the infinities break the rule too.
    """

    most: float | None = None
    finite: bool = False

    @property
    def what(self) -> str:
        parts = [
            *(["is NaN or infinite"] if self.finite else []),
            *([f"is larger than {self.most:.7g}"] if self.most is not None else []),
        ]
        return " or ".join(parts)

    def wrong(self, values: pa.Array) -> pa.Array:
        values = values.cast(pa.float64())
        is_finite = pc.is_finite(values)
        found = pc.invert(is_finite) if self.finite else _none(len(values))
        if self.most is None:
            return found
        return pc.or_kleene(found, pc.and_kleene(is_finite, pc.greater(pc.abs(values), self.most)))


@dataclass(frozen=True, kw_only=True)
class TimestampRange(RowRule):
    """A timestamp or date must be in a range.

    Attributes:
        first_us, last_us: first and last point in time, in microseconds since 1970. The range of a date
            contains every day on which a point in time of this range lies.
    """

    first_us: int
    last_us: int

    @property
    def what(self) -> str:
        return f"is before {_time(self.first_us)} or after {_time(self.last_us)}"

    def wrong(self, values: pa.Array) -> pa.Array:
        if pa.types.is_date(values.type):
            days = values.cast(pa.date32()).cast(pa.int32())
            return _outside(days, self.first_us // _DAY_US, self.last_us // _DAY_US)
        units = _UNITS_PER_SECOND[values.type.unit]
        first = -(-self.first_us * units // 1_000_000)
        # the last one includes the rest of its microsecond
        last = ((self.last_us + 1) * units - 1) // 1_000_000
        return _outside(values.cast(pa.int64()), first, last)


@dataclass(frozen=True, kw_only=True)
class UuidText(RowRule):
    """A text must be a UUID.

    Attributes:
        any_form: whether the forms count too that Postgres reads: without hyphens, or with one after any
            group of four digits, and in braces.
    """

    any_form: bool = False

    @property
    def what(self) -> str:
        return "is not a UUID"

    def wrong(self, values: pa.Array) -> pa.Array:
        return pc.invert(pc.match_substring_regex(as_binary(values), _ANY_UUID if self.any_form else _UUID))


@dataclass(frozen=True, kw_only=True)
class OneOf(RowRule):
    """A text must be one of the given texts, such as the labels of an enum.

    Attributes:
        values: the texts.
    """

    values: tuple[str, ...]

    @property
    def what(self) -> str:
        shown = ", ".join(map(repr, self.values[:10]))
        return f"is not one of {shown}" + (", …" if len(self.values) > 10 else "")

    def wrong(self, values: pa.Array) -> pa.Array:
        known = pa.array([each.encode() for each in self.values], pa.large_binary())
        found = pc.is_in(as_binary(values).cast(pa.large_binary()), value_set=known)
        return pc.and_(pc.invert(found), values.is_valid())


def check_rules(rules: Iterable[RowRule], rows: pa.RecordBatch) -> None:
    """Checks rules that the task has not checked, because the driver did not know them.

    Raises:
        InvalidRecordError: if a row breaks one. The error names the column and the rule.
    """
    for rule in rules:
        column = rows.column(rows.schema.get_field_index(rule.column))
        if pc.any(rule.broken(column)).as_py():
            raise InvalidRecordError(
                f"{rule.message(column.type)}, in a row that was checked by older rules, or by none.",
                fix=rule.fix or "restart the query, which then knows the rule.",
            )


_HEX = "[0-9a-fA-F]"
_UUID = rf"\A{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}\z"
_ANY_UUID = rf"\A(({_HEX}{{4}}-?){{7}}{_HEX}{{4}}|\{{({_HEX}{{4}}-?){{7}}{_HEX}{{4}}\}})\z"
_DAY_US = 86_400_000_000
_UNITS_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def _time(at_us: int) -> str:
    """Returns a point in time as text; only its year if Python's calendar does not have it."""
    day = np.datetime64(at_us // _DAY_US, "D")
    return str(day)


# -- texts -----------------------------------------------------------------------------------------


def is_utf8(texts: pa.Array) -> pa.Array:
    """Returns which texts are UTF-8; null for null. Spark does not check what it takes for text."""
    if _are_utf8(texts):
        return pc.if_else(texts.is_valid(), True, pa.scalar(None, pa.bool_()))
    return pa.array([_decodes(each) for each in as_binary(texts).to_pylist()], pa.bool_())


def _are_utf8(texts: pa.Array) -> bool:
    raw = as_binary(texts)
    try:
        raw.cast(pa.large_string() if pa.types.is_large_binary(raw.type) else pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def _decodes(text: bytes | None) -> bool | None:
    try:
        return None if text is None else text.decode() is not None
    except UnicodeDecodeError:
        return False


def as_binary(texts: pa.Array) -> pa.Array:
    """Returns texts or bytes as binary or large binary. Does not copy them, except for views."""
    texts = _plain(texts)
    kind = texts.type
    if pa.types.is_large_string(kind) or pa.types.is_fixed_size_binary(kind):
        return texts.cast(pa.large_binary())
    return texts.cast(pa.binary()) if pa.types.is_string(kind) else texts


def _has_zero_byte(texts: pa.Array) -> bool:
    """Returns whether the bytes of the texts contain a zero, without a copy of them."""
    raw = as_binary(texts)
    if raw.null_count == len(raw):
        return False
    _, offsets, data = raw.buffers()
    if not data:
        return False
    width = np.int64 if pa.types.is_large_binary(raw.type) else np.int32
    bounds = np.frombuffer(offsets, width)[raw.offset : raw.offset + len(raw) + 1]
    used = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]
    return bool(used.size and used.min() == 0)


def _is_text_or_nested(kind: pa.DataType) -> bool:
    return bool(_is_text(kind) or pa.types.is_nested(kind))


def _is_text(kind: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_string(kind) or is_.is_large_string(kind) or is_.is_string_view(kind))


# -- nested values ---------------------------------------------------------------------------------


def _is_encoded(kind: pa.DataType) -> bool:
    return (
        pa.types.is_dictionary(kind)
        or pa.types.is_run_end_encoded(kind)
        or isinstance(kind, pa.BaseExtensionType)
    )


def _plain(values: pa.Array) -> pa.Array:
    """Returns views, and values of a dictionary, in runs or of an extension type, as an ordinary array."""
    while _is_encoded(values.type):
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        elif pa.types.is_run_end_encoded(values.type):
            values = pc.run_end_decode(values)
        else:
            values = values.storage
    if pa.types.is_string_view(values.type):
        return values.cast(pa.large_string())
    return values.cast(pa.large_binary()) if pa.types.is_binary_view(values.type) else values


def _inner(values: pa.Array, path: tuple[str, ...], rows: _Rows = None) -> tuple[pa.Array, _Rows]:
    """Returns the values at a path, and the row of each.

    Raises:
        KeyError: if the type has no such path, which is a mistake of the sink.
    """
    for step in path:
        inside = {name: (found, of_rows) for name, found, of_rows in _children(values, rows)}
        values, rows = inside[step]
    return values, rows


def _children(values: pa.Array, rows: _Rows) -> Iterator[tuple[str, pa.Array, _Rows]]:
    """Yields what values that are not null contain: the step to it, the values, and the row of each."""
    kind = values.type
    if not pa.types.is_nested(kind):
        return
    if values.null_count:
        rows = _at(rows, np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False)))
        values = values.drop_null()
    if pa.types.is_struct(kind):
        for number, field in enumerate(kind):
            yield field.name, _plain(values.field(number)), rows
    elif pa.types.is_map(kind):
        ends = values.offsets.to_numpy()
        of_rows = _at(rows, np.repeat(np.arange(len(values)), np.diff(ends)))
        for step, found in ((KEY, values.keys), (VALUE, values.items)):
            yield step, _plain(found.slice(ends[0], ends[-1] - ends[0])), of_rows
    else:
        parents = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
        yield ELEMENT, _plain(pc.list_flatten(values)), _at(rows, parents.astype(np.int64))


def _at(rows: _Rows, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return numbers if rows is None else rows[numbers]


def _texts_in(values: pa.Array, rows: _Rows) -> Iterator[tuple[pa.Array, _Rows]]:
    """Yields all texts in values, however deep, and the row of each."""
    if _is_text(values.type):
        yield values, rows
    for _, inside, rows_inside in _children(values, rows):
        yield from _texts_in(inside, rows_inside)


def _of_rows(wrong: pa.Array, rows: _Rows, count: int) -> pa.Array:
    """Returns which rows contain a value that is true in ``wrong``."""
    if rows is None:
        return wrong
    found = np.zeros(count, bool)
    if pc.any(wrong).as_py():
        found[rows[wrong.to_numpy(zero_copy_only=False)]] = True
    return pa.array(found)


def _nested(kind: pa.DataType, path: tuple[str, ...]) -> pa.DataType:
    """Returns the type at a path."""
    for step in path:
        kind = _plain_type(kind)
        if pa.types.is_struct(kind):
            kind = kind.field(step).type
        elif pa.types.is_map(kind):
            kind = kind.key_type if step == KEY else kind.item_type
        else:
            kind = kind.value_type
    return _plain_type(kind)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    while _is_encoded(kind):
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    return kind


def kind_of(kind: pa.DataType) -> str:
    """Returns what people call values of an Arrow type, such as "text" or "integer"."""
    is_ = pa.types
    kind = _plain_type(kind)
    if _is_text(kind):
        return "text"
    if is_.is_integer(kind):
        return "integer"
    if is_.is_floating(kind):
        return "floating-point number"
    if is_.is_decimal(kind):
        return "decimal"
    if is_.is_timestamp(kind):
        return "timestamp"
    if is_.is_date(kind):
        return "date"
    if is_.is_boolean(kind):
        return "boolean"
    if is_.is_struct(kind):
        return "struct"
    if is_.is_map(kind):
        return "map"
    if is_.is_nested(kind):
        return "list"
    return "bytes" if "binary" in str(kind) else str(kind)


# -- numbers ---------------------------------------------------------------------------------------


def _none(rows: int) -> pa.Array:
    """Returns false for each row: no row breaks the rule."""
    return pa.repeat(pa.scalar(False), rows)


def _outside(values: pa.Array, low: int, high: int) -> pa.Array:
    """Returns which integers are less than ``low`` or greater than ``high``."""
    limits = np.iinfo(values.type.to_pandas_dtype())
    found: Any = _none(len(values))
    if low > limits.min:
        found = pc.less(values, pa.scalar(low, values.type)) if low <= limits.max else values.is_valid()
    if high < limits.max:
        above = pc.greater(values, pa.scalar(high, values.type)) if high >= limits.min else values.is_valid()
        found = pc.or_kleene(found, above)
    return found
