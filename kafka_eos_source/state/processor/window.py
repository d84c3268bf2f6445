"""The group keys that a task is at work on, and tables with one value for each of them.

A processor is called key by key, but reads and writes of a *window* of keys (some thousands) reach the store
together: the first read of a variable fetches its value for every key of the window, in one `get_many`; what
was written goes out in one `put_many` when the window is left.
"""

from __future__ import annotations

import pyarrow as pa

from kafka_eos_source.errors import StatefulProcessorError
from kafka_eos_source.state.encoding.keys import keyed_keys
from kafka_eos_source.state.model import StateAccess

#: Keys in a window: enough to share the cost of a call, few enough for their values to fit in memory.
WINDOW_KEYS = 4096


class KeyWindow:
    """The keys of the window, and the one whose handler runs.

    Attributes:
        state: of the shard; the driver, which has no keys either, has none.
        group_keys: of the window, as `KeyCodec` makes them; all different.
        sections: of each, its length and the key itself: what follows the table byte in a key of `layout`.
        section: of the key whose handler runs; None = none does.
    """

    state: StateAccess

    def __init__(self, state: StateAccess | None = None) -> None:
        if state is not None:
            self.state = state
        self.group_keys: pa.BinaryArray = pa.array([], pa.binary())
        self.sections: list[bytes] = []
        self.section: bytes | None = None

    def enter(self, group_keys: pa.BinaryArray) -> None:
        """Turn to these keys. Tables must have been flushed."""
        self.group_keys = group_keys
        self.sections = [key[1:] for key in keyed_keys(1, group_keys).to_pylist()]
        self.section = None

    def current(self) -> bytes:
        """The section of the key whose handler runs.

        Raises:
            StatefulProcessorError: state was used where there is no key, in ``init`` or ``close``.
        """
        if self.section is None:
            raise StatefulProcessorError(
                "IMPLICIT_KEY_NOT_FOUND: state or a timer was used outside of a handler, there is no key",
                fix="create state variables in init(), use them in handleInputRows, handleExpiredTimer and "
                "handleInitialState",
            )
        return self.section


class PointTable:
    """A table with at most one value a group key, read and written a window at a time.

    Args:
        keys: the window.
        table: byte of the table.
    """

    def __init__(self, keys: KeyWindow, table: int) -> None:
        self._keys = keys
        self._table = table
        self._prefix = bytes([table])
        self._values: dict[bytes, bytes | None] = {}
        self._written: dict[bytes, None] = {}  # in order, so that attempts write the same

    def read(self, section: bytes) -> bytes | None:
        """The value of a key of the window; None = there is none."""
        try:
            return self._values[section]
        except KeyError:
            self._fetch()
            return self._values[section]

    def write(self, section: bytes, value: bytes | None) -> None:
        """Set the value of a key of the window; None removes it."""
        self._values[section] = value
        self._written[section] = None

    def flush(self) -> None:
        """Hand what was written to the store, and forget the window."""
        if self._written:
            keys = [self._prefix + section for section in self._written]
            values = [self._values[section] for section in self._written]
            self._keys.state.put_many(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))
        self._values.clear()
        self._written.clear()

    def _fetch(self) -> None:
        keys = self._keys
        found = keys.state.get_many(keyed_keys(self._table, keys.group_keys)).to_pylist()
        fetched = dict(zip(keys.sections, found, strict=True))
        fetched.update(self._values)  # written before the first read
        self._values = fetched
