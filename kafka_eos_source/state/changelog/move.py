"""Rules for moving a store's state to another number of shards.

While state moves, a *move record* replaces the token in the metadata of the group's offsets. The transaction
that copies the state writes it, and the transaction that fills the new changelog removes it. `Token.decode`
raises an error for it, so no task and no commit of the query can run meanwhile.

For a move from n to m shards::

    changelog   copy      record    next stage
    ──────────  ────────  ────────  ──────────────────────────────────────────────────────────────
    n shards    any       none      COPY    one transaction copies all records, writes the move record
    m, n shards any       none      COPY    the same: somebody added partitions to a topic of n shards
    old         complete  present   REMAKE  delete the changelog topic, create it with m partitions
    none        complete  present   REMAKE
    not m       complete  present   REMAKE  a task of the query created the topic; it is empty
    m, new      complete  present   FILL    one transaction copies all records back, writes the tokens
    m           any       none      CLEAN   delete the copy
    m           none      none      DONE
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import (
    ChangelogError,
    OperatorError,
    StateError,
    StateMismatchError,
    TokenMissingError,
)
from kafka_eos_source.kafka.topic_admin import TopicShape
from kafka_eos_source.protocol.token import MOVING, ShardProgress, Token
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, JsonError, parse_json
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.describe import META_KEY, META_TABLE, Description
from kafka_eos_source.state.encoding.layout import KeyCodec, hash_columns, split_keys
from kafka_eos_source.state.model import ShardsBy

_VERSION = 1

#: What `Placement.of` returns for an entry that belongs to no key, and so to every shard.
EVERY_SHARD = -1


@dataclass(frozen=True)
class Move:
    """The move record: what the later stages of a move need to know.

    Attributes:
        store: name of the store whose state moves.
        was, to: number of shards before and after the move.
        topic_id: Kafka's id of the old changelog topic, which tells it from the new one.
        token: token of the query's last batch, without the part of a shard.
        task_attempt_id: a new id that the token of every new shard names, so that no pending changes match
            it.
        time_ms, event_time_ms: largest times of all shards, as in `ShardProgress`.
        counts: sums over all old shards; the first new shard gets them.
    """

    store: str
    was: int
    to: int
    topic_id: str
    token: Token
    task_attempt_id: str
    time_ms: int
    event_time_ms: int | None
    counts: Mapping[str, int] = field(default_factory=dict, hash=False)

    def encode(self) -> str:
        """Returns the move record as offset metadata: about 500 bytes of JSON, plus the counts."""
        return json.dumps(
            {
                "kafka-eos": _VERSION,
                MOVING: {
                    "store": self.store,
                    "was": self.was,
                    "to": self.to,
                    "topic_id": self.topic_id,
                    "token": self.token.encode(),
                    "attempt": self.task_attempt_id,
                    "time": self.time_ms,
                    "event": self.event_time_ms,
                    "counts": dict(self.counts),
                },
            },
            separators=(",", ":"),
        )

    @classmethod
    def decode(cls, metadata: str) -> Move | None:
        """Returns the move record in an offset's metadata; None if the metadata is no move record.

        Raises:
            OperatorError: if the move record is damaged, or a newer release wrote it.
        """
        try:
            document = parse_json(metadata.rstrip("\0")) if f'"{MOVING}"' in metadata else None
        except JsonError:
            return None
        if not isinstance(document, dict) or MOVING not in document:
            return None
        try:
            found = document[MOVING]
            token = Token.decode(found["token"])
            if document["kafka-eos"] == _VERSION and token is not None:
                return cls(
                    store=found["store"],
                    was=int(found["was"]),
                    to=int(found["to"]),
                    topic_id=found["topic_id"],
                    token=token,
                    task_attempt_id=found["attempt"],
                    time_ms=int(found["time"]),
                    event_time_ms=None if found["event"] is None else int(found["event"]),
                    counts={str(name): int(count) for name, count in found["counts"].items()},
                )
        except SHAPE_ERRORS as error:
            raise OperatorError(
                f"the move record in a committed offset cannot be decoded ({error!r}): {metadata}.",
                fix="find the program that commits offsets to this group, and stop it.",
            ) from error
        raise OperatorError(
            f"the move record in a committed offset has a format that this version of kafka-eos cannot read: "
            f"{metadata}.",
            fix="finish the move with the version of kafka-eos that began it.",
        )

    def shard_token(self, shard: int) -> Token:
        """Returns the token of a new shard."""
        counts = self.counts if shard == 0 else {}
        progress = ShardProgress(self.task_attempt_id, self.time_ms, self.event_time_ms, counts)
        return replace(self.token, shard=progress, shards=self.to)


class Stage(Enum):
    """A stage of a move, as in the table of the module."""

    COPY = "copy"
    REMAKE = "remake"
    FILL = "fill"
    CLEAN = "clean"
    DONE = "done"


@dataclass(frozen=True)
class MoveState:
    """What Kafka holds of a store and of its move.

    Attributes:
        changelog, copy: the topics; None = it does not exist.
        move: the move record; None = no move has begun, or it is finished.
        shards: number of shards that the tokens name; None = there is no token. It is smaller than the number
            of partitions if somebody added partitions to the changelog.
    """

    changelog: TopicShape | None
    copy: TopicShape | None
    move: Move | None
    shards: int | None = None

    @property
    def was(self) -> int:
        """Number of shards before the move."""
        partitions = 0 if self.changelog is None else self.changelog.partitions
        return partitions if self.shards is None else min(self.shards, partitions)


def next_stage(state: MoveState, to: int) -> Stage:
    """Returns the next stage of a move to ``to`` shards, by the table of the module.

    Raises:
        ChangelogError: if the changelog does not exist, or the copy is gone during a move.
        StateError: if a move to another number of shards is under way.
    """
    if state.move is None:
        if state.changelog is None:
            raise ChangelogError("the store has no changelog topic.", fix="correct QUERY or --store.")
        if state.changelog.partitions != to or state.was != to:
            return Stage.COPY
        return Stage.CLEAN if state.copy is not None else Stage.DONE
    if state.move.to != to:
        raise StateError(
            f"a move of this state from {state.move.was} to {state.move.to} shards is under way.",
            fix=f"finish it with --shards {state.move.to}; then move the state again.",
        )
    if state.copy is None or state.copy.partitions != to:
        raise ChangelogError(
            "the topic with the copy of the state is gone, and the move is not finished.",
            fix="another program deleted that topic. Restore it from a copy, and run the command again. "
            "Without a copy the state is lost: start the query with a new application.id and a new "
            "checkpoint, so that the state is computed from the input again.",
        )
    changelog = state.changelog
    if changelog is None or changelog.topic_id == state.move.topic_id or changelog.partitions != to:
        return Stage.REMAKE
    return Stage.FILL


def begin_move(
    store: str, tokens: Mapping[int, Token | None], topic_id: str, to: int, task_attempt_id: str
) -> Move:
    """Returns the move record of a new move.

    Args:
        store: name of the store.
        tokens: token of each shard of the changelog.
        topic_id, to, task_attempt_id: as in `Move`.

    Raises:
        TokenMissingError: if a shard has no token, so that no batch of it was committed.
        StateMismatchError: if shards are at different batches or belong to different queries.
    """
    missing = sorted(shard for shard, token in tokens.items() if token is None or token.shard is None)
    if missing:
        raise TokenMissingError(
            f"shards {missing} of store {store!r} have no token: no batch of the query has committed them.",
            fix="if batches were committed, delete nothing: the query uses another group (pass --kafka "
            "group.id=…), or its group was deleted. Only if the store never had a batch, there is nothing to "
            "move: delete its changelog topic, and start the query with the new number of shards."
            if len(missing) == len(tokens)
            else "keep the changelog topic, which holds the state of the other shards. If somebody deleted "
            "offsets of the group, start the query once with the number of shards that it had and "
            "onMissingState=changelog:… with the number of its next batch, let it commit a batch, stop it, "
            "and run this command again. The state of these shards is then what the changelog holds, which "
            "need not fit the output.",
        )
    present = {shard: token for shard, token in tokens.items() if token is not None}
    batches = {(token.query_id, token.batch_id) for token in present.values()}
    if len(batches) > 1:
        raise StateMismatchError(
            f"shards of store {store!r} are at different batches: "
            + ", ".join(
                f"{k} at batch {t.batch_id} of query {t.query_id}" for k, t in sorted(present.items())
            )
            + ".",
            fix="let the query commit one more batch, then stop it.",
        )
    progress = [token.shard for token in present.values() if token.shard is not None]
    counts: Counter[str] = Counter()
    for each in progress:
        counts.update(each.counts)
    return Move(
        store=store,
        was=len(tokens),
        to=to,
        topic_id=topic_id,
        token=replace(present[0], shard=None, shards=-1),
        task_attempt_id=task_attempt_id,
        time_ms=max(each.time_ms for each in progress),
        event_time_ms=max((p.event_time_ms for p in progress if p.event_time_ms is not None), default=None),
        counts=dict(counts),
    )


class Placement:
    """Finds the new shard of each key of a store.

    Args:
        description: what the store holds.
        was, to: number of shards before and after the move.

    Raises:
        StateMismatchError: if the keys are not in the shards of Spark's hash.
    """

    def __init__(self, description: Description, was: int, to: int) -> None:
        if description.shards_by is not ShardsBy.HASH:
            raise cannot_move()
        self._keys = KeyCodec(description.key)
        self._was = was
        self._to = to

    def of(self, keys: pa.BinaryArray, shard: int) -> Ints:
        """Returns the new shard of each key of an old shard; `EVERY_SHARD` for entries of no key.

        Raises:
            StateMismatchError: if a key cannot be decoded, or Spark's hash sends it to another old shard. The
                shards were then not chosen by these keys.
        """
        try:
            entries = split_keys(keys)
            is_keyed = entries.tables != META_TABLE
            columns = self._keys.decode(entries.group_keys.filter(pa.array(is_keyed)))
        except ValueError as error:
            raise _misplaced(shard, f"{error}") from error
        hashes = hash_columns(columns).astype(np.int64)
        wrong = np.flatnonzero(np.mod(hashes, self._was) != shard)
        if len(wrong):
            key = [column[int(wrong[0])].as_py() for column in columns]
            raise _misplaced(
                shard, f"key {key} belongs to shard {int(hashes[wrong[0]]) % self._was} by Spark's hash"
            )
        placed = np.full(len(keys), EVERY_SHARD, np.int64)
        placed[is_keyed] = np.mod(hashes, self._to)
        return placed


def cannot_move() -> StateMismatchError:
    """Returns the error for state whose shards are the partitions of the input."""
    return StateMismatchError(
        "the operator of this state has shards='partitions': the shard of a key is the partition of the "
        "input topic that Kafka's producers chose, so the state cannot be moved to other shards.",
        fix="nothing was moved. For an input topic with another number of partitions, start over with a new "
        "application.id and a new checkpoint, so that the state is computed again.",
    )


def merge_keyless_entries(by_shard: Mapping[int, Mapping[bytes, bytes]]) -> dict[bytes, bytes]:
    """Returns the entries that belong to no key, as every new shard gets them.

    The description of the store is the same in all shards. Every other entry is a time (8 bytes, big endian)
    that never goes back, so the latest one counts.

    Raises:
        StateMismatchError: if shards have different descriptions of the store.
    """
    merged: dict[bytes, bytes] = {}
    for entries in by_shard.values():
        for key, value in entries.items():
            known = merged.setdefault(key, value)
            if known != value and key == META_KEY:
                raise StateMismatchError(
                    "the shards have different descriptions of what the store holds.",
                    fix="let the query commit one more batch, then stop it.",
                )
            merged[key] = max(known, value)
    return merged


def _misplaced(shard: int, what: str) -> StateMismatchError:
    return StateMismatchError(
        f"shard {shard} holds an entry that cannot be assigned to a new shard: {what}.",
        fix="nothing was moved. Only stores of kafka-eos processors can be moved, and only if rows were "
        "grouped by the columns that the store describes.",
    )
