"""The texts of errors that belong to one row."""

from __future__ import annotations

from enum import IntEnum

MAX_EMPTY_ITEMS = 65536
MAX_DEPTH = 100

#: How much of a value is quoted at most.
QUOTED_BYTES = 48


class Code(IntEnum):
    """Why a row does not decode or encode, as in avro.c."""

    TRUNCATED = 1
    VARINT = 2
    INT_RANGE = 3
    UNION_INDEX = 4
    ENUM_INDEX = 5
    ENUM_SYMBOL = 6
    NEGATIVE_LENGTH = 7
    UTF8 = 8
    DECIMAL_SIZE = 9
    OVERFLOW = 10
    BRANCH = 11
    TRAILING = 12
    SHORT = 13
    EMPTY_ITEMS = 14
    DEPTH = 16
    BOOLEAN = 17
    BLOCK_BYTES = 18
    NULL_VALUE = 19
    FIXED_SIZE = 20
    SYMBOL = 21
    MEMBERS = 22
    DECIMAL_RANGE = 23


_TEXTS: dict[Code, str] = {
    Code.TRUNCATED: "the payload ends too early: {detail} bytes or items are announced, {more} bytes left",
    Code.VARINT: "a number takes more than 64 bits",
    Code.INT_RANGE: "{detail} does not fit into an int",
    Code.UNION_INDEX: "the union has {more} branches, but the payload selects number {detail}",
    Code.ENUM_INDEX: "the enum has {more} symbols, but the payload selects number {detail}",
    Code.ENUM_SYMBOL: "the reader's enum lacks symbol number {detail} of the writer's, and has no default",
    Code.NEGATIVE_LENGTH: "the length {detail} is negative",
    Code.UTF8: "a string is not valid UTF-8",
    Code.DECIMAL_SIZE: "a decimal of {detail} bytes is empty, or has more digits than its precision",
    Code.OVERFLOW: "the timestamp {detail} is too far from 1970 for the unit of the type",
    Code.BRANCH: "the reader's schema does not accept this branch of the writer's union",
    Code.TRAILING: "{detail} bytes follow the value",
    Code.SHORT: "the message has {detail} bytes, fewer than the {more} of its frame",
    Code.EMPTY_ITEMS: "a block has {detail} items of no bytes; at most {more} are accepted in one row",
    Code.DEPTH: "values are nested more than {detail} levels deep",
    Code.BOOLEAN: "byte {detail} is not a boolean",
    Code.BLOCK_BYTES: "a block announces {detail} bytes, {more} are left",
    Code.NULL_VALUE: "the value is null, but the schema does not allow null",
    Code.FIXED_SIZE: "the value has {detail} bytes, but the fixed type has {more}",
    Code.SYMBOL: "the enum has no symbol {text!r}",
    Code.MEMBERS: "{detail} members of the union are set; exactly one must be",
    Code.DECIMAL_RANGE: "the decimal has more digits than the precision of the type",
}


def message(code: int, detail: int, more: int, path: str, reason: str = "", text: bytes = b"") -> str:
    """Returns the message of an error: the field, and the cause."""
    quoted = text.decode(errors="replace")
    cause = _TEXTS[Code(code)].format(detail=detail, more=more, text=quoted)
    where = f"field {path.lstrip('.')}: " if path else ""
    return f"{where}{cause}{f' ({reason})' if reason else ''}"
