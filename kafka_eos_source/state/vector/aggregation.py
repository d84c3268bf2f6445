"""Computes all aggregates of a processor together, with one grouping of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidSchemaError, StateError
from kafka_eos_source.state.encoding.describe import fields_from_json, fields_to_json
from kafka_eos_source.state.vector.accumulators import Accumulator, accumulator
from kafka_eos_source.state.vector.aggregates import Aggregate
from kafka_eos_source.state.vector.group import Plan, Request, group
from kafka_eos_source.state.vector.retractable import RetractableCount, check_removed_column

#: Name of the column of the state that counts the rows of a group, if rows are taken back.
_LIVE = "__live"


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
        removed: name of the boolean column that marks the rows to take back; None = no row is taken back.

    Attributes:
        columns: names of the input columns that the aggregates read.
        state: columns of the state of all aggregates.
        results: columns of the results.
        removed: the argument.

    Raises:
        InvalidSchemaError: if there is no aggregate, a column is missing, or a column has a type that its
            aggregate does not support; or if rows are taken back that an aggregate cannot forget.
    """

    def __init__(
        self, aggregates: Mapping[str, Aggregate], schema: pa.Schema, removed: str | None = None
    ) -> None:
        if not aggregates:
            raise InvalidSchemaError(
                "no aggregate is declared.", fix="declare at least one, such as {'rows': count()}."
            )
        if removed is not None:
            check_removed_column(schema, removed)
        self.aggregates = dict(aggregates)
        self.removed = removed
        self._accumulators = [accumulator(name, each, schema, removed) for name, each in aggregates.items()]
        read = {column for each in aggregates.values() for column in each.columns()}
        #: Accumulators without a result. A group whose last row was taken back must vanish, so count rows.
        self._hidden: list[Accumulator] = []
        if removed is not None:
            read.add(removed)
            self._hidden = [RetractableCount(_LIVE, None, removed)]
        self.columns = sorted(read)
        self._schema = pa.schema([schema.field(column) for column in self.columns])
        self.state = pa.schema([field for each in self._all for field in each.state])
        #: Columns of the state of each aggregate, by the name of its result.
        self.states_by_name = {
            name: each.state for name, each in zip(aggregates, self._accumulators, strict=True)
        }
        self.results = pa.schema(
            [pa.field(name, each.result) for name, each in zip(aggregates, self._accumulators, strict=True)]
        )

    def held(self, *, changes: bool) -> list[pa.Field]:
        """Returns the columns that a value has in addition if results are held back.

        Args:
            changes: whether the result that was emitted last is needed again.
        """
        fields = [pa.field("__due_ms", pa.int64()), pa.field("__emitted", pa.bool_(), nullable=False)]
        if changes:
            fields += [pa.field(f"__emitted_{field.name}", field.type) for field in self.results]
        return fields

    def aggregate_rows(
        self, keys: Sequence[pa.Array], rows: Mapping[str, pa.Array], extra: Sequence[Request] = ()
    ) -> Grouped:
        """Computes the states of groups of input rows.

        Args:
            keys: columns that identify the group of each row.
            rows: input columns by name.
            extra: more that is computed for each group.
        """
        plans = [each.plan_rows(rows) for each in self._all]
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
        plans = [each.plan_states(own) for each, own in zip(self._all, self._own(states), strict=True)]
        return self._grouped(keys, plans, extra)

    def combine(self, old: Sequence[pa.Array], new: Sequence[pa.Array]) -> list[pa.Array]:
        """Merges two states of the same groups row by row.

        For a group without a stored state, ``old`` is what `RowCodec.decode` returns for a missing value:
        null, or zero in a column that is not nullable.
        """
        pairs = zip(self._all, self._own(old), self._own(new), strict=True)
        return [column for each, before, after in pairs for column in each.combine(before, after)]

    def finish(self, states: Sequence[pa.Array]) -> list[pa.Array]:
        """Computes the results from the states."""
        own = self._own(states)[: len(self._accumulators)]
        return [each.finish(state) for each, state in zip(self._accumulators, own, strict=True)]

    def lives(self, states: Sequence[pa.Array]) -> pa.BooleanArray | None:
        """Returns whether each group still has rows; None if no row is ever taken back.

        Raises:
            StateError: if a group took back more rows than it received.
        """
        if self.removed is None:
            return None
        rows = states[-1]
        if len(rows) and pc.min(rows).as_py() < 0:
            raise StateError(
                f"a group took back {-pc.min(rows).as_py()} more rows than it received "
                f"(removed={self.removed!r}).",
                fix="start the operator together with the one before it, which must have emit='changes': new "
                "state needs every row from the beginning. Use another application.id and checkpoint.",
            )
        return pc.greater(rows, 0)

    def to_json(self) -> dict[str, Any]:
        """Returns the aggregates as JSON values, as the store's description keeps them."""
        written: dict[str, Any] = {
            "aggregates": [[name, each.to_json()] for name, each in self.aggregates.items()],
            "columns": fields_to_json(self._schema),
        }
        return written if self.removed is None else {**written, "removed": self.removed}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Aggregation:
        """Returns the aggregation that `to_json` wrote."""
        aggregates = {name: Aggregate.from_json(each) for name, each in written["aggregates"]}
        return cls(aggregates, fields_from_json(written["columns"]), written.get("removed"))

    @property
    def _all(self) -> list[Accumulator]:
        """The accumulators in the order of their states."""
        return self._accumulators + self._hidden

    def _grouped(self, keys: Sequence[pa.Array], plans: list[Plan], extra: Sequence[Request]) -> Grouped:
        groups, (more, *states) = group(keys, [Plan(extra, lambda answers: answers), *plans])
        return Grouped(groups, more, [column for own in states for column in own])

    def _own(self, states: Sequence[pa.Array]) -> list[list[pa.Array]]:
        """Splits the columns of the state by aggregate."""
        parts, start = [], 0
        for each in self._all:
            parts.append(list(states[start : start + len(each.state)]))
            start += len(each.state)
        return parts
