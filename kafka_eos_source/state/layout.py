"""Keys of a store, which are the keys of its changelog records too.

::

    keyed   table (1 byte, 0x01 … 0x7f) │ length of group key (4, big endian) │ group key │ rest
    timed   table (1 byte, 0x81 … 0xff) │ time (8, big endian, sign flipped) │ length (4) │ group key │ rest
    0x00    not for processors: the batch record of a changelog partition

*Group key*: the grouping columns, encoded by `keys`. It can be found in every key, so that a changelog can be
sharded anew without knowing what the processor keeps. Lengths and not separators: a key that ends in another
one's beginning never mixes with it. Timed tables are ordered by time, over all group keys: what is due is a
range scan from the table's start.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_LENGTH = struct.Struct(">I")
_TIMED = struct.Struct(">BQI")
_KEYED = struct.Struct(">BI")
_SIGN = 1 << 63

#: First byte of the timed tables and up.
TIMED = 0x80

#: Key of the record that tells, in each changelog partition, which batch the records before it belong to.
BATCH_KEY = b"\x00kafka-eos-batch"


class Entry(NamedTuple):
    """A key, taken apart. ``time_ms`` is None in a keyed table."""

    table: int
    group_key: bytes
    rest: bytes
    time_ms: int | None = None


def keyed(table: int, group_key: bytes, rest: bytes = b"") -> bytes:
    """A key of a keyed table (1 to 127)."""
    return _KEYED.pack(table, len(group_key)) + group_key + rest


def timed(table: int, time_ms: int, group_key: bytes, rest: bytes = b"") -> bytes:
    """A key of a timed table (129 to 255), ordered by time first."""
    return _TIMED.pack(table, time_ms + _SIGN, len(group_key)) + group_key + rest


def before(table: int, time_ms: int) -> bytes:
    """The end (excluded) of a scan over a timed table's entries earlier than ``time_ms``."""
    return struct.pack(">BQ", table, time_ms + _SIGN)


def split(key: bytes) -> Entry:
    """A processor's key, taken apart.

    Raises:
        ValueError: it is none.
    """
    if not key or key[0] in (0, TIMED):
        raise ValueError(f"not a key of a table: {key[:32]!r}")
    time_ms = None
    at = 1
    if key[0] > TIMED:
        time_ms = int.from_bytes(key[1:9], "big") - _SIGN
        at = 9
    if len(key) < at + 4:
        raise ValueError(f"a key cut short: {key[:32]!r}")
    (length,) = _LENGTH.unpack_from(key, at)
    at += 4
    if len(key) < at + length:
        raise ValueError(f"a key cut short: {key[:32]!r}")
    return Entry(key[0], key[at : at + length], key[at + length :], time_ms)


def upper_bound(prefix: bytes) -> bytes | None:
    """The first key behind all that start with ``prefix``; None = there is none, the prefix is all 0xff."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None
