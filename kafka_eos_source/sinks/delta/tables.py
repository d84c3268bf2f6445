"""From options to an open table: what is created if it is missing, and its schema's evolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, SinkRetryableError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.delta.fit import arrow_schema, demands, has_null_type, misfit, new_columns

if TYPE_CHECKING:
    from deltalake import DeltaTable, Schema

FAIL, ADD = "fail", "add"


@dataclass(frozen=True)
class Target:
    """A table, as the options name it. Picklable; may hold credentials, so not printed.

    Attributes:
        uri: of its folder.
        storage: options of delta-rs's object store.
        create: whether to create it if it is missing.
        partition_by, properties: of a table that is created.
        evolution: `FAIL` or `ADD`.
    """

    uri: str
    storage: Mapping[str, str] = field(repr=False)
    create: bool
    partition_by: tuple[str, ...]
    properties: Mapping[str, str]
    evolution: str

    def load(self) -> DeltaTable | None:
        """The table as it is now; None = there is none."""
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            return DeltaTable(self.uri, storage_options=dict(self.storage))
        except TableNotFoundError:
            return None

    def ready(self, schema: pa.Schema, deadline: Deadline) -> DeltaTable:
        """The table, created and evolved as the options allow, so that it takes rows of this schema.

        Driver and executors may do it at the same time: whoever comes second finds it done.

        Raises:
            InvalidOptionError: there is no table and none is to be created, or it asks for too much.
            InvalidSchemaError: it cannot take such rows.
            SinkRetryableError: others kept changing it until the deadline.
        """
        from deltalake.exceptions import CommitFailedError

        table = self.load() or self._create(schema)
        asked = demands(table)
        if asked:
            raise InvalidOptionError(
                f"the Delta table {self.uri!r} asks more of its writers than this sink can give: {asked}.",
                fix="write to a table without it.",
            )
        problem = misfit(arrow_schema(table), schema)
        while problem and self.evolution == ADD and (added := new_columns(arrow_schema(table), schema)):
            try:
                self._add(table, schema, added)
            except CommitFailedError as error:
                if deadline.expired:
                    raise SinkRetryableError(f"others change {self.uri!r} all the time: {error}") from error
            table = self.load() or self._create(schema)
            problem = misfit(arrow_schema(table), schema)
        if problem:
            raise InvalidSchemaError(
                f"the Delta table {self.uri!r} does not take the frame: {problem}.",
                fix="cast or drop columns (sink.<name>.columns)"
                + ("." if self.evolution == ADD else "; schema.evolution=add adds columns to the table."),
            )
        return table

    def _create(self, schema: pa.Schema) -> DeltaTable:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        if not self.create:
            raise InvalidOptionError(
                f"there is no Delta table in {self.uri!r}.",
                fix="create it, correct sink.<name>.path, or set sink.<name>.create=true.",
            )
        missing = [name for name in self.partition_by if name not in schema.names]
        if missing or len(self.partition_by) == len(schema):
            raise InvalidOptionError(
                f"option 'partition.by' is {', '.join(self.partition_by)}; the frame has "
                f"{', '.join(schema.names)}, and one column at least must be left for the files.",
                fix="correct it.",
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
                    fix="correct sink.<name>.properties and partition.by.",
                ) from error
            return found  # somebody else was quicker

    def _add(self, table: DeltaTable, schema: pa.Schema, added: list[str]) -> None:
        fields = _delta_schema(pa.schema([schema.field(name) for name in added])).fields
        table.alter.add_columns(fields)


def _delta_schema(schema: pa.Schema) -> Schema:
    from deltalake import Schema

    try:
        found: Schema = Schema.from_arrow(schema)
    except Exception as error:
        raise _unknown(str(error).partition("\n")[0]) from error
    # delta-rs takes unsigned numbers for signed ones, and columns without a type
    problem = misfit(pa.schema(found.to_arrow()), schema) or "; ".join(
        f"column {each.name!r} has type {each.type}" for each in schema if has_null_type(each.type)
    )
    if problem:
        raise _unknown(problem)
    return found


def _unknown(what: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"a Delta table does not hold the frame: {what}.",
        fix="cast the column, or leave it out with sink.<name>.columns.",
    )
