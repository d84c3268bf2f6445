"""Moves the state of a stopped query to another number of shards. No step can lose or double anything.

A topic's partitions can be made more, never fewer, and a key's records must not stay behind in the partition
that it left. So the changelog is made anew, by way of a copy::

    COPY     changelog ──────▶ copy, placed by the new number of shards          ┐ one transaction of the
             mark instead of the tokens, on changelog and copy                   ┘ query's transactional id
    REMAKE   changelog deleted, created with the new number of partitions, and marked
    FILL     copy ──────▶ changelog, partition by partition                      ┐ one transaction
             tokens of the query's last batch on the changelog, no mark          ┘
    CLEAN    copy deleted

Every stage is found again by looking (`state.changelog.move`), so that the command is simply given again:

=====================================  ====================================================================
killed, or Kafka unreachable           what is there then
=====================================  ====================================================================
before COPY's transaction commits      the old state, untouched; the query could go on with its old shards
between COPY and the end of FILL       state and tokens in the copy, all of it; the query refuses to run
                                       (its tasks and its sink meet the mark) and is told what to do
within FILL's transaction              the same; what it wrote is aborted, and never read
before CLEAN                           all is done; an idle topic is left, which the command removes
COPY's or FILL's commit unanswered     one of the two states before; looking tells
=====================================  ====================================================================

A query that is alive: COPY initialises its transactional id, which fences the driver. A driver that takes the
id back before COPY commits, fences COPY: nothing was changed, and the command says so. One that comes later
finds the mark. So there is no moment at which both believe that they own the state.

Two of these commands at once: each looks again right before it deletes a topic, and a commit of one fences
the other. What is left is one that is stopped (SIGSTOP) between that look and the deletion: do not do that.

Local databases need no care: the new topic has another id, by which they are known to be worth nothing; each
shard restores itself when it is next opened.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kafka_eos_source.commit.session import KafkaClients
from kafka_eos_source.errors import (
    AbortableError,
    ChangelogError,
    FencedError,
    OutcomeUnknownError,
    StateError,
)
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.kafka.transactional import TransactionalProducer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate.rescale_records import Sent, send_back, send_placed
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.batch_record import record_of
from kafka_eos_source.state.changelog.move import (
    Move,
    MoveState,
    Stage,
    begin_move,
    next_stage,
)
from kafka_eos_source.state.changelog.topic import changelog_name
from kafka_eos_source.state.reading.cut import Changelog, Cut

_log = logging.getLogger(__name__)

#: Longest transaction that a broker allows by default (``transaction.max.timeout.ms``).
TRANSACTION_MS = 900_000

_PAUSE_SECONDS = 0.1

Say = Callable[[str], None]


def copy_name(application_id: str, store: str) -> str:
    """``<application.id>-<store>-changelog-rescale``, where the state is meanwhile: no store's changelog."""
    return f"{changelog_name(application_id, store)}-rescale"


class Rescale:
    """One store, on its way.

    Args:
        kafka: librdkafka properties of a producer.
        application_id: the query's transactional id.
        store: its name in the query.
        group_id: the query's group.
        to: number of shards.
        timeout_ms: for each wait for the brokers, not for the whole.
        say: told of each stage.
    """

    def __init__(
        self,
        kafka: Mapping[str, str],
        application_id: str,
        store: str,
        group_id: str,
        to: int,
        *,
        timeout_ms: int = 30_000,
        say: Say = _log.info,
    ) -> None:
        self._application_id = application_id
        self._store = store
        self._group_id = group_id
        self._to = to
        self._timeout_ms = timeout_ms
        self._say = say
        self._connection = admin_config(kafka)
        self._clients = KafkaClients({"transaction.timeout.ms": str(TRANSACTION_MS), **kafka})
        self._changelog = changelog_name(application_id, store)
        self._copy = copy_name(application_id, store)
        self._pause = threading.Event()  # never set

    def stage(self) -> Stage:
        """What comes next, as it looks at this moment: an unfinished transaction is not waited for.

        Raises: as `look` and `move.next_stage`.
        """
        return next_stage(self._look(stable=False)[0], self._to)

    def look(self) -> tuple[MoveState, Mapping[TopicPartition, GroupOffset]]:
        """What there is now, and the group's offsets, none of which is about to change.

        Raises:
            UnavailableError, AuthorizationError: of Kafka.
            OperatorError: a mark is damaged, or of a newer version.
        """
        return self._look(stable=True)

    def _look(self, *, stable: bool) -> tuple[MoveState, Mapping[TopicPartition, GroupOffset]]:
        with TopicAdmin(self._connection) as admin:
            changelog = admin.shape(self._changelog, self._soon())
            copy = admin.shape(self._copy, self._soon())
        certainly = [
            TopicPartition(name, number)
            for name, shape in ((self._changelog, changelog), (self._copy, copy))
            for number in range(shape.partitions if shape is not None else 0)
        ]
        group = GroupOffsets(self._connection)
        if stable:
            offsets = group.fetch(self._group_id, certainly, self._soon())
        else:
            offsets, _ = group.now(self._group_id, certainly, self._soon())
        marks = [Move.decode(each.metadata) for each in offsets.values()]
        own = (mark for mark in marks if mark is not None and mark.store == self._store)
        return MoveState(changelog, copy, next(own, None)), offsets

    def run(self) -> None:
        """All stages that are left. Given again after whatever happened, it goes on where it was.

        Raises:
            StateError: the query is alive; or a move to another number is under way.
            StateMismatchError, TokenMissingError, ChangelogError: this state cannot be moved.
            OutcomeUnknownError: a commit was not answered: give the command again.
            KafkaEosError: of Kafka.
        """
        steps = {
            Stage.COPY: self._do_copy,
            Stage.REMAKE: self._do_remake,
            Stage.FILL: self._do_fill,
            Stage.CLEAN: self._do_clean,
        }
        last = None
        with self._transaction():
            self._say("the query is fenced; what it or an earlier move left unfinished is settled")
        while (stage := next_stage(self.look()[0], self._to)) is not Stage.DONE:
            if stage is last:
                raise StateError(
                    f"stage {stage.value!r} of the move was done and is to be done again.",
                    fix="somebody else is at work on these topics: end that, then give the command again.",
                )
            steps[stage]()
            failpoints.reach(f"rescale.after_{stage.value}")
            last = stage

    # ------------------------------------------------------------------ stages

    def _do_copy(self) -> None:
        try:
            with self._transaction() as producer:
                # the transactional id is ours: what is read from here on stays
                seen, offsets = self.look()
                if next_stage(seen, self._to) is not Stage.COPY:
                    raise StateError("another move of this state was begun.", fix="give the command again.")
                cut, move = self._begin(seen, offsets)
                self._say(f"copying {cut.shards} shards to {self._to}, as of batch {move.token.batch_id}")
                self._make(Stage.COPY, self._copy, self._changelog)
                self._begin_on(producer, self._copy)
                sent = Sent(producer, self._copy, self._timeout_ms)
                send_placed(self._store_changelog(), cut, self._to, sent)
                self._settle(producer, sent.records)
                ends = self._ends(producer, self._copy)
                mark = move.encode()
                self._commit(
                    producer,
                    [
                        *(GroupOffset(tp, end, mark) for tp, end in ends.items()),
                        *(GroupOffset(cut.tp(k), cut.ends[k], mark) for k in range(cut.shards)),
                    ],
                )
                self._say(
                    f"{sent.records:,} records are in topic {self._copy}; the query cannot run until the end"
                )
        except FencedError as error:
            raise StateError(
                f"a driver of application.id={self._application_id!r} is alive and took its id back: "
                f"{error.message}",
                fix="nothing was changed. Stop the query, then give the command again.",
            ) from error

    def _do_remake(self) -> None:
        self._say(f"making topic {self._changelog} anew, with {self._to} partitions")
        self._make(Stage.REMAKE, self._changelog, self._copy)
        with self._transaction() as producer:
            move = self.look()[0].move
            if move is None:
                raise StateError("somebody else went on with this move.", fix="give the command again.")
            producer.begin()
            mark = move.encode()
            self._commit(producer, [GroupOffset(tp, 0, mark) for tp in self._partitions(self._changelog)])

    def _do_fill(self) -> None:
        with self._transaction() as producer:
            seen, offsets = self.look()
            move = seen.move
            if next_stage(seen, self._to) is not Stage.FILL or move is None:
                raise StateError("somebody else went on with this move.", fix="give the command again.")
            self._say(f"filling topic {self._changelog}")
            self._begin_on(producer, self._changelog)
            sent = Sent(producer, self._changelog, self._timeout_ms)
            send_back(self._store_changelog(), self._copy, move, offsets, sent)
            self._settle(producer, sent.records)
            ends = self._ends(producer, self._changelog)
            self._commit(
                producer,
                [
                    *(
                        GroupOffset(tp, end, move.shard_token(tp.partition).encode())
                        for tp, end in ends.items()
                    ),
                    *(
                        GroupOffset(tp, each.offset)
                        for tp, each in sorted(offsets.items())
                        if tp.topic == self._copy
                    ),
                ],
            )

    def _do_clean(self) -> None:
        with TopicAdmin(self._connection) as admin:
            self._still(Stage.CLEAN)
            admin.delete(self._copy, self._soon())

    # ------------------------------------------------------------------ their parts

    def _begin(self, seen: MoveState, offsets: Mapping[TopicPartition, GroupOffset]) -> tuple[Cut, Move]:
        assert seen.changelog is not None
        shards = range(seen.changelog.partitions)
        found = {k: offsets.get(TopicPartition(self._changelog, k)) for k in shards}
        tokens = {k: None if each is None else Token.decode(each.metadata) for k, each in found.items()}
        topic_id = seen.changelog.topic_id
        move = begin_move(self._store, tokens, topic_id, self._to, f"rescale-{uuid.uuid4().hex}")
        return Cut(
            self._application_id,
            self._store,
            self._changelog,
            topic_id,
            len(shards),
            {k: 0 if each is None else each.offset for k, each in found.items()},
            {k: None if token is None else record_of(token) for k, token in tokens.items()},
        ), move

    def _make(self, stage: Stage, name: str, like: str) -> None:
        """The topic anew, empty, with the new number of partitions; else as the other one is."""
        with TopicAdmin(self._connection) as admin:
            replicas, config = admin.creation_settings(like, self._soon())
            self._still(stage)
            admin.delete(name, self._soon())
            self._await_forgotten(name)
            failpoints.reach("rescale.between_topics")
            admin.create(name, self._to, replicas, config, self._soon())
            shape = admin.await_led(name, self._soon())
        if shape.partitions != self._to:
            raise ChangelogError(
                f"topic {name!r} was made by somebody else, with {shape.partitions} partitions.",
                fix="a query runs: stop it, then give the command again.",
            )

    def _still(self, stage: Stage) -> None:
        """Looks once more right before a topic is deleted: not if somebody else got further meanwhile."""
        if next_stage(self.look()[0], self._to) is not stage:
            raise StateError(
                "somebody else is at work on this move.", fix="end that, then give the command again."
            )

    def _await_forgotten(self, name: str) -> None:
        """Waits until the group has no offsets of a deleted topic.

        Its coordinator forgets them when it hears of the deletion, by the names of partitions: later it would
        take those of the new topic for them. One that does not forget at all is waited for as long as any
        answer is.
        """
        deadline = self._soon()
        while not deadline.expired:
            offsets = GroupOffsets(self._connection).fetch(self._group_id, (), self._soon())
            if all(tp.topic != name for tp in offsets):
                return
            self._pause.wait(min(_PAUSE_SECONDS, deadline.remaining_seconds()))
        _log.warning("group %s still has offsets of the deleted topic %s", self._group_id, name)

    def _store_changelog(self) -> Changelog:
        return Changelog(self._application_id, self._store, self._group_id, self._connection)

    # ------------------------------------------------------------------ a transaction

    @contextmanager
    def _transaction(self) -> Iterator[TransactionalProducer]:
        """A producer that owns the transactional id; whatever it leaves open is aborted."""
        producer = self._clients.producer(self._application_id)
        try:
            producer.init(self._soon())
            failpoints.reach("rescale.after_init")
            yield producer
        except OutcomeUnknownError as error:
            raise OutcomeUnknownError(
                error.message, fix="give the command again: it looks whether the commit took effect."
            ) from error
        except BaseException:
            producer.abort(self._soon())
            raise
        finally:
            producer.close()

    def _begin_on(self, producer: TransactionalProducer, topic: str) -> None:
        """The client must know the topic before it gets records: it adds none that it does not know."""
        producer.check_partitions({topic: self._to - 1}, self._soon())
        producer.begin()

    def _settle(self, producer: TransactionalProducer, records: int) -> None:
        producer.flush(Deadline.after_ms(TRANSACTION_MS))
        if producer.enqueued != records:
            raise AbortableError(f"{producer.enqueued} records enqueued, {records} read")

    def _ends(self, producer: TransactionalProducer, topic: str) -> Mapping[TopicPartition, int]:
        return producer.ends(self._partitions(topic))

    def _partitions(self, topic: str) -> list[TopicPartition]:
        return [TopicPartition(topic, number) for number in range(self._to)]

    def _commit(self, producer: TransactionalProducer, offsets: Sequence[GroupOffset]) -> None:
        producer.send_offsets(offsets, self._group_id, self._soon())
        failpoints.reach("rescale.before_commit")
        producer.commit(self._soon())
        failpoints.reach("rescale.after_commit")

    def _soon(self) -> Deadline:
        return Deadline.after_ms(self._timeout_ms)
