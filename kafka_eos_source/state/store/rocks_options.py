"""How a RocksDB of state is set up. One cache of blocks serves all databases of a process."""

from __future__ import annotations

import threading
from typing import Any

import rocksdict

from kafka_eos_source.state.store.config import StoreConfig

_MIB = 1 << 20
#: The offsets' memtable holds a few records, again and again.
_SMALL_BUFFER_BYTES = 1 * _MIB

_cache: Any = None
_cache_lock = threading.Lock()


def database_options(config: StoreConfig) -> Any:
    """Of the database as a whole."""
    options = family_options(config, small=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_atomic_flush(True)
    options.set_max_total_wal_size(config.max_wal_bytes)
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.point_in_time())
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(2)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


def family_options(config: StoreConfig, *, small: bool = False) -> Any:
    """Of a column family; ``small``: of one that holds a few records, again and again."""
    options = rocksdict.Options(raw_mode=True)
    options.set_write_buffer_size(_SMALL_BUFFER_BYTES if small else config.write_buffer_bytes)
    options.set_max_write_buffer_number(3)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_min_level_to_compress(2)  # what is young is read and rewritten most
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(_block_cache(config))
    blocks.set_bloom_filter(10, False)
    blocks.set_format_version(5)
    options.set_block_based_table_factory(blocks)
    return options


def _block_cache(config: StoreConfig) -> Any:
    global _cache
    with _cache_lock:
        if _cache is None:
            _cache = rocksdict.Cache(config.block_cache_bytes)
        return _cache
