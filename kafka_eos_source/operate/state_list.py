"""What state there is: databases on this machine, changelogs in Kafka. Only looks; waits for nobody."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kafka_eos_source.errors import KafkaEosError, OperatorError
from kafka_eos_source.kafka.cluster_reader import LogEnds
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate.cluster import Look
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.reading.local import StoreFolder, folders
from kafka_eos_source.state.store.transactional import TransactionalStateStore


@dataclass(frozen=True)
class LocalShard:
    """One database on this machine.

    Attributes:
        folder: where.
        identity: what it says of itself; None = it cannot be read, see ``problem``.
        batch: whose state it is; None = no batch's.
        next_offset: changelog offset to go on from; None = not recorded.
        pending: batches whose changes are kept beside the data.
        size_bytes: of its files.
        problem: why it cannot be read.
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
        log: where its log begins and ends.
        committed: the group's offset; None = none.
        token: beside it; None = none.
        problem: why the token says nothing.
    """

    store: str
    tp: TopicPartition
    log: LogEnds
    committed: int | None = None
    token: Token | None = None
    problem: str = ""

    @property
    def lag(self) -> int:
        """Offsets behind what is committed: a marker, as a rule; more is another's, or is being committed."""
        return self.log.end - (self.committed or 0)


def local(root: str, application_id: str | None = None, store: str | None = None) -> list[LocalShard]:
    """The databases under a state directory."""
    return [_look_into(each) for each in folders(root, application_id, store)]


def changelogs(
    look: Look, group_id: str, application_id: str, store: str | None, deadline: Deadline
) -> list[ChangelogShard]:
    """The changelogs of a query, by the names of topics.

    Raises:
        UnavailableError, AuthorizationError: of Kafka.
    """
    _, topics = look.topics(deadline)
    stores = stores_of(application_id, topics)
    tps = [
        TopicPartition(topic, shard)
        for name, topic in stores.items()
        if store in (None, name)
        for shard in range(topics[topic])
    ]
    if not tps:
        return []
    offsets, _ = look.group(group_id, tps, deadline)
    logs = look.logs(tps)
    names = {topic: name for name, topic in stores.items()}
    found = []
    for tp in sorted(tps):
        held = offsets.get(tp)
        token, problem = None, ""
        try:
            token = None if held is None else Token.decode(held.metadata)
        except OperatorError as error:
            problem = error.message
        committed = None if held is None else held.offset
        found.append(ChangelogShard(names[tp.topic], tp, logs[tp], committed, token, problem))
    return found


def stores_of(application_id: str, topics: Mapping[str, int]) -> dict[str, str]:
    """Stores of a query by name, each with its changelog topic."""
    pattern = re.compile(re.escape(application_id) + r"-(.+)-changelog")
    return {found[1]: name for name in sorted(topics) if (found := pattern.fullmatch(name))}


def _look_into(folder: StoreFolder) -> LocalShard:
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
        return LocalShard(folder, size_bytes=folder.size_bytes(), problem=error.message)
