"""The sink: data files at stage, a note of them at prepare, one version of the table at commit.

The commit carries Delta's own transaction identifiers (PROTOCOL.md, Transaction Identifiers): one application
id for each query and sink, whose version is the sequence number of the Kafka transaction, and another one
whose version is a hash of the whole id. So the table itself knows the last batch and attempt of each query
and sink, in two numbers that survive checkpoints and the clean-up of the log. They are compared for equality,
never by order. A commit is refused by the protocol if another one with the same application id came in since
the table was looked at: two that finish the same batch cannot both succeed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source import option_values as values
from kafka_eos_source.kafka.secrets import concealed
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Outcome,
    SinkContext,
    SinkTxn,
    Stage,
    StageContext,
    Staged,
)
from kafka_eos_source.sinks.delta import tables
from kafka_eos_source.sinks.delta.files import AddedFile, Folder, StagedFiles, TaskFiles
from kafka_eos_source.sinks.delta.fit import arrow_schema
from kafka_eos_source.sinks.options import SinkOption, columns
from kafka_eos_source.sinks.registry import require
from kafka_eos_source.sinks.table_format import HELD_BYTES, STAGE_SECONDS, TableFormatSink
from kafka_eos_source.sinks.targets import location

if TYPE_CHECKING:
    from deltalake import DeltaTable

_log = logging.getLogger(__name__)

#: In the commit's metadata.
ID = "kafka-eos.id"
COMPRESSIONS = ("snappy", "zstd", "gzip", "none")
#: Commits that are searched for an id which is not the last: only a driver that was overtaken asks for one.
_SEARCHED = 1000


def json_texts(name: str, value: str) -> Mapping[str, str]:
    """A JSON object of texts."""
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise values.invalid(name, value, 'a JSON object of texts such as {"delta.appendOnly":"true"}')
    return found


class DeltaSink(TableFormatSink["DeltaTable"]):
    """``type=delta``.

    Args:
        path: URI of the table's folder.
        storage: options of delta-rs's object store.
        create: whether to create a table that is missing.
        partition_by: columns, of a table that is created.
        properties: of a table that is created.
        schema_evolution: ``fail`` or ``add``.
        compression: of Parquet's pages.
        buffer_bytes: of rows that a task holds before it writes a file.
    """

    after_commit = "sink.delta.after_version"
    page = "docs/sink-delta.md"
    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption("path", values.text, None, "URI", "Of the table's folder.", required=True),
        SinkOption(
            "storage.*",
            values.text,
            {},
            "text",
            "Options of the object store, as delta-rs has them: `storage.aws_region`, "
            "`storage.aws_secret_access_key` and so on.",
            "none",
        ),
        SinkOption("create", values.boolean, True, "boolean", "Create the table if it is missing."),
        SinkOption("partition.by", columns, (), "columns, comma list", "Of a table that is created.", "none"),
        SinkOption(
            "properties",
            json_texts,
            {},
            "JSON object",
            'Of a table that is created: `{"delta.appendOnly":"true"}`.',
            "none",
        ),
        SinkOption(
            "schema.evolution",
            values.choice(tables.FAIL, tables.ADD),
            tables.FAIL,
            "`fail`, `add`",
            "When the frame has columns that the table lacks: fail, or add them.",
        ),
        SinkOption(
            "compression",
            values.choice(*COMPRESSIONS),
            "snappy",
            "`snappy`, `zstd`, `gzip`, `none`",
            "Of Parquet's pages.",
        ),
        SinkOption(
            "buffer.bytes",
            values.integer(1 << 20),
            HELD_BYTES,
            "bytes",
            "Of rows that a task holds in memory before it writes a file.",
        ),
    )

    def __init__(
        self,
        path: str,
        storage: Mapping[str, str] | None = None,
        create: bool = True,
        partition_by: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        schema_evolution: str = tables.FAIL,
        compression: str = "snappy",
        buffer_bytes: int = HELD_BYTES,
    ) -> None:
        require("deltalake", "delta")
        self._to = tables.Target(
            path, dict(storage or {}), create, tuple(partition_by), dict(properties or {}), schema_evolution
        )
        self.compression = compression
        self.buffer_bytes = buffer_bytes

    def open(self, context: SinkContext) -> None:
        super().open(context)
        require("deltalake", "delta")

    def target(self) -> str | None:
        return location(self._to.uri)

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        self._to.ready(schema, deadline)
        self.notes()

    def stage(self, context: StageContext) -> Stage:
        table = self._to.ready(context.schema, Deadline.after_seconds(STAGE_SECONDS))
        about = table.metadata()
        return TaskFiles(
            Folder(self._to.uri, self._to.storage),
            functools.partial(StagedFiles, str(about.id), tuple(about.partition_columns)),
            arrow_schema(table),
            context.schema,
            about.partition_columns,
            context.attempt,
            self.compression,
            self.buffer_bytes,
        )

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        store = self.notes()
        table = self.load()
        if table is None:
            return Fatal(f"the table {self._to.uri!r} is gone", "create it; restart the query.")
        if self.is_committed(table, txn) or store.get(str(txn)) is not None:
            return OK
        tokens: Sequence[StagedFiles] = staged.tokens
        for each in tokens:
            changed = self.misfit(table, {"table": each.table_id, "partition_by": each.partition_by})
            if changed:
                return Fatal(changed, "restart the query: it stages the batch anew.")
        note = {
            "table": tokens[0].table_id,
            "partition_by": list(tokens[0].partition_by),
            "rows": staged.rows,
            "files": [file.told() for each in tokens for file in each.files],
        }
        absent = self.absent(table, note)
        if absent:
            return Fatal(absent, "let driver and executors share the table's folder; then restart the query.")
        store.put(str(txn), note)
        return OK

    @property
    def label(self) -> str:
        return f"the table {self._to.uri!r}"

    def load(self) -> DeltaTable | None:
        return self._to.load()

    def _app_ids(self) -> tuple[str, str]:
        """Delta's application ids, of the last sequence and of its attempt, for this query and sink."""
        batch = f"{self.context.application_id}/{self.context.name}"
        return batch, f"{batch}#attempt"

    def is_committed(self, table: DeltaTable, txn: SinkTxn) -> bool:
        batch, attempt = self._app_ids()
        found = table.transaction_version(batch), table.transaction_version(attempt)
        return bool(found == (txn.sequence, _number(txn)))

    def was_committed(self, table: DeltaTable, txn: SinkTxn) -> bool:
        """Before later ones."""
        batch, _ = self._app_ids()
        wanted = f"{batch}: {txn}"
        return any(each.get(ID) == wanted for each in table.history(_SEARCHED))

    def misfit(self, table: DeltaTable, note: Mapping[str, Any]) -> str:
        about, partition_by = table.metadata(), list(note["partition_by"])
        if str(about.id) != note["table"]:
            return f"the table {self._to.uri!r} was dropped and created anew since the batch was staged"
        if list(about.partition_columns) != partition_by:
            return (
                f"the table {self._to.uri!r} is partitioned by {about.partition_columns} by now; the "
                f"batch was staged by {partition_by}"
            )
        return ""

    def absent(self, table: DeltaTable, note: Mapping[str, Any]) -> str:
        fs, root = Folder(self._to.uri, self._to.storage).open()
        for each in note["files"]:
            file = AddedFile.of(each)
            found = fs.get_file_info(f"{root}{file.path}")
            if found.type != pafs.FileType.File:
                return f"the data file {file.path} is not in {self._to.uri!r}"
            if found.size != file.bytes:
                return f"the data file {file.path} has {found.size} bytes, its task wrote {file.bytes}"
        return ""

    def publish(self, table: DeltaTable, txn: SinkTxn, note: Mapping[str, Any]) -> Exception | None:
        """One version on top of what was looked at; delta-rs puts it on top of others' that do not conflict.

        Returns:
            The conflict, when somebody was quicker; None = it is there.
        """
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        batch, attempt = self._app_ids()
        properties = CommitProperties(
            custom_metadata={ID: f"{batch}: {txn}"},
            app_transactions=[Transaction(batch, txn.sequence), Transaction(attempt, _number(txn))],
        )
        failpoints.reach("sink.delta.before_version")
        try:
            table.create_write_transaction(
                [AddedFile.of(each).action() for each in note["files"]],
                "append",
                table.schema(),
                table.metadata().partition_columns,
                commit_properties=properties,
            )
        except CommitFailedError as error:
            conflict: Exception = error
            _log.info("%s: somebody else committed first: %s", txn, concealed(str(conflict)))
            return conflict
        return None


def _number(txn: SinkTxn) -> int:
    """The id as a version: 63 bits."""
    return int.from_bytes(hashlib.sha256(str(txn).encode()).digest()[:8], "big") >> 1
