"""What can be computed of the rows of a key: declarations, made on the driver.

=========  ===================================================  ===========================================
aggregate  of                                                   result
=========  ===================================================  ===========================================
count      rows, or values of a column that are not null        int64, never null
sum        integers                                             int64; an error when it does not fit
sum        float, double                                        double
sum        decimal(p, s)                                        decimal(min(38, p + 10), s), exact
mean       integers, float, double                              double
mean       decimal(p, s)                                        decimal(min(38, p + 4), min(38, s + 4))
min, max   any column that state holds; NaN is the largest      its type
latest     any column that state holds                          its type: null if the newest row's is null
=========  ===================================================  ===========================================

Nulls count as in SQL: they are skipped, and of none but nulls the result is null. Types are Spark's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Aggregate:
    """One result: use `count`, `sum_`, `min_`, `max_`, `mean` or `latest`.

    Attributes:
        kind: which one.
        column: that it is of; None = the rows themselves.
        by: columns that say which row is the newest; the first counts first.
    """

    kind: str
    column: str | None = None
    by: tuple[str, ...] = ()

    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return (() if self.column is None else (self.column,)) + self.by

    def to_json(self) -> list[Any]:
        """For the description of the store."""
        return [self.kind, self.column, list(self.by)]

    @classmethod
    def from_json(cls, written: Sequence[Any]) -> Aggregate:
        """The aggregate of `to_json`."""
        kind, column, by = written
        return cls(kind, column, tuple(by))


def count(column: str | None = None) -> Aggregate:
    """How many rows, or how many values of ``column`` that are not null."""
    return Aggregate("count", column)


def sum_(column: str) -> Aggregate:
    """The sum of the values that are not null. Exact for integers and decimals."""
    return Aggregate("sum", column)


def min_(column: str) -> Aggregate:
    """The smallest value. Strings and binary compare by their bytes."""
    return Aggregate("min", column)


def max_(column: str) -> Aggregate:
    """The largest value. NaN is larger than any other number, as in Spark."""
    return Aggregate("max", column)


def mean(column: str) -> Aggregate:
    """The mean of the values that are not null."""
    return Aggregate("mean", column)


def latest(column: str, by: str | Sequence[str] = ()) -> Aggregate:
    """The value of the newest row: the one with the largest ``by``; null if that row's value is null.

    Args:
        column: whose value it is.
        by: event time, or several columns to settle ties, the first one first: ``("timestamp", "offset")``.
            Rows with a null in one of them are left out. Of rows that are equal in all, the one that
            arrived last counts. Without ``by`` that is so of all rows; in windows it is their event time.

    Rows of one input partition arrive in the order of that partition; between partitions there is no order,
    as a shuffle comes before the operator. The rows of one key are in one Kafka partition, as a rule.
    """
    return Aggregate("latest", column, (by,) if isinstance(by, str) else tuple(by))
