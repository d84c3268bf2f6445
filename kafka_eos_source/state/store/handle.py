"""The part of a store that a processor may use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import pyarrow as pa

from kafka_eos_source.errors import StateError
from kafka_eos_source.state.store.records import Offsets
from kafka_eos_source.state.store.transactional import TransactionalStateStore


class StateHandle:
    """Reads and staged writes of a store. Committing is refused, as in Kafka Streams (KIP-1035).

    The methods are those of `TransactionalStateStore`.
    """

    def __init__(self, store: TransactionalStateStore) -> None:
        self._store = store
        # The two methods that processors call most are the store's own, without a second call.
        self.get = store.get
        self.put = store.put

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        return self._store.get_many(keys)

    def put_many(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        self._store.put_many(keys, values)

    def put_all(self, pairs: Sequence[tuple[bytes, bytes | None]]) -> None:
        self._store.put_all(pairs)

    def put_if_absent(self, key: bytes, value: bytes | None) -> bytes | None:
        return self._store.put_if_absent(key, value)

    def delete(self, key: bytes) -> None:
        self._store.delete(key)

    def delete_range(self, low: bytes, high: bytes | None) -> None:
        self._store.delete_range(low, high)

    def range(
        self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        return self._store.range(low, high, reverse=reverse)

    def reverse_range(
        self, low: bytes | None = None, high: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        return self._store.reverse_range(low, high)

    def prefix_scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._store.prefix_scan(prefix)

    def all(self) -> Iterator[tuple[bytes, bytes]]:
        return self._store.all()

    def approximate_num_entries(self) -> int:
        return self._store.approximate_num_entries()

    def approximate_num_uncommitted_bytes(self) -> int:
        return self._store.approximate_num_uncommitted_bytes()

    def position(self) -> Offsets:
        return self._store.position()

    def commit(self, *_args: object, **_named: object) -> NoReturn:
        raise _refused("commit")

    def rollback(self) -> NoReturn:
        raise _refused("rollback")

    def close(self) -> NoReturn:
        raise _refused("close")


def _refused(method: str) -> StateError:
    return StateError(
        f"{method}() of a state store was called by a processor.",
        fix="remove the call: the operator commits the state in the transaction of the micro-batch.",
    )
