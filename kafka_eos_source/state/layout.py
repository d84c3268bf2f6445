"""Layout of the keys in a store, which are also the keys of its changelog records.

::

    keyed   table (1 byte, 0x01 … 0x7f) │ length of group key (4, big endian) │ group key │ rest
    timed   table (1 byte, 0x81 … 0xff) │ time (8, big endian, sign flipped) │ length (4) │ group key │ rest
    0x00    reserved: the batch record of a changelog partition (`model.Owner`)

The *group key* holds the grouping columns, encoded by `encoding.keys`. Every key contains it, so that
``kafka-eos state rescale`` can move a changelog to another number of shards without knowing the processor.
The keys contain lengths instead of separators, so a group key that is a prefix of another one never matches
its entries. Timed tables are ordered by time across all group keys: a range scan from the start of the table
finds the entries that are due.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kafka_eos_source.state.model import StateAccess

_LENGTH = struct.Struct(">I")
_TIMED = struct.Struct(">BQI")
_KEYED = struct.Struct(">BI")
_SIGN = 1 << 63

#: Tables above this number are timed.
TIMED = 0x80


class Entry(NamedTuple):
    """The parts of a key. ``time_ms`` is None in a keyed table."""

    table: int
    group_key: bytes
    rest: bytes
    time_ms: int | None = None


def keyed(table: int, group_key: bytes, rest: bytes = b"") -> bytes:
    """Returns a key of a keyed table (1 to 127)."""
    return _KEYED.pack(table, len(group_key)) + group_key + rest


def timed(table: int, time_ms: int, group_key: bytes, rest: bytes = b"") -> bytes:
    """Returns a key of a timed table (129 to 255), which is ordered by time first."""
    return _TIMED.pack(table, time_ms + _SIGN, len(group_key)) + group_key + rest


def before(table: int, time_ms: int) -> bytes:
    """Returns the exclusive end of a scan over a timed table's entries earlier than ``time_ms``."""
    return struct.pack(">BQ", table, time_ms + _SIGN)


def earliest_ms(state: StateAccess, table: int) -> int | None:
    """Returns the time of the earliest entry of a timed table; None if the table is empty."""
    prefix = bytes([table])
    first = next(iter(state.range(prefix, upper_bound(prefix))), None)
    return None if first is None else split(first[0]).time_ms


def split(key: bytes) -> Entry:
    """Returns the parts of a key that `keyed` or `timed` made.

    Raises:
        ValueError: if the key has neither layout.
    """
    if not key or key[0] in (0, TIMED):
        raise ValueError(f"not a key of a table: {key[:32]!r}")
    time_ms = None
    at = 1
    if key[0] > TIMED:
        time_ms = int.from_bytes(key[1:9], "big") - _SIGN
        at = 9
    if len(key) < at + 4:
        raise ValueError(f"a key is truncated: {key[:32]!r}")
    (length,) = _LENGTH.unpack_from(key, at)
    at += 4
    if len(key) < at + length:
        raise ValueError(f"a key is truncated: {key[:32]!r}")
    return Entry(key[0], key[at : at + length], key[at + length :], time_ms)


def upper_bound(prefix: bytes) -> bytes | None:
    """Returns the first key after all keys with this prefix; None if the prefix is empty or all 0xff."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None
