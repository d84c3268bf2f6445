"""The half of a store that is in memory: what a transaction has staged, whose it is, how much it may be."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from kafka_eos_source.errors import StateError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.store.advance import furthest
from kafka_eos_source.state.store.limits import too_many_bytes
from kafka_eos_source.state.store.overlay import Overlay
from kafka_eos_source.state.store.records import Offsets


class Staged:
    """One transaction after the other.

    Args:
        store: name, for messages.

    Attributes:
        overlay: its writes.
        position: largest input offsets that they reflect (KIP-796).
        generation: how often staged writes were taken out of sight other than by becoming data.
    """

    def __init__(self, store: str) -> None:
        self.overlay = Overlay()
        self.position: Offsets = {}
        self.generation = 0
        self._store = store
        self._thread = 0
        self._soft: int | None = None
        self._hard: int | None = None

    @property
    def empty(self) -> bool:
        return not (self.overlay.rows or self.overlay.ranges)

    @property
    def over_share(self) -> bool:
        """More is staged than the soft limit."""
        return self._soft is not None and self.overlay.bytes > self._soft

    def limit(self, soft_bytes: int | None, hard_bytes: int | None) -> None:
        self._soft, self._hard = soft_bytes, hard_bytes

    def is_mine(self) -> bool:
        """Whether this thread is the writer. One becomes it with the first write of a transaction."""
        return self._thread == threading.get_ident()

    def own(self) -> None:
        """This thread is the writer from now on, until the transaction ends.

        Raises:
            StateError: another one is.
        """
        if self._thread:
            raise StateError(
                f"store {self._store}: two threads stage writes in one transaction",
                fix="one thread writes; others read through view()",
            )
        self._thread = threading.get_ident()

    def check_size(self) -> None:
        """Raises: UncommittedBytesError: more is staged than the hard limit."""
        if self._hard is not None and self.overlay.bytes > self._hard:
            assert self._soft is not None
            raise too_many_bytes(self._store, self.overlay.bytes, self._soft, self._hard)

    def reflect(self, position: Mapping[TopicPartition, int]) -> None:
        self.position = furthest(self.position, position)

    def end(self) -> None:
        """The transaction is over: what it staged is data, or of no interest."""
        self.overlay = Overlay()
        self.position = {}
        self._thread = 0

    def withdraw(self) -> None:
        """The transaction is over, and views of what it staged show what is not so."""
        self.end()
        self.generation += 1
