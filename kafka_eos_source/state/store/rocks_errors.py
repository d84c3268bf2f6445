"""What rocksdict raises, as errors of ours."""

from __future__ import annotations

import re
from pathlib import Path

import rocksdict

from kafka_eos_source.errors import (
    KafkaEosError,
    StateCorruptedError,
    StateError,
    StateLockedError,
    StoreClosedError,
)
from kafka_eos_source.state.store.owner import owner_of


def translate(error: Exception, path: Path) -> KafkaEosError:
    """One of ours for what rocksdict raised, which is a plain `Exception` with RocksDB's text."""
    text = str(error)
    if isinstance(error, KafkaEosError):
        return error
    if isinstance(error, rocksdict.DbClosedError):
        return StoreClosedError(f"the database {path} is closed")
    if text.startswith("IO error") and re.search(r"lock", text.split(str(path))[0], re.IGNORECASE):
        return StateLockedError(
            f"the database {path} is open in {owner_of(path)}",
            fix="stop that process; a crashed one holds nothing. Files named LOCK need not be removed.",
        )
    if text.startswith("Corruption") or (text.startswith("IO error: No such file") and str(path) in text):
        return StateCorruptedError(
            f"the database {path} is damaged: {text}", fix="it is set aside and restored from the changelog"
        )
    return StateError(f"the database {path}: {text}", fix="see to the disk, then start the query again")
