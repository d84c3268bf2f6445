"""What Spark's three kinds of state variable share here.

::

    value   keyed(table, key)             → row
    list    keyed(table, key)             → position of the next element (8) │ number of elements (8)
            keyed(table, key, position)   → row
    map     keyed(table, key, map key)    → row

A row of a variable with a time to live has its expiry before it (`ttl`). Variables are made in ``init`` and
*bound* to their tables when it has returned; they always speak of the key whose handler runs (`KeyWindow`).
"""

from __future__ import annotations

from kafka_eos_source.errors import StatefulProcessorError
from kafka_eos_source.state.processor.codec import Value
from kafka_eos_source.state.processor.registry import VariableInfo
from kafka_eos_source.state.processor.ttl import EXPIRY_BYTES, ExpiryIndex
from kafka_eos_source.state.processor.versions import VersionedCodec
from kafka_eos_source.state.processor.window import KeyWindow


class Variable:
    """What the three kinds share.

    Args:
        name: of the variable.
        keys: the window of keys.
    """

    def __init__(self, name: str, keys: KeyWindow) -> None:
        self.name = name
        self._keys = keys
        self._expiries: ExpiryIndex | None = None

    def bind(self, info: VariableInfo, now_ms: int, ttl_ms: int | None) -> None:
        """Take the table that the registry gave, for one batch of this processing time."""
        self._prefix = bytes([info.table])
        codec = VersionedCodec(info.schemas)
        self._names, self._encode, self._decode = codec.names, codec.encode, codec.decode
        if ttl_ms is not None:
            self._expiries = ExpiryIndex(self._keys.state, info.table, now_ms, ttl_ms)

    def flush(self) -> None:
        """Hand what was written for this window to the store."""
        if self._expiries is not None:
            self._expiries.flush()

    def sweep(self) -> int:
        """Remove values that have expired; nothing may be unflushed. Returns how many."""
        return 0 if self._expiries is None else len(self._expiries.sweep())

    def _section(self) -> bytes:
        section = self._keys.section
        return self._keys.current() if section is None else section

    def _pack(self, row: Value) -> bytes:
        """A row as it is stored by this batch."""
        if row is None:
            raise illegal_value("NULL_VALUE", self.name, "None")
        data = self._encode(row)
        return data if self._expiries is None else self._expiries.expiry + data

    def _unpack(self, value: bytes) -> Value:
        return self._decode(value if self._expiries is None else value[EXPIRY_BYTES:])

    def _is_live(self, value: bytes) -> bool:
        return self._expiries is None or self._expiries.is_live(value)


def illegal_value(condition: str, name: str, what: str) -> StatefulProcessorError:
    """The error of Spark's `StateStoreErrors` for a value that state does not take."""
    return StatefulProcessorError(
        f"ILLEGAL_STATE_STORE_VALUE.{condition}: {what} cannot be written to state variable {name!r}",
        fix="use clear() to remove state",
    )
