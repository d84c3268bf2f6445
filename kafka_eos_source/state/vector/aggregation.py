"""Computes all aggregates of a processor together, with one grouping of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.encoding.describe import fields_from_json, fields_to_json
from kafka_eos_source.state.vector.accumulators import accumulator
from kafka_eos_source.state.vector.aggregates import Aggregate
from kafka_eos_source.state.vector.group import Plan, Request, group


class Grouped(NamedTuple):
    """Columns with one row per group, in the order in which the groups first appear.

    Attributes:
        keys: columns that identify the group.
        extra: results of the extra requests, one column each.
        states: columns of `Aggregation.state`.
    """

    keys: list[pa.Array]
    extra: list[pa.Array]
    states: list[pa.Array]


class Aggregation:
    """Declared aggregates over columns of known types.

    Args:
        aggregates: declarations by the name of their result.
        schema: columns of the input rows.

    Attributes:
        columns: names of the input columns that the aggregates read.
        state: columns of the state of all aggregates.
        results: columns of the results.

    Raises:
        InvalidSchemaError: if there is no aggregate, a column is missing, or a column has a type that its
            aggregate does not support.
    """

    def __init__(self, aggregates: Mapping[str, Aggregate], schema: pa.Schema) -> None:
        if not aggregates:
            raise InvalidSchemaError(
                "no aggregate is declared.", fix="declare at least one, such as {'rows': count()}."
            )
        self.aggregates = dict(aggregates)
        self._accumulators = [accumulator(name, each, schema) for name, each in aggregates.items()]
        self.columns = sorted({column for each in aggregates.values() for column in each.columns()})
        self._schema = pa.schema([schema.field(column) for column in self.columns])
        self.state = pa.schema([field for each in self._accumulators for field in each.state])
        #: Columns of the state of each aggregate, by the name of its result.
        self.states_by_name = {
            name: each.state for name, each in zip(aggregates, self._accumulators, strict=True)
        }
        self.results = pa.schema(
            [pa.field(name, each.result) for name, each in zip(aggregates, self._accumulators, strict=True)]
        )

    def aggregate_rows(
        self, keys: Sequence[pa.Array], rows: Mapping[str, pa.Array], extra: Sequence[Request] = ()
    ) -> Grouped:
        """Computes the states of groups of input rows.

        Args:
            keys: columns that identify the group of each row.
            rows: input columns by name.
            extra: more that is computed for each group.
        """
        plans = [each.plan_rows(rows) for each in self._accumulators]
        return self._grouped(keys, plans, extra)

    def merge_states(
        self, keys: Sequence[pa.Array], states: Sequence[pa.Array], extra: Sequence[Request] = ()
    ) -> Grouped:
        """Merges states that were computed from parts of the rows into one state per group.

        Args:
            keys: columns that identify the group of each state.
            states: columns of ``state``.
            extra: more that is computed for each group.
        """
        plans = [
            each.plan_states(own) for each, own in zip(self._accumulators, self._own(states), strict=True)
        ]
        return self._grouped(keys, plans, extra)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        """Merges two states of the same groups row by row.

        For a group without a stored state, ``old`` is what `RowCodec.decode` returns for a missing value:
        null, or zero in a column that is not nullable.
        """
        pairs = zip(self._accumulators, self._own(old), self._own(new), strict=True)
        return [column for each, before, after in pairs for column in each.combine(before, after)]

    def finish(self, states: Sequence[pa.Array]) -> list[pa.Array]:
        """Computes the results from the states."""
        return [each.finish(own) for each, own in zip(self._accumulators, self._own(states), strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Returns the aggregates as JSON values, as the store's description keeps them."""
        return {
            "aggregates": [[name, each.to_json()] for name, each in self.aggregates.items()],
            "columns": fields_to_json(self._schema),
        }

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Aggregation:
        """Returns the aggregation that `to_json` wrote."""
        aggregates = {name: Aggregate.from_json(each) for name, each in written["aggregates"]}
        return cls(aggregates, fields_from_json(written["columns"]))

    def _grouped(self, keys: Sequence[pa.Array], plans: list[Plan], extra: Sequence[Request]) -> Grouped:
        groups, (more, *states) = group(keys, [Plan(extra, lambda answers: answers), *plans])
        return Grouped(groups, more, [column for own in states for column in own])

    def _own(self, states: Sequence[pa.Array]) -> list[list[pa.Array]]:
        """Splits the columns of the state by aggregate."""
        parts, start = [], 0
        for each in self._accumulators:
            parts.append(list(states[start : start + len(each.state)]))
            start += len(each.state)
        return parts
