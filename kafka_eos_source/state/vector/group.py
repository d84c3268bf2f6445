"""Grouping of columns by Arrow: several accumulators ask, one pass over the rows answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.state.encoding import binary, cells

#: Null for a group that has nothing but nulls.
NO_NULLS_ONLY = pc.ScalarAggregateOptions(skip_nulls=True, min_count=1)
#: Zero for such a group.
ZERO_FOR_NULLS = pc.ScalarAggregateOptions(skip_nulls=True, min_count=0)

#: A column (None = the rows themselves), the name of Arrow's aggregation, its options.
Request = tuple[Any, str, Any]


@dataclass(frozen=True)
class Plan:
    """What to ask of a grouping, and how to make columns of the answers.

    Attributes:
        requests: to Arrow.
        collect: from their answers, one array each, to as many arrays as the one who planned it needs.
    """

    requests: Sequence[Request]
    collect: Callable[[list[pa.Array]], list[pa.Array]]


def group(keys: Sequence[pa.Array], plans: Sequence[Plan]) -> tuple[list[pa.Array], list[list[pa.Array]]]:
    """The distinct keys, in the order in which they come first, and what each plan collected for them.

    -0.0 groups with 0.0, and every NaN is one, as in Spark.
    """
    columns = {f"k{index}": _normal(key) for index, key in enumerate(keys)}
    names = list(columns)
    asked: list[tuple[Any, str, Any]] = []
    answers: list[str] = []
    for plan in plans:
        for column, function, options in plan.requests:
            name = f"v{len(asked)}"
            if column is None:
                asked.append(([], function, options))
                answers.append(function)
            else:
                columns[name] = column
                asked.append((name, function, options))
                answers.append(f"{name}_{function}")
    if not asked:
        asked.append(([], "count_all", None))
    table = pa.table(columns)
    # One thread: rows keep their order, and an executor's core is all that a task has.
    grouped = table.group_by(names, use_threads=False).aggregate(_distinct(asked))
    found = iter([_whole(grouped.column(answer)) for answer in answers])
    collected = [plan.collect([next(found) for _ in plan.requests]) for plan in plans]
    return [_whole(grouped.column(name)) for name in names], collected


def _distinct(asked: list[tuple[Any, str, Any]]) -> list[tuple[Any, str, Any]]:
    """Requests of the rows themselves once only: their answers have the same name."""
    return list(
        {(str(target), function): (target, function, options) for target, function, options in asked}.values()
    )


def _normal(key: pa.Array) -> pa.Array:
    return (
        cells.unpack(cells.pack(key, normalize=True), key.type, binary.valid(key))
        if cells.is_float(key.type)
        else key
    )


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else binary.concat(column.chunks, column.type)
