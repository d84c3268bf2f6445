"""The base class of Spark's three kinds of state variable, and how their entries are stored.

::

    value   keyed(table, key)             → row
    list    keyed(table, key)             → position of the next element (8) │ number of elements (8)
            keyed(table, key, position)   → row
    map     keyed(table, key, map key)    → row

If a variable has a time to live, the time of expiry precedes each row (`ttl`). ``init`` creates variables;
when it has returned, they are *bound* to their tables. They always refer to the key whose handler runs
(`KeyWindow`).
"""

from __future__ import annotations

from kafka_eos_source.errors import StatefulProcessorError
from kafka_eos_source.state.processor.codec import Value
from kafka_eos_source.state.processor.evolution import VersionedCodec
from kafka_eos_source.state.processor.registry import VariableInfo
from kafka_eos_source.state.processor.ttl import EXPIRY_BYTES, ExpiryIndex
from kafka_eos_source.state.processor.window import KeyWindow


class Variable:
    """A state variable of any kind.

    Args:
        name: name of the variable.
        keys: the window of keys.
    """

    def __init__(self, name: str, keys: KeyWindow) -> None:
        self.name = name
        self._keys = keys
        self._expiries: ExpiryIndex | None = None

    def bind(self, info: VariableInfo, now_ms: int, ttl_ms: int | None) -> None:
        """Binds the variable to the table that the registry assigned, for one batch.

        Args:
            info: table and schemas of the variable.
            now_ms: processing time of the batch.
            ttl_ms: time to live; None if values do not expire.
        """
        self._prefix = bytes([info.table])
        codec = VersionedCodec(info.schemas)
        self._names, self._encode, self._decode = codec.names, codec.encode, codec.decode
        if ttl_ms is not None:
            self._expiries = ExpiryIndex(self._keys.state, info.table, now_ms, ttl_ms)

    def flush(self) -> None:
        """Writes the changes to the keys of this window to the store."""
        if self._expiries is not None:
            self._expiries.flush()

    def sweep(self) -> int:
        """Removes expired values and returns how many. Requires that all changes are flushed."""
        return 0 if self._expiries is None else len(self._expiries.sweep())

    def next_sweep_ms(self) -> int | None:
        """Returns when a batch must remove expired values; None if no value expires."""
        return None if self._expiries is None else self._expiries.next_sweep_ms()

    def _section(self) -> bytes:
        section = self._keys.section
        return self._keys.current() if section is None else section

    def _pack(self, row: Value) -> bytes:
        """Returns the row as this batch stores it, with its time of expiry if it has one."""
        if row is None:
            raise illegal_value("NULL_VALUE", self.name, "None")
        data = self._encode(row)
        return data if self._expiries is None else self._expiries.expiry + data

    def _unpack(self, value: bytes) -> Value:
        return self._decode(value if self._expiries is None else value[EXPIRY_BYTES:])

    def _is_live(self, value: bytes) -> bool:
        return self._expiries is None or self._expiries.is_live(value)


def illegal_value(condition: str, name: str, what: str) -> StatefulProcessorError:
    """Returns the error that Spark's `StateStoreErrors` defines for a value that state cannot hold."""
    return StatefulProcessorError(
        f"ILLEGAL_STATE_STORE_VALUE.{condition}: {what} cannot be written to state variable {name!r}.",
        fix="write at least one row; to remove state, use clear().",
    )
