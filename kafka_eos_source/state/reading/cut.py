"""Where the changelog of a store is committed at one moment: all shards at the same batch.

Output, state and offsets of a batch are one transaction, and one request reads all of the group's offsets
that are asked for. So what it answers is the state of one batch in every shard, and the input that it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kafka_eos_source.errors import ChangelogError, NotUpToBoundError
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.batch_record import record_of
from kafka_eos_source.state.changelog.committed import CommittedShard, changelog_client
from kafka_eos_source.state.changelog.topic import changelog_name
from kafka_eos_source.state.model import BatchRecord, StoreIdentity

#: What must be reflected: a batch, or the largest input offset of each partition that must be (KIP-796).
Bound = int | Mapping[TopicPartition, int]


@dataclass(frozen=True)
class Cut:
    """One moment of a store's changelog. Picklable.

    Attributes:
        application_id, store: whose.
        topic, topic_id: of the changelog.
        shards: how many.
        ends: committed end of each shard's partition (excluded); 0 where nothing was ever committed.
        batches: the micro-batch that it belongs to; None = none was ever committed.
        inputs: committed offsets of the input partitions that were asked for: next one to read.
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
        return TopicPartition(self.topic, shard)

    def identity(self, shard: int, schema: str = "") -> StoreIdentity:
        """Of a store that holds this shard."""
        return StoreIdentity(
            self.application_id, self.store, shard, self.shards, self.topic, self.topic_id, schema
        )

    @property
    def batch_id(self) -> int | None:
        """The newest batch; None = none was committed."""
        return newest_batch(self.batches.values())

    def check(self, at_least: Bound | None) -> None:
        """Whether it reflects what was asked for.

        Raises:
            NotUpToBoundError: not yet.
        """
        if isinstance(at_least, int):
            check_batch(self.batch_id, at_least)
            return
        behind = {tp: at for tp, at in (at_least or {}).items() if self.inputs.get(tp, 0) <= at}
        if behind:
            text = ", ".join(
                f"{tp} up to offset {self.inputs.get(tp, 0)} (excluded), asked for {at}"
                for tp, at in sorted(behind.items())
            )
            raise NotUpToBoundError(f"the state holds {text}.", fix="ask again after the next batch.")


@dataclass(frozen=True)
class Changelog:
    """The changelog of one store, and the group that says how far it is committed.

    Attributes:
        kafka: librdkafka properties, from `kafka.config.check_consumer`. May hold passwords.
        group_id: the query's consumer group.
    """

    application_id: str
    store: str
    group_id: str
    kafka: Mapping[str, str] = field(repr=False)

    @property
    def topic(self) -> str:
        return changelog_name(self.application_id, self.store)

    def cut(self, deadline: Deadline, at_least: Bound | None = None) -> Cut:
        """How far it is committed now. Never waits longer than for a transaction that is being ended.

        Args:
            deadline: for the brokers, and for a transaction that is about to move the offsets.
            at_least: input partitions named there are looked up too; `Cut.check` compares.

        Raises:
            ChangelogError: there is no such topic.
            UnavailableError: no answer, or an unfinished transaction, until ``deadline``.
            AuthorizationError: topic or group may not be described.
            OperatorError: a token is damaged, or of a newer version.
        """
        topic = self.topic
        with TopicAdmin(self.kafka) as admin:
            shape = admin.shape(topic, deadline)
        if shape is None:
            raise ChangelogError(
                f"changelog topic {topic!r} does not exist.",
                fix="correct application.id or the store's name; `kafka-eos state ls` lists what there is.",
            )
        tps = [TopicPartition(topic, shard) for shard in range(shape.partitions)]
        inputs = () if at_least is None or isinstance(at_least, int) else tuple(at_least)
        with changelog_client(self.kafka, self.group_id) as consumer:
            shards = CommittedShard(consumer, self.group_id, tps[0])
            found = shards.offsets([*tps[1:], *inputs], deadline)
        return Cut(
            application_id=self.application_id,
            store=self.store,
            topic=topic,
            topic_id=shape.topic_id,
            shards=shape.partitions,
            ends={tp.partition: found[tp].offset if tp in found else 0 for tp in tps},
            batches={tp.partition: _batch(found.get(tp)) for tp in tps},
            inputs={tp: found[tp].offset for tp in inputs if tp in found},
        )


def newest_batch(batches: Collection[BatchRecord | None]) -> int | None:
    """The largest batch id; None = there is none."""
    return max((each.batch_id for each in batches if each is not None and each.batch_id >= 0), default=None)


def check_batch(found: int | None, wanted: int) -> None:
    """Raises: NotUpToBoundError: the state is of an earlier batch."""
    if found is None or found < wanted:
        of = "no batch" if found is None else f"batch {found}"
        raise NotUpToBoundError(
            f"the state is of {of}, asked for batch {wanted}.", fix="ask again after the next batch."
        )


def _batch(found: GroupOffset | None) -> BatchRecord | None:
    token = None if found is None else Token.decode(found.metadata)
    return None if token is None else record_of(token)
