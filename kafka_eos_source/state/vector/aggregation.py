"""All aggregates of a processor together: one grouping, one state of columns, one row of results."""

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
    """Groups, in the order in which they come first.

    Attributes:
        keys: their columns.
        extra: what else was asked for them.
        states: columns of `Aggregation.state`.
    """

    keys: list[pa.Array]
    extra: list[pa.Array]
    states: list[pa.Array]


class Aggregation:
    """Declared aggregates over columns of known types.

    Args:
        aggregates: by the name of their result.
        schema: of the rows.

    Raises:
        InvalidSchemaError: a column is missing, or of a type that its aggregate is not for.
    """

    def __init__(self, aggregates: Mapping[str, Aggregate], schema: pa.Schema) -> None:
        if not aggregates:
            raise InvalidSchemaError("no aggregate", fix="name one at least, such as {'rows': count()}")
        self.aggregates = dict(aggregates)
        self._accumulators = [accumulator(name, each, schema) for name, each in aggregates.items()]
        #: Columns of the rows that are read.
        self.columns = sorted({column for each in aggregates.values() for column in each.columns()})
        self._schema = pa.schema([schema.field(column) for column in self.columns])
        self.state = pa.schema([field for each in self._accumulators for field in each.state])
        self.results = pa.schema(
            [pa.field(name, each.result) for name, each in zip(aggregates, self._accumulators, strict=True)]
        )

    def of_rows(
        self, keys: Sequence[pa.Array], rows: Mapping[str, pa.Array], extra: Sequence[Request] = ()
    ) -> Grouped:
        """Rows to the states of their groups."""
        plans = [each.of_rows(rows) for each in self._accumulators]
        return self._grouped(keys, plans, extra)

    def of_states(
        self, keys: Sequence[pa.Array], states: Sequence[pa.Array], extra: Sequence[Request] = ()
    ) -> Grouped:
        """States, computed of parts of the rows, to those of their groups."""
        plans = [each.of_states(own) for each, own in zip(self._accumulators, self._own(states), strict=True)]
        return self._grouped(keys, plans, extra)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        """States of the same groups, row by row; ``old`` may be null (`rows.RowCodec.decode` of nothing)."""
        pairs = zip(self._accumulators, self._own(old), self._own(new), strict=True)
        return [column for each, before, after in pairs for column in each.combine(before, after)]

    def finish(self, states: Sequence[pa.Array]) -> list[pa.Array]:
        """The results."""
        return [each.finish(own) for each, own in zip(self._accumulators, self._own(states), strict=True)]

    def to_json(self) -> dict[str, Any]:
        """For the description of the store."""
        return {
            "aggregates": [[name, each.to_json()] for name, each in self.aggregates.items()],
            "columns": fields_to_json(self._schema),
        }

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Aggregation:
        """The aggregation of `to_json`."""
        aggregates = {name: Aggregate.from_json(each) for name, each in written["aggregates"]}
        return cls(aggregates, fields_from_json(written["columns"]))

    def _grouped(self, keys: Sequence[pa.Array], plans: list[Plan], extra: Sequence[Request]) -> Grouped:
        groups, (more, *states) = group(keys, [Plan(extra, lambda found: found), *plans])
        return Grouped(groups, more, [column for own in states for column in own])

    def _own(self, states: Sequence[pa.Array]) -> list[list[pa.Array]]:
        """The columns of each aggregate's state."""
        found, at = [], 0
        for each in self._accumulators:
            found.append(list(states[at : at + len(each.state)]))
            at += len(each.state)
        return found
