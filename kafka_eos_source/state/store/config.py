"""Settings of a store. The names in brackets are those of Kafka Streams or of the query's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kafka_eos_source.errors import InvalidOptionError

Isolation = Literal["read_committed", "read_uncommitted"]

_MIB = 1 << 20


@dataclass(frozen=True)
class StoreConfig:
    """How a store behaves; what it holds does not depend on it.

    Attributes:
        uncommitted_max_bytes: [``statestore.uncommitted.max.bytes``, KIP-892] staged writes beyond which the
            next micro-batch should be smaller; -1 = no limit. Bytes of memory, not of payload: see `overlay`.
        hard_limit_factor: a batch that stages more than this times the limit fails.
        query_isolation: [``default.interactive.query.isolation.level``] of a view that does not say. Kafka's
            default is read_uncommitted.
        lock_timeout_ms: how long to wait for another owner to let go, when opening.
        wal_sync: write each commit through to the disk before going on. Without it a killed process loses
            nothing, a machine that loses power loses the last seconds, whole commits at a time.
        write_buffer_bytes: RocksDB memtable of each column family.
        max_wal_bytes: log beyond which RocksDB flushes. Bounds what is replayed when a store is opened after
            a crash, with two million keys and batches of 100,000: 4 MiB 0.2 s, 8 MiB 0.4 s, 16 MiB 0.7 s.
        block_cache_bytes: cache of disk blocks, shared by the stores of a process; the first to open sets it.
        max_age_ms: a store whose last commit is older must not be caught up from the changelog, because
            deletes may have been compacted away there (KIP-1259): half of Kafka's default
            ``delete.retention.ms``. -1 = any age.
    """

    uncommitted_max_bytes: int = 64 * _MIB
    hard_limit_factor: int = 4
    query_isolation: Isolation = "read_committed"
    lock_timeout_ms: int = 10_000
    wal_sync: bool = False
    write_buffer_bytes: int = 8 * _MIB
    max_wal_bytes: int = 8 * _MIB
    block_cache_bytes: int = 64 * _MIB
    max_age_ms: int = 12 * 3600 * 1000

    def __post_init__(self) -> None:
        """Raises: InvalidOptionError: a value is out of range."""
        _at_least("statestore.uncommitted.max.bytes", self.uncommitted_max_bytes, 1, or_none=True)
        _at_least("state.max.age.ms", self.max_age_ms, 1, or_none=True)
        for name in ("hard_limit_factor", "write_buffer_bytes", "max_wal_bytes", "block_cache_bytes"):
            _at_least(name, getattr(self, name), 1)
        _at_least("lock_timeout_ms", self.lock_timeout_ms, 0)
        check_isolation(self.query_isolation)


def check_isolation(level: str) -> None:
    """Raises: InvalidOptionError: there is no such isolation level."""
    if level not in get_args(Isolation):
        raise InvalidOptionError(
            f"isolation level {level!r}", fix=f"one of {', '.join(map(repr, get_args(Isolation)))}"
        )


def _at_least(name: str, value: int, least: int, *, or_none: bool = False) -> None:
    if value < least and not (or_none and value == -1):
        expected = f"at least {least}" + (", or -1 for none" if or_none else "")
        raise InvalidOptionError(f"{name} is {value}; expected {expected}")
