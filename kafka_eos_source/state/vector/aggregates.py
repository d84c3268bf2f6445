"""Declarations of the aggregates that an operator computes for each key. Used on the driver.

=========  ======================================  =====================================================
aggregate  input column                            result type
=========  ======================================  =====================================================
count      none, or any column                     int64, never null
sum        int8 to int64                           int64; the query fails if the sum does not fit
sum        float, double                           double
sum        decimal(p, s)                           decimal(min(38, p + 10), s), exact
mean       int8 to int64, float, double            double
mean       decimal(p, s)                           decimal(min(38, p + 4), min(38, s + 4))
min, max   any type that state supports            type of the column; NaN is larger than any number
latest     any type that state supports            type of the column; null if the newest row's value is null
=========  ======================================  =====================================================

State supports bool, int8 to int64, float, double, decimal, string, binary, date and timestamp.

Nulls are handled as in SQL: every aggregate except ``latest`` and ``count()`` skips them, and the result for
a group that contains only nulls is null (0 for ``count(column)``). Result types are those of Spark SQL.

The functions here only build a declaration, so they raise nothing. The operator checks the declaration
against the input columns when it is created. It raises `InvalidSchemaError` if a column is missing or has a
type that the aggregate does not support.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Aggregate:
    """Declaration of one aggregate.

    Create it with `count`, `sum_`, `min_`, `max_`, `mean` or `latest`.

    Attributes:
        kind: ``"count"``, ``"sum"``, ``"min"``, ``"max"``, ``"mean"`` or ``"latest"``.
        column: name of the input column; None = count rows.
        by: for ``latest``: names of the columns that order the rows, the most significant one first.
    """

    kind: str
    column: str | None = None
    by: tuple[str, ...] = ()

    def columns(self) -> tuple[str, ...]:
        """Returns the names of the input columns that the aggregate reads."""
        return (() if self.column is None else (self.column,)) + self.by

    def to_json(self) -> list[Any]:
        """Returns the declaration as JSON values, as the store's description keeps it."""
        return [self.kind, self.column, list(self.by)]

    @classmethod
    def from_json(cls, written: Sequence[Any]) -> Aggregate:
        """Returns the aggregate that `to_json` wrote."""
        kind, column, by = written
        return cls(kind, column, tuple(by))


def count(column: str | None = None) -> Aggregate:
    """Counts rows, or the values of a column that are not null.

    The result is int64 and never null.

    Args:
        column: name of the column whose non-null values are counted; None = count rows.

    Example::

        {"flights": count(), "delayed": count("delay_minutes")}
    """
    return Aggregate("count", column)


def sum_(column: str) -> Aggregate:
    """Sums the values of a column that are not null.

    The sum of integers is int64 and exact, the sum of float or double is a double, and the sum of
    decimal(p, s) is an exact decimal(min(38, p + 10), s). A sum that does not fit its type fails the
    micro-batch with `StateError`; it never wraps around.

    Args:
        column: name of an integer, float, double or decimal column.

    Example::

        {"revenue": sum_("amount")}
    """
    return Aggregate("sum", column)


def min_(column: str) -> Aggregate:
    """Finds the smallest value of a column.

    The result has the column's type. Strings and binary values are compared byte by byte.

    Args:
        column: name of a column of any type that state supports.

    Example::

        {"cheapest": min_("price")}
    """
    return Aggregate("min", column)


def max_(column: str) -> Aggregate:
    """Finds the largest value of a column.

    The result has the column's type. As in Spark, NaN is larger than any other number. Strings and binary
    values are compared byte by byte.

    Args:
        column: name of a column of any type that state supports.

    Example::

        {"longest": max_("seconds")}
    """
    return Aggregate("max", column)


def mean(column: str) -> Aggregate:
    """Computes the mean of the values of a column that are not null.

    The mean of integers, float or double is a double. The mean of decimal(p, s) is
    decimal(min(38, p + 4), min(38, s + 4)), rounded half up.

    Args:
        column: name of an integer, float, double or decimal column.

    Example::

        {"mean_delay": mean("delay_minutes")}
    """
    return Aggregate("mean", column)


def latest(column: str, by: str | Sequence[str] = ()) -> Aggregate:
    """Returns the value of the newest row, which is the row with the largest ``by``.

    The result has the column's type. It is null if the newest row's value is null.

    Rows of one input partition arrive in the order of that partition. A shuffle precedes the operator, so
    rows of different input partitions arrive in any order. Kafka's default partitioner writes all records
    of one key to one partition, so ``by="offset"`` gives an exact result for them.

    Args:
        column: name of a column of any type that state supports.
        by: name of the column that orders the rows, such as the event time, or several columns, the most
            significant one first: ``("timestamp", "offset")``. A row with a null in any of them is ignored.
            Of several rows with equal values, the last one to arrive wins. Without ``by``, the last row to
            arrive wins; with a window, the window's event-time column is the default.

    Example::

        {"gate": latest("gate", by=("timestamp", "offset"))}
    """
    return Aggregate("latest", column, (by,) if isinstance(by, str) else tuple(by))
