"""Finds a store: its databases on this machine, and the committed offsets of its changelog (a `Cut`).

The databases are in ``<state.dir>/<application.id>/<store>/<shard>/``, as `StoreIdentity.folder` defines.

The output, the state and the offsets of a micro-batch commit in one transaction, and one OffsetFetch request
reads the committed offsets of all partitions. Its answer therefore describes the state of one batch in every
shard, and the input that this state reflects.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from kafka_eos_source.errors import ChangelogError, NotUpToBoundError, StateError, UnavailableError
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import Token, number_of_shards
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.state.changelog.topic import CommittedShard, changelog_client, changelog_name
from kafka_eos_source.state.model import BatchRecord, Owner, StoreIdentity, record_of
from kafka_eos_source.state.operator.shard_store import SnapshotUse


@dataclass(frozen=True, order=True)
class StoreFolder:
    """Folder of one shard's database.

    Attributes:
        application_id: the query's ``application.id``, from the path.
        store: name of the store, from the path.
        shard: number of the shard, from the path.
        path: path of the folder.
    """

    application_id: str
    store: str
    shard: int
    path: Path

    def size_bytes(self) -> int:
        """Returns the current size of the folder's files in bytes."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except FileNotFoundError:  # a compaction of the owner deleted the file
                    continue
        return total


def folders(
    root: str | os.PathLike[str], application_id: str | None = None, store: str | None = None
) -> list[StoreFolder]:
    """Returns the databases under ``root`` in order of their path, without damaged and incomplete ones.

    Args:
        root: the state directory.
        application_id: return only the databases of this application; None = of all.
        store: return only the databases of this store; None = of all.
    """
    return sorted(_walk(Path(root), application_id, store))


def _walk(root: Path, application_id: str | None, store: str | None) -> Iterator[StoreFolder]:
    for application in _children(root, application_id):
        for each in _children(application, store):
            for shard in _children(each, None):
                if shard.name.isdecimal() and (shard / "db" / "CURRENT").exists():
                    yield StoreFolder(application.name, each.name, int(shard.name), shard)


def one_store(
    root: str | os.PathLike[str], application_id: str | None, store: str | None
) -> tuple[str, str, list[StoreFolder]]:
    """Finds the only store under ``root`` with these names.

    Args:
        root: the state directory.
        application_id: the query's ``application.id``; None = any.
        store: name of the store; None = any.

    Returns:
        Its ``application.id``, its name, and the folders of its shards on this machine.

    Raises:
        StateError: if no store or several stores match.
    """
    matches = folders(root, application_id, store)
    names = sorted({(each.application_id, each.store) for each in matches})
    if len(names) == 1:
        return (*names[0], matches)
    requested = f"application.id={application_id!r}, store={store!r}"
    if not names:
        raise StateError(
            f"there is no state of {requested} in {str(root)!r} on this machine.",
            fix="correct state.dir; or set kafka.bootstrap.servers instead, to read the changelog.",
        )
    raise StateError(
        f"there are several stores in {str(root)!r}: {', '.join('/'.join(each) for each in names)}; "
        f"expected one that matches {requested}.",
        fix="set application.id and storeName.",
    )


def _children(folder: Path, name: str | None) -> list[Path]:
    try:
        return [folder / name] if name is not None else [each for each in folder.iterdir() if each.is_dir()]
    except FileNotFoundError:
        return []


# ------------------------------------------------------------------ in the changelog

#: What the state must reflect (KIP-796): a batch id, or for each input partition the offset of a record.
Bound = int | Mapping[TopicPartition, int]

#: A snapshot that takes longer to download than this, and than the caller's limit, is not used. It is the
#: default of ``state.timeout.ms``, which limits a download in a task.
_LEAST_DOWNLOAD_MS = 600_000

#: Pause between two reads while the state is behind a bound: the first, and the longest after doubling.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 0.25


@dataclass(frozen=True)
class Cut:
    """Committed offsets of a store's changelog at one moment. Picklable.

    Attributes:
        application_id: the query's ``application.id``.
        store: name of the store.
        topic: name of the changelog topic.
        topic_id: id of the changelog topic.
        shards: number of shards, as the tokens name it; else the number of partitions of the changelog.
        ends: for each shard the committed end of its partition (exclusive); 0 = nothing is committed yet.
        batches: for each shard the micro-batch that its end belongs to; None = no batch is committed yet.
        inputs: committed offsets of the requested input partitions: the next offset to read.
    """

    application_id: str
    store: str
    topic: str
    topic_id: str
    shards: int
    ends: Mapping[int, int]
    batches: Mapping[int, BatchRecord | None]
    inputs: Mapping[TopicPartition, int] = field(default_factory=lambda: MappingProxyType({}))

    def tp(self, shard: int) -> TopicPartition:
        """Returns the changelog partition of a shard."""
        return TopicPartition(self.topic, shard)

    @property
    def owner(self) -> Owner:
        """Whose state the changelog must hold."""
        return Owner(self.application_id, self.store, self.shards)

    def log_start(self, shard: int) -> int:
        """Returns the first offset that the changelog of a shard may have (`ShardProgress.log_start`)."""
        batch = self.batches[shard]
        return 0 if batch is None else batch.log_start

    def identity(self, shard: int) -> StoreIdentity:
        """Returns the identity of a store that holds this shard."""
        return StoreIdentity(self.application_id, self.store, shard, self.shards, self.topic, self.topic_id)

    @property
    def batch_id(self) -> int | None:
        """Id of the newest batch; None = no batch is committed yet."""
        return newest_batch(self.batches.values())

    def check(self, at_least: Bound | None) -> None:
        """Checks that the state reflects a batch, or the records at some input offsets.

        Raises:
            NotUpToBoundError: if it does not reflect them yet.
        """
        if isinstance(at_least, int):
            check_batch(self.batch_id, at_least)
            return
        behind = {tp: at for tp, at in sorted((at_least or {}).items()) if self.inputs.get(tp, 0) <= at}
        if behind:
            text = ", ".join(
                f"{tp} up to offset {self.inputs[tp]} (exclusive), but not offset {at}"
                if tp in self.inputs
                else f"no offset of {tp}, expected offset {at}"
                for tp, at in behind.items()
            )
            unknown = [str(tp) for tp in behind if tp not in self.inputs]
            fix = "read again after the next batch."
            if unknown:
                fix += (
                    f" If this stays so, correct {', '.join(unknown)}: the query commits offsets of the "
                    "Kafka sources that it reads on its sink's cluster."
                )
            raise NotUpToBoundError(f"the state reflects {text}.", fix=fix)

    def same_state(self, other: Cut) -> bool:
        """Returns whether nothing was committed to the store between this cut and another one."""
        return (self.topic_id, self.shards, self.ends, self.batches) == (
            other.topic_id,
            other.shards,
            other.ends,
            other.batches,
        )


@dataclass(frozen=True)
class Changelog:
    """The changelog of one store, and the consumer group that holds its committed offsets.

    Attributes:
        application_id: the query's ``application.id``.
        store: name of the store.
        group_id: the query's consumer group.
        kafka: librdkafka properties, from `kafka.config.check_consumer`. They may contain passwords.
        snapshot_location: where snapshots of the shards are, from which a read may begin; None = it begins
            with the changelog.
    """

    application_id: str
    store: str
    group_id: str
    kafka: Mapping[str, str] = field(repr=False)
    snapshot_location: str | None = field(default=None, repr=False)

    @property
    def topic(self) -> str:
        """Name of the changelog topic."""
        return changelog_name(self.application_id, self.store)

    def cut(self, deadline: Deadline, at_least: Bound | None = None) -> Cut:
        """Reads the committed offsets of all shards.

        Args:
            deadline: limit for the brokers to answer, and for an open transaction to end.
            at_least: the cut includes the offsets of the input partitions that it names. This function does
                not wait for it; `Cut.check` compares.

        Raises:
            ChangelogError: if the changelog topic does not exist.
            UnavailableError: if the brokers do not answer, or a transaction is still open, at the deadline.
            AuthorizationError: if the principal may not describe the topic or the group.
            OperatorError: if a token is damaged or was written by a newer version.
        """
        with TopicAdmin(self.kafka) as admin:
            return self._cut(admin, deadline, at_least)

    def cut_at_least(self, at_least: Bound, deadline: Deadline) -> Cut:
        """Reads the committed offsets of all shards, once the state reflects a batch or input offsets.

        Args:
            at_least: what the state must reflect.
            deadline: limit for the query to commit it, and for the brokers to answer.

        Raises:
            NotUpToBoundError: if the state does not reflect it at the deadline.
            KafkaEosError: as `cut`.
        """
        pauses = Pauses(deadline, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        behind: NotUpToBoundError | None = None
        with TopicAdmin(self.kafka) as admin:
            while True:
                try:
                    cut = self._cut(admin, deadline, at_least)
                    cut.check(at_least)
                    return cut
                except NotUpToBoundError as error:
                    behind = error
                except UnavailableError as error:  # the deadline passed during the request
                    if behind is None:
                        raise
                    raise behind from error
                if pauses.expired:
                    raise behind
                pauses.wait()

    def delete_retention_ms(self, deadline: Deadline) -> int:
        """Reads ``delete.retention.ms`` of the changelog topic: older state may have missed deletes.

        Raises:
            UnavailableError: if the topic does not exist, or no broker answers before ``deadline``.
            AuthorizationError: if the principal may not describe the topic's configuration.
        """
        with TopicAdmin(self.kafka) as admin:
            return int(admin.config(self.topic, deadline)["delete.retention.ms"])

    def snapshots(self, deadline: Deadline, *, only_reads: bool) -> SnapshotUse | None:
        """Returns how this process uses the snapshots of the shards; None if no location is set.

        Args:
            deadline: of the reads. Its budget limits each wait for the brokers, but a download may take
                longer than that.
            only_reads: as in `SnapshotUse`.
        """
        if self.snapshot_location is None:
            return None
        timeout_ms = max(int(1000 * deadline.budget_seconds), _LEAST_DOWNLOAD_MS)
        return SnapshotUse(self.snapshot_location, timeout_ms, only_reads)

    def _cut(self, admin: TopicAdmin, deadline: Deadline, at_least: Bound | None) -> Cut:
        topic = self.topic
        shape = admin.shape(topic, deadline)
        if shape is None:
            raise ChangelogError(
                f"changelog topic {topic!r} does not exist.",
                fix="correct application.id or the store's name; `kafka-eos state list` lists both.",
            )
        tps = [TopicPartition(topic, shard) for shard in range(shape.partitions)]
        inputs = () if at_least is None or isinstance(at_least, int) else tuple(at_least)
        with changelog_client(self.kafka) as consumer:
            shards = CommittedShard(consumer, self.group_id, tps[0])
            committed = shards.offsets([*tps[1:], *inputs], deadline)
        # partitions that somebody added to the topic hold no state, and change the shard of no key
        told = number_of_shards(
            Token.decode(committed[tp].metadata) if tp in committed else None for tp in tps
        )
        tps = tps[:told]
        return Cut(
            application_id=self.application_id,
            store=self.store,
            topic=topic,
            topic_id=shape.topic_id,
            shards=len(tps),
            ends={tp.partition: committed[tp].offset if tp in committed else 0 for tp in tps},
            batches={tp.partition: _batch(committed.get(tp)) for tp in tps},
            inputs={tp: committed[tp].offset for tp in inputs if tp in committed},
        )


def newest_batch(batches: Collection[BatchRecord | None]) -> int | None:
    """Returns the largest batch id; None = no batch is committed yet."""
    return max((each.batch_id for each in batches if each is not None and each.batch_id >= 0), default=None)


def check_batch(batch_id: int | None, at_least: int) -> None:
    """Checks that the state reflects a batch.

    Args:
        batch_id: newest batch of the state; None = no batch is committed yet.
        at_least: the expected batch.

    Raises:
        NotUpToBoundError: if the state reflects an earlier batch.
    """
    if batch_id is None or batch_id < at_least:
        of = "no batch" if batch_id is None else f"batch {batch_id}"
        raise NotUpToBoundError(
            f"the state reflects {of}; expected batch {at_least} or later.",
            fix="read again after the next batch.",
        )


def _batch(committed: GroupOffset | None) -> BatchRecord | None:
    token = None if committed is None else Token.decode(committed.metadata)
    return None if token is None else record_of(token)
