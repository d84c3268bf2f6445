"""Whether the databases on this machine hold what the changelog holds: keys, values, offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from kafka_eos_source.errors import StateError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.reading.cut import Changelog, Cut
from kafka_eos_source.state.reading.local import StoreFolder
from kafka_eos_source.state.reading.snapshot import of_changelog, of_folders
from kafka_eos_source.state.store.overlay import Pair

#: Differences of a shard that are kept to be shown.
SHOWN = 20


class Kind(Enum):
    """How an entry differs."""

    MISSING = "only in the changelog"
    SURPLUS = "only in the database"
    OTHER = "another value"


@dataclass(frozen=True)
class Difference:
    """One key."""

    kind: Kind
    key: bytes


@dataclass
class Verified:
    """One shard, compared.

    Attributes:
        batch_id: that both are at; None = no batch.
        end: committed end of the changelog, where both are.
        entries: of the changelog.
        differing: how many keys differ.
        differences: the first of them.
    """

    shard: int
    batch_id: int | None
    end: int
    entries: int = 0
    differing: int = 0
    differences: list[Difference] = field(default_factory=list)


def verify(found: list[StoreFolder], changelog: Changelog, deadline: Deadline) -> Iterator[Verified]:
    """Compares each shard, one after another, at one moment for all; the query may run.

    Args:
        found: the databases, of one store.
        changelog: of the same store.
        deadline: for Kafka, each wait; and for databases that a task is about to bring to its batch.

    Raises:
        NotUpToBoundError: a database is behind Kafka; the query brings it up when it next runs there.
        StateError: there is no database.
        KafkaEosError: as `snapshot.of_folders` and `snapshot.of_changelog`.
    """
    if not found:
        raise StateError(
            f"no database of store {changelog.store!r} is on this machine.",
            fix="name the operator's state.dir with --state-dir.",
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
    """Two scans in the order of keys, gone through together."""
    theirs, ours = next(log, None), next(disk, None)
    while theirs is not None or ours is not None:
        if ours is None or (theirs is not None and theirs[0] < ours[0]):
            assert theirs is not None
            _differs(result, Kind.MISSING, theirs[0])
            result.entries += 1
            theirs = next(log, None)
        elif theirs is None or ours[0] < theirs[0]:
            _differs(result, Kind.SURPLUS, ours[0])
            ours = next(disk, None)
        else:
            if ours[1] != theirs[1]:
                _differs(result, Kind.OTHER, ours[0])
            result.entries += 1
            theirs, ours = next(log, None), next(disk, None)


def _differs(result: Verified, kind: Kind, key: bytes) -> None:
    result.differing += 1
    result.differences += islice([Difference(kind, key)], max(0, SHOWN - len(result.differences)))
