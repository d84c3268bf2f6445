"""Moves the state of a stopped query to another number of shards, without losing or doubling a record.

Kafka can add partitions to a topic but not remove them, and a key's old records must not remain in the
partition that the key leaves. So the command creates the changelog again, by way of a copy::

    COPY     changelog ──────▶ copy, placed by the new number of shards          ┐ slices: transactions of
             journal on the offsets of the copy                                  ┘ the query's own id
             move record instead of tokens on the offsets of changelog and copy    in the last slice
    REMAKE   changelog deleted, created with the new number of partitions and the move record
    FILL     copy ──────▶ changelog, partition by partition                      ┐ slices
             journal on the offsets of the copy                                  ┘
             tokens of the query's last batch on the changelog's offsets           in the last slice
    CLEAN    copy deleted

The next stage follows from what Kafka holds (`state.changelog.move`), and the slice from the journal
(`rescale_copy.CopyJournal`). So after a failure the same command is run again, and continues after the last
slice:

=====================================  ====================================================================
the command is killed, or Kafka fails  what Kafka then holds
=====================================  ====================================================================
before COPY's last slice commits       the old state, unchanged; the query could continue with its old shards,
                                       and the next run would then copy its newer state from the beginning
between COPY and the end of FILL       all state and tokens in the copy; the query refuses to run, because its
                                       tasks and its sink find the move record, and fail with the fix
within a slice of FILL                 the same; the records of the aborted transaction are never read
before CLEAN                           the new state; the command still has to delete the copy
COPY's or FILL's commit unanswered     one of the two states above; the next run finds out which
=====================================  ====================================================================

If the query is still alive: COPY initialises its transactional id, which fences the driver. A driver that
takes the id back before COPY commits fences COPY; then nothing has changed, and the command reports it. A
driver that starts later finds the move record. So there is no moment at which both own the state.

If the command runs twice at once: each run checks the stage again right before it deletes a topic, and a
commit of one run fences the other. One case remains: a run that is suspended (SIGSTOP) between this check and
the deletion. Do not do that.

Local databases need no care. The new topic has another topic id, by which a shard recognises that its
database is outdated; it then restores itself.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kafka_eos_source.commit.micro_batch import KafkaClients
from kafka_eos_source.commit.request import Producer
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
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate.rescale_copy import (
    SLICE_SECONDS,
    CopyJournal,
    Progress,
    RecordSender,
    copy_back,
    copy_to_new_shards,
    digest,
    filled_until,
    finish_changelog,
    with_filled,
)
from kafka_eos_source.protocol.token import Token, number_of_shards
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.state.changelog.move import Move, MoveState, Stage, begin_move, cannot_move, next_stage
from kafka_eos_source.state.changelog.recovery import MAX_AGE
from kafka_eos_source.state.changelog.topic import changelog_name, read_tail
from kafka_eos_source.state.model import Owner, foreign_state, record_of
from kafka_eos_source.state.reading.stores import Changelog, Cut

_log = logging.getLogger(__name__)

#: Timeout of the transactions, in ms; a slice takes about a tenth of it (`rescale_copy.SLICE_SECONDS`).
TRANSACTION_MS = 120_000

Report = Callable[[str], None]


class _Again(Exception):
    """The stage must continue with a new producer, because the old one may not begin another transaction."""


class Rescale:
    """Moves one store to another number of shards.

    Args:
        kafka: librdkafka properties of a producer.
        application_id: the query's transactional id.
        store: name of the store in the query.
        group_id: the query's consumer group.
        to: new number of shards.
        timeout_ms: limits each single wait for the brokers, not the whole move.
        report: called with a message at each stage.
        show: called with the progress of a stage after each of its transactions.
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
        report: Report = _log.info,
        show: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._application_id = application_id
        self._group_id = group_id
        self._to = to
        self._timeout_ms = timeout_ms
        self._report = report
        self._show = show
        self._transaction_ms = int(kafka.get("transaction.timeout.ms", TRANSACTION_MS))
        self._clients = KafkaClients({**kafka, "transaction.timeout.ms": str(self._transaction_ms)})
        self._topics = RescaleTopics(admin_config(kafka), application_id, store, group_id, to, timeout_ms)
        self._changelog, self._copy = self._topics.changelog, self._topics.copy

    def stage(self) -> Stage:
        """Returns the next stage, without waiting for unfinished transactions.

        Raises: as `RescaleTopics.next_stage` raises it.
        """
        return self._topics.next_stage(stable=False)

    def run(self) -> None:
        """Runs all remaining stages. After a failure, call it again; it continues where it stopped.

        Raises:
            StateError: if the query is alive, or a move to another number of shards is under way.
            StateMismatchError, TokenMissingError, ChangelogError: if this state cannot be moved.
            OutcomeUnknownError: if Kafka did not answer a commit; run the command again.
        """
        steps = {
            Stage.COPY: self._copy_out,
            Stage.REMAKE: self._recreate_changelog,
            Stage.FILL: self._fill_changelog,
            Stage.CLEAN: self._topics.delete_copy,
        }
        last = None
        with self._transaction():
            self._report(
                "fenced the query; unfinished transactions of the query and of earlier moves have ended"
            )
        while (stage := self._topics.next_stage()) is not Stage.DONE:
            if stage is last:
                raise StateError(
                    f"stage {stage.value!r} of the move is done, but Kafka does not show its result: another "
                    "program changes the topics or the group's offsets.",
                    fix="stop that program, then run the command again.",
                )
            while not self._is_done(steps[stage]):
                continue
            failpoints.reach(f"rescale.after_{stage.value}")
            last = stage

    # ------------------------------------------------------------------ stages

    def _is_done(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except _Again:
            return False
        return True

    def _copy_out(self) -> None:
        try:
            with self._transaction() as producer:
                # This process owns the transactional id, so what it reads from here on does not change.
                seen, offsets = self._topics.observe()
                if next_stage(seen, self._to) is not Stage.COPY:
                    raise StateError(
                        "another process has begun a move of this state.", fix="run the command again."
                    )
                cut, move = self._topics.plan_move(seen, offsets)
                self._report(f"copying {cut.shards} shards to {self._to} at batch {move.token.batch_id}")
                journal = self._begun_copy(seen, offsets, cut)
                self._copy_slices(producer, cut, move, journal)
        except FencedError as error:
            raise StateError(
                f"a driver of application.id={self._application_id!r} is alive and took its transactional id "
                f"back, so the move did not begin: {error.message}",
                fix="nothing was changed. Stop the query, then run the command again.",
            ) from error

    def _begun_copy(
        self, seen: MoveState, offsets: Mapping[TopicPartition, GroupOffset], cut: Cut
    ) -> CopyJournal:
        """Returns the journal of an earlier run if its copy is of this state; else creates an empty copy."""
        first = offsets.get(TopicPartition(self._copy, 0))
        journal = None if first is None else CopyJournal.decode(first.metadata)
        if journal is not None and seen.copy is not None:
            if not journal.continues(cut, self._to, seen.copy.topic_id):
                self._report("copying from the beginning: the query has run since the last attempt")
            elif self._may_lack_deletes(journal):
                self._report(
                    "copying from the beginning: the last attempt was too long ago, and compaction of the "
                    "changelog may have removed deletes since (delete.retention.ms)"
                )
            else:
                self._report(
                    f"continuing at offset {journal.offset} of shard {journal.shard}; the copy already holds "
                    f"{journal.records:,} records"
                )
                return journal
        return CopyJournal(digest(cut), self._to, self._topics.recreate_copy())

    def _may_lack_deletes(self, journal: CopyJournal) -> bool:
        """Whether compaction may have removed deletes of keys that an earlier run has copied."""
        retention_ms = self._topics.reader().delete_retention_ms(self._deadline())
        return time.time() * 1000 - journal.since_ms > MAX_AGE * retention_ms

    def _copy_slices(self, producer: Producer, cut: Cut, move: Move, journal: CopyJournal) -> None:
        before = sum(cut.ends[k] for k in range(journal.shard)) + journal.offset
        progress = Progress("copy", before, sum(cut.ends.values()))
        sender = self._sender(producer, self._copy, progress, journal.records)
        notes_tp = TopicPartition(self._copy, 0)

        def commit_slice(now: CopyJournal, done: int) -> None:
            self._flush(producer, sender)
            end = producer.ends([notes_tp])[notes_tp]
            now = replace(now, notes=end - 1)  # the notes were sent last, and nobody else writes
            self._commit(producer, [GroupOffset(notes_tp, end, now.encode())], "rescale.slice")
            self._begin_slice(producer, sender, done)

        self._begin_transaction(producer, self._copy)
        complete = copy_to_new_shards(self._topics.reader(), cut, journal, sender, commit_slice)
        self._flush(producer, sender)
        record = move.encode()
        self._commit(
            producer,
            [
                *(GroupOffset(tp, end, record) for tp, end in self._ends(producer, self._copy).items()),
                *(GroupOffset(cut.tp(k), cut.ends[k], record) for k in range(cut.shards)),
            ],
        )
        self._show(sender.committed(progress.total))
        self._report(
            f"copied {complete.records:,} records to topic {self._copy}; the query cannot run until the move "
            "is complete"
        )

    def _recreate_changelog(self) -> None:
        self._report(f"creating topic {self._changelog} again with {self._to} partition(s)")
        self._topics.recreate_changelog()
        with self._transaction() as producer:
            move = self._topics.observe()[0].move
            if move is None:
                raise StateError("another process has continued this move.", fix="run the command again.")
            producer.begin()
            record = move.encode()
            self._commit(producer, [GroupOffset(tp, 0, record) for tp in self._partitions(self._changelog)])

    def _fill_changelog(self) -> None:
        with self._transaction() as producer:
            seen, offsets = self._topics.observe()
            move = seen.move
            if next_stage(seen, self._to) is not Stage.FILL or move is None or seen.changelog is None:
                raise StateError("another process has continued this move.", fix="run the command again.")
            topic_id = seen.changelog.topic_id
            of_copy = {tp: offsets[tp] for tp in self._partitions(self._copy) if tp in offsets}
            if len(of_copy) < self._to:
                raise ChangelogError(
                    f"the group has committed offsets of {len(of_copy)} of the {self._to} partitions of "
                    f"{self._copy!r}; expected all of them.",
                    fix="another program deleted offsets of the group. If there is a copy of them, commit "
                    "them again with their own metadata, and run the command again; the metadata of other "
                    "partitions could leave out a part of the state. Otherwise start the query with a new "
                    "application.id and a new checkpoint.",
                )
            copy = {tp: each.offset for tp, each in of_copy.items()}
            filled = {tp: filled_until(each.metadata, topic_id) for tp, each in of_copy.items()}
            begun = sum(filled.values())
            after = f", after {begun:,} offsets of an earlier run" if begun else ""
            self._report(f"filling topic {self._changelog}{after}")
            progress = Progress("fill", begun, sum(copy.values()))
            sender = self._sender(producer, self._changelog, progress)

            def commit_slice(now: Mapping[TopicPartition, int], done: int) -> None:
                self._flush(producer, sender)
                journal = [GroupOffset(tp, copy[tp], with_filled(move, topic_id, now[tp])) for tp in copy]
                self._commit(producer, journal, "rescale.slice")
                self._begin_slice(producer, sender, done)

            self._begin_transaction(producer, self._changelog)
            copy_back(self._topics.reader(), copy, filled, sender, commit_slice)
            finish_changelog(move, sender)
            self._flush(producer, sender)
            ends = self._ends(producer, self._changelog)
            self._commit(
                producer,
                [
                    *(
                        GroupOffset(tp, end, move.shard_token(tp.partition).encode())
                        for tp, end in ends.items()
                    ),
                    *(GroupOffset(tp, end) for tp, end in copy.items()),
                ],
            )
            self._show(sender.committed(progress.total))

    def _sender(
        self, producer: Producer, topic: str, progress: Progress, records_before: int = 0
    ) -> RecordSender:
        return RecordSender(
            producer,
            topic,
            self._timeout_ms,
            progress,
            slice_seconds=min(SLICE_SECONDS, self._transaction_ms / 4000),
            records_before=records_before,
        )

    def _begin_slice(self, producer: Producer, sender: RecordSender, done: int) -> None:
        """Reports the slice that was committed, and begins the next one.

        Raises:
            _Again: if an old request to end a transaction may still reach the broker (`is_clean`).
        """
        self._show(sender.committed(done))
        if not producer.is_clean():
            raise _Again
        producer.begin()
        sender.begin_slice()

    # ------------------------------------------------------------------ a transaction

    @contextmanager
    def _transaction(self) -> Iterator[Producer]:
        """Yields a producer that owns the transactional id.

        If the body fails, aborts the transaction that it left open.
        """
        producer = self._clients.producer(self._application_id)
        try:
            producer.init(self._deadline())
            failpoints.reach("rescale.after_init")
            yield producer
        except OutcomeUnknownError as error:
            raise OutcomeUnknownError(
                error.message, fix="run the command again; it finds out whether the commit took effect."
            ) from error
        except BaseException:
            producer.abort(self._deadline())
            raise
        finally:
            producer.close()

    def _begin_transaction(self, producer: Producer, topic: str) -> None:
        """Begins a transaction once the client knows the topic; it refuses records of unknown topics."""
        producer.check_partitions({topic: self._to - 1}, self._deadline())
        producer.begin()

    def _flush(self, producer: Producer, sender: RecordSender) -> None:
        producer.flush(Deadline.after_ms(self._transaction_ms))
        if producer.enqueued != sender.records:
            raise AbortableError(f"sent {producer.enqueued} records to Kafka, but read {sender.records}")

    def _ends(self, producer: Producer, topic: str) -> Mapping[TopicPartition, int]:
        return producer.ends(self._partitions(topic))

    def _partitions(self, topic: str) -> list[TopicPartition]:
        return [TopicPartition(topic, number) for number in range(self._to)]

    def _commit(self, producer: Producer, offsets: Sequence[GroupOffset], what: str = "rescale") -> None:
        producer.send_offsets(offsets, self._group_id, self._deadline())
        failpoints.reach(f"{what}.before_commit")
        producer.commit(self._deadline())
        failpoints.reach(f"{what}.after_commit")

    def _deadline(self) -> Deadline:
        return Deadline.after_ms(self._timeout_ms)


# -- the two topics of a move: what Kafka holds of them, and how a stage deletes and creates them

_PAUSE_SECONDS = 0.1
_DELETE_RETENTION = "delete.retention.ms"
#: How long the copy keeps deletes: ten years.
_COPY_KEEPS_DELETES_MS = 10 * 365 * 24 * 3_600_000


def kept_deletes(config: Mapping[str, str]) -> dict[str, str]:
    """Returns the configuration for the copy of a changelog: as the changelog's, but it keeps all deletes."""
    own = config.get(_DELETE_RETENTION)
    longer = _COPY_KEEPS_DELETES_MS + (0 if own is None else int(own) + 1)
    return {**config, _DELETE_RETENTION: str(longer)}


def unkept_deletes(config: Mapping[str, str]) -> dict[str, str]:
    """Returns the configuration of the changelog of which a copy was made: the inverse of `kept_deletes`."""
    own = int(config.get(_DELETE_RETENTION, 0)) - _COPY_KEEPS_DELETES_MS - 1
    others = {name: value for name, value in config.items() if name != _DELETE_RETENTION}
    return others if own < 0 else {**others, _DELETE_RETENTION: str(own)}


def copy_name(application_id: str, store: str) -> str:
    """Returns the name of the topic that holds the state during a move.

    It is ``<application.id>-<store>-changelog-rescale``, which no store uses for its changelog.
    """
    return f"{changelog_name(application_id, store)}-rescale"


class RescaleTopics:
    """The changelog of a store and its copy, while `rescale.Rescale` moves the state.

    Args:
        connection: librdkafka properties for connecting to the cluster.
        application_id: the query's transactional id.
        store: name of the store in the query.
        group_id: the query's consumer group.
        to: new number of shards.
        timeout_ms: limits each single wait for the brokers.

    Attributes:
        changelog: name of the changelog topic.
        copy: name of the topic that holds the state during the move.
    """

    def __init__(
        self,
        connection: Mapping[str, str],
        application_id: str,
        store: str,
        group_id: str,
        to: int,
        timeout_ms: int,
    ) -> None:
        self.changelog = changelog_name(application_id, store)
        self.copy = copy_name(application_id, store)
        self._connection = connection
        self._application_id = application_id
        self._store = store
        self._group_id = group_id
        self._to = to
        self._timeout_ms = timeout_ms

    def observe(self, *, stable: bool = True) -> tuple[MoveState, Mapping[TopicPartition, GroupOffset]]:
        """Reads the topics and the group's offsets.

        Args:
            stable: whether to wait until unfinished transactions on the group have ended.

        Raises:
            OperatorError: if a move record is damaged or has a newer version.
            StateMismatchError: if the state cannot be moved.
        """
        with TopicAdmin(self._connection) as admin:
            changelog = admin.shape(self.changelog, self._deadline())
            copy = admin.shape(self.copy, self._deadline())
        certainly = [
            TopicPartition(name, number)
            for name, shape in ((self.changelog, changelog), (self.copy, copy))
            for number in range(shape.partitions if shape is not None else 0)
        ]
        group = GroupOffsets(self._connection)
        if stable:
            offsets = group.fetch(self._group_id, certainly, self._deadline())
        else:
            offsets, _ = group.now(self._group_id, certainly, self._deadline())
        moves = [Move.decode(each.metadata) for each in offsets.values()]
        own = (move for move in moves if move is not None and move.store == self._store)
        move = next(own, None)
        shards = None
        if move is None and changelog is not None:
            shards = self.shards(offsets, changelog.partitions)
        return MoveState(changelog, copy, move, shards), offsets

    def next_stage(self, *, stable: bool = True) -> Stage:
        """Returns the next stage of the move.

        Raises: as `observe` and `move.next_stage` raise it.
        """
        return next_stage(self.observe(stable=stable)[0], self._to)

    def shards(self, offsets: Mapping[TopicPartition, GroupOffset], partitions: int) -> int | None:
        """Returns the number of shards, as the tokens of the changelog name it; None if there is none.

        Raises:
            StateMismatchError: if the shards are the partitions of the input.
        """
        own = (offsets.get(TopicPartition(self.changelog, number)) for number in range(partitions))
        tokens = [None if each is None else Token.decode(each.metadata) for each in own]
        if any(token is not None and token.in_read for token in tokens):
            raise cannot_move()
        return number_of_shards(tokens)

    def plan_move(self, seen: MoveState, offsets: Mapping[TopicPartition, GroupOffset]) -> tuple[Cut, Move]:
        """Returns the committed state of the old changelog, and the move record.

        Raises:
            ChangelogError: if the changelog is that of another application or store.
            TokenMissingError, StateMismatchError: as `begin_move`.
        """
        assert seen.changelog is not None
        shards = range(seen.was)
        found = {k: offsets.get(TopicPartition(self.changelog, k)) for k in shards}
        tokens = {k: None if each is None else Token.decode(each.metadata) for k, each in found.items()}
        topic_id = seen.changelog.topic_id
        if not any(tokens.values()):
            self._refuse_foreign(seen.changelog.partitions)
        move = begin_move(self._store, tokens, topic_id, self._to, f"rescale-{uuid.uuid4().hex}")
        return Cut(
            self._application_id,
            self._store,
            self.changelog,
            topic_id,
            len(shards),
            {k: 0 if each is None else each.offset for k, each in found.items()},
            {k: None if token is None else record_of(token) for k, token in tokens.items()},
        ), move

    def _refuse_foreign(self, partitions: int) -> None:
        """Raises if the topic holds the state of another application or store, which must not be touched."""
        own = Owner(self._application_id, self._store, partitions)
        for number in range(partitions):
            tp = TopicPartition(self.changelog, number)
            for found in read_tail(self._connection, tp, 0, self._deadline()).owners:
                if (found.application_id, found.store) != (own.application_id, own.store):
                    raise foreign_state(tp, found, own)

    def reader(self) -> Changelog:
        """Returns what reads the records of the changelog and of its copy."""
        return Changelog(self._application_id, self._store, self._group_id, self._connection)

    def recreate_copy(self) -> str:
        """Deletes the copy, and creates it empty with the settings of the changelog; returns its topic id."""
        self._recreate(Stage.COPY, self.copy, self.changelog)
        with TopicAdmin(self._connection) as admin:
            copy = admin.shape(self.copy, self._deadline())
        if copy is None:
            raise ChangelogError(
                f"topic {self.copy!r} was created, but another program has deleted it.",
                fix="find out which program deletes it.",
            )
        return copy.topic_id

    def recreate_changelog(self) -> None:
        """Deletes the changelog, and creates it empty with the settings of the copy."""
        self._recreate(Stage.REMAKE, self.changelog, self.copy)

    def delete_copy(self) -> None:
        """Deletes the copy, at the end of the move."""
        with TopicAdmin(self._connection) as admin:
            self._raise_unless_stage(Stage.CLEAN)
            admin.delete(self.copy, self._deadline())

    def _recreate(self, stage: Stage, name: str, like: str) -> None:
        """Deletes a topic and creates it empty, with the new number of partitions.

        Replication factor and configuration are those of the topic ``like``. But the copy keeps all deletes.
        If a run of FILL is killed and another one continues much later, it must find the deletes of keys that
        the killed run has filled in.
        """
        with TopicAdmin(self._connection) as admin:
            replicas, config = admin.creation_settings(like, self._deadline())
            config = kept_deletes(config) if stage is Stage.COPY else unkept_deletes(config)
            self._raise_unless_stage(stage)
            admin.delete(name, self._deadline())
            self._await_offsets_deleted(name)
            failpoints.reach("rescale.between_topics")
            admin.create(name, self._to, replicas, config, self._deadline())
            shape = admin.await_led(name, self._deadline())
        if shape.partitions != self._to:
            raise ChangelogError(
                f"another process has created topic {name!r} with {shape.partitions} partition(s); expected "
                f"{self._to}.",
                fix="stop the query, then run the command again.",
            )

    def _raise_unless_stage(self, stage: Stage) -> None:
        """Raises if another process has moved on to another stage; called right before a topic is deleted."""
        if self.next_stage() is not stage:
            raise StateError(
                "another process works on this move.", fix="stop it, then run the command again."
            )

    def _await_offsets_deleted(self, name: str) -> None:
        """Waits until the group has no offsets of a deleted topic.

        The group coordinator deletes them when it learns about the deletion. It knows partitions by name, so
        if the new topic existed by then, it would delete the new topic's offsets. If the offsets stay, the
        wait ends at the deadline with a warning.
        """
        pauses = Pauses(self._deadline(), _PAUSE_SECONDS)
        while not pauses.expired:
            offsets = GroupOffsets(self._connection).fetch(self._group_id, (), self._deadline())
            if all(tp.topic != name for tp in offsets):
                return
            pauses.wait()
        _log.warning("consumer group %s still has offsets of the deleted topic %s", self._group_id, name)

    def _deadline(self) -> Deadline:
        return Deadline.after_ms(self._timeout_ms)
