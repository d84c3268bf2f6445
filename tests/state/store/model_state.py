"""A `StateAccess` backed by a dict: the reference for the store, and a fast state for processors."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from kafka_eos_source.state.encoding import layout


class ModelState:
    """A dict whose scans, like the store's, show the state at the time of the call."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    def get(self, key: bytes) -> bytes | None:
        return self.rows.get(key)

    def put(self, key: bytes, value: bytes | None) -> None:
        assert key
        assert key[0] >= 1
        if value is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = value

    def delete(self, key: bytes) -> None:
        self.put(key, None)

    def delete_range(self, low: bytes, high: bytes | None) -> None:
        for key, _ in self.range(low, high):
            del self.rows[key]

    def range(
        self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        keys = [key for key in self.rows if (low is None or key >= low) and (high is None or key < high)]
        return iter([(key, self.rows[key]) for key in sorted(keys, reverse=reverse)])

    def prefix_scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self.range(prefix, layout.upper_bound(prefix))

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        return pa.array([self.rows.get(key) for key in keys.to_pylist()], pa.binary())

    def put_many(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
            self.put(key, value)
