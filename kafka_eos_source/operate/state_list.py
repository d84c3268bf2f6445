"""Lists local state databases, and changelogs in Kafka. Changes nothing and waits for no transaction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kafka_eos_source.errors import KafkaEosError, OperatorError
from kafka_eos_source.kafka.reader import LogEnds
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate.cluster import MetadataReader
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.reading.stores import StoreFolder, folders
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
    reader: MetadataReader, group_id: str, application_id: str, store: str | None, deadline: Deadline
) -> list[ChangelogShard]:
    """Lists the changelog partitions of a query, which it recognises by the names of the topics.

    Raises:
        UnavailableError, AuthorizationError: if Kafka cannot be reached or refuses the request.
    """
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
