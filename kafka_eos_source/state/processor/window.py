"""A window of group keys whose reads and writes reach the store together.

A processor is called key by key, but the store is read and written for a *window* of some thousand keys at
once. The first read of a variable fetches its value for every key of the window, with one `get_many`. When
the window ends, one `put_many` writes the changes.
"""

from __future__ import annotations

import pyarrow as pa

from kafka_eos_source.errors import StatefulProcessorError
from kafka_eos_source.state.encoding.layout import keyed_keys
from kafka_eos_source.state.model import StateAccess

#: Number of keys in a window: large enough to share the cost of a call, small enough to fit into memory.
WINDOW_KEYS = 4096


class KeyWindow:
    """The keys of the window, and the key whose handler runs.

    Attributes:
        state: state of the shard; not set on the driver, which has no keys.
        group_keys: the distinct group keys of the window, encoded by `KeyCodec`.
        sections: for each key, its length and the key: the part of a `layout` key after the table byte.
        section: section of the key whose handler runs; None if no handler runs.
    """

    state: StateAccess

    def __init__(self, state: StateAccess | None = None) -> None:
        if state is not None:
            self.state = state
        self.group_keys: pa.BinaryArray = pa.array([], pa.binary())
        self.sections: list[bytes] = []
        self.section: bytes | None = None

    def enter(self, group_keys: pa.BinaryArray) -> None:
        """Starts a window of these keys. Requires that all tables are flushed."""
        self.group_keys = group_keys
        self.sections = [key[1:] for key in keyed_keys(1, group_keys).to_pylist()]
        self.section = None

    def current(self) -> bytes:
        """Returns the section of the key whose handler runs.

        Raises:
            StatefulProcessorError: if no handler runs, as in ``init`` or ``close``.
        """
        if self.section is None:
            raise StatefulProcessorError(
                "IMPLICIT_KEY_NOT_FOUND: state or a timer was used outside a handler, where there is no key.",
                fix="create state variables in init(), and use them in handleInputRows(), "
                "handleExpiredTimer() and handleInitialState() only.",
            )
        return self.section


class PointTable:
    """A table with at most one value per group key, read and written one window at a time.

    Args:
        keys: the window of keys.
        table: byte of the table.
    """

    def __init__(self, keys: KeyWindow, table: int) -> None:
        self._keys = keys
        self._table = table
        self._prefix = bytes([table])
        self._values: dict[bytes, bytes | None] = {}
        self._written: dict[bytes, None] = {}  # ordered, so that all task attempts write the same

    def read(self, section: bytes) -> bytes | None:
        """Returns the value of a key of the window; None if it has no value."""
        try:
            return self._values[section]
        except KeyError:
            self._fetch()
            return self._values[section]

    def write(self, section: bytes, value: bytes | None) -> None:
        """Sets the value of a key of the window; None removes it."""
        self._values[section] = value
        self._written[section] = None

    def flush(self) -> None:
        """Writes the changes to the store, and clears the cached values."""
        if self._written:
            keys = [self._prefix + section for section in self._written]
            values = [self._values[section] for section in self._written]
            self._keys.state.put_many(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))
        self._values.clear()
        self._written.clear()

    def _fetch(self) -> None:
        keys = self._keys
        stored = keys.state.get_many(keyed_keys(self._table, keys.group_keys)).to_pylist()
        fetched = dict(zip(keys.sections, stored, strict=True))
        fetched.update(self._values)  # values that were written before the first read
        self._values = fetched
