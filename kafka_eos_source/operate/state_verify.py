"""Compares the databases on this machine with the changelog: keys, values, offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from kafka_eos_source.errors import StateError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.reading.snapshot import of_changelog, of_folders
from kafka_eos_source.state.reading.stores import Changelog, Cut, StoreFolder
from kafka_eos_source.state.store.overlay import Pair

#: How many differences of a shard are kept for display.
SHOWN = 20


class Kind(Enum):
    """How an entry differs."""

    MISSING = "only in the changelog"
    SURPLUS = "only in the database"
    OTHER = "different values"


@dataclass(frozen=True)
class Difference:
    """One key that differs."""

    kind: Kind
    key: bytes


@dataclass
class Verified:
    """The result for one shard.

    Attributes:
        batch_id: the batch whose state both have; None = no batch.
        end: the changelog offset up to which both were read.
        entries: number of entries in the changelog.
        differing: number of keys that differ.
        differences: the first of these keys.
    """

    shard: int
    batch_id: int | None
    end: int
    entries: int = 0
    differing: int = 0
    differences: list[Difference] = field(default_factory=list)


def verify(found: list[StoreFolder], changelog: Changelog, deadline: Deadline) -> Iterator[Verified]:
    """Compares each shard, one after another, as of one moment for all. The query may run.

    Args:
        found: the databases of one store.
        changelog: changelog of the same store.
        deadline: limits each wait for Kafka, and the wait for databases that a task is about to update.

    Raises:
        NotUpToBoundError: if a database is behind Kafka; the query updates it when it next runs on this
            machine.
        StateError: if there is no database.
        KafkaEosError: as `snapshot.of_folders` and `snapshot.of_changelog` raise it.
    """
    if not found:
        raise StateError(
            f"this machine has no database of store {changelog.store!r} in --state-dir.",
            fix="set --state-dir to the operator's option state.dir.",
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
    """Merges two scans in key order and adds the differences to ``result``."""
    logged, stored = next(log, None), next(disk, None)
    while logged is not None or stored is not None:
        if stored is None or (logged is not None and logged[0] < stored[0]):
            assert logged is not None
            _add_difference(result, Kind.MISSING, logged[0])
            result.entries += 1
            logged = next(log, None)
        elif logged is None or stored[0] < logged[0]:
            _add_difference(result, Kind.SURPLUS, stored[0])
            stored = next(disk, None)
        else:
            if stored[1] != logged[1]:
                _add_difference(result, Kind.OTHER, stored[0])
            result.entries += 1
            logged, stored = next(log, None), next(disk, None)


def _add_difference(result: Verified, kind: Kind, key: bytes) -> None:
    result.differing += 1
    result.differences += islice([Difference(kind, key)], max(0, SHOWN - len(result.differences)))
