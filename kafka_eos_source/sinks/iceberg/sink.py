"""The sink: data files at stage, a note of them at prepare, one snapshot at commit.

The snapshot's summary names the batch, and so does a table property that is set in the same commit: the
property outlives the expiry of snapshots. Every commit of ours is made on top of metadata that was searched
for the id, and only if nobody has committed since (Iceberg's ``assert-ref-snapshot-id``): two that finish the
same batch cannot both succeed. After a conflict the search is made again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import SinkRetryableError
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
from kafka_eos_source.sinks.iceberg import tables
from kafka_eos_source.sinks.iceberg.files import StagedFiles, TaskFiles, data_file, unknown_partitions
from kafka_eos_source.sinks.iceberg.spec import PartitionBy, partition_by
from kafka_eos_source.sinks.options import SinkOption
from kafka_eos_source.sinks.registry import require
from kafka_eos_source.sinks.table_format import HELD_BYTES, STAGE_SECONDS, TableFormatSink

if TYPE_CHECKING:
    from pyiceberg.table import Table

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: In the summary of a snapshot; the names of Iceberg's own connector for Kafka Connect begin alike.
APPLICATION, SINK, SEQUENCE, ATTEMPT = (
    f"kafka-eos.{each}" for each in ("application-id", "sink", "sequence", "attempt")
)
#: In place of the sequence, for an old id.
BATCH = "kafka-eos.batch-id"


class IcebergSink(TableFormatSink["Table"]):
    """``type=iceberg``.

    Args:
        table: ``namespace.table``.
        catalog_name: pyiceberg's name of the catalog: a section of its ``.pyiceberg.yaml``, if there is one.
        catalog: properties of the catalog and of the file system below it, as pyiceberg documents them.
        create: whether to create a table that is missing.
        partition_by: of a table that is created.
        properties: of a table that is created.
        schema_evolution: ``fail`` or ``add``.
        buffer_bytes: of rows that a task holds before it writes a file.
    """

    after_commit = "sink.iceberg.after_snapshot"
    page = "docs/sink-iceberg.md"
    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption("table", values.text, None, "`namespace.table`", "The table.", required=True),
        SinkOption("catalog.name", values.text, "default", "text", "pyiceberg's name of the catalog."),
        SinkOption(
            "catalog.*",
            values.text,
            {},
            "text",
            "Properties of the catalog and its file system, as pyiceberg has them: `catalog.type`, "
            "`catalog.uri`, `catalog.warehouse`, `catalog.s3.region` and so on.",
            "none",
        ),
        SinkOption("create", values.boolean, True, "boolean", "Create the table if it is missing."),
        SinkOption(
            "partition.by",
            partition_by,
            (),
            "columns and transforms, comma list",
            "Of a table that is created: `days(ts), bucket(16, id), country`.",
            "none",
        ),
        SinkOption("properties.*", values.text, {}, "text", "Properties of a table that is created.", "none"),
        SinkOption(
            "schema.evolution",
            values.choice(tables.FAIL, tables.ADD),
            tables.FAIL,
            "`fail`, `add`",
            "When the frame has columns that the table lacks: fail, or add them, and widen those that grew.",
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
        table: str,
        catalog_name: str = "default",
        catalog: Mapping[str, str] | None = None,
        create: bool = True,
        partition_by: Sequence[PartitionBy] = (),
        properties: Mapping[str, str] | None = None,
        schema_evolution: str = tables.FAIL,
        buffer_bytes: int = HELD_BYTES,
    ) -> None:
        require("pyiceberg.catalog", "iceberg")
        namespace, _, own = table.rpartition(".")
        if not namespace or not own:
            raise values.invalid("table", table, "namespace.table")
        self._to = tables.Target(
            table,
            catalog_name,
            dict(catalog or {}),
            create,
            tuple(partition_by),
            dict(properties or {}),
            schema_evolution,
        )
        self.buffer_bytes = buffer_bytes

    def open(self, context: SinkContext) -> None:
        super().open(context)
        require("pyiceberg.catalog", "iceberg")

    def target(self) -> str | None:
        return self._to.name

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        _asked(lambda: self._to.ready(schema, deadline))
        self.notes()

    def stage(self, context: StageContext) -> Stage:
        table = _asked(lambda: self._to.ready(context.schema, Deadline.after_seconds(STAGE_SECONDS)))
        return TaskFiles(table, context.schema, context.attempt, self.buffer_bytes)

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        store = self.notes()
        table = self.load()
        if table is None:
            return Fatal(f"the table {self._to.identifier!r} is gone", "create it; restart the query.")
        if self.is_committed(table, txn) or store.get(str(txn)) is not None:
            return OK
        tokens: Sequence[StagedFiles] = staged.tokens
        files = [file for each in tokens for file in each.files]
        for uuid in sorted({each.table_uuid for each in tokens}):
            note = {"table": uuid, "rows": staged.rows, "files": files}
            changed = self.misfit(table, note)
            if changed:
                return Fatal(changed, "restart the query: it stages the batch anew.")
        absent = self.absent(table, note)
        if absent:
            return Fatal(
                absent, "let driver and executors share the table's file system; then restart the query."
            )
        store.put(str(txn), note)
        return OK

    @property
    def label(self) -> str:
        return f"the table {self._to.identifier!r}"

    def load(self) -> Table | None:
        return _asked(self._to.load)

    def _property(self) -> str:
        """Of the table: names the query's last batch. Queries and sinks have one each."""
        own = f"{self.context.application_id}\0{self.context.name}"
        return f"kafka-eos.committed.{hashlib.sha256(own.encode()).hexdigest()[:16]}"

    def _summary(self, txn: SinkTxn) -> dict[str, str]:
        return {
            APPLICATION: txn.application_id,
            SINK: self.context.name,
            BATCH if txn.is_old else SEQUENCE: str(txn.sequence),
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

    def misfit(self, table: Table, note: Mapping[str, Any]) -> str:
        if note["table"] != str(table.metadata.table_uuid):
            return f"{self._to.identifier!r} was dropped and created anew since the batch was staged"
        specs = {file["spec"] for file in note["files"]}
        if len(specs) > 1:
            return f"the partition spec of {self._to.identifier!r} changed while tasks staged the batch"
        if not specs <= table.specs().keys():
            return f"{self._to.identifier!r} lost the partition spec {specs.pop()}, which the files follow"
        dropped = unknown_partitions(table, specs.pop())
        if dropped:
            return f"{self._to.identifier!r} has no column any more for its partitions {', '.join(dropped)}"
        return ""

    def absent(self, table: Table, note: Mapping[str, Any]) -> str:
        for each in note["files"]:
            if not _asked(functools.partial(_exists, table, each)):
                return f"the data file {each['path']} is not there, or not as long as its task wrote it"
        return ""

    def publish(self, table: Table, txn: SinkTxn, note: Mapping[str, Any]) -> Exception | None:
        """One snapshot on top of what was looked at.

        Returns:
            The conflict, when somebody was quicker; None = it is there.
        """
        from pyiceberg.exceptions import CommitFailedException

        # a manifest holds files of one spec, which pyiceberg takes to be the table's present one; the catalog
        # is sent the snapshot alone, so the table keeps the spec that somebody gave it since
        (spec,) = {file["spec"] for file in note["files"]}
        table.metadata = table.metadata.model_copy(update={"default_spec_id": spec})
        merge = table.properties.get("commit.manifest-merge.enabled", "false").lower() == "true"
        transaction = table.transaction()
        transaction.set_properties({self._property(): str(txn)})
        update = transaction.update_snapshot(snapshot_properties=self._summary(txn))
        with update.merge_append() if merge else update.fast_append() as snapshot:
            for each in note["files"]:
                snapshot.append_data_file(data_file(table, each))
        # pyiceberg would try again on top of others' snapshots without looking whose they are, and delete the
        # manifests at last, though an answer may be lost and the snapshot be there: both is done here
        transaction._snapshot_producers = []
        failpoints.reach("sink.iceberg.before_snapshot")
        try:
            _asked(transaction.commit_transaction, but=CommitFailedException)
        except CommitFailedException as error:
            conflict: Exception = error
            _log.info("%s: somebody else committed first: %s", txn, concealed(str(conflict)))
            now = self.load()
            if now is not None and now.snapshot_by_id(snapshot.snapshot_id) is None:
                snapshot._clean_all_uncommitted()
            return conflict
        return None


def _exists(table: Table, told: Mapping[str, Any]) -> bool:
    try:
        return bool(len(table.io.new_input(told["path"])) == told["bytes"])
    except FileNotFoundError:
        return False


def _asked(call: Callable[[], _T], but: type[Exception] | tuple[()] = ()) -> _T:
    """Raises: SinkRetryableError: what the library raised means "not now"."""
    try:
        return call()
    except but:
        raise
    except Exception as error:
        if tables.passing(error) and not isinstance(error, OSError):
            raise SinkRetryableError(f"{type(error).__name__}: {concealed(str(error))}") from error
        raise
