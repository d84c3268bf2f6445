"""From options to an open table: its catalog, its creation if it is missing, its schema's evolution."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pyarrow as pa

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, SinkRetryableError
from kafka_eos_source.kafka.secrets import concealed
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.iceberg.fit import misfit
from kafka_eos_source.sinks.iceberg.spec import PartitionBy

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

FAIL, ADD = "fail", "add"


@dataclass(frozen=True)
class Target:
    """A table, as the options name it. Picklable; may hold credentials, so not printed.

    Attributes:
        identifier: ``namespace.table``.
        catalog: its name.
        properties: of the catalog, as pyiceberg has them.
        create: whether to create the table if it is missing.
        partition_by, table_properties: of a table that is created.
        evolution: `FAIL` or `ADD`.
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
        """Table and catalog, as people and `TwoPhaseSink.target` name them."""
        uri = self.properties.get("uri", "")
        parts = urlsplit(uri)
        server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/") if uri else ""
        warehouse = self.properties.get("warehouse", "")
        # pyiceberg's catalog in a database keeps the tables of each catalog name apart
        kind = self.properties.get("type", "")
        own = [self.catalog] if kind == "sql" or not uri else []
        return f"the table {self.identifier} of the catalog {' '.join([*own, server, warehouse]).strip()}"

    def load(self) -> Table | None:
        """The table as it is now; None = there is none."""
        from pyiceberg.exceptions import NoSuchTableError

        try:
            return self._catalog().load_table(self.identifier)
        except NoSuchTableError:
            return None

    def ready(self, schema: pa.Schema, deadline: Deadline) -> Table:
        """The table, created and evolved as the options allow, so that it takes rows of this schema.

        Driver and executors may do it at the same time: whoever comes second finds it done.

        Raises:
            InvalidOptionError: there is no table, and none is to be created.
            InvalidSchemaError: it cannot take such rows.
            SinkRetryableError: others kept changing its schema until the deadline.
        """
        from pyiceberg.exceptions import CommitFailedException, ValidationError

        table = self.load()
        if table is None:
            table = self._create(schema)
        problem = misfit(table, schema)
        while problem and self.evolution == ADD:
            try:
                with table.update_schema() as update:
                    update.union_by_name(schema)
            except CommitFailedException as error:
                if deadline.expired:
                    raise SinkRetryableError(
                        f"others change the schema of {self.identifier!r} all the time: {error}"
                    ) from error
            except (ValueError, TypeError, NotImplementedError, ValidationError) as error:
                problem = f"{problem} It cannot be evolved: {error}"
                break
            table = self.load() or self._create(schema)
            before, problem = problem, misfit(table, schema)
            if problem == before:
                break
        if problem:
            raise InvalidSchemaError(
                f"the Iceberg table {self.identifier!r} does not take the frame: {problem}",
                fix="cast or drop columns (sink.<name>.columns)"
                + ("." if self.evolution == ADD else "; schema.evolution=add adds columns to the table."),
            )
        return table

    def _create(self, schema: pa.Schema) -> Table:
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError
        from pyiceberg.transforms import parse_transform

        if not self.create:
            raise InvalidOptionError(
                f"the catalog {self.catalog!r} has no Iceberg table {self.identifier!r}.",
                fix="create it, correct sink.<name>.table, or set sink.<name>.create=true.",
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
            pass  # another task or driver was quicker: it is loaded below
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InvalidSchemaError(
                f"the Iceberg table {self.identifier!r} cannot be created: {error}",
                fix="cast the column, leave it out with sink.<name>.columns, or correct partition.by.",
            ) from error
        found: Table = catalog.load_table(self.identifier)
        return found

    def _catalog(self) -> Catalog:
        # a connection is not shared with a forked child
        return _connected(self.catalog, tuple(sorted(self.properties.items())), os.getpid())


@lru_cache(maxsize=16)
def _connected(name: str, properties: tuple[tuple[str, str], ...], _pid: int) -> Catalog:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NotInstalledError

    try:
        return load_catalog(name, **dict(properties))
    except (ValueError, NotInstalledError, ModuleNotFoundError) as error:
        raise InvalidOptionError(
            f"the Iceberg catalog {name!r} cannot be opened: {concealed(str(error))}",
            fix="set sink.<name>.catalog.type, catalog.uri and what else pyiceberg asks of such a catalog.",
        ) from error


def passing(error: Exception) -> bool:
    """Whether the same call may succeed later: the catalog or the store is busy, or cannot be reached."""
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
    alchemy = sys.modules.get("sqlalchemy.exc")  # only a catalog in a database has imported it
    return isinstance(error, busy) or (
        alchemy is not None and isinstance(error, alchemy.OperationalError | alchemy.TimeoutError)
    )
