"""Decides when RocksDB compacts the data family of a store, and waits for compactions.

A task has its store open for a moment only. With RocksDB's own rules, nearly every task began a compaction of
many tables, closing the store aborted it, and the next task began it again; ``docs/state-store.md`` has
measurements. Therefore compactions are off when a database is opened. A write switches them on if level 0 has
many tables, and closing the database waits for the one that runs. `rocksdb.data_options` keeps them short.

::

    off ──a write finds many tables at level 0──▶ on ──close──▶ off ──the running compaction ends──▶ closed

If a compaction fails, its task succeeds all the same; see `_report_failure`.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from kafka_eos_source.errors import KafkaEosError, StateCorruptedError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.retry import Pauses
from kafka_eos_source.state.store.files import RESTORE_FIX, replace_text
from kafka_eos_source.state.store.rocksdb import (
    Family,
    call,
    check_writable,
    property_of,
    remove_options_files,
)

_log = logging.getLogger(__name__)

#: Number of tables at level 0 from which on the data family is compacted. A lookup checks the Bloom filter of
#: each of them, which takes 0.2 µs.
DUE_TABLES = 8
#: How long `await_end` waits for a due compaction to begin. RocksDB begins none after a failed write.
_BEGIN_SECONDS = 1.0
#: How often `await_end` looks whether a compaction has ended: first, and later on. RocksDB does not tell it.
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.001, 0.02
#: File of a database in which a compaction found damage; it has the text of the error.
_DAMAGE = "damage"


def are_due(data: Family, path: Path) -> bool:
    """Returns whether the data family of the database at ``path`` has many tables at level 0."""
    return property_of(data, path, "num-files-at-level0") >= DUE_TABLES


def switch(data: Family, path: Path, *, on: bool) -> None:
    """Switches the compactions of the data family on or off. A failure is logged.

    Args:
        data: the data family.
        path: folder of the database.
        on: whether RocksDB may begin compactions.
    """
    try:
        call(path, data.set_options, {"disable_auto_compactions": "false" if on else "true"})
    except KafkaEosError as error:
        # Whoever writes next gets an error, too, if the disk is full or has failed. The log must not keep the
        # error itself, because its traceback would keep the database open.
        text = str(error)
        _log.warning("the compactions of %s could not be switched on or off: %s", path, text)
    remove_options_files(path)


def await_end(db: Family, data: Family, path: Path) -> None:
    """Waits until the running compaction has ended, and lets no other one begin.

    So a task waits for one compaction at most, and none is done in vain. There is no time limit: a compaction
    that is aborted whenever the disk is slow would never end.

    Args:
        db: the database.
        data: its data family, whose compactions are on.
        path: folder of the database.
    """
    pauses = Pauses(Deadline.after_seconds(_BEGIN_SECONDS), _FIRST_LOOK_SECONDS, _LOOK_SECONDS)
    while property_of(data, path, "compaction-pending") and not is_running(data, path):
        if have_failed(db, path) or pauses.expired:
            break
        pauses.wait()
    switch(data, path, on=False)
    failpoints.reach("state.within_compaction")
    pauses = Pauses(None, _FIRST_LOOK_SECONDS, _LOOK_SECONDS)
    while is_running(data, path):
        pauses.wait()
    if have_failed(db, path):
        _report_failure(db, path)


def is_running(data: Family, path: Path) -> bool:
    """Returns whether a compaction of any column family runs."""
    return property_of(data, path, "num-running-compactions") > 0


def have_failed(db: Family, path: Path) -> bool:
    """Returns whether a compaction or a flush of any column family has failed since this open."""
    # RocksDB counts them in the family "default"
    return property_of(db, path, "background-errors") > 0


def check_undamaged(path: Path) -> None:
    """Checks that no compaction has found damage in the database of this folder.

    Raises:
        StateCorruptedError: if one has.
    """
    file = path / _DAMAGE
    if file.exists():
        raise StateCorruptedError(
            f"a compaction found damage: {file.read_text(errors='replace')}", fix=RESTORE_FIX
        )


def _report_failure(db: Family, path: Path) -> None:
    """Logs why a compaction failed. If a table is damaged, the next open raises an error.

    The batch is in the log, so its task succeeds. But no later task could compact a damaged table either.
    """
    text = "the disk may be full; RocksDB's file LOG has the reason"
    try:
        check_writable(db, path)
    except KafkaEosError as error:
        text = error.message
        if isinstance(error, StateCorruptedError):
            with suppress(OSError):  # the disk is full; a later task finds the damage again
                replace_text(path / _DAMAGE, text)
    _log.warning("a compaction of %s failed, and a later task repeats it: %s", path, text)
