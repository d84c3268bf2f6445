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
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import SinkRetryableError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import ALLOW_HTTP, is_secret
from kafka_eos_source.sinks import manifest as manifests
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Ok,
    Outcome,
    SinkContext,
    SinkTxn,
    Stage,
    StageContext,
    Staged,
)
from kafka_eos_source.sinks.iceberg import tables
from kafka_eos_source.sinks.iceberg.files import StagedFiles, TaskFiles, check, from_json, unknown_partitions
from kafka_eos_source.sinks.iceberg.spec import PartitionBy, partition_by
from kafka_eos_source.sinks.specs import ALLOW_HTTP_OPTION, SECRET_NAME, SinkOption, require
from kafka_eos_source.sinks.table_format import (
    ADD,
    BUFFER,
    BUFFER_BYTES,
    CREATE,
    FAIL,
    STAGE_SECONDS,
    TableFormatSink,
)

if TYPE_CHECKING:
    from pyiceberg.table import Table

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Keys in the summary of a snapshot, named like those of Iceberg's connector for Kafka Connect.
APPLICATION, CLUSTER, SINK, SEQUENCE, ATTEMPT = (
    f"kafka-eos.{each}" for each in ("application-id", "cluster", "sink", "sequence", "attempt")
)


class IcebergSink(TableFormatSink["Table"]):
    """``type=iceberg``: appends to an Iceberg table.

    Args:
        table: ``namespace.table``.
        catalog_name: name of the catalog in pyiceberg; if ``.pyiceberg.yaml`` has such a section, pyiceberg
            uses it.
        catalog: properties of the catalog and its file system, as in pyiceberg's documentation.
        create: whether to create the table if it does not exist.
        partition_by: partition fields of a table that the sink creates.
        properties: properties of a table that the sink creates.
        schema_evolution: what to do if the frame has columns that the table lacks: ``fail`` or ``add``.
        buffer_bytes: size of the rows that a task buffers before it writes a file.
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
        table: str,
        catalog_name: str = "default",
        catalog: Mapping[str, str] | None = None,
        create: bool = True,
        partition_by: Sequence[PartitionBy] = (),
        properties: Mapping[str, str] | None = None,
        schema_evolution: str = FAIL,
        buffer_bytes: int = BUFFER_BYTES,
        allow_http: bool = False,
    ) -> None:
        require("pyiceberg.catalog", "iceberg")
        if any(is_secret(name) or SECRET_NAME.search(name) for name in catalog or {}):
            for name, value in (catalog or {}).items():
                if "://" in value:
                    sent = "the credentials of the catalog"
                    values.refuse_plain_http(f"catalog.{name}", value, sent, ALLOW_HTTP, allowed=allow_http)
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
        _call(lambda: self._to.ready(schema, deadline))
        self.notes()

    def stage(self, context: StageContext) -> Stage:
        table = _call(lambda: self._to.ready(context.schema, Deadline.after_seconds(STAGE_SECONDS)))
        return TaskFiles(table, context.schema, context.task_attempt_id, self.buffer_bytes)

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        store = self.notes()
        table = self.load()
        if table is None:
            return Fatal(
                f"the table {self._to.identifier!r} was deleted",
                "create the table again, then restart the query.",
            )
        if self.is_committed(table, txn):
            return OK
        if (digest := store.digest(str(txn))) is not None:
            return Ok(digest)
        receipts: Sequence[StagedFiles] = staged.receipts
        files = [file for each in receipts for file in each.files]
        for uuid in sorted({each.table_uuid for each in receipts}):
            note = {"table": uuid, "rows": staged.rows, "files": files}
            incompatibility = self.incompatibility(table, note)
            if incompatibility:
                return Fatal(incompatibility, "restart the query; it then stages the batch again.")
        missing = self.missing_file(table, note)
        if missing:
            return Fatal(
                missing, "use a file system that driver and executors share, then restart the query."
            )
        return Ok(store.put(str(txn), note))

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
        if tables.is_retryable(error) and not isinstance(error, OSError):
            raise SinkRetryableError(f"{type(error).__name__}: {error}") from error
        raise
