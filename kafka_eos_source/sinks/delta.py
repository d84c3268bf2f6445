"""`DeltaSink`: writes data files at stage, lists them in a note at prepare, commits one table version.

The commit contains two of Delta's transaction identifiers (PROTOCOL.md, Transaction Identifiers) for each
sink, query and Kafka cluster. The version of the first is the sequence number of the Kafka transaction; the
version of the second is a hash of the whole sink transaction id. So the table itself records the last batch
of each of them, in two numbers that survive Delta's checkpoints and the clean-up of its log. The sink
compares them for equality, never by order. Delta's protocol refuses a commit if another one with the same
transaction identifier was made since the table was loaded, so two processes cannot both commit one batch.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.sinks import manifest as manifests
from kafka_eos_source.sinks.contract import (
    SinkContext,
    SinkTxn,
    Stage,
    StageContext,
)
from kafka_eos_source.sinks.delta_files import AddedFile, Folder, StagedFiles, TaskFiles
from kafka_eos_source.sinks.row_checks import ELEMENT, KEY, VALUE, RowRule
from kafka_eos_source.sinks.sink_options import SinkOption, columns
from kafka_eos_source.sinks.specs import require
from kafka_eos_source.sinks.table_columns import (
    LENGTH,
    has_null_type,
    matching,
    misfit,
    new_columns,
    rules,
    spelled,
    year_rules,
)
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
from kafka_eos_source.sinks.targets import check_folder, location

if TYPE_CHECKING:
    from deltalake import DeltaTable, Schema

_log = logging.getLogger(__name__)

#: Key of the id in the metadata of a commit.
ID = "kafka-eos.id"
#: Storage options of delta-rs that name a store or an account.
_STORES = (
    *("aws_endpoint_url", "aws_endpoint", "endpoint_url", "endpoint"),
    *("azure_storage_endpoint", "azure_endpoint", "azure_storage_account_name", "account_name"),
)
COMPRESSIONS = ("snappy", "zstd", "gzip", "none")
#: Storage options for `Target.check`, so that an object store that does not answer is noticed in time.
_IMPATIENT = {"max_retries": "1", "retry_timeout": "4s", "timeout": "4s", "connect_timeout": "2s"}
#: Number of commits that are searched for an earlier id. Only a fenced driver asks for one.
_SEARCHED_COMMITS = 1000


def json_texts(name: str, value: str) -> Mapping[str, str]:
    """Parses a JSON object whose values are strings.

    Raises:
        InvalidOptionError: if the text is not such an object.
    """
    try:
        found = parse_json(value)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise values.invalid(name, value, 'a JSON object of strings such as {"delta.appendOnly":"true"}')
    return found


class DeltaSink(TableFormatSink["DeltaTable"]):
    """``type=delta``: appends to a Delta Lake table.

    Made from its `OPTIONS`, which describe the arguments; `constructors.delta` is for users.
    """

    failpoint_after_commit = "sink.delta.after_version"
    docs_page = "docs/sink-delta.md"
    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption("path", values.text, None, "URI", "URI of the table's folder.", required=True),
        SinkOption(
            "storage.*",
            values.text,
            {},
            "text",
            "Storage options of delta-rs: `storage.aws_region`, `storage.aws_secret_access_key` and so on.",
            "none",
        ),
        CREATE,
        SinkOption(
            "partition.by",
            columns,
            (),
            "comma-separated columns",
            "Partition columns of a table that the sink creates.",
            "none",
        ),
        SinkOption(
            "properties",
            json_texts,
            {},
            "JSON object",
            'Properties of a table that the sink creates: `{"delta.appendOnly":"true"}`.',
            "none",
        ),
        SinkOption(
            "schema.evolution",
            values.choice(FAIL, ADD),
            FAIL,
            "`fail`, `add`",
            "What to do if the frame has columns that the table lacks: fail the query, or add the columns.",
        ),
        SinkOption(
            "compression",
            values.choice(*COMPRESSIONS),
            "snappy",
            "`snappy`, `zstd`, `gzip`, `none`",
            "Compression of Parquet's pages.",
        ),
        BUFFER,
    )

    def __init__(
        self,
        *,
        path: str,
        storage: Mapping[str, str],
        create: bool,
        partition_by: Sequence[str],
        properties: Mapping[str, str],
        schema_evolution: str,
        compression: str,
        buffer_bytes: int,
    ) -> None:
        self._to = Target(path, storage, create, tuple(partition_by), properties, schema_evolution)
        self.compression = compression
        self.buffer_bytes = buffer_bytes

    def open(self, context: SinkContext) -> None:
        super().open(context)
        require("deltalake", "delta")

    def target(self) -> str | None:
        stated = {name.lower(): value for name, value in self._to.storage.items()}
        return location(self._to.uri, next((stated[name] for name in _STORES if name in stated), None))

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        self._to.check(schema)

    def make_ready(self, schema: pa.Schema, deadline: Deadline) -> None:
        self._to.ready(schema, deadline)
        self.notes()

    def row_rules(self, schema: pa.Schema, deadline: Deadline) -> Sequence[RowRule]:
        return self._rules(self.load(), schema)

    def _rules(self, table: DeltaTable | None, schema: pa.Schema) -> list[RowRule]:
        label = self._to.name
        if table is None:
            return rules(schema, schema, label)
        own, partition_by = with_lengths(table), table.metadata().partition_columns
        found, _ = matching(schema.names, own.names)
        in_paths = [field for field in schema if found.get(field.name) in partition_by]
        return [*rules(schema, own, label), *year_rules(in_paths, f"a partition column of the {label}")]

    def stage(self, context: StageContext) -> Stage:
        table = self._to.ready(context.schema, Deadline.after_seconds(STAGE_SECONDS))
        metadata = table.metadata()
        return TaskFiles(
            Folder(self._to.uri, self._to.storage),
            functools.partial(StagedFiles, str(metadata.id), tuple(metadata.partition_columns)),
            arrow_schema(table),
            context.schema,
            [each for each in self._rules(table, context.schema) if each not in context.checked],
            metadata.partition_columns,
            context.task_attempt_id,
            self.compression,
            self.buffer_bytes,
        )

    def note(self, receipts: Sequence[StagedFiles]) -> Mapping[str, Any]:
        return {
            "table": receipts[0].table_id,
            "partition_by": list(receipts[0].partition_by),
            "files": [file.to_json() for each in receipts for file in each.files],
        }

    @property
    def label(self) -> str:
        return f"the table {self._to.uri!r}"

    def load(self) -> DeltaTable | None:
        return self._to.load()

    def _app_ids(self) -> tuple[str, str]:
        """Returns Delta's transaction identifiers that hold the sequence number and the hash of the id."""
        own = self.context.txn(0, "")
        batch = f"{own.application_id}/{own.cluster}/{own.sink}"
        return batch, f"{batch}#attempt"

    def is_committed(self, table: DeltaTable, txn: SinkTxn) -> bool:
        batch, attempt = self._app_ids()
        found = table.transaction_version(batch), table.transaction_version(attempt)
        return bool(found == (txn.sequence, _number(txn)))

    def was_committed(self, table: DeltaTable, txn: SinkTxn) -> bool:
        """Returns whether one of the last 1000 commits records the id."""
        return any(each.get(ID) == str(txn) for each in table.history(_SEARCHED_COMMITS))

    def read_note(self, note: Mapping[str, Any]) -> Mapping[str, Any]:
        files = [AddedFile.from_json(each) for each in manifests.objects(note["files"])]
        return {"table": str(note["table"]), "partition_by": list(note["partition_by"]), "files": files}

    def incompatibility(self, table: DeltaTable, note: Mapping[str, Any]) -> str:
        metadata, partition_by = table.metadata(), list(note["partition_by"])
        if str(metadata.id) != note["table"]:
            return f"the table {self._to.uri!r} was dropped and created again after the batch was staged"
        if list(metadata.partition_columns) != partition_by:
            return (
                f"the table {self._to.uri!r} is now partitioned by {metadata.partition_columns}, but the "
                f"batch was staged for partitions by {partition_by}"
            )
        return ""

    def missing_file(self, table: DeltaTable, note: Mapping[str, Any]) -> str:
        fs, root = Folder(self._to.uri, self._to.storage).open()
        for file in note["files"]:
            found = fs.get_file_info(f"{root}{file.path}")
            if found.type != pafs.FileType.File:
                return f"the data file {file.path} does not exist in {self._to.uri!r}"
            if found.size != file.bytes:
                return f"the data file {file.path} has {found.size} bytes, but its task wrote {file.bytes}"
        return ""

    def publish(self, table: DeltaTable, txn: SinkTxn, note: Mapping[str, Any]) -> Exception | None:
        """Commits one version on top of the loaded one, or on top of later ones that do not conflict.

        Returns:
            The conflict, if there is one; otherwise None.
        """
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        batch, attempt = self._app_ids()
        properties = CommitProperties(
            custom_metadata={ID: str(txn)},
            app_transactions=[Transaction(batch, txn.sequence), Transaction(attempt, _number(txn))],
        )
        failpoints.reach("sink.delta.before_version")
        try:
            table.create_write_transaction(
                [file.action() for file in note["files"]],
                "append",
                table.schema(),
                table.metadata().partition_columns,
                commit_properties=properties,
            )
        except CommitFailedError as error:
            conflict: Exception = error
            _log.info(
                "%s: another writer committed to the table first: %s",
                txn,
                self.context.secrets.hide(str(conflict)),
            )
            return conflict
        return None


def _number(txn: SinkTxn) -> int:
    """Returns a hash of the id that fits into a version of a transaction identifier: 63 bits."""
    return int.from_bytes(hashlib.sha256(str(txn).encode()).digest()[:8], "big") >> 1


# -- the table -----------------------------------------------------------------------------------


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

    @property
    def name(self) -> str:
        """Name of the table, for errors."""
        return f"Delta table {self.uri!r}"

    def load(self, **storage: str) -> DeltaTable | None:
        """Loads the current version of the table; returns None if the table does not exist.

        Args:
            storage: storage options that apply unless the user set them.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            return DeltaTable(self.uri, storage_options={**storage, **self.storage})
        except TableNotFoundError:
            return None

    def check(self, schema: pa.Schema) -> None:
        """Checks that `ready` would succeed, without changing anything.

        Raises:
            InvalidOptionError, InvalidSchemaError: as `ready`.
            UnavailableError, OSError: if the folder cannot be reached, or is not writable.
        """
        is_local = urlsplit(self.uri).scheme in ("", "file")
        table = self.load(**({} if is_local else _IMPATIENT))
        if table is None:
            self._check_creation(schema)
        else:
            problem, added = self._misfit(table, schema)
            if added is not None:
                own = arrow_schema(table)
                features = table.protocol().writer_features or ()
                after = pa.schema([*own, *pa.schema(_delta_schema(added, features).to_arrow())])
                problem = misfit(spelled(schema, own, self.name), after)
            if problem:
                raise unfit(self.name, f"{problem}.", self.evolution)
        if is_local:
            check_folder(*file_system(self.uri), self.uri)

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
            problem, added = self._misfit(table, schema)
            if added is not None:
                features = table.protocol().writer_features or ()
                new = _delta_schema(added, features).fields
                try:
                    table.alter.add_columns(new)
                except (CommitFailedError, OSError):
                    raise
                except Exception as error:  # delta-rs has no class for some of them
                    raise _unsupported_schema(str(error).partition("\n")[0]) from error
                return evolve()
            return table, problem and f"{problem}."

        return fitting_table(evolve, CommitFailedError, self.name, self.evolution, deadline)

    def _misfit(self, table: DeltaTable, schema: pa.Schema) -> tuple[str, pa.Schema | None]:
        """Returns why rows of a schema do not fit the table ("" if they do), and the columns to add to it.

        Raises:
            InvalidOptionError: if the table has features that this sink cannot write.
            InvalidSchemaError: as `spelled`.
        """
        if unsupported := unsupported_features(table):
            raise InvalidOptionError(
                f"the {self.name} uses features that this sink cannot write: {unsupported}.",
                fix="write to a table without these features.",
            )
        own = arrow_schema(table)
        frame = spelled(schema, own, self.name)
        added = new_columns(frame, own) if self.evolution == ADD else []
        return misfit(frame, own), pa.schema([frame.field(name) for name in added]) if added else None

    def _check_creation(self, schema: pa.Schema) -> None:
        """Checks that the table, which does not exist, may be created and can hold rows of this schema.

        Raises:
            InvalidOptionError, InvalidSchemaError: if not.
        """
        if not self.create:
            raise InvalidOptionError(
                f"there is no Delta table in {self.uri!r}, and the option 'create' is false.",
                fix="create the table, correct sink.<name>.path, or set sink.<name>.create=true.",
            )
        spelled(schema, pa.schema([]), self.name)
        columns = self._partition_columns(schema)
        if len(columns) < len(self.partition_by) or len(columns) == len(schema):
            raise InvalidOptionError(
                f"option 'partition.by' has the value {', '.join(self.partition_by)!r}; expected some, but "
                f"not all, of the frame's columns: {', '.join(schema.names)}.",
                fix="correct the option.",
            )
        if nested := [name for name in columns if pa.types.is_nested(schema.field(name).type)]:
            raise _unsupported_schema(f"it cannot be partitioned by {', '.join(nested)}, which is nested")
        _delta_schema(schema)

    def _partition_columns(self, schema: pa.Schema) -> list[str]:
        """Returns the columns of the frame by which a new table is partitioned; none for unknown names."""
        found, _ = matching(self.partition_by, schema.names)
        return list(dict.fromkeys(found.values()))

    def _create(self, schema: pa.Schema) -> DeltaTable:
        from deltalake import DeltaTable

        self._check_creation(schema)
        try:
            return DeltaTable.create(
                self.uri,
                schema,
                mode="error",
                partition_by=self._partition_columns(schema),
                configuration=dict(self.properties),
                storage_options=dict(self.storage),
            )
        except OSError:
            raise
        except Exception as error:  # delta-rs has no class for some of them
            found = self.load()
            if found is None:
                raise InvalidOptionError(
                    f"the {self.name} cannot be created: {error}.",
                    fix="correct sink.<name>.properties and sink.<name>.partition.by.",
                ) from error
            return found  # another process created the table first


def _delta_schema(schema: pa.Schema, features: Sequence[str] = ()) -> Schema:
    """Returns Delta's schema of new columns.

    Args:
        schema: columns to create.
        features: features of the table, if it exists.

    Raises:
        InvalidSchemaError: if a Delta table cannot have them.
    """
    from deltalake import Schema

    try:
        found: Schema = Schema.from_arrow(schema)
    except Exception as error:
        raise _unsupported_schema(str(error).partition("\n")[0]) from error
    # delta-rs silently converts unsigned integers to signed ones, and accepts columns without a type
    problem = misfit(schema, pa.schema(found.to_arrow())) or "; ".join(
        f"column {each.name!r} has type {each.type}" for each in schema if has_null_type(each.type)
    )
    # delta-rs overlooks them when it declares the features of a table, which then nobody can load
    local = [(each.name, in_map) for each in schema for in_map in _local_timestamps(each.type)]
    if local and _NTZ not in features and all(in_map for _, in_map in local):
        problem = problem or f"column {local[0][0]!r} has timestamps without a time zone in a map"
    if problem:
        raise _unsupported_schema(problem)
    return found


def _local_timestamps(kind: pa.DataType, *, in_map: bool = False) -> Iterator[bool]:
    """Yields for each timestamp without a time zone in a type whether it is in a map."""
    if pa.types.is_timestamp(kind) and kind.tz is None:
        yield in_map
    for at in range(kind.num_fields):
        yield from _local_timestamps(kind.field(at).type, in_map=in_map or pa.types.is_map(kind))


def _unsupported_schema(problem: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"a Delta table cannot hold the frame: {problem}.",
        fix="cast the column, or exclude it with sink.<name>.columns.",
    )


# -- what a table can hold -----------------------------------------------------------------------

#: Timestamps without a time zone.
_NTZ = "timestampNtz"
#: Features of tables (PROTOCOL.md, Table Features) that an append by this sink respects, or delta-rs for it,
#: or whose use shows in metadata or properties. With any other one, delta-rs refuses the commit, which would
#: be after Kafka's.
_FEATURES = frozenset(
    {
        *("appendOnly", "invariants", "checkConstraints", "changeDataFeed", "generatedColumns"),
        *("columnMapping", "deletionVectors", _NTZ, "v2Checkpoint"),
    }
)
#: Versions of the protocol that have only these features, and the one in which a table names its features.
_WRITER_VERSIONS = (1, 2, 3, 4, 5, 7)
#: Metadata of columns that only writers with more features may write (PROTOCOL.md: generated and identity
#: columns, invariants).
_UNSUPPORTED_METADATA = ("delta.generationExpression", "delta.identity.", "delta.invariants")
#: Prefixes of table properties that require such writers, with the values that do not.
_UNSUPPORTED_PROPERTIES = {
    "delta.constraints.": (),
    "delta.columnMapping.mode": ("none",),
    "delta.enableRowTracking": ("false",),
    "delta.enableIcebergCompatV": ("false",),
}
#: Metadata of a column that Spark declared with a type char or varchar: its type in SQL, with these.
_CHAR_VARCHAR = "__CHAR_VARCHAR_TYPE_STRING"
_FLAT_TYPE = re.compile(r"(?:var)?char\((?P<most>[0-9]{1,9})\)|[a-z_ ]+(?:\([0-9, ]*\))?", re.IGNORECASE)


def arrow_schema(table: DeltaTable) -> pa.Schema:
    """Returns the Arrow schema of the table's rows."""
    return pa.schema(table.schema().to_arrow())


def unsupported_features(table: DeltaTable) -> str:
    """Describes features of the table that this sink cannot write; empty if there are none."""
    protocol = table.protocol()
    found = [f"the feature {name}" for name in protocol.writer_features or () if name not in _FEATURES]
    if protocol.min_writer_version not in _WRITER_VERSIONS:
        found.append(f"version {protocol.min_writer_version} of the protocol for writers")
    found += [
        f"the property {name}={value}"
        for name, value in table.metadata().configuration.items()
        for prefix, harmless in _UNSUPPORTED_PROPERTIES.items()
        if name.startswith(prefix) and value not in harmless
    ]
    found += [
        f"column {'.'.join(path)!r} has {name}"
        for path, metadata in _metadata(parse_json(table.schema().to_json()), ())
        for name in metadata
        if name.startswith(_UNSUPPORTED_METADATA)
    ]
    table_schema = arrow_schema(table)
    found += [
        f"it is partitioned by the binary column {name!r}"
        for name in table.metadata().partition_columns
        if pa.types.is_binary(table_schema.field(name).type)
    ]
    return "; ".join(found)


def _metadata(kind: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yields the path and the metadata of each field in a type, as PROTOCOL.md describes it in JSON."""
    if not isinstance(kind, dict):
        return
    for each in kind.get("fields", ()):
        inner = (*path, each["name"])
        yield inner, each.get("metadata") or {}
        yield from _metadata(each["type"], inner)
    for name, step in (("elementType", ELEMENT), ("keyType", KEY), ("valueType", VALUE)):
        yield from _metadata(kind.get(name), (*path, step))


def with_lengths(table: DeltaTable) -> pa.Schema:
    """Returns the Arrow schema of the table's rows, in which fields name their type if it is char or varchar.

    Spark keeps such a type, or one that contains it, in the metadata of a column. As in Delta's own streaming
    writer, a text may have fewer characters than a char, and spaces count.
    """
    stated = dict(_metadata(parse_json(table.schema().to_json()), ()))
    return pa.schema(
        [
            _with_lengths(field, text)[0]
            if isinstance(text := stated[(field.name,)].get(_CHAR_VARCHAR), str)
            else field
            for field in arrow_schema(table)
        ]
    )


def _with_lengths(field: pa.Field, text: str) -> tuple[pa.Field, str]:
    """Returns a field with the lengths that its type has in a text of SQL, and the text after that type."""
    kind, types = field.type, pa.types
    if types.is_struct(kind):
        text, fields = text.removeprefix("struct<"), []
        for each in kind:
            text = text.removeprefix(",").removeprefix(f"{each.name}:").removeprefix(f"`{each.name}`:")
            inner, text = _with_lengths(each, text)
            fields.append(inner)
        return field.with_type(pa.struct(fields)), text.removeprefix(">")
    if types.is_list(kind) or types.is_large_list(kind):
        element, text = _with_lengths(kind.value_field, text.removeprefix("array<"))
        return field.with_type(pa.list_(element)), text.removeprefix(">")
    if types.is_map(kind):
        key, text = _with_lengths(kind.key_field, text.removeprefix("map<"))
        item, text = _with_lengths(kind.item_field, text.removeprefix(","))
        return field.with_type(pa.map_(key, item)), text.removeprefix(">")
    found = _FLAT_TYPE.match(text)
    if found is None:
        return field, text
    is_limited = types.is_string(kind) and found["most"]
    return field.with_metadata({LENGTH: found[0]}) if is_limited else field, text[found.end() :]
