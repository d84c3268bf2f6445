"""Aggregates that keep many values of each group: collect_list, collect_set and count_distinct.

The state has an array for each input column. The elements at one position of these arrays belong to one row.
Each batch that changes a group reads and writes its arrays, so they are limited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import AggregateLimitError
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.vector.accumulators import Accumulator, supported_type
from kafka_eos_source.state.vector.arrays import Plan, group, row_numbers, rows_of

#: Default of the option ``state.aggregate.max.values``.
MAX_VALUES = 10_000

OPTION = "state.aggregate.max.values"


class ValueLists(Accumulator):
    """The aggregates collect_list, collect_set and count_distinct.

    Args:
        name: name of the result.
        aggregate: the declaration.
        types: types of the input columns.
        max_values: largest number of values that `settled` accepts for a group.
    """

    def __init__(
        self, name: str, aggregate: Aggregate, types: Sequence[pa.DataType], max_values: int
    ) -> None:
        self._name = name
        self._kind = aggregate.kind
        self._columns = aggregate.inputs
        self._is_distinct = aggregate.kind != "collect_list"
        self._max_values = max_values
        self._types = [
            pa.list_(supported_type(name, aggregate, column, type_))
            for column, type_ in zip(aggregate.inputs, types, strict=True)
        ]
        self.result = pa.int64() if aggregate.kind == "count_distinct" else self._types[0]
        self.state = [pa.field(f"{name}__values{index}", type_) for index, type_ in enumerate(self._types)]

    def plan_rows(self, rows: Mapping[str, pa.Array]) -> Plan:
        columns = [rows[column] for column in self._columns]
        present = np.logical_and.reduce([binary.valid(column) for column in columns])

        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            rows, groups = rows_of(grouped[0])
            kept = present[np.asarray(rows)]
            rows = rows.filter(pa.array(kept))
            return self._lists([column.take(rows) for column in columns], groups[kept], len(grouped[0]))

        return Plan([row_numbers(columns[0])], collect)

    def plan_states(self, states: Sequence[pa.Array]) -> Plan:
        def collect(grouped: list[pa.Array]) -> list[pa.Array]:
            rows, groups = rows_of(grouped[0])
            return self._merged([column.take(rows) for column in states], groups, len(grouped[0]))

        return Plan([row_numbers(states[0])], collect)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        both = [pa.concat_arrays(pair) for pair in zip(old, new, strict=True)]
        count = len(old[0])
        # The lists of a group must be adjacent, the stored one first.
        order = np.arange(2 * count).reshape(2, count).T.reshape(-1)
        return self._merged([column.take(pa.array(order)) for column in both], order % max(count, 1), count)

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        lengths = binary.list_lengths(states[0])
        if self._kind == "count_distinct":
            return pa.array(lengths, pa.int64())
        return binary.lists_of(states[0].flatten(), lengths, self.result)  # null becomes an empty array

    def settled(self, states: Sequence[pa.Array]) -> list[pa.Array]:
        lengths = binary.list_lengths(states[0])
        most = int(lengths.max(initial=0))
        if most > self._max_values:
            held = "values" if self._kind == "collect_list" else "distinct values"
            advice = " or approx_count_distinct, whose state has a constant size" * (
                self._kind == "count_distinct"
            )
            raise AggregateLimitError(
                f"aggregate {self._name!r} ({self._kind}) would keep {most} {held} of one group; expected at "
                f"most {self._max_values} ({OPTION}).",
                fix=f"use a window, so that each group has fewer values{advice}; or set {OPTION} to at least "
                f"{most}: each micro-batch that changes a group rewrites all its values.",
            )
        return list(states)

    def _merged(self, lists: Sequence[pa.ListArray], groups: Ints, count: int) -> list[pa.Array]:
        """Merges lists of the same groups, which are adjacent, into one list for each group."""
        lengths = binary.list_lengths(lists[0])
        return self._lists([each.flatten() for each in lists], np.repeat(groups, lengths), count)

    def _lists(self, columns: list[pa.Array], groups: Ints, count: int) -> list[pa.Array]:
        """Returns the lists of each group.

        Args:
            columns: the elements, in the order of their groups.
            groups: the group of each element.
            count: number of groups.
        """
        if self._is_distinct and len(groups):
            (numbers, *columns), _ = group([pa.array(groups), *columns], [])
            groups = binary.raw(numbers, np.int64)
            if bool((groups[1:] < groups[:-1]).any()):  # Arrow nearly keeps the order
                order = np.argsort(groups, kind="stable")
                groups, columns = groups[order], [column.take(pa.array(order)) for column in columns]
        lengths = np.bincount(groups, minlength=count)
        pairs = zip(columns, self._types, strict=True)
        return [binary.lists_of(column, lengths, type_) for column, type_ in pairs]
