"""Opens a store and restores it; replaces unusable local state, at most once.

::

    open ──────▶ restore ──Restored──▶ ready
     │ damaged     │ WipeNeeded, or damage found during the restore
     ▼             ▼
    remove or set aside, once ──▶ open, restore ──Restored──▶ ready
                                               └──anything else──▶ error, so that there is no loop

Wherever there is no store, a snapshot may take its place, at most twice. If that one cannot be used either,
it is removed, and an empty store is restored from the whole changelog.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import NoReturn

from kafka_eos_source.errors import ChangelogError, KafkaEosError, StateCorruptedError
from kafka_eos_source.state.changelog.restore import Restored
from kafka_eos_source.state.changelog.restore_plan import Reason, WipeNeeded
from kafka_eos_source.state.changelog.restore_progress import RestoreProgress
from kafka_eos_source.state.model import StoreIdentity
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore

_log = logging.getLogger(__name__)


def open_restored(
    path: str | os.PathLike[str],
    identity: StoreIdentity,
    config: StoreConfig,
    restore_store: Callable[[TransactionalStateStore], Restored | WipeNeeded],
    progress: RestoreProgress,
    install_snapshot: Callable[[], bool] | None = None,
) -> tuple[TransactionalStateStore, Restored]:
    """Returns the open store of a shard, with the state of the batch that Kafka holds.

    Local state is wiped at most once; a damaged database is set aside instead of removed. If the process is
    killed, the same call continues where it stopped.

    Args:
        path: folder of the store.
        identity: which state it is.
        config: of the store.
        restore_store: promotes pending changes or reads the changelog, usually by `restore.restore`. It is
            called with the open store, and a second time with an empty one if that store was wiped.
        progress: of ``restore_store``; a wipe and the use of a snapshot are recorded there.
        install_snapshot: called where there is no store; puts a snapshot there if one fits, and returns
            whether it did. None = there are no snapshots.

    Raises:
        ChangelogError: if an empty store could not be restored either.
        StateCorruptedError, StateError: if the store was damaged again soon after it was created again.
        KafkaEosError: any error of opening and of ``restore_store``; the store is closed then.
    """
    wiped: WipeNeeded | None = None
    is_snapshot = not _has_store(path) and install_snapshot is not None and install_snapshot()
    while True:
        may_wipe = wiped is None or is_snapshot
        try:
            store = TransactionalStateStore.open(path, identity, config)
        except StateCorruptedError as error:
            if not may_wipe:
                raise
            wipe = WipeNeeded(_damage(path, identity), error.message.rstrip("."))
        else:
            progress.snapshot_offset = store.next_offset(progress.tp) if is_snapshot else None
            outcome = _try_restore(store, restore_store, may_wipe=may_wipe)
            if isinstance(outcome, Restored):
                return store, outcome
            wipe = outcome
        if is_snapshot:
            TransactionalStateStore.destroy(path)
            _log.warning(
                "the snapshot in %s cannot be used (%s: %s); the whole changelog is read instead",
                path,
                wipe.reason.value,
                wipe.why,
            )
            install_snapshot, is_snapshot = None, False
            continue
        if wiped is not None:
            _raise_wiped_twice(path, wiped, wipe)
        wiped = wipe
        _wipe(path, wipe)
        progress.wiped = wipe.reason
        is_snapshot = install_snapshot is not None and install_snapshot()


def _has_store(path: str | os.PathLike[str]) -> bool:
    return os.path.exists(os.path.join(path, "VERSION"))


def _try_restore(
    store: TransactionalStateStore,
    restore_store: Callable[[TransactionalStateStore], Restored | WipeNeeded],
    *,
    may_wipe: bool,
) -> Restored | WipeNeeded:
    """Returns the result of ``restore_store``; closes the store unless it is restored."""
    try:
        outcome = restore_store(store)
    except BaseException as error:
        store.close()
        if isinstance(error, StateCorruptedError) and may_wipe:
            return WipeNeeded(Reason.CORRUPT, error.message.rstrip("."))
        raise
    if isinstance(outcome, WipeNeeded):
        store.close()
    return outcome


def _damage(path: str | os.PathLike[str], identity: StoreIdentity) -> Reason:
    """Returns why opening failed: another changelog topic, or damaged files."""
    try:
        with TransactionalStateStore.open_read_only(path) as reader:
            topic_id = reader.identity.topic_id
    except KafkaEosError:
        return Reason.CORRUPT
    return Reason.OTHER_TOPIC if identity.topic_id and topic_id != identity.topic_id else Reason.CORRUPT


def _wipe(path: str | os.PathLike[str], wipe: WipeNeeded) -> None:
    """Removes local state; sets a damaged database aside, so that a person can examine it."""
    if wipe.reason is Reason.CORRUPT:
        result = f"set aside as {TransactionalStateStore.set_aside(path)}"
    else:
        TransactionalStateStore.destroy(path)
        result = "removed"
    _log.warning("the state in %s is %s and restored (%s): %s", path, result, wipe.reason.value, wipe.why)


def _raise_wiped_twice(path: str | os.PathLike[str], first: WipeNeeded, second: WipeNeeded) -> NoReturn:
    fix = (
        "find out what removes records of the changelog while it is read: its retention, or "
        "kafka-delete-records.sh."
    )
    if second.reason is Reason.TOO_OLD:
        fix = (
            "set delete.retention.ms of the changelog topic to more than twice the time that a restore takes."
        )
    raise ChangelogError(
        f"the state in {path} was removed ({first.reason.value}: {first.why}), and the restored state cannot "
        f"be used either ({second.reason.value}: {second.why}).",
        fix=fix,
    )
