"""`IcebergSink`: writes data files at stage, lists them in a note at prepare, commits one snapshot.

The summary of the snapshot contains the sink transaction id. So does a table property that the same commit
sets, because the property survives the expiry of snapshots. Before each commit, the sink searches the loaded
metadata for the id, and the commit requires that nobody has committed since (Iceberg's
``assert-ref-snapshot-id``). So two processes cannot both commit the same batch. After a conflict, the sink
loads the table and searches again.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, SinkRetryableError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import ALLOW_HTTP, Secrets, is_secret
from kafka_eos_source.sinks import manifest as manifests
from kafka_eos_source.sinks.contract import (
    SinkContext,
    SinkTxn,
    Stage,
    StageContext,
)
from kafka_eos_source.sinks.iceberg_files import (
    StagedFiles,
    TaskFiles,
    arrow_schema,
    check,
    from_json,
    unknown_partitions,
    unwritable_partitions,
)
from kafka_eos_source.sinks.row_checks import RowRule
from kafka_eos_source.sinks.sink_options import ALLOW_HTTP_OPTION, SinkOption
from kafka_eos_source.sinks.specs import SECRET_NAME, require
from kafka_eos_source.sinks.sql_database import has_database_file
from kafka_eos_source.sinks.table_columns import misfit, rules, spelled, year_rules
from kafka_eos_source.sinks.table_format import (
    ADD,
    BUFFER,
    CREATE,
    FAIL,
    STAGE_SECONDS,
    TableFormatSink,
    fitting_table,
    unfit,
)
from kafka_eos_source.sinks.targets import location

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyiceberg.table.update.schema import UpdateSchema

_COLUMN = r"[^\s(),`]+"
_FORMS = re.compile(
    rf"(?P<time>years?|months?|days?|hours?)\(\s*(?P<of>{_COLUMN})\s*\)"
    rf"|(?P<cut>bucket|truncate)\(\s*(?P<width>[1-9][0-9]{{0,8}})\s*,\s*(?P<what>{_COLUMN})\s*\)"
    rf"|(?P<identity>{_COLUMN})"
)
_COMMAS = re.compile(r",(?![^()]*\))")


@dataclass(frozen=True)
class PartitionBy:
    """One field of a partition spec.

    Attributes:
        column: source column in the table; dots separate the fields of structs.
        transform: transform in Iceberg's notation: ``identity``, ``day``, ``bucket[16]``.
        name: name of the partition field, as Iceberg's Java library would choose it.
    """

    column: str
    transform: str
    name: str


def partition_by(name: str, value: str) -> tuple[PartitionBy, ...]:
    """Parses a list such as ``days(ts), bucket(16, id), country``.

    Raises:
        InvalidOptionError: if an entry is malformed or repeated.
    """
    found = tuple(_one(name, value, each.strip()) for each in _COMMAS.split(value))
    if len({each.name for each in found}) < len(found):
        raise values.invalid(name, value, "each column and transform only once")
    return found


def _one(name: str, value: str, text: str) -> PartitionBy:
    form = _FORMS.fullmatch(text)
    if form is None:
        raise values.invalid(
            name,
            value,
            "a comma-separated list of columns and transforms: years(c), months(c), days(c), hours(c), "
            f"bucket(n, c), truncate(n, c); {text!r} is neither",
        )
    if form["time"]:
        transform = form["time"].removesuffix("s")
        return PartitionBy(form["of"], transform, f"{form['of']}_{transform}")
    if form["cut"]:
        ending = "bucket" if form["cut"] == "bucket" else "trunc"
        return PartitionBy(form["what"], f"{form['cut']}[{form['width']}]", f"{form['what']}_{ending}")
    return PartitionBy(form["identity"], "identity", form["identity"])


# -- the sink ------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Versions of Iceberg's format that pyiceberg writes. It refuses others only when it commits.
_FORMAT_VERSIONS = (1, 2)
#: Keys in the summary of a snapshot, named like those of Iceberg's connector for Kafka Connect.
APPLICATION, CLUSTER, SINK, SEQUENCE, ATTEMPT = (
    f"kafka-eos.{each}" for each in ("application-id", "cluster", "sink", "sequence", "attempt")
)


class IcebergSink(TableFormatSink["Table"]):
    """``type=iceberg``: appends to an Iceberg table.

    Made from its `OPTIONS`, which describe the arguments; `constructors.iceberg` is for users.
    """

    failpoint_after_commit = "sink.iceberg.after_snapshot"
    docs_page = "docs/sink-iceberg.md"
    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption("table", values.text, None, "`namespace.table`", "Name of the table.", required=True),
        SinkOption("catalog.name", values.text, "default", "text", "Name of the catalog in pyiceberg."),
        SinkOption(
            "catalog.*",
            values.text,
            {},
            "text",
            "pyiceberg's properties of the catalog and its file system: `catalog.type`, `catalog.uri`, "
            "`catalog.warehouse`, `catalog.s3.region` and so on.",
            "none",
        ),
        CREATE,
        SinkOption(
            "partition.by",
            partition_by,
            (),
            "comma-separated columns and transforms",
            "Partition fields of a table that the sink creates: `days(ts), bucket(16, id), country`.",
            "none",
        ),
        SinkOption(
            "properties.*", values.text, {}, "text", "Properties of a table that the sink creates.", "none"
        ),
        SinkOption(
            "schema.evolution",
            values.choice(FAIL, ADD),
            FAIL,
            "`fail`, `add`",
            "What to do if the frame has columns that the table lacks, or wider types: fail the query, or "
            "change the table.",
        ),
        BUFFER,
        ALLOW_HTTP_OPTION,
    )

    def __init__(
        self,
        *,
        table: str,
        catalog_name: str,
        catalog: Mapping[str, str],
        create: bool,
        partition_by: Sequence[PartitionBy],
        properties: Mapping[str, str],
        schema_evolution: str,
        buffer_bytes: int,
        allow_http: bool,
    ) -> None:
        if any(is_secret(name) or SECRET_NAME.search(name) for name in catalog):
            for name, value in catalog.items():
                if "://" in value:
                    sent = "the credentials of the catalog"
                    values.refuse_plain_http(f"catalog.{name}", value, sent, ALLOW_HTTP, allowed=allow_http)
        namespace, _, own = table.rpartition(".")
        if not namespace or not own:
            raise values.invalid("table", table, "namespace.table")
        self._to = Target(
            table,
            catalog_name,
            dict(catalog),
            create,
            tuple(partition_by),
            dict(properties),
            schema_evolution,
        )
        self.buffer_bytes = buffer_bytes

    def open(self, context: SinkContext) -> None:
        super().open(context)
        require("pyiceberg.catalog", "iceberg")

    def target(self) -> str | None:
        return self._to.name

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        _call(lambda: self._to.check(schema))

    def make_ready(self, schema: pa.Schema, deadline: Deadline) -> None:
        _call(lambda: self._to.ready(schema, deadline))
        self.notes()

    def row_rules(self, schema: pa.Schema, deadline: Deadline) -> Sequence[RowRule]:
        return self._rules(self.load(), schema)

    def _rules(self, table: Table | None, schema: pa.Schema) -> list[RowRule]:
        own, label = schema if table is None else arrow_schema(table.schema()), self._to.label
        # pyiceberg makes Python's dates of the bounds of a file
        return [*rules(schema, own, label), *year_rules(schema, f"{label}, as pyiceberg writes it")]

    def stage(self, context: StageContext) -> Stage:
        schema = context.schema
        table = _call(lambda: self._to.ready(schema, Deadline.after_seconds(STAGE_SECONDS)))
        unchecked = [each for each in self._rules(table, schema) if each not in context.checked]
        return TaskFiles(table, schema, unchecked, context.task_attempt_id, self.buffer_bytes)

    def note(self, receipts: Sequence[StagedFiles]) -> Mapping[str, Any]:
        files = [file for each in receipts for file in each.files]
        return {"table": receipts[0].table_uuid, "files": files}

    @property
    def label(self) -> str:
        return f"the table {self._to.identifier!r}"

    def load(self) -> Table | None:
        return _call(self._to.load)

    def _property(self) -> str:
        """Returns the name of the table property that holds the last id of this sink, query and cluster."""
        return f"kafka-eos.committed.{self.context.owner}"

    def _summary(self, txn: SinkTxn) -> dict[str, str]:
        return {
            APPLICATION: txn.application_id,
            CLUSTER: txn.cluster,
            SINK: txn.sink,
            SEQUENCE: str(txn.sequence),
            ATTEMPT: txn.attempt,
        }

    def is_committed(self, table: Table, txn: SinkTxn) -> bool:
        if table.properties.get(self._property()) == str(txn):
            return True
        wanted = self._summary(txn).items()
        return any(
            wanted <= snapshot.summary.additional_properties.items()
            for snapshot in table.snapshots()
            if snapshot.summary is not None
        )

    def read_note(self, note: Mapping[str, Any]) -> Mapping[str, Any]:
        for each in manifests.objects(note["files"]):
            check(each)
        return {"table": str(note["table"]), "files": note["files"]}

    def incompatibility(self, table: Table, note: Mapping[str, Any]) -> str:
        if note["table"] != str(table.metadata.table_uuid):
            return f"{self.label} was dropped and created again after the batch was staged"
        specs = {file["spec"] for file in note["files"]}
        if len(specs) > 1:
            return f"the partition spec of {self.label} changed while tasks staged the batch"
        if not specs <= table.specs().keys():
            return f"{self.label} no longer has the partition spec {specs.pop()}, which the staged files use"
        dropped = unknown_partitions(table, specs.pop())
        if dropped:
            return f"{self.label} no longer has the source columns of the partitions {', '.join(dropped)}"
        return ""

    def missing_file(self, table: Table, note: Mapping[str, Any]) -> str:
        for each in note["files"]:
            if not _call(functools.partial(_exists, table, each)):
                return f"the data file {each['path']} does not exist, or has another size than its task wrote"
        return ""

    def publish(self, table: Table, txn: SinkTxn, note: Mapping[str, Any]) -> Exception | None:
        from pyiceberg.exceptions import CommitFailedException

        # A manifest contains files of one partition spec, and pyiceberg assumes that it is the table's
        # current one. The catalog receives only the snapshot, so this does not alter the table's spec.
        (spec,) = {file["spec"] for file in note["files"]}
        table.metadata = table.metadata.model_copy(update={"default_spec_id": spec})
        merge = table.properties.get("commit.manifest-merge.enabled", "false").lower() == "true"
        transaction = table.transaction()
        transaction.set_properties({self._property(): str(txn)})
        update = transaction.update_snapshot(snapshot_properties=self._summary(txn))
        with update.merge_append() if merge else update.fast_append() as snapshot:
            for each in note["files"]:
                snapshot.append_data_file(from_json(table, each))
        # Disables two features of pyiceberg, which this sink handles itself. After a conflict, pyiceberg
        # would retry on top of new snapshots without checking whether one contains this batch. After a
        # failure, it would delete the manifests, although the snapshot may exist if only the answer was lost.
        transaction._snapshot_producers = []
        failpoints.reach("sink.iceberg.before_snapshot")
        try:
            _call(transaction.commit_transaction, except_for=CommitFailedException)
        except CommitFailedException as error:
            conflict: Exception = error
            _log.info(
                "%s: another writer committed to the table first: %s",
                txn,
                self.context.secrets.hide(str(conflict)),
            )
            current = self.load()
            if current is not None and current.snapshot_by_id(snapshot.snapshot_id) is None:
                snapshot._clean_all_uncommitted()
            return conflict
        return None


def _exists(table: Table, file: Mapping[str, Any]) -> bool:
    try:
        return bool(len(table.io.new_input(file["path"])) == file["bytes"])
    except FileNotFoundError:
        return False


def _call(call: Callable[[], _T], except_for: type[Exception] | tuple[()] = ()) -> _T:
    """Calls pyiceberg and turns errors that a retry may resolve into `SinkRetryableError`.

    Args:
        call: function to call.
        except_for: errors to raise as they are.
    """
    try:
        return call()
    except except_for:
        raise
    except Exception as error:
        if is_retryable(error) and not isinstance(error, OSError):
            raise SinkRetryableError(f"{type(error).__name__}: {error}") from error
        raise


# -- the table -----------------------------------------------------------------------------------


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
    def label(self) -> str:
        """Name of the table, for errors."""
        return f"Iceberg table {self.identifier!r}"

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
        from pyiceberg.exceptions import CommitFailedException

        def evolve(former_problem: str = "") -> tuple[Table, str]:
            table = self.load() or self._create(schema)
            frame = self._spelled(table, schema)
            problem = misfit(frame, arrow_schema(table.schema()))
            if self.evolution != ADD or problem in ("", former_problem):
                return table, problem and f"{problem}."
            update, why = _evolution(table, frame)
            if update is None:
                return table, f"{problem}. {why}"
            update.commit()
            return evolve(problem)

        return fitting_table(evolve, CommitFailedException, self.label, self.evolution, deadline)

    def check(self, schema: pa.Schema) -> None:
        """Checks that `ready` would succeed, without changing anything.

        Raises:
            InvalidOptionError, InvalidSchemaError: as `ready`.
        """
        table = self._load_from_existing_catalog()
        if table is None:
            self._check_creation(schema)
            return
        frame = self._spelled(table, schema)
        problem, why = misfit(frame, arrow_schema(table.schema())), ""
        if problem and self.evolution == ADD:
            update, why = _evolution(table, frame)
            problem = problem if update is None else misfit(frame, arrow_schema(update._apply()))
        if problem:
            raise unfit(self.label, f"{problem}. {why}".strip(), self.evolution)

    def _spelled(self, table: Table, schema: pa.Schema) -> pa.Schema:
        """Returns the schema of the frame in the table's names (`spelled`).

        Raises:
            InvalidOptionError: if the table has a partition field, or a version, that pyiceberg cannot write.
            InvalidSchemaError: as `spelled`.
        """
        version = table.metadata.format_version
        if version not in _FORMAT_VERSIONS:
            raise InvalidOptionError(
                f"the {self.label} has version {version} of Iceberg's format; this sink writes "
                f"{', '.join(map(str, _FORMAT_VERSIONS))}.",
                fix="write to a table of such a version.",
            )
        if unknown := unwritable_partitions(table):
            raise InvalidOptionError(
                f"the {self.label} has partition fields that this sink cannot write: {', '.join(unknown)}.",
                fix="write to a table without them.",
            )
        return spelled(schema, arrow_schema(table.schema()), self.label)

    def _load_from_existing_catalog(self) -> Table | None:
        """Loads the table; returns None if there is none. Creates neither a catalog nor its database."""
        from pyiceberg.exceptions import NoSuchTableError
        from pyiceberg.utils.config import Config

        merged = {**(Config().get_catalog_config(self.catalog) or {}), **self.properties}
        uri = str(merged.get("uri", ""))
        if merged.get("type", "sql") != "sql" or uri.startswith(("http", "thrift")) or not uri:
            return self.load()
        if not has_database_file(uri):
            return None
        from pyiceberg.catalog.sql import IcebergTables

        stated = {**self.properties, "init_catalog_tables": "false"}
        catalog: Any = _connected(self.catalog, tuple(sorted(stated.items())), os.getpid())
        tables = require("sqlalchemy", "iceberg").inspect(catalog.engine)
        if not tables.has_table(IcebergTables.__tablename__):
            return None
        try:
            found: Table = catalog.load_table(self.identifier)
        except NoSuchTableError:
            return None
        return found

    def _check_creation(self, schema: pa.Schema) -> None:
        """Checks that the table, which does not exist, may be created and can hold rows of this schema.

        Raises:
            InvalidOptionError, InvalidSchemaError: if not.
        """
        if not self.create:
            raise InvalidOptionError(
                f"the catalog {self.catalog!r} has no Iceberg table {self.identifier!r}, and the option "
                "'create' is false.",
                fix="create the table, correct sink.<name>.table, or set sink.<name>.create=true.",
            )
        spelled(schema, pa.schema([]), self.label)
        self._partition_fields(schema)

    def _partition_fields(self, schema: pa.Schema) -> list[PartitionBy]:
        """Returns `partition_by` of a table with this schema, with its spelling of the columns.

        Raises:
            InvalidSchemaError: if an Iceberg table cannot have the schema, or the partition fields.
        """
        from pyiceberg.catalog import Catalog
        from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException
        from pyiceberg.schema import assign_fresh_schema_ids
        from pyiceberg.transforms import parse_transform

        found = []
        try:
            created = assign_fresh_schema_ids(Catalog._convert_schema_if_needed(schema))
            for each in self.partition_by:
                column = created.find_field(each.column, case_sensitive=False)
                if not parse_transform(each.transform).can_transform(column.field_type):
                    raise self._uncreatable(
                        f"{each.transform} does not take a column of the type {column.field_type}, as "
                        f"{each.column!r} is."
                    )
                own = created.find_column_name(column.field_id) or each.column
                found.append(PartitionBy(own, each.transform, own + each.name.removeprefix(each.column)))
        except (ValueError, TypeError, NotImplementedError, UnsupportedPyArrowTypeException) as error:
            raise self._uncreatable(error) from error
        return found

    def _uncreatable(self, why: object) -> InvalidSchemaError:
        return InvalidSchemaError(
            f"the {self.label} cannot be created: {why}",
            fix="cast the column, exclude it with sink.<name>.columns, or correct partition.by.",
        )

    def _create(self, schema: pa.Schema) -> Table:
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError
        from pyiceberg.transforms import parse_transform

        self._check_creation(schema)
        partition_by = self._partition_fields(schema)
        catalog = self._catalog()
        try:
            catalog.create_namespace_if_not_exists(self.identifier.rpartition(".")[0])
            creation = catalog.create_table_transaction(
                self.identifier, schema, properties=dict(self.table_properties)
            )
            if partition_by:
                with creation.update_spec() as spec:
                    for each in partition_by:
                        spec.add_field(each.column, parse_transform(each.transform), each.name)
            creation.commit_transaction()
        except (TableAlreadyExistsError, CommitFailedException):
            pass  # another process created the table first; load it below
        except (ValueError, TypeError, NotImplementedError) as error:
            raise self._uncreatable(error) from error
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


# -- what a table can hold -----------------------------------------------------------------------


def _evolution(table: Table, frame: pa.Schema) -> tuple[UpdateSchema | None, str]:
    """Returns the change of the table's schema that the rows need, not committed; or why there is none.

    Args:
        table: table.
        frame: schema of the rows, as `spelled`. Columns that fit do not take part in the change.
    """
    from pyiceberg.exceptions import ValidationError
    from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException

    own = arrow_schema(table.schema())
    wanted = pa.schema(
        [
            field
            for field in frame
            if field.name not in own.names or misfit(pa.schema([field]), pa.schema([own.field(field.name)]))
        ]
    )
    try:
        return table.update_schema().union_by_name(wanted, table.metadata.format_version), ""
    except (
        *(ValueError, TypeError, NotImplementedError),
        *(ValidationError, UnsupportedPyArrowTypeException),
    ) as error:
        return None, f"The table's schema cannot be evolved: {error}"
