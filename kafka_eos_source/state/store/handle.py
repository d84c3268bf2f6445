"""The part of a store that a processor may use."""

from __future__ import annotations

from typing import NoReturn

from kafka_eos_source.errors import StateError
from kafka_eos_source.state.store.transactional import TransactionalStateStore


class StateHandle:
    """`model.StateAccess` to a store. Committing is refused, as in Kafka Streams (KIP-1035)."""

    def __init__(self, store: TransactionalStateStore) -> None:
        # The store's own methods, because a second call for each key would be slow.
        self.get = store.get
        self.put = store.put
        self.delete = store.delete
        self.delete_range = store.delete_range
        self.range = store.range
        self.prefix_scan = store.prefix_scan
        self.get_many = store.get_many
        self.put_many = store.put_many

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
