"""Consumers that stay open between the tasks of a process.

Spark reuses a Python worker for many tasks, so a consumer that stays connected saves each small batch the
TCP, TLS and metadata round trips. Positions do not survive a task: every task assigns its own ranges, so
records that were prefetched for one batch cannot appear in the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafka_eos_source.kafka.wire.consumer import WireConsumer

#: Consumers with the same properties are interchangeable.
_Key = frozenset[tuple[str, str]]


@dataclass(slots=True)
class _Idle:
    consumer: WireConsumer
    since: float


class ConsumerPool:
    """Idle consumers of this process, by configuration.

    A worker runs one task at a time, so there is rarely more than one idle consumer. The bound matters to a
    process that serves many queries in turn. A forked child process must neither use nor close the
    connections of its parent, which both processes would then use. It keeps references to them.

    Args:
        capacity: the number of idle consumers to keep.
        idle_seconds: consumers that were idle for longer are closed at the next `borrow` (5 min, like
            ``spark.kafka.consumer.cache.timeout``).
    """

    def __init__(self, capacity: int = 4, idle_seconds: float = 300.0) -> None:
        self._capacity = capacity
        self._idle_seconds = idle_seconds
        self._idle: list[tuple[_Key, _Idle]] = []
        self._pid = os.getpid()
        self._of_parent: list[object] = []

    @contextmanager
    def borrow(self, conf: Mapping[str, str]) -> Iterator[WireConsumer]:
        """Lends a consumer; takes it back if the block succeeds, closes it if the block fails.

        Args:
            conf: the properties of the consumer; see `WireConsumer`.
        """
        # the import takes 0.1 s, which processes that only plan reads need not spend
        from kafka_eos_source.kafka.wire.consumer import WireConsumer

        self._after_fork()
        self._close_stale()
        key = frozenset(conf.items())
        consumer = self._pop(key) or WireConsumer(conf)
        sound = False
        try:
            yield consumer
            sound = True
        except GeneratorExit:
            sound = True  # Spark stopped the task early, for example because of a LIMIT
            raise
        finally:
            if sound:
                consumer.release()
                self._idle.append((key, _Idle(consumer, time.monotonic())))
                self._shrink(self._capacity)
            else:
                consumer.close()

    def close(self) -> None:
        """Closes all idle consumers."""
        self._after_fork()
        self._shrink(0)

    def __len__(self) -> int:
        return len(self._idle)

    def _pop(self, key: _Key) -> WireConsumer | None:
        for index in range(len(self._idle) - 1, -1, -1):
            if self._idle[index][0] == key:
                return self._idle.pop(index)[1].consumer
        return None

    def _close_stale(self) -> None:
        before = time.monotonic() - self._idle_seconds
        while self._idle and self._idle[0][1].since < before:
            self._idle.pop(0)[1].consumer.close()

    def _shrink(self, to: int) -> None:
        while len(self._idle) > to:
            self._idle.pop(0)[1].consumer.close()

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            self._of_parent.extend(self._idle)
            self._idle.clear()
            self._pid = os.getpid()


#: The pool of this process.
POOL = ConsumerPool()
