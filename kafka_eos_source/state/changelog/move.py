"""A store's state on its way to another number of shards: what marks it, what comes next, where a key goes.

While state moves, a *mark* stands in place of the token in the group's offsets. It is written in the same
transaction as the copy of the state, and taken away in the same transaction as the new changelog is filled.
Whoever reads a token meets it as an error (`Token.decode`): no task and no commit of the query gets past it.

::

    changelog   copy    mark      next
    ──────────  ──────  ────────  ────────────────────────────────────────────────────────────────
    n shards    any     none      COPY    all records into the copy, mark: one transaction
    old         whole   there     REMAKE  the changelog is deleted, and made with m partitions
    none        whole   there     REMAKE
    not m       whole   there     REMAKE  a task of the query made it meanwhile; nothing can be in it
    m, new      whole   there     FILL    all records from the copy, tokens, mark gone: one transaction
    m           any     none      CLEAN   the copy is deleted
    m           none    none      DONE
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
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.describe import META_KEY, META_TABLE, Description
from kafka_eos_source.state.encoding.keys import KeyCodec, split_keys
from kafka_eos_source.state.encoding.spark_hash import hash_columns

_VERSION = 1

#: In `Placement.of`: of no key, but of every shard.
EVERY_SHARD = -1


@dataclass(frozen=True)
class Move:
    """The mark.

    Attributes:
        store: whose state moves.
        was, to: numbers of shards.
        topic_id: of the changelog that it came from: one of that id is the old one.
        token: of the query's last batch, without its shard's part.
        attempt: made up; the token of every new shard names it, and no pending batch on any disk does.
        time_ms, event_time_ms: largest of all shards, as `ShardProgress` has them.
        counts: of all shards, added up; the first new one has them.
    """

    store: str
    was: int
    to: int
    topic_id: str
    token: Token
    attempt: str
    time_ms: int
    event_time_ms: int | None
    counts: Mapping[str, int] = field(default_factory=dict, hash=False)

    def encode(self) -> str:
        """Offset metadata: JSON, some 500 bytes, and the counts."""
        return json.dumps(
            {
                "kafka-eos": _VERSION,
                MOVING: {
                    "store": self.store,
                    "was": self.was,
                    "to": self.to,
                    "topic_id": self.topic_id,
                    "token": self.token.encode(),
                    "attempt": self.attempt,
                    "time": self.time_ms,
                    "event": self.event_time_ms,
                    "counts": dict(self.counts),
                },
            },
            separators=(",", ":"),
        )

    @classmethod
    def decode(cls, metadata: str) -> Move | None:
        """The mark in an offset's metadata; None = it is none.

        Raises:
            OperatorError: it is damaged, or of a newer version.
        """
        try:
            document = json.loads(metadata.rstrip("\0")) if f'"{MOVING}"' in metadata else None
        except ValueError:
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
                    attempt=found["attempt"],
                    time_ms=int(found["time"]),
                    event_time_ms=None if found["event"] is None else int(found["event"]),
                    counts={str(name): int(count) for name, count in found["counts"].items()},
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise OperatorError(
                f"the mark of a move of state is damaged ({error!r}): {metadata}",
                fix="find out which program commits offsets to this group.",
            ) from error
        raise OperatorError(
            f"the mark of a move of state is of another version: {metadata}",
            fix="finish the move with the version of kafka-eos that began it.",
        )

    def shard_token(self, shard: int) -> Token:
        """The token of a new shard."""
        counts = self.counts if shard == 0 else {}
        return replace(
            self.token, shard=ShardProgress(self.attempt, self.time_ms, self.event_time_ms, counts)
        )


class Stage(Enum):
    """What comes next; see the module."""

    COPY = "copy"
    REMAKE = "remake"
    FILL = "fill"
    CLEAN = "clean"
    DONE = "done"


@dataclass(frozen=True)
class Seen:
    """What Kafka shows of a store.

    Attributes:
        changelog, copy: the topics; None = there is none.
        move: the mark; None = there is none.
    """

    changelog: TopicShape | None
    copy: TopicShape | None
    move: Move | None


def next_stage(seen: Seen, to: int) -> Stage:
    """The table of the module.

    Raises:
        ChangelogError: there is no changelog, or the copy is gone.
        StateError: a move to another number is under way.
    """
    if seen.move is None:
        if seen.changelog is None:
            raise ChangelogError(
                "the store has no changelog topic.", fix="correct --application-id or --store."
            )
        if seen.changelog.partitions != to:
            return Stage.COPY
        return Stage.CLEAN if seen.copy is not None else Stage.DONE
    if seen.move.to != to:
        raise StateError(
            f"a move of this state from {seen.move.was} to {seen.move.to} shards is under way.",
            fix=f"finish it with --shards {seen.move.to}; then move it again.",
        )
    if seen.copy is None or seen.copy.partitions != to:
        raise ChangelogError(
            "the copy of the state is gone, in the middle of its move.",
            fix="somebody deleted that topic. If the changelog was not made anew yet, bring the group's "
            "offsets back; else the state is lost, and the query starts anew.",
        )
    changelog = seen.changelog
    if changelog is None or changelog.topic_id == seen.move.topic_id or changelog.partitions != to:
        return Stage.REMAKE
    return Stage.FILL


def begin(store: str, tokens: Mapping[int, Token | None], topic_id: str, to: int, attempt: str) -> Move:
    """The mark of a move that begins.

    Args:
        tokens: of each shard of the changelog.

    Raises:
        TokenMissingError: a shard has none: no batch was committed.
        StateMismatchError: shards are of different batches or queries.
    """
    missing = sorted(shard for shard, token in tokens.items() if token is None or token.shard is None)
    if missing:
        raise TokenMissingError(
            f"shards {missing} of store {store!r} have no token: no batch of the query committed them.",
            fix="a store without a batch has nothing to move: delete its changelog topic, and start the "
            "query with the new number of shards. If batches were committed, the group was deleted, or is "
            "another one: give --kafka group.id=….",
        )
    found = {shard: token for shard, token in tokens.items() if token is not None}
    of = {(token.query_id, token.batch_id) for token in found.values()}
    if len(of) > 1:
        raise StateMismatchError(
            f"shards of store {store!r} are of different batches: "
            + ", ".join(f"{k} of batch {t.batch_id} of query {t.query_id}" for k, t in sorted(found.items())),
            fix="let the query commit one more batch, then stop it.",
        )
    marks = [token.shard for token in found.values() if token.shard is not None]
    counts: Counter[str] = Counter()
    for mark in marks:
        counts.update(mark.counts)
    return Move(
        store=store,
        was=len(tokens),
        to=to,
        topic_id=topic_id,
        token=replace(found[0], shard=None),
        attempt=attempt,
        time_ms=max(mark.time_ms for mark in marks),
        event_time_ms=max((m.event_time_ms for m in marks if m.event_time_ms is not None), default=None),
        counts=dict(counts),
    )


class Placement:
    """Where keys of a store go when it has another number of shards.

    Args:
        description: of the store.
        was, to: numbers of shards.
    """

    def __init__(self, description: Description, was: int, to: int) -> None:
        self._keys = KeyCodec(description.key)
        self._was = was
        self._to = to

    def of(self, keys: pa.BinaryArray, shard: int) -> Ints:
        """The new shard of each key of an old one; `EVERY_SHARD` for what belongs to no key.

        Raises:
            StateMismatchError: a key is not one that Spark's hash sends to the old shard, or is none at all:
                these keys are not what shards are chosen by.
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
                shard, f"key {key} is of shard {int(hashes[wrong[0]]) % self._was} by Spark's hash"
            )
        placed = np.full(len(keys), EVERY_SHARD, np.int64)
        placed[is_keyed] = np.mod(hashes, self._to)
        return placed


def of_every_shard(found: Mapping[int, Mapping[bytes, bytes]]) -> dict[bytes, bytes]:
    """What every new shard gets, of what each old one holds outside of all keys.

    The description is the same in all of them. Anything else is a time (8 bytes, big endian), which never
    goes back: the latest counts.

    Raises:
        StateMismatchError: shards describe the store in different ways.
    """
    merged: dict[bytes, bytes] = {}
    for held in found.values():
        for key, value in held.items():
            known = merged.setdefault(key, value)
            if known != value and key == META_KEY:
                raise StateMismatchError(
                    "shards describe what the store holds in different ways.",
                    fix="let the query commit one more batch, then stop it.",
                )
            merged[key] = max(known, value)
    return merged


def _misplaced(shard: int, what: str) -> StateMismatchError:
    return StateMismatchError(
        f"shard {shard} holds what cannot be placed: {what}.",
        fix="nothing was moved. Only stores of this package's processors, grouped by the columns that they "
        "describe, can be.",
    )
