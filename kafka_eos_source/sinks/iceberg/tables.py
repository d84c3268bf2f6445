"""Loads an Iceberg table from the sink's options; creates it and evolves its schema if allowed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import Secrets
from kafka_eos_source.sinks.iceberg.fit import schema_mismatch
from kafka_eos_source.sinks.iceberg.spec import PartitionBy
from kafka_eos_source.sinks.table_format import ADD, fitting_table
from kafka_eos_source.sinks.targets import location

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table


@dataclass(frozen=True)
class Target:
    """A table as the options describe it.

    Picklable. The repr omits `properties`, because they may contain credentials.

    Attributes:
        identifier: ``namespace.table``.
        catalog: name of the catalog.
        properties: pyiceberg's properties of the catalog.
        create: whether to create the table if it does not exist.
        partition_by, table_properties: partition fields and properties of a table that the sink creates.
        evolution: `table_format.FAIL` or `ADD`.
    """

    identifier: str
    catalog: str
    properties: Mapping[str, str] = field(repr=False)
    create: bool
    partition_by: tuple[PartitionBy, ...]
    table_properties: Mapping[str, str]
    evolution: str

    @property
    def name(self) -> str:
        """Name of the table and its catalog, for people and for `TwoPhaseSink.target`."""
        uri = self.properties.get("uri", "")
        parts = urlsplit(uri)
        server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/") if uri else ""
        warehouse = self.properties.get("warehouse", "")
        if "/" in warehouse:  # a folder; else the name that a REST catalog gave it
            warehouse = location(warehouse)
        # pyiceberg's SQL catalog stores the tables of several catalogs in one database, by catalog name
        kind = self.properties.get("type", "")
        own = [self.catalog] if kind == "sql" or not uri else []
        return f"the table {self.identifier} of the catalog {' '.join([*own, server, warehouse]).strip()}"

    def load(self) -> Table | None:
        """Loads the current metadata of the table; returns None if the table does not exist."""
        from pyiceberg.exceptions import NoSuchTableError

        try:
            return self._catalog().load_table(self.identifier)
        except NoSuchTableError:
            return None

    def ready(self, schema: pa.Schema, deadline: Deadline) -> Table:
        """Loads the table; if necessary and allowed, creates it or evolves it for rows of this schema.

        Driver and executors may do this at the same time; all but the first find the work done.

        Raises:
            InvalidOptionError: if the table does not exist and must not be created.
            InvalidSchemaError, SinkRetryableError: as `fitting_table`.
        """
        from pyiceberg.exceptions import CommitFailedException, ValidationError

        def evolve(former_problem: str = "") -> tuple[Table, str]:
            table = self.load() or self._create(schema)
            problem = schema_mismatch(table, schema)
            if self.evolution != ADD or problem in ("", former_problem):
                return table, problem
            try:
                with table.update_schema() as update:
                    update.union_by_name(schema)
            except (ValueError, TypeError, NotImplementedError, ValidationError) as error:
                return table, f"{problem} The table's schema cannot be evolved: {error}"
            return evolve(problem)

        name = f"Iceberg table {self.identifier!r}"
        return fitting_table(evolve, CommitFailedException, name, self.evolution, deadline)

    def _create(self, schema: pa.Schema) -> Table:
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError
        from pyiceberg.transforms import parse_transform

        if not self.create:
            raise InvalidOptionError(
                f"the catalog {self.catalog!r} has no Iceberg table {self.identifier!r}, and the option "
                "'create' is false.",
                fix="create the table, correct sink.<name>.table, or set sink.<name>.create=true.",
            )
        catalog = self._catalog()
        try:
            catalog.create_namespace_if_not_exists(self.identifier.rpartition(".")[0])
            creation = catalog.create_table_transaction(
                self.identifier, schema, properties=dict(self.table_properties)
            )
            if self.partition_by:
                with creation.update_spec() as spec:
                    for each in self.partition_by:
                        spec.add_field(each.column, parse_transform(each.transform), each.name)
            creation.commit_transaction()
        except (TableAlreadyExistsError, CommitFailedException):
            pass  # another process created the table first; load it below
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InvalidSchemaError(
                f"the Iceberg table {self.identifier!r} cannot be created: {error}",
                fix="cast the column, exclude it with sink.<name>.columns, or correct partition.by.",
            ) from error
        found: Table = catalog.load_table(self.identifier)
        return found

    def _catalog(self) -> Catalog:
        # the process id is part of the cache key, because a forked process must not share the connection
        return _connected(self.catalog, tuple(sorted(self.properties.items())), os.getpid())


@lru_cache(maxsize=16)
def _connected(name: str, properties: tuple[tuple[str, str], ...], _pid: int) -> Catalog:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NotInstalledError

    try:
        return load_catalog(name, **dict(properties))
    except (ValueError, NotInstalledError, ModuleNotFoundError) as error:
        raise InvalidOptionError(
            f"the Iceberg catalog {name!r} cannot be opened: {Secrets.of(dict(properties)).hide(str(error))}",
            fix="set sink.<name>.catalog.type, sink.<name>.catalog.uri and the other properties that "
            "pyiceberg requires for this type of catalog.",
        ) from error


def is_retryable(error: Exception) -> bool:
    """Returns whether the same call may succeed later: the catalog or the store is busy or unreachable."""
    from pyiceberg import exceptions as known

    busy: tuple[type[Exception], ...] = (
        OSError,
        known.AuthorizationExpiredError,
        known.CommitFailedException,
        known.CommitStateUnknownException,
        known.ServerError,
        known.ServiceUnavailableError,
        known.TooManyRequestsError,
        known.WaitingForLockException,
    )
    alchemy = sys.modules.get("sqlalchemy.exc")  # imported only if the catalog is in a database
    return isinstance(error, busy) or (
        alchemy is not None and isinstance(error, alchemy.OperationalError | alchemy.TimeoutError)
    )
