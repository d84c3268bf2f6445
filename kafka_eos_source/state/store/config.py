"""Settings of a store. Names in brackets are options of the query or of Kafka Streams."""

from __future__ import annotations

from dataclasses import dataclass

from kafka_eos_source.errors import InvalidOptionError

_MIB = 1 << 20


@dataclass(frozen=True)
class StoreConfig:
    """Settings of a store; the data on disk does not depend on them.

    Attributes:
        uncommitted_max_bytes: [``statestore.uncommitted.max.bytes``, KIP-892] memory of staged writes above
            which they go to disk; the stores of a process share it; -1 = no limit. Counted as `overlay`
            describes.
        lock_timeout_ms: [``state.lock.timeout.ms``] how long `open` waits while another process has the store
            open.
        wal_sync: [``state.wal.sync``] wait until each commit is on disk. Without it a process that is killed
            loses nothing; a machine that loses power loses the last seconds, in whole commits.
        write_buffer_bytes: size of RocksDB's memtable of each column family.
        max_wal_bytes: size of the write-ahead log above which RocksDB flushes. It bounds the time to open a
            store after a crash; with two million keys and batches of 100,000 changes: 4 MiB 0.2 s, 8 MiB
            0.4 s, 16 MiB 0.7 s.
        block_cache_bytes: size of the block cache that the stores of a process share; the first store that is
            opened sets it.
    """

    uncommitted_max_bytes: int = 64 * _MIB
    lock_timeout_ms: int = 10_000
    wal_sync: bool = False
    write_buffer_bytes: int = 8 * _MIB
    max_wal_bytes: int = 8 * _MIB
    block_cache_bytes: int = 64 * _MIB

    def __post_init__(self) -> None:
        """Raises `InvalidOptionError` if a value is out of range."""
        _at_least("statestore.uncommitted.max.bytes", self.uncommitted_max_bytes, 1, or_unlimited=True)
        for name in ("write_buffer_bytes", "max_wal_bytes", "block_cache_bytes"):
            _at_least(name, getattr(self, name), 1)
        _at_least("lock_timeout_ms", self.lock_timeout_ms, 0)


def _at_least(name: str, value: int, least: int, *, or_unlimited: bool = False) -> None:
    if value < least and not (or_unlimited and value == -1):
        expected = f"at least {least}" + (", or -1 for no limit" if or_unlimited else "")
        raise InvalidOptionError(f"{name} is {value}; expected {expected}.")
