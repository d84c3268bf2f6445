"""The rules that make a row a Kafka record, each with the rows of an Arrow column that break it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.spark.schema import HEADERS, KEY, PARTITION, TIMESTAMP, TOPIC, VALUE

#: Bytes that a record needs besides its key, value and headers: an upper bound of Kafka's formats.
_RECORD_OVERHEAD = 100
#: The same for a header besides its key and value.
_HEADER_OVERHEAD = 10


@dataclass(frozen=True)
class Rule:
    """A rule for the values of one column.

    Attributes:
        column: name of the column.
        what_is_wrong: what a row does that breaks the rule, after the name of the column.
        fix: what the user can do.
        broken: returns which rows break the rule; null counts as false.
    """

    column: str
    what_is_wrong: str
    fix: str
    broken: Callable[[pa.Array], pa.Array]

    @property
    def text(self) -> str:
        """The rule's violation in words."""
        return f"column {self.column!r} {self.what_is_wrong}"


def _rows_of_entries(headers: pa.Array, entries: pa.Array) -> pa.Array:
    """Returns which rows have an entry of their headers that is true in ``entries``."""
    rows = np.zeros(len(headers), bool)
    if pc.any(entries).as_py():
        rows[pc.list_parent_indices(headers).filter(entries).to_numpy()] = True
    return pa.array(rows)


def _has_null_entry(headers: pa.Array) -> pa.Array:
    return _rows_of_entries(headers, headers.flatten().is_null())


def _has_null_key(headers: pa.Array) -> pa.Array:
    entries = headers.flatten()
    # a null entry is another rule's; the user's field names may be in another letter case
    return _rows_of_entries(headers, pc.and_(entries.is_valid(), entries.field(0).is_null()))


RULES: Mapping[str, tuple[Rule, ...]] = {
    TOPIC: (
        Rule(
            TOPIC,
            "is null",
            "set the option 'topic', or remove or fill such rows",
            lambda column: column.is_null(),
        ),
        Rule(
            TOPIC,
            "is empty",
            "remove or fill such rows",
            lambda column: pc.equal(column.cast(pa.string()), ""),
        ),
    ),
    PARTITION: (
        Rule(
            PARTITION,
            "is negative",
            "use a partition that exists, or null to let the partitioner choose one",
            lambda column: pc.less(column, 0),
        ),
    ),
    HEADERS: (
        Rule(HEADERS, "has a null entry", "remove the header, or set its key", _has_null_entry),
        Rule(HEADERS, "has an entry with a null key", "remove the header, or set its key", _has_null_key),
    ),
    TIMESTAMP: (
        Rule(
            TIMESTAMP,
            "is before 1970",
            "use a later timestamp, because Kafka's timestamps are milliseconds since 1970",
            lambda column: pc.less(_as_integer(column), 0),
        ),
    ),
}


def check(name: str, column: pa.Array) -> None:
    """Raises an error if a row of a column breaks a rule.

    Raises:
        InvalidRecordError: names the column and the first such row.
    """
    for rule in RULES.get(name, ()):
        first = pc.index(pc.fill_null(rule.broken(column), False), True).as_py()
        if first >= 0:
            raise InvalidRecordError(f"{rule.text} in row {first} of the Arrow batch.", fix=f"{rule.fix}.")


@dataclass(frozen=True)
class RecordLimits:
    """What the topic of a write accepts, for tasks that set invalid rows aside.

    Attributes:
        record_bytes: size of the largest record, uncompressed.
        partitions: number of partitions of the topic; None if each row names its topic.
    """

    record_bytes: int
    partitions: int | None = None

    def rules(self) -> tuple[Rule, ...]:
        """Returns the rules that follow from the limits, besides the size."""
        if self.partitions is None:
            return ()
        count = self.partitions
        return (
            Rule(
                PARTITION,
                f"names a partition that the topic does not have; it has {count} (0 to {count - 1})",
                "correct the column",
                lambda column: pc.greater_equal(column, count),
            ),
        )


def record_bytes(columns: Mapping[str, pa.Array]) -> pa.Array:
    """Returns an upper bound of the size of each row's record, in bytes (int64), without compression."""
    rows = len(columns[VALUE]) if VALUE in columns else len(next(iter(columns.values())))
    size = pa.repeat(pa.scalar(_RECORD_OVERHEAD, pa.int64()), rows)
    for name in (KEY, VALUE):
        if name in columns:
            lengths = pc.binary_length(columns[name]).cast(pa.int64())
            size = pc.add(size, pc.fill_null(lengths, 0))
    headers = columns.get(HEADERS)
    if headers is not None and headers.null_count < len(headers):
        size = pc.add(size, _header_bytes(headers))
    return size


def _header_bytes(headers: pa.Array) -> pa.Array:
    entries = headers.flatten()
    lengths = np.full(len(entries), _HEADER_OVERHEAD, np.int64)
    for each in (0, 1):
        lengths += pc.fill_null(pc.binary_length(entries.field(each)), 0).to_numpy(zero_copy_only=False)
    rows = pc.list_parent_indices(headers).to_numpy()
    return pa.array(np.bincount(rows, weights=lengths, minlength=len(headers)).astype(np.int64))


def _as_integer(timestamps: pa.Array) -> pa.Array:
    """Returns timestamps as integers; only the sign counts."""
    return timestamps.cast(pa.int64()) if pa.types.is_timestamp(timestamps.type) else timestamps
