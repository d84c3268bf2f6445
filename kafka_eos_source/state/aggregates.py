"""Declares the aggregates of `state.aggregate`, under the names that they have in ``pyspark.sql.functions``.

=======================  ======================  ==========================================================
aggregate                input column            result type
=======================  ======================  ==========================================================
count                    none, or any column     bigint, never null
sum                      integer                 bigint; the query fails if the sum does not fit
sum                      float, double           double
sum                      decimal(p, s)           decimal(min(38, p + 10), s), exact
avg (mean)               integer, float, double  double
avg (mean)               decimal(p, s)           decimal(min(38, p + 4), min(38, s + 4))
min, max                 any supported type      type of the column; NaN is larger than any number
first, last              any supported type      type of the column
max_by, min_by           any supported type      type of the column
bool_and, bool_or        boolean                 boolean
stddev_samp, stddev_pop  number or decimal       double
var_samp, var_pop        number or decimal       double
count_distinct           any supported types     bigint, never null
approx_count_distinct    any supported type      bigint, never null
collect_list             any supported type      array of the column's type, never null
collect_set              any supported type      array of the column's type, never null
percentile_approx        number, decimal, date   type of the column; an array of it for several percentages
                         or timestamp
=======================  ======================  ==========================================================

Supported types are boolean, tinyint to bigint, float, double, decimal, string, binary, date and timestamp.
"Integer" is tinyint to bigint, "number" is an integer, float or double.

Nulls are handled as in Spark: every aggregate except ``count()``, ``first`` and ``last`` skips them, and its
result for a group that contains only nulls is null (0 for counts, an empty array for lists). Result types
are those of Spark SQL.

These functions only build a declaration. They raise `InvalidOptionError` if an argument is malformed. The
operator checks the declaration against the input columns when it is created: it raises `InvalidSchemaError`
if a column is missing or has a type that the aggregate does not support.

Several names are those of Python's own functions, so import the module and not the names::

    from kafka_eos_source.state import aggregates as agg

    {"orders": agg.count(), "revenue": agg.sum("amount"), "largest": agg.max("amount")}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka_eos_source.errors import InvalidOptionError

__all__ = [
    "Aggregate",
    "approx_count_distinct",
    "avg",
    "bool_and",
    "bool_or",
    "collect_list",
    "collect_set",
    "count",
    "count_distinct",
    "first",
    "last",
    "max",
    "max_by",
    "mean",
    "min",
    "min_by",
    "percentile_approx",
    "stddev",
    "stddev_pop",
    "stddev_samp",
    "sum",
    "var_pop",
    "var_samp",
    "variance",
]


@dataclass(frozen=True)
class Aggregate:
    """Declaration of one aggregate. The functions of this module create it.

    Attributes:
        kind: name of the function that declared it, such as ``"sum"``. Functions with two names have the
            kind ``"avg"``, ``"stddev_samp"`` or ``"var_samp"``.
        inputs: names of the input columns that are aggregated; none = count rows.
        by: names of the columns that order the rows, the most significant one first.
        settings: the other arguments, as pairs of name and value.
    """

    kind: str
    inputs: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        shown = [", ".join(self.inputs) + (f" by {', '.join(self.by)}" if self.by else "")]
        shown += [f"{name}={value}" for name, value in self.settings]
        return f"{self.kind}({', '.join(filter(None, shown))})"

    def __getitem__(self, setting: str) -> Any:
        """Returns the value of a setting.

        Raises:
            KeyError: if the aggregate has no such setting.
        """
        return dict(self.settings)[setting]

    def columns(self) -> tuple[str, ...]:
        """Returns the names of the input columns that the aggregate reads."""
        return self.inputs + self.by

    def to_json(self) -> dict[str, Any]:
        """Returns the declaration as JSON values, as the store's description keeps it."""
        written = {"kind": self.kind, "inputs": [*self.inputs], "by": [*self.by]}
        return {**written, **{name: _as_json(value) for name, value in self.settings}}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Aggregate:
        """Returns the aggregate that `to_json` wrote."""
        settings = {name: value for name, value in written.items() if name not in ("kind", "inputs", "by")}
        return cls(
            written["kind"],
            tuple(written["inputs"]),
            tuple(written["by"]),
            tuple((name, _from_json(value)) for name, value in settings.items()),
        )


def _as_json(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


def _from_json(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# -- counts, sums and extremes


def count(column: str | None = None) -> Aggregate:
    """Counts rows, or the values of a column that are not null.

    The result is bigint and never null.

    Args:
        column: name of the column whose non-null values are counted; None or ``"*"`` = count rows.

    Example::

        {"flights": agg.count(), "delayed": agg.count("delay_minutes")}
    """
    return Aggregate("count", () if column is None or column == "*" else (_name("count", column),))


def sum(column: str) -> Aggregate:
    """Sums the values of a column that are not null.

    The sum of integers is bigint and exact, the sum of float or double is a double, and the sum of
    decimal(p, s) is an exact decimal(min(38, p + 10), s). A sum that does not fit its type fails the
    micro-batch with `StateError`; it never wraps around.

    Args:
        column: name of an integer, float, double or decimal column.

    Example::

        {"revenue": agg.sum("amount")}
    """
    return Aggregate("sum", (_name("sum", column),))


def avg(column: str) -> Aggregate:
    """Computes the mean of the values of a column that are not null.

    The mean of integers, float or double is a double. The mean of decimal(p, s) is
    decimal(min(38, p + 4), min(38, s + 4)), rounded half up.

    Args:
        column: name of an integer, float, double or decimal column.

    Example::

        {"mean_delay": agg.avg("delay_minutes")}
    """
    return Aggregate("avg", (_name("avg", column),))


mean = avg


def min(column: str) -> Aggregate:
    """Finds the smallest value of a column.

    The result has the column's type. Strings and binary values are compared byte by byte.

    Args:
        column: name of a column of any supported type.

    Example::

        {"cheapest": agg.min("price")}
    """
    return Aggregate("min", (_name("min", column),))


def max(column: str) -> Aggregate:
    """Finds the largest value of a column.

    The result has the column's type. As in Spark, NaN is larger than any other number. Strings and binary
    values are compared byte by byte.

    Args:
        column: name of a column of any supported type.

    Example::

        {"longest": agg.max("seconds")}
    """
    return Aggregate("max", (_name("max", column),))


def bool_and(column: str) -> Aggregate:
    """Finds out whether all values of a column that are not null are true.

    The result is a boolean.

    Args:
        column: name of a boolean column.

    Example::

        {"all_paid": agg.bool_and("paid")}
    """
    return Aggregate("bool_and", (_name("bool_and", column),))


def bool_or(column: str) -> Aggregate:
    """Finds out whether any value of a column is true.

    The result is a boolean: null if the group has only nulls.

    Args:
        column: name of a boolean column.

    Example::

        {"any_failed": agg.bool_or("failed")}
    """
    return Aggregate("bool_or", (_name("bool_or", column),))


# -- one row of each group


def first(column: str, ignore_nulls: bool = False, *, by: str | Sequence[str] = ()) -> Aggregate:
    """Returns the value of the oldest row, which is the row with the smallest ``by``.

    The result has the column's type. It is null if the oldest row's value is null, unless ``ignore_nulls``
    is set.

    Args:
        column: name of a column of any supported type.
        ignore_nulls: whether to skip rows in which ``column`` is null.
        by: name of the column that orders the rows, or names of several; see `last`. Of several rows with
            equal values, the first one to arrive wins.

    Example::

        {"opening_price": agg.first("price", by=("timestamp", "offset"))}
    """
    return Aggregate("first", (_name("first", column),), _names("first", by), _nulls(ignore_nulls))


def last(column: str, ignore_nulls: bool = False, *, by: str | Sequence[str] = ()) -> Aggregate:
    """Returns the value of the newest row, which is the row with the largest ``by``.

    The result has the column's type. It is null if the newest row's value is null, unless ``ignore_nulls``
    is set.

    Rows of one input partition arrive in the order of that partition. A shuffle precedes the operator, so
    rows of different input partitions arrive in any order. Kafka's default partitioner writes all records
    of one key to one partition, so ``by="offset"`` gives an exact result for them.

    Args:
        column: name of a column of any supported type.
        ignore_nulls: whether to skip rows in which ``column`` is null.
        by: name of the column that orders the rows, such as the event time, or several columns, the most
            significant one first: ``("timestamp", "offset")``. A row with a null in any of them is ignored.
            Of several rows with equal values, the last one to arrive wins. Without ``by``, the last row to
            arrive wins; with a window, the window's event-time column is the default.

    Example::

        {"gate": agg.last("gate", by=("timestamp", "offset"))}
    """
    return Aggregate("last", (_name("last", column),), _names("last", by), _nulls(ignore_nulls))


def max_by(column: str, by: str) -> Aggregate:
    """Returns the value of a column in the row with the largest value of another column.

    The result has the column's type. It is null if that row's value is null. Rows in which ``by`` is null are
    ignored. Of several rows with the largest value, the last one to arrive wins.

    Args:
        column: name of a column of any supported type.
        by: name of the column that is compared, as `max` does.

    Example::

        {"longest_flight": agg.max_by("flight", by="minutes")}
    """
    return Aggregate("max_by", (_name("max_by", column),), (_name("max_by", by),))


def min_by(column: str, by: str) -> Aggregate:
    """Returns the value of a column in the row with the smallest value of another column.

    The result has the column's type. It is null if that row's value is null. Rows in which ``by`` is null are
    ignored. Of several rows with the smallest value, the first one to arrive wins.

    Args:
        column: name of a column of any supported type.
        by: name of the column that is compared, as `min` does.

    Example::

        {"cheapest_shop": agg.min_by("shop", by="price")}
    """
    return Aggregate("min_by", (_name("min_by", column),), (_name("min_by", by),))


# -- spread


def stddev_samp(column: str) -> Aggregate:
    """Computes the standard deviation of a sample: the square root of `var_samp`.

    The result is a double, and null for fewer than two values.

    Args:
        column: name of an integer, float, double or decimal column; its values are computed as doubles.

    Example::

        {"spread": agg.stddev("delay_minutes")}
    """
    return Aggregate("stddev_samp", (_name("stddev_samp", column),))


stddev = stddev_samp


def stddev_pop(column: str) -> Aggregate:
    """Computes the standard deviation of a population: the square root of `var_pop`.

    The result is a double, and null for a group without values.

    Args:
        column: name of an integer, float, double or decimal column; its values are computed as doubles.

    Example::

        {"spread": agg.stddev_pop("delay_minutes")}
    """
    return Aggregate("stddev_pop", (_name("stddev_pop", column),))


def var_samp(column: str) -> Aggregate:
    """Computes the variance of a sample: the sum of squared distances from the mean, divided by n - 1.

    The result is a double, and null for fewer than two values. The partial results are merged in a way that
    keeps its digits (Chan et al.), so a large mean does not harm it.

    Args:
        column: name of an integer, float, double or decimal column; its values are computed as doubles.

    Example::

        {"spread": agg.variance("delay_minutes")}
    """
    return Aggregate("var_samp", (_name("var_samp", column),))


variance = var_samp


def var_pop(column: str) -> Aggregate:
    """Computes the variance of a population: the sum of squared distances from the mean, divided by n.

    The result is a double, and null for a group without values.

    Args:
        column: name of an integer, float, double or decimal column; its values are computed as doubles.

    Example::

        {"spread": agg.var_pop("delay_minutes")}
    """
    return Aggregate("var_pop", (_name("var_pop", column),))


# -- distinct values and lists, which the option state.aggregate.max.values limits


def count_distinct(*columns: str) -> Aggregate:
    """Counts the distinct values of a column, or the distinct combinations of values of several columns.

    The result is bigint, exact and never null. A row with a null in any of the columns is skipped. The state
    keeps every distinct value. The option ``state.aggregate.max.values`` limits how many a group may have; a
    group with more fails the micro-batch with `AggregateLimitError`.

    Args:
        columns: names of one or more columns of any supported type.

    Example::

        {"customers": agg.count_distinct("customer_id")}
    """
    if not columns:
        raise InvalidOptionError(
            "count_distinct() names no column.",
            fix="name the columns whose distinct values are counted, such as count_distinct('customer_id').",
        )
    return Aggregate("count_distinct", tuple(_name("count_distinct", column) for column in columns))


def approx_count_distinct(column: str, rsd: float = 0.05) -> Aggregate:
    """Estimates the number of distinct values of a column with a HyperLogLog sketch of constant size.

    The result is bigint and never null.

    Args:
        column: name of a column of any supported type.
        rsd: relative standard deviation of the estimate, from 0.0022 to 0.39. The sketch of a group has
            ``2^ceil(2 log2(1.106 / rsd))`` bytes, 512 for 0.05.

    Example::

        {"visitors": agg.approx_count_distinct("visitor_id", rsd=0.02)}
    """
    if not _is_number(rsd) or not 0.0022 <= rsd <= 0.39:
        raise InvalidOptionError(
            f"approx_count_distinct has rsd={rsd!r}; expected a number from 0.0022 to 0.39.",
            fix="set 'rsd' to the relative standard deviation that you accept, such as 0.05.",
        )
    settings = (("rsd", float(rsd)),)
    return Aggregate("approx_count_distinct", (_name("approx_count_distinct", column),), (), settings)


def collect_list(column: str) -> Aggregate:
    """Collects the values of a column that are not null into an array.

    The result is an array, which is empty if there are no values. Values of one input partition are in the
    order of that partition; otherwise the order is unspecified. The option ``state.aggregate.max.values``
    limits how many values a group may have; a group with more fails the micro-batch with
    `AggregateLimitError`.

    Args:
        column: name of a column of any supported type.

    Example::

        {"items": agg.collect_list("item")}
    """
    return Aggregate("collect_list", (_name("collect_list", column),))


def collect_set(column: str) -> Aggregate:
    """Collects the distinct values of a column that are not null into an array.

    The result is an array, which is empty if there are no values. The order of its values is unspecified. The
    option ``state.aggregate.max.values`` limits how many values a group may have; a group with more fails the
    micro-batch with `AggregateLimitError`.

    Args:
        column: name of a column of any supported type.

    Example::

        {"carriers": agg.collect_set("carrier")}
    """
    return Aggregate("collect_set", (_name("collect_set", column),))


def percentile_approx(column: str, percentage: float | Sequence[float], accuracy: int = 10_000) -> Aggregate:
    """Finds the value of a column that is not smaller than the given share of its values.

    The result is one of the values, so it has the column's type. It is exact as long as the group has at most
    ``accuracy`` distinct values. After that, its rank differs by at most ``1 / accuracy`` of the number of
    values (rounded up), however the rows were split.

    Args:
        column: name of an integer, float, double, decimal, date or timestamp column.
        percentage: share from 0.0 to 1.0: 0.5 = the median; or several, for an array of results.
        accuracy: from 1 to 1,000,000. The state of a group has up to a few times ``accuracy`` entries of 32
            bytes, and each micro-batch that changes the group rewrites them.

    Example::

        {"delay_p50_p99": agg.percentile_approx("delay_minutes", [0.5, 0.99], accuracy=1000)}
    """
    several = isinstance(percentage, (list, tuple))
    shares = tuple(percentage) if isinstance(percentage, (list, tuple)) else (percentage,)
    if not shares or not all(_is_number(share) and 0 <= share <= 1 for share in shares):
        raise InvalidOptionError(
            f"percentile_approx has percentage={percentage!r}; expected one or more numbers from 0.0 to 1.0.",
            fix="set 'percentage' to such a share: 0.5 is the median, 0.99 the 99th percentile.",
        )
    if not isinstance(accuracy, int) or isinstance(accuracy, bool) or not 1 <= accuracy <= 1_000_000:
        raise InvalidOptionError(
            f"percentile_approx has accuracy={accuracy!r}; expected an integer from 1 to 1000000.",
            fix="set 'accuracy' to n for a rank that differs by at most 1/n, such as 1000.",
        )
    wanted = tuple(map(float, shares))
    settings = (("percentage", wanted if several else wanted[0]), ("accuracy", accuracy))
    return Aggregate("percentile_approx", (_name("percentile_approx", column),), (), settings)


# -- arguments


def _name(function: str, column: Any) -> str:
    """Returns the name of a column.

    Raises:
        InvalidOptionError: if it is no name.
    """
    if isinstance(column, str):
        return column
    raise InvalidOptionError(
        f"{function} has the argument {column!r}; expected the name of a column.",
        fix=f"pass the name, such as {function}('amount'). Compute an expression as a column first "
        "(withColumn).",
    )


def _names(function: str, columns: Any) -> tuple[str, ...]:
    named = (columns,) if isinstance(columns, str) or not isinstance(columns, (list, tuple)) else columns
    return tuple(_name(function, column) for column in named)


def _nulls(ignore_nulls: bool) -> tuple[tuple[str, Any], ...]:
    return (("ignore_nulls", True),) if ignore_nulls else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
