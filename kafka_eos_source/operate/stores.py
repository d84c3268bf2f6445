"""What the ``state`` commands do with stores: list, get, verify, restore, and lower their recorded times."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from kafka_eos_source.commit.micro_batch import KafkaClients
from kafka_eos_source.commit.ownership import refuse_changed
from kafka_eos_source.errors import (
    AbortableError,
    FencedError,
    InvalidOptionError,
    KafkaEosError,
    OperatorError,
    OutcomeUnknownError,
    StateError,
    TokenMissingError,
)
from kafka_eos_source.kafka.admin import ClusterReader
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.reader import ChangelogReader, LogEnds
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import ShardProgress, Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.recovery import Restored, RestoreProgress, WipeNeeded
from kafka_eos_source.state.changelog.topic import changelog_client, changelog_name
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.operator.shard_store import (
    Action,
    ReadChangelog,
    bring_to_batch,
    open_shard_store,
)
from kafka_eos_source.state.reading.live import text
from kafka_eos_source.state.reading.query import StateQuery
from kafka_eos_source.state.reading.snapshot import of_changelog, of_folders
from kafka_eos_source.state.reading.stores import Changelog, Cut, StoreFolder, folders
from kafka_eos_source.state.store.overlay import Pair
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore


@dataclass(frozen=True)
class LocalShard:
    """One database on this machine.

    Attributes:
        folder: its folder.
        identity: the identity that it stores; None = it cannot be read, see ``problem``.
        batch: the batch whose state it contains; None = no batch.
        next_offset: changelog offset from which to continue; None = not recorded.
        pending: batches whose changes are kept on disk until the token decides their fate.
        size_bytes: size of its files.
        problem: why it cannot be read, and what to do.
    """

    folder: StoreFolder
    identity: StoreIdentity | None = None
    batch: BatchRecord | None = None
    next_offset: int | None = None
    pending: Sequence[int] = ()
    size_bytes: int = 0
    problem: str = ""


@dataclass(frozen=True)
class ChangelogShard:
    """One partition of a changelog.

    Attributes:
        store: name of the store.
        tp: the partition.
        log: bounds of its log.
        committed: the group's committed offset; None = no offset.
        token: the token in the metadata of that offset; None = no token.
        problem: why the token cannot be decoded.
    """

    store: str
    tp: TopicPartition
    log: LogEnds
    committed: int | None = None
    token: Token | None = None
    problem: str = ""

    @property
    def lag(self) -> int:
        """Offsets in the log from the committed offset on.

        Usually 1, for the control record of the commit. More belong to an open transaction, or to another
        program.
        """
        return self.log.end - (self.committed or 0)


def local_shards(root: str, application_id: str | None = None, store: str | None = None) -> list[LocalShard]:
    """Lists the databases in a state directory."""
    return [_read_shard(each) for each in folders(root, application_id, store)]


def changelog_shards(
    reader: ClusterReader, group_id: str, application_id: str, store: str | None, deadline: Deadline
) -> list[ChangelogShard]:
    """Lists the changelog partitions of a query, which it recognises by the names of the topics."""
    _, topics = reader.topics(deadline)
    stores = stores_of(application_id, topics)
    tps = [
        TopicPartition(topic, shard)
        for name, topic in stores.items()
        if store in (None, name)
        for shard in range(topics[topic])
    ]
    if not tps:
        return []
    offsets, _ = reader.group(group_id, tps, deadline)
    logs = reader.logs(tps)
    names = {topic: name for name, topic in stores.items()}
    found = []
    for tp in sorted(tps):
        offset = offsets.get(tp)
        token, problem = None, ""
        try:
            token = None if offset is None else Token.decode(offset.metadata)
        except OperatorError as error:
            problem = error.message
        committed = None if offset is None else offset.offset
        found.append(ChangelogShard(names[tp.topic], tp, logs[tp], committed, token, problem))
    return found


def stores_of(application_id: str, topics: Mapping[str, int]) -> dict[str, str]:
    """Returns the changelog topic of each store of a query, by name of the store."""
    pattern = re.compile(re.escape(application_id) + r"-(.+)-changelog")
    return {found[1]: name for name in sorted(topics) if (found := pattern.fullmatch(name))}


def _read_shard(folder: StoreFolder) -> LocalShard:
    try:
        with TransactionalStateStore.open_read_only(folder.path) as reader:
            own = reader.identity
            return LocalShard(
                folder,
                own,
                reader.last_batch(),
                reader.next_offset(TopicPartition(own.changelog_topic, own.shard)),
                [each.record.batch_id for each in reader.pending()],
                folder.size_bytes(),
            )
    except KafkaEosError as error:
        problem = f"{error.message} Fix: {error.fix}" if error.fix else error.message
        return LocalShard(folder, size_bytes=folder.size_bytes(), problem=problem)


# -- get


def selected_rows(
    state: StateQuery, key: Sequence[str], prefix: str | None, variable: str | None, *, timers: bool = False
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a key, of all keys whose first column begins with ``prefix``, or all rows.

    Raises:
        InvalidOptionError: if both key and prefix are set, or the key has the wrong number or types of
            columns.
        KafkaEosError: as `StateQuery.rows` raises it.
    """
    if key and prefix is not None:
        raise InvalidOptionError("KEY and --prefix exclude each other.", fix="remove one of them.")
    if key:
        description = state.description()
        if description is not None:
            yield from state.rows(parse_key(description.key, key), variable, timers=timers)
        return
    for row in state.all(variable, timers=timers):
        if prefix is None or text(next(iter(row["key"].values()))).startswith(prefix):
            yield row


def parse_key(fields: pa.Schema, key: Sequence[str]) -> tuple[Any, ...]:
    """Converts the words of a command line into a key with these columns; binary is hexadecimal.

    Raises:
        InvalidOptionError: if a word is not a value of its column, or the number of words is wrong.
    """
    if len(key) != len(fields):
        raise InvalidOptionError(
            f"the key has {len(key)} value(s); expected {len(fields)}: {', '.join(fields.names)}.",
            fix="give one value for each grouping column; quote values that contain blanks.",
        )
    return tuple(_parse_word(word, field) for word, field in zip(key, fields, strict=True))


def _parse_word(word: str, field: pa.Field) -> Any:
    try:
        if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            return bytes.fromhex(word)
        if pa.types.is_boolean(field.type):
            return {"true": True, "false": False}[word.lower()]
        return pa.array([word]).cast(field.type)[0].as_py()
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise InvalidOptionError(
            f"{word!r} is not a value of column {field.name!r}, which has type {field.type}.",
            fix="write numbers in decimal, times as 2026-11-21T12:00:00Z, and binary in hexadecimal.",
        ) from error


# -- verify

#: How many differences of a shard are kept for display.
SHOWN = 20


class Kind(Enum):
    """How an entry differs."""

    MISSING = "only in the changelog"
    SURPLUS = "only in the database"
    OTHER = "different values"


@dataclass(frozen=True)
class Difference:
    """One key that differs."""

    kind: Kind
    key: bytes


@dataclass
class Verified:
    """The result for one shard.

    Attributes:
        batch_id: the batch whose state both have; None = no batch.
        end: the changelog offset up to which both were read.
        entries: number of entries in the changelog.
        differing: number of keys that differ.
        differences: the first of these keys.
    """

    shard: int
    batch_id: int | None
    end: int
    entries: int = 0
    differing: int = 0
    differences: list[Difference] = field(default_factory=list)


def verify(found: list[StoreFolder], changelog: Changelog, deadline: Deadline) -> Iterator[Verified]:
    """Compares each shard, one after another, as of one moment for all. The query may run.

    Args:
        found: the databases of one store.
        changelog: changelog of the same store.
        deadline: limits each wait for Kafka, and the wait for databases that a task is about to update.

    Raises:
        NotUpToBoundError: if a database is behind Kafka; the query updates it when it next runs on this
            machine.
        StateError: if there is no database.
        KafkaEosError: as `snapshot.of_folders` and `snapshot.of_changelog` raise it.
    """
    if not found:
        raise StateError(
            f"this machine has no database of store {changelog.store!r} in --state-dir.",
            fix="set --state-dir to the operator's option state.dir.",
        )
    cuts: list[Cut] = []

    def cut(left: Deadline) -> Cut:
        cuts.append(changelog.cut(left))
        return cuts[-1]

    with of_folders(found, cut, deadline) as disk:
        at = cuts[-1]
        for shard, state in sorted(disk.states.items()):
            with of_changelog(changelog, at, [shard], deadline) as log:
                verified = Verified(
                    shard, None if state.batch is None else state.batch.batch_id, at.ends[shard]
                )
                compare(verified, log.states[shard].view.all(), state.view.all())
                yield verified


def compare(result: Verified, log: Iterator[Pair], disk: Iterator[Pair]) -> None:
    """Merges two scans in key order and adds the differences to ``result``."""
    logged, stored = next(log, None), next(disk, None)
    while logged is not None or stored is not None:
        if stored is None or (logged is not None and logged[0] < stored[0]):
            assert logged is not None
            _add_difference(result, Kind.MISSING, logged[0])
            result.entries += 1
            logged = next(log, None)
        elif logged is None or stored[0] < logged[0]:
            _add_difference(result, Kind.SURPLUS, stored[0])
            stored = next(disk, None)
        else:
            if stored[1] != logged[1]:
                _add_difference(result, Kind.OTHER, stored[0])
            result.entries += 1
            logged, stored = next(log, None), next(disk, None)


def _add_difference(result: Verified, kind: Kind, key: bytes) -> None:
    result.differing += 1
    result.differences += islice([Difference(kind, key)], max(0, SHOWN - len(result.differences)))


# -- restore
#
# A shard's own task does the same, on the same path (`open_shard_store`). The command prepares a machine in
# advance, so that the first batch does not wait. The query must not run on this machine, because only one
# process can own a database.

#: How long to wait for the lock of a database. A running query holds it for the duration of a batch.
_LOCK_MS = 2_000


@dataclass(frozen=True)
class RestoredShard:
    """One shard that now has the state that Kafka holds.

    Attributes:
        batch_id: the batch whose state it has.
        snapshot_offset: changelog offset of the snapshot with which it began; None = not with a snapshot.
        records: number of changelog records that were read.
        wiped: why the old database was discarded; None = it was not.
        promoted: whether its pending batch was the committed one, so that nothing had to be read.
        ms: how long reading took, in ms.
    """

    shard: int
    batch_id: int
    snapshot_offset: int | None
    records: int
    wiped: str | None
    promoted: bool
    ms: float


def restore_shards(
    root: str | Path, changelog: Changelog, cut: Cut, shards: Collection[int], deadline: Deadline
) -> Iterator[RestoredShard]:
    """Restores the shards one after another. After a crash, the same call continues.

    Args:
        root: the state directory.
        changelog: changelog of the store.
        cut: the committed end of each shard. Shards without a committed batch are skipped.
        shards: numbers of the shards.
        deadline: its budget limits each single wait for the brokers.

    Raises:
        StateLockedError: if the query runs on this machine.
        AuthorizationError: if the principal may not read the topic or its configuration.
        KafkaEosError: as `open_restored` and `restore` raise it.
    """
    retention_ms = changelog.delete_retention_ms(deadline)
    for shard in sorted(shards):
        batch = cut.batches[shard]
        if batch is not None:
            path = cut.identity(shard).folder(root)
            yield _restore_shard(path, changelog, cut, shard, batch, retention_ms, deadline)


def _restore_shard(
    path: Path,
    changelog: Changelog,
    cut: Cut,
    shard: int,
    batch: BatchRecord,
    delete_retention_ms: int,
    deadline: Deadline,
) -> RestoredShard:
    tp, end = cut.tp(shard), cut.ends[shard]
    progress = RestoreProgress(tp)
    promoted = False

    def bring(store: TransactionalStateStore, read: ReadChangelog) -> Restored | WipeNeeded:
        nonlocal promoted
        action, outcome = bring_to_batch(store, tp, batch, end, read)
        promoted = promoted or action is Action.PROMOTE
        return outcome

    with changelog_client(changelog.kafka) as consumer:
        store, restored = open_shard_store(
            path,
            cut.identity(shard),
            StoreConfig(lock_timeout_ms=_LOCK_MS),
            ChangelogReader(consumer, tp),
            bring,
            end=end,
            deadline=deadline,
            progress=progress,
            delete_retention_ms=delete_retention_ms,
            snapshots=changelog.snapshots(deadline, only_reads=False),
            accepted_start=batch.log_start,
        )
    store.close()
    return RestoredShard(
        shard,
        batch.batch_id,
        progress.snapshot_offset,
        restored.records,
        None if progress.wiped is None else progress.wiped.value,
        promoted,
        restored.ms,
    )


# -- lower-time
#
# The token on each changelog partition carries the processing time of the shard's last batch, and no later
# batch has an earlier one. If a clock was ahead once, that time stays in the future, and no timer fires until
# the other clocks are there. This command commits the same tokens again, with a time that is not in the
# future, in one transaction of the query's own id. Offsets, state and the position of the query stay as they
# are.
#
# A driver that is alive is fenced; it takes the id back before this command commits, which then changes
# nothing, or after it. In that case tasks that began before still report the time in the future, and the
# commit of their batch is refused (`commit.report_checks`).


@dataclass(frozen=True)
class LoweredShard:
    """A shard whose recorded time is in the future.

    Attributes:
        shard: number of the shard.
        was_ms: recorded processing time, in ms since the epoch.
        offset: what the command commits instead: the same offset, with the token at the lower time.
    """

    shard: int
    was_ms: int
    offset: GroupOffset


def future_shards(
    offsets: Mapping[TopicPartition, GroupOffset], application_id: str, store: str, now_ms: int
) -> list[LoweredShard]:
    """Returns the shards of a store whose recorded time is later than ``now_ms``.

    Args:
        offsets: the committed offsets of the query's group.
        application_id: the query's ``application.id``.
        store: name of the store.
        now_ms: the current time, in ms since the epoch.

    Raises:
        TokenMissingError: if the group has no token of the store.
        StateError: if the state is being moved to other shards.
    """
    topic = changelog_name(application_id, store)
    shards: dict[TopicPartition, tuple[Token, ShardProgress]] = {}
    for tp, each in offsets.items():
        token = Token.decode(each.metadata) if tp.topic == topic else None
        if token is not None and token.shard is not None and token.application_id == application_id:
            shards[tp] = token, token.shard
    if not shards:
        raise TokenMissingError(
            f"the consumer group has no token of store {store!r} of application.id {application_id!r}, so "
            "there is no recorded time.",
            fix="correct QUERY, --store or --kafka group.id=…; `kafka-eos state list` lists the stores.",
        )
    return [
        LoweredShard(
            tp.partition,
            progress.time_ms,
            replace(
                offsets[tp],
                metadata=replace(token, shard=replace(progress, time_ms=now_ms)).encode(),
            ),
        )
        for tp, (token, progress) in sorted(shards.items())
        if progress.time_ms > now_ms
    ]


def find_future_shards(
    kafka: Mapping[str, str], application_id: str, store: str, group_id: str, now_ms: int, deadline: Deadline
) -> list[LoweredShard]:
    """Returns the shards that `lower_times` would change; raises as `future_shards`, or if Kafka fails."""
    offsets, _ = GroupOffsets(admin_config(kafka)).now(group_id, (), deadline)
    return future_shards(offsets, application_id, store, now_ms)


def lower_times(
    kafka: Mapping[str, str], application_id: str, store: str, group_id: str, now_ms: int, deadline: Deadline
) -> list[LoweredShard]:
    """Lowers the recorded times that are in the future to ``now_ms``; returns these shards.

    Args:
        kafka: librdkafka properties of a producer.
        application_id, store: the store.
        group_id: the query's consumer group.
        now_ms: the current time, in ms since the epoch.
        deadline: for the whole call.

    Raises:
        StateError: if the query is alive, or the group changed meanwhile. Nothing was changed.
        TokenMissingError: if the group has no token of the store.
        OutcomeUnknownError: if Kafka did not answer the commit; run the command again.
    """
    clients = KafkaClients(kafka)
    producer = clients.producer(application_id)
    try:
        producer.init(deadline)
        offsets = clients.group_offsets(group_id, (), deadline)
        shards = future_shards(offsets, application_id, store, now_ms)
        if not shards:
            return []
        producer.begin()
        producer.send_offsets([each.offset for each in shards], group_id, deadline)
        # a coordinator that accepted these offsets is up to date; the one that was asked before may not be
        partitions = [each.offset.tp for each in shards]
        refuse_changed(group_id, partitions, offsets, clients.proved_offsets(group_id, partitions, deadline))
        producer.commit(deadline)
        return shards
    except OutcomeUnknownError as error:
        raise OutcomeUnknownError(
            error.message, fix="run the command again; it shows which times are recorded."
        ) from error
    except (FencedError, AbortableError) as error:
        producer.abort(deadline)
        raise StateError(
            f"a driver of application.id={application_id!r} is alive, or another program commits offsets to "
            f"the group, so no time was lowered: {error.message}",
            fix="stop the query, then run the command again.",
        ) from error
    finally:
        producer.close()
