"""The folder of a store: what is checked before and after RocksDB opens it, and how it is put away.

::

    <path>/VERSION                 format, read before RocksDB touches anything
    <path>/db/                     RocksDB
    <path>/owner                   who has it open; still there = the last owner did not close it
    <path>/.checkpoint             changelog offsets, for tools and for a downgrade
    <path>/.position               from Kafka Streams: taken over once, then removed
    <path>.corrupt-<ms>/           a damaged one, set aside; the newest is kept
    <path>.trash-…/                being removed
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

from kafka_eos_source.errors import (
    StateCorruptedError,
    StateError,
    StateFormatError,
    StateLockedError,
    StateMismatchError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import StoreIdentity
from kafka_eos_source.state.store import records
from kafka_eos_source.state.store.checkpoint_file import (
    CHECKPOINT,
    POSITION,
    read_last_offsets,
    write_checkpoint,
)
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.database import Database, is_open_here
from kafka_eos_source.state.store.files import remove_tree, replace_text
from kafka_eos_source.state.store.owner import owner_of, remove_owner, write_owner
from kafka_eos_source.state.store.records import Committed

#: Damaged twice within this time is no accident: restoring again and again would hide a failing disk.
_AGAIN_MS = 600_000

_log = logging.getLogger(__name__)


def open_store(path: Path, identity: StoreIdentity, config: StoreConfig) -> tuple[Database, Committed]:
    """Opens or makes the store; see `TransactionalStateStore.open` for what it raises."""
    path.mkdir(parents=True, exist_ok=True)
    remove_trash(path)
    db_path = path / "db"
    known = check_version(path)
    if known and db_path.exists() and any(db_path.iterdir()) and not (db_path / "CURRENT").exists():
        raise StateCorruptedError(f"the database {db_path} has lost its CURRENT file")
    if not known:
        replace_text(path / "VERSION", f"{records.FORMAT}\n", sync=True)
    database = Database.open(db_path, config)
    try:
        if remove_owner(db_path):
            _log.info("the last owner of %s did not close it", path)
        write_owner(db_path)
        found = records.decode(database.scan(family="offsets"))
        committed = _settled(path, found, identity, has_data=database.has_data())
        if committed != found:
            writes = database.batch()
            puts, gone = records.encode(found, committed)
            for key, value in puts:
                writes.put("offsets", key, value)
            for key in gone:
                writes.delete("offsets", key)
            database.write(writes, sync=config.wal_sync)
        (path / POSITION).unlink(missing_ok=True)
        write_checkpoint(path, committed.offsets)
    except BaseException:
        database.close()
        closed(path)
        raise
    return database, committed


def closed(path: Path) -> None:
    """Notes that the database was closed in good order."""
    remove_owner(path / "db")


def check_version(path: Path) -> bool:
    """True if this folder has a store already.

    Raises:
        StateFormatError: of a newer release.
        StateCorruptedError: the file says nothing.
    """
    try:
        text = (path / "VERSION").read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return False
    if not text.isdecimal():
        raise StateCorruptedError(f"{path / 'VERSION'} has {text[:40]!r}, expected a number")
    try:
        records.check_format(int(text))
    except StateFormatError as error:
        raise StateFormatError(f"{path}: {error.message}", fix=f"{error.fix} ({path})") from None
    return True


def set_aside(path: Path) -> Path | None:
    """See `TransactionalStateStore.set_aside`."""
    now_ms = int(time.time() * 1000)
    with _unlocked(path):
        if not path.exists():
            return None
        aside = path.with_name(f"{path.name}.corrupt-{now_ms}")
        earlier = [
            other for other in path.parent.glob(f"{path.name}.corrupt-*") if other.name[-13:].isdecimal()
        ]
        for other in earlier:
            since_ms = now_ms - int(other.name.rpartition("-")[2])
            if since_ms < _AGAIN_MS:
                raise StateError(
                    f"{path} is damaged, {since_ms // 1000} s after it was before ({other})",
                    fix="see to the disk; remove that folder to have the state restored once more",
                )
        path.rename(aside)
    for other in earlier:
        remove_tree(other)
    return aside


def destroy(path: Path) -> None:
    """See `TransactionalStateStore.destroy`."""
    with _unlocked(path):
        remove_tree(path)


def remove_trash(path: Path) -> None:
    """Ends a removal that a kill cut short."""
    for left in path.parent.glob(f"{path.name}.trash-*"):
        remove_tree(left)


def _settled(path: Path, found: Committed, identity: StoreIdentity, *, has_data: bool) -> Committed:
    """What the records should say once the store is open: checked, made, or taken over from Kafka's files."""
    changelog = TopicPartition(identity.changelog_topic, identity.shard)
    settled = found
    if found.identity is None:
        offsets = {changelog: 0}
        if has_data:
            last = (read_last_offsets(path / CHECKPOINT) or {}).get(changelog)
            if last is None:
                raise StateCorruptedError(
                    f"the store {path} has data and does not say how far it is", reason="no-offset"
                )
            offsets = {changelog: last + 1}
            _log.info("store %s: took over %s", path, CHECKPOINT)
        settled = replace(settled, identity=identity, offsets=MappingProxyType(offsets))
    else:
        settled = replace(settled, identity=_checked(path, found.identity, identity))
        if changelog not in found.offsets:
            raise StateCorruptedError(
                f"the store {path} has no offset of its changelog {changelog}", reason="no-offset"
            )
    position = read_last_offsets(path / POSITION)
    if position:
        merged = {**position, **{tp: max(at, position.get(tp, at)) for tp, at in found.position.items()}}
        settled = replace(settled, position=MappingProxyType(merged))
    return settled


def _checked(path: Path, found: StoreIdentity, identity: StoreIdentity) -> StoreIdentity:
    """The identity to keep; of the topic id and the schema, the one that is known ("" = not).

    Raises:
        StateMismatchError: another store's.
        StateCorruptedError: the changelog was deleted and made anew, with as many shards as it may have.
    """
    known = replace(
        identity, topic_id=identity.topic_id or found.topic_id, schema=identity.schema or found.schema
    )
    whose = (found.application_id, found.store, found.shard, found.changelog_topic)
    is_ours = whose == (known.application_id, known.store, known.shard, known.changelog_topic)
    if is_ours and found.topic_id and found.topic_id != known.topic_id:
        raise StateCorruptedError(
            f"the store {path} is of changelog topic {identity.changelog_topic} with id {found.topic_id}, "
            f"which was deleted; the one there now has id {identity.topic_id}",
            reason="topic",
        )
    theirs = asdict(replace(found, topic_id=known.topic_id, schema=found.schema or known.schema))
    differ = ", ".join(
        f"{name} {theirs[name]!r}, expected {mine!r}"
        for name, mine in asdict(known).items()
        if theirs[name] != mine
    )
    if differ:
        raise StateMismatchError(
            f"the state in {path} is of {differ}",
            fix="shards and schema cannot change in place: re-shard with 'kafka-eos state rescale', use "
            "another store name, or remove the folder to restore from the changelog",
        )
    return known


@contextmanager
def _unlocked(path: Path) -> Iterator[None]:
    """Holds RocksDB's own lock file meanwhile, so that nobody opens what is being put away.

    Raises:
        StateLockedError: somebody has it open.
    """
    db_path = path / "db"
    if is_open_here(db_path):
        raise StateLockedError(f"the database {db_path} is open in this process", fix="close it first")
    try:
        lock = os.open(db_path / "LOCK", os.O_RDWR)
    except FileNotFoundError:
        yield  # never opened, or gone already
        return
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise StateLockedError(
            f"the database {db_path} is open in {owner_of(db_path)}", fix="stop that process first"
        ) from error
    try:
        yield
    finally:
        os.close(lock)
