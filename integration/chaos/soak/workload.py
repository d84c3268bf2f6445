"""The queries of the soak, their input, and what they must write: pure functions of the input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from integration.support.history import Record, Send

SOURCE = "in"
PARTITIONS = 2
KEYS = 24
#: Name of the state store of `COUNTS`.
STORE = "totals"

#: Totals of a key: how many rows it has had, and the sum of their numbers.
Totals = tuple[int, int]


def key_of(number: int) -> str:
    """Returns the key of an input row."""
    return f"k{number % KEYS:02d}"


def partition_of(number: int) -> int:
    """Returns the source partition of an input row. All rows of a key are in one partition."""
    return number % KEYS % PARTITIONS


def value_of(number: int) -> str:
    """Returns the value of an input row: its number, in a fixed width so that text sorts like numbers."""
    return f"{number:010d}"


@dataclass(frozen=True)
class Query:
    """One query. Each of its output values begins with its name, so that values name their writer.

    Attributes:
        name: name, ``application.id`` and consumer group.
        host: the process that runs it; several queries may share one.
        sinks: types of the external sinks that receive its rows too.
    """

    name: str
    host: str
    sinks: tuple[str, ...] = ()

    @property
    def topics(self) -> tuple[str, ...]:
        """Output topics, the default one first."""
        return (self.name,)

    def rows(self, records: Iterable[Record], totals: dict[str, Totals]) -> Iterator[Send]:
        """Yields what one micro-batch writes.

        Args:
            records: the input of the batch, by partition and offset.
            totals: state of the query, which the batch changes.
        """
        for each in records:
            yield Send(self.name, None, each.key, f"{self.name}:{each.value}")


@dataclass(frozen=True)
class Routed(Query):
    """Drops every fifth row, and routes the others by parity; runs inside the read (`map_in_read`)."""

    @property
    def topics(self) -> tuple[str, ...]:
        return f"{self.name}-even", f"{self.name}-odd"

    def rows(self, records: Iterable[Record], totals: dict[str, Totals]) -> Iterator[Send]:
        for each in records:
            number = int(each.value)
            if number % 5:
                yield Send(self.topics[number % 2], None, each.key, f"{self.name}:{each.value}")


@dataclass(frozen=True)
class Counts(Query):
    """Counts rows and sums numbers per key, in a store with a changelog; writes each changed key."""

    def rows(self, records: Iterable[Record], totals: dict[str, Totals]) -> Iterator[Send]:
        changed: dict[str, None] = {}
        for each in records:
            key = str(each.key)
            rows, total = totals.get(key, (0, 0))
            totals[key] = rows + 1, total + int(each.value)
            changed[key] = None
        for key in changed:
            rows, total = totals[key]
            yield Send(self.name, None, key, f"{self.name}:{rows}:{total}")


SPARK = "spark"
QUERIES: tuple[Query, ...] = (
    Query("copy", SPARK),
    Counts("counts", SPARK),
    Query("archive", SPARK, ("filesystem", "sql")),
    Routed("routed", SPARK),
    Query("fast", "fast"),
    Query("fastarchive", "fastarchive", ("filesystem", "sql")),
)
OUTPUTS = tuple(topic for query in QUERIES for topic in query.topics)


@dataclass(frozen=True)
class Batch:
    """One micro-batch as the offset log has it: where it ends in each source partition."""

    batch_id: int
    ends: Mapping[int, int]


@dataclass(frozen=True)
class Carry:
    """What one chunk leaves to the next one, for one query.

    Attributes:
        next_batch: id of the first batch of the next chunk.
        position: next source offset of each partition.
        totals: state of the query.
        sequence: sequence number of its token, which counts its transactions.
    """

    next_batch: int = 0
    position: Mapping[int, int] = field(default_factory=dict)
    totals: Mapping[str, Totals] = field(default_factory=dict)
    sequence: int = 0

    def to_json(self) -> dict[str, object]:
        return {
            "next_batch": self.next_batch,
            "position": {str(partition): offset for partition, offset in self.position.items()},
            "totals": {key: list(both) for key, both in self.totals.items()},
            "sequence": self.sequence,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, object]) -> Carry:
        position, totals = found["position"], found["totals"]
        assert isinstance(position, dict)
        assert isinstance(totals, dict)
        return cls(
            int(str(found["next_batch"])),
            {int(partition): int(offset) for partition, offset in position.items()},
            {key: (rows, total) for key, (rows, total) in totals.items()},
            int(str(found["sequence"])),
        )
