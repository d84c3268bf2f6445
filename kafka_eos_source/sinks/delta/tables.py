"""Loads a Delta table from the sink's options; creates it and evolves its schema if the options allow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.delta.fit import (
    arrow_schema,
    has_null_type,
    new_columns,
    schema_mismatch,
    unsupported_features,
)
from kafka_eos_source.sinks.table_format import ADD, fitting_table

if TYPE_CHECKING:
    from deltalake import DeltaTable, Schema


@dataclass(frozen=True)
class Target:
    """A table as the options describe it.

    Picklable. The repr omits `storage`, because it may contain credentials.

    Attributes:
        uri: URI of the table's folder.
        storage: storage options of delta-rs.
        create: whether to create the table if it does not exist.
        partition_by, properties: partition columns and properties of a table that the sink creates.
        evolution: `table_format.FAIL` or `ADD`.
    """

    uri: str
    storage: Mapping[str, str] = field(repr=False)
    create: bool
    partition_by: tuple[str, ...]
    properties: Mapping[str, str]
    evolution: str

    def load(self) -> DeltaTable | None:
        """Loads the current version of the table; returns None if the table does not exist."""
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            return DeltaTable(self.uri, storage_options=dict(self.storage))
        except TableNotFoundError:
            return None

    def ready(self, schema: pa.Schema, deadline: Deadline) -> DeltaTable:
        """Loads the table; creates it or adds columns, if necessary and allowed, for rows of this schema.

        Driver and executors may do this at the same time; all but the first find the work done.

        Raises:
            InvalidOptionError: if the table does not exist and must not be created, or has features that
                this sink cannot write.
            InvalidSchemaError, SinkRetryableError: as `fitting_table`.
        """
        from deltalake.exceptions import CommitFailedError

        def evolve() -> tuple[DeltaTable, str]:
            table = self.load() or self._create(schema)
            if unsupported := unsupported_features(table):
                raise InvalidOptionError(
                    f"the Delta table {self.uri!r} uses features that this sink cannot write: {unsupported}.",
                    fix="write to a table without these features.",
                )
            problem = schema_mismatch(arrow_schema(table), schema)
            if problem and self.evolution == ADD and (added := new_columns(arrow_schema(table), schema)):
                self._add(table, schema, added)
                return evolve()
            return table, problem and f"{problem}."

        return fitting_table(evolve, CommitFailedError, f"Delta table {self.uri!r}", self.evolution, deadline)

    def _create(self, schema: pa.Schema) -> DeltaTable:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        if not self.create:
            raise InvalidOptionError(
                f"there is no Delta table in {self.uri!r}, and the option 'create' is false.",
                fix="create the table, correct sink.<name>.path, or set sink.<name>.create=true.",
            )
        missing = [name for name in self.partition_by if name not in schema.names]
        if missing or len(self.partition_by) == len(schema):
            raise InvalidOptionError(
                f"option 'partition.by' has the value {', '.join(self.partition_by)!r}; expected some, but "
                f"not all, of the frame's columns: {', '.join(schema.names)}.",
                fix="correct the option.",
            )
        _delta_schema(schema)
        try:
            return DeltaTable.create(
                self.uri,
                schema,
                mode="error",
                partition_by=list(self.partition_by),
                configuration=dict(self.properties),
                storage_options=dict(self.storage),
            )
        except (DeltaError, ValueError) as error:
            found = self.load()
            if found is None:
                raise InvalidOptionError(
                    f"the Delta table {self.uri!r} cannot be created: {error}.",
                    fix="correct sink.<name>.properties and sink.<name>.partition.by.",
                ) from error
            return found  # another process created the table first

    def _add(self, table: DeltaTable, schema: pa.Schema, added: list[str]) -> None:
        fields = _delta_schema(pa.schema([schema.field(name) for name in added])).fields
        table.alter.add_columns(fields)


def _delta_schema(schema: pa.Schema) -> Schema:
    from deltalake import Schema

    try:
        found: Schema = Schema.from_arrow(schema)
    except Exception as error:
        raise _unsupported_schema(str(error).partition("\n")[0]) from error
    # delta-rs silently converts unsigned integers to signed ones, and accepts columns without a type
    problem = schema_mismatch(pa.schema(found.to_arrow()), schema) or "; ".join(
        f"column {each.name!r} has type {each.type}" for each in schema if has_null_type(each.type)
    )
    if problem:
        raise _unsupported_schema(problem)
    return found


def _unsupported_schema(problem: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"a Delta table cannot hold the frame: {problem}.",
        fix="cast the column, or exclude it with sink.<name>.columns.",
    )
