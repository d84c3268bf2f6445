"""The two topics of a move of state: what Kafka holds of them, and how a stage deletes and creates them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping

from kafka_eos_source.errors import ChangelogError, StateError
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import Token, number_of_shards
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.state.changelog.move import Move, MoveState, Stage, begin_move, cannot_move, next_stage
from kafka_eos_source.state.changelog.topic import changelog_name, read_tail
from kafka_eos_source.state.model import Owner, foreign_state, record_of
from kafka_eos_source.state.reading.stores import Changelog, Cut

_log = logging.getLogger(__name__)

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
    if own < -1:  # a release made the copy that did not lengthen this time
        return dict(config)
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
            UnavailableError, AuthorizationError: if Kafka cannot be reached or refuses the request.
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
