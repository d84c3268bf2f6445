"""A store that is opened, brought to where Kafka says, and, where it is worth nothing, removed and made anew.

::

    open ──────▶ bring ──Restored──▶ ready
     │  damaged    │ WipeNeeded, or found damaged on the way
     ▼             ▼
    put away, once ──▶ open anew, bring ──Restored──▶ ready
                                        └──anything else──▶ error: no loop
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
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore

_log = logging.getLogger(__name__)


def open_restored(
    path: str | os.PathLike[str],
    identity: StoreIdentity,
    config: StoreConfig,
    bring: Callable[[TransactionalStateStore], Restored | WipeNeeded],
    progress: RestoreProgress,
) -> tuple[TransactionalStateStore, Restored]:
    """The shard's store, open and at the batch that Kafka holds.

    What was there is wiped at most once; a damaged database is set aside, not removed.
    After a kill at any point the same call goes on.

    Args:
        path: folder of the store.
        identity: whose state it is.
        config: of the store.
        bring: promotes what is pending or restores, mostly `restore.restore`. Called with an open store, a
            second time with an empty one.
        progress: that of ``bring``; told of a wipe.

    Raises:
        ChangelogError: an empty store could not be restored either.
        StateCorruptedError, StateError: the store was damaged again soon after it was made anew.
        KafkaEosError: whatever opening and ``bring`` raise; the store is closed then.
    """
    wiped: WipeNeeded | None = None
    while True:
        try:
            store = TransactionalStateStore.open(path, identity, config)
        except StateCorruptedError as error:
            if wiped is not None:
                raise
            wiped = WipeNeeded(_damage(path, identity), error.message)
        else:
            outcome = _brought(store, bring, once_more=wiped is None)
            if isinstance(outcome, Restored):
                return store, outcome
            if wiped is not None:
                _give_up(path, wiped, outcome)
            wiped = outcome
        _put_away(path, wiped)
        progress.wiped = wiped.reason


def _brought(
    store: TransactionalStateStore,
    bring: Callable[[TransactionalStateStore], Restored | WipeNeeded],
    *,
    once_more: bool,
) -> Restored | WipeNeeded:
    """What ``bring`` says; the store is closed unless it is restored."""
    try:
        outcome = bring(store)
    except BaseException as error:
        store.close()
        if isinstance(error, StateCorruptedError) and once_more:
            return WipeNeeded(Reason.CORRUPT, error.message)
        raise
    if isinstance(outcome, WipeNeeded):
        store.close()
    return outcome


def _damage(path: str | os.PathLike[str], identity: StoreIdentity) -> Reason:
    """Why a store counts as damaged: its changelog is another topic by now, or its files are."""
    try:
        with TransactionalStateStore.open_read_only(path) as reader:
            theirs = reader.identity.topic_id
    except KafkaEosError:
        return Reason.CORRUPT
    return Reason.OTHER_TOPIC if identity.topic_id and theirs != identity.topic_id else Reason.CORRUPT


def _put_away(path: str | os.PathLike[str], wipe: WipeNeeded) -> None:
    """A damaged database is kept for whoever wants to know why; another one's files say nothing."""
    if wipe.reason is Reason.CORRUPT:
        where = f"set aside as {TransactionalStateStore.set_aside(path)}"
    else:
        TransactionalStateStore.destroy(path)
        where = "removed"
    _log.warning("state in %s is %s and restored (%s): %s", path, where, wipe.reason.value, wipe.why)


def _give_up(path: str | os.PathLike[str], first: WipeNeeded, second: WipeNeeded) -> NoReturn:
    raise ChangelogError(
        f"state in {path} was removed ({first.reason.value}: {first.why}) and what was restored is worth "
        f"nothing again ({second.reason.value}: {second.why}).",
        fix="see what removes records of the changelog while it is read: its retention, or somebody's "
        "kafka-delete-records.sh.",
    )
