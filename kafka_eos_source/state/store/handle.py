"""What a processor may do with a store: everything but what is the engine's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import pyarrow as pa

from kafka_eos_source.errors import StateError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.store.records import Offsets
from kafka_eos_source.state.store.transactional import TransactionalStateStore


class StateHandle:
    """A store's reads and staged writes. Committing is refused, as Kafka refuses it (KIP-1035)."""

    def __init__(self, store: TransactionalStateStore) -> None:
        self._store = store
        self.get = store.get
        self.put = store.put

    # The two hottest are the store's own methods; the rest is forwarded.
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

    def stage_position(self, position: Mapping[TopicPartition, int]) -> None:
        self._store.stage_position(position)

    def position(self) -> Offsets:
        return self._store.position()

    def commit(self, *_args: object, **_named: object) -> NoReturn:
        raise _engines_only("commit")

    def rollback(self) -> NoReturn:
        raise _engines_only("rollback")

    def close(self) -> NoReturn:
        raise _engines_only("close")


def _engines_only(what: str) -> StateError:
    return StateError(
        f"{what} of a state store was called by a processor",
        fix="leave it out: a batch's state is committed with the batch's transaction",
    )
