"""Groups columns with Arrow: computes the requests of several accumulators in one pass over the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.state.encoding import binary

#: Option of an Arrow aggregation whose result is null for a group that contains only nulls.
NO_NULLS_ONLY = pc.ScalarAggregateOptions(skip_nulls=True, min_count=1)
#: Option of an Arrow aggregation whose result is zero for a group that contains only nulls.
ZERO_FOR_NULLS = pc.ScalarAggregateOptions(skip_nulls=True, min_count=0)

#: A column (None = the rows themselves), the name of an Arrow aggregation, and its options.
Request = tuple[Any, str, Any]


@dataclass(frozen=True)
class Plan:
    """Arrow aggregations that one accumulator requests, and how it converts their results.

    Attributes:
        requests: the requested aggregations.
        collect: converts their results, one array each, to the columns that the accumulator needs.
    """

    requests: Sequence[Request]
    collect: Callable[[list[pa.Array]], list[pa.Array]]


def group(keys: Sequence[pa.Array], plans: Sequence[Plan]) -> tuple[list[pa.Array], list[list[pa.Array]]]:
    """Groups rows by key and executes the plans.

    As in Spark, -0.0 and 0.0 are one group, and all NaN values are one group.

    Args:
        keys: columns that identify the group of each row.
        plans: what to compute for each group.

    Returns:
        Columns of the distinct keys, in the order in which they first appear; and for each plan the columns
        that it collected.
    """
    columns = {f"k{index}": _normalized(key) for index, key in enumerate(keys)}
    names = list(columns)
    requests: list[tuple[Any, str, Any]] = []
    results: list[str] = []
    for plan in plans:
        for column, function, options in plan.requests:
            name = f"v{len(requests)}"
            if column is None:
                requests.append(([], function, options))
                results.append(function)
            else:
                columns[name] = column
                requests.append((name, function, options))
                results.append(f"{name}_{function}")
    if not requests:
        requests.append(([], "count_all", None))
    table = pa.table(columns)
    # With one thread the groups keep the order of the rows, and a Spark task has only one core anyway.
    grouped = table.group_by(names, use_threads=False).aggregate(_distinct(requests))
    arrays = iter([_combined(grouped.column(result)) for result in results])
    collected = [plan.collect([next(arrays) for _ in plan.requests]) for plan in plans]
    return [_combined(grouped.column(name)) for name in names], collected


def _distinct(requests: list[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any]]:
    """Removes repeated requests for the rows themselves, whose results would have the same name."""
    return list({(str(request[0]), request[1]): request for request in requests}.values())


def _normalized(key: pa.Array) -> pa.Array:
    return (
        binary.unpack(binary.pack(key, normalize=True), key.type, binary.valid(key))
        if binary.is_float(key.type)
        else key
    )


def _combined(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else binary.concat(column.chunks, column.type)
