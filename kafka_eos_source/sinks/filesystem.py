"""`FilesystemSink`: tasks write hidden files, a manifest prepares them, and one rename commits them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.sinks import formats
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
    TwoPhaseSink,
)
from kafka_eos_source.sinks.filesystem_layout import MANIFEST, Layout, Manifest, StagedFile, committed_files
from kafka_eos_source.sinks.row_checks import RowRule, check_rules
from kafka_eos_source.sinks.sink_options import SinkOption
from kafka_eos_source.sinks.targets import check_folder, location, not_writable

__all__ = ["FilesystemSink", "committed_files"]

_log = logging.getLogger(__name__)

_MAX_DELETE_RETRIES = 9
#: Number of records that stay; older ones are deleted once in so many batches. A start asks only for the
#: newest batch, and a fenced driver for its last one.
_KEPT_RECORDS = 100
#: Most bytes that application id and name of the sink may have together. A file name has at most 255 bytes;
#: ``batch=``, cluster, sequence number, attempt and hyphens need the rest.
_MAX_NAME_BYTES = 194


class FilesystemSink(TwoPhaseSink):
    """``type=filesystem``: writes Parquet, JSON lines or CSV files to a shared folder.

    Made from its `OPTIONS`, which describe the arguments; `constructors.files` is for users.
    """

    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption(
            "path",
            values.text,
            None,
            "URI",
            "Folder that driver and executors share: local, `hdfs://`, `s3://`, `gs://`, `abfs://`.",
            required=True,
        ),
        formats.FORMAT,
        formats.COMPRESSION,
    )

    def __init__(
        self,
        *,
        path: str,
        format: str,
        compression: str,
    ) -> None:
        self.path = path
        self.format = format
        self.compression = compression

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self._at = Layout.at(self.path, context)

    def target(self) -> str | None:
        return location(self.path)

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        self._check_options(schema)
        check_folder(self._at.fs, self._at.root, self.path)

    def make_ready(self, schema: pa.Schema, deadline: Deadline) -> None:
        self._check_options(schema)
        try:
            self._at.make_private()
        except PermissionError as error:
            raise not_writable(self.path, error) from error

    def _check_options(self, schema: pa.Schema) -> None:
        formats.check(self.format, schema)
        names = f"{self.context.application_id}{self.context.name}".encode()
        if self._at.renames_folders and len(names) > _MAX_NAME_BYTES:
            raise InvalidOptionError(
                f"sink {self.context.name!r}: the sink's name and application.id have {len(names)} bytes "
                f"together; expected at most {_MAX_NAME_BYTES}, because file names contain both.",
                fix="choose a shorter application.id before the first batch.",
            )

    def row_rules(self, schema: pa.Schema, deadline: Deadline) -> Sequence[RowRule]:
        return formats.row_rules(self.format, schema)

    def stage(self, context: StageContext) -> Stage:
        return _File(self, self._at, context)

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        at = self._at
        if at.is_committed(txn):
            return OK
        receipts: Sequence[StagedFile] = staged.receipts
        found = at.read(at.prepared(txn), txn) or at.read(at.record(txn), txn)
        if found is not None:
            return Ok(found.digest)
        data = self._manifest(txn, receipts, staged)
        failpoints.reach("sink.filesystem.before_manifest")
        # write the manifest before checking the files: from then on `tidy` does not delete them
        at.write(at.prepared(txn), data)
        for each in receipts:
            file = at.staged_file(each.staged)
            info = at.fs.get_file_info(file)
            if info.type != pafs.FileType.File or info.size != each.size_bytes:
                at.delete(at.prepared(txn))
                return Fatal(
                    f"the staged file {file} has {info.size} bytes on the driver, but its task wrote "
                    f"{each.size_bytes}",
                    "use a folder that driver and executors share, then restart the query.",
                )
        return Ok(manifests.digest(data))

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        """Gathers the files, records that, renames their folder, deletes the manifest.

        Resumes after a kill at any step. A batch that was committed stays so if its folder is moved away.
        """
        at = self._at
        if at.is_committed(txn):
            is_visible = at.is_visible(txn)
            if is_visible and not at.is_published(txn):
                raise manifests.refused(f"the manifest in {at.committed(txn)}", manifests.NOT_PREPARED)
            if not is_visible:
                _log.warning(
                    "batch %s was committed, and its folder %s was moved or deleted after that; nothing is "
                    "written again",
                    txn,
                    at.committed(txn),
                )
        else:
            manifest = at.read(at.prepared(txn), txn) or at.read(at.record(txn), txn)
            if manifest is None:
                # another process may have committed the batch since the check above
                return OK if at.is_committed(txn) else self._unknown(txn)
            try:
                self._gather(txn, manifest)
                failpoints.reach("sink.filesystem.before_record")
                self._record(txn, manifest)
                failpoints.reach("sink.filesystem.before_rename")
                if at.renames_folders:
                    at.fs.move(at.gathered(txn), at.committed(txn))
                else:
                    at.write(f"{at.committed(txn)}/{MANIFEST}", manifest.data)
            except OSError:
                if not at.is_committed(txn):
                    raise  # otherwise, another process committed the batch first
            at.flush(at.root)
        failpoints.reach("sink.filesystem.after_rename")
        self._delete_leftovers(txn)
        return OK

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        """Deletes the manifest last, so `recover` still finds the id if the process is killed before.

        If a person aborts a batch whose commit had begun, `recover` finds it by the gathered files. They are
        deleted after the record, because a record without files means that the batch was committed.
        """
        at = self._at
        if at.is_committed(txn):
            self._delete_leftovers(txn)
            return OK
        at.delete(at.record(txn))
        at.delete_folder(at.gathered(txn))
        failpoints.reach("sink.filesystem.within_abort")
        at.delete(at.prepared(txn))
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        """Lists ids; deletes what a killed commit left of a batch that readers see.

        Nothing is deleted because a record says so, or a batch that somebody else put there: only `commit`
        knows the digest that vouches for it.
        """
        at = self._at
        found = at.txns()
        for txn in {txn for txn in found if at.is_published(txn)}:
            self._delete_leftovers(txn)
            found.remove(txn)
        return sorted(found)

    def tidy(self, batch_id: int, deadline: Deadline) -> None:
        """Deletes staged files, except those of prepared batches, and old records (`TwoPhaseSink.tidy`)."""
        at = self._at
        for each in at.files(f"{at.folder}/prepared"):
            if each.base_name.endswith(".new"):  # a process was killed while writing the manifest
                at.delete(each.path)
        if batch_id % _KEPT_RECORDS == 0:
            self._delete_old_records()
        for folder in at.files(f"{at.folder}/staged"):
            if folder.base_name.isdecimal() and int(folder.base_name) <= batch_id:
                self._delete_staged(folder.path)

    def _delete_old_records(self) -> None:
        at = self._at
        unfinished = {at.record(txn) for txn in at.txns()}
        records = at.files(f"{at.folder}/committed")
        for each in sorted(records, key=lambda each: each.mtime_ns or 0)[:-_KEPT_RECORDS]:
            if each.path not in unfinished:
                at.delete(each.path)

    def _delete_staged(self, folder: str) -> None:
        staged = {each.path for each in self._at.files(folder)}
        kept = staged & self._prepared_files()
        if not kept:
            self._at.delete_folder(folder)
        for path in staged - kept if kept else ():
            self._at.delete(path)

    def _prepared_files(self) -> set[str]:
        """Returns the staged files of all prepared batches, whichever process prepared them."""
        at = self._at
        found = [at.read(at.prepared(txn), txn) for txn in at.txns()]
        return {at.staged_file(each.staged) for manifest in found if manifest for each in manifest.files}

    def _delete_leftovers(self, txn: SinkTxn) -> None:
        """Deletes what a killed commit, or one in another process, left of a batch that is committed."""
        if self._at.renames_folders:
            self._delete_gathered(txn)
        self._at.delete(self._at.prepared(txn))

    def _unknown(self, txn: SinkTxn) -> Fatal:
        return Fatal(
            f"nothing is prepared under {txn} in {self.path}, and neither its folder nor the record of its "
            f"commit ({self._at.record(txn)}) exists",
            "put back what was deleted or moved: the batch's folder, if it was archived, or the folder "
            "_kafka_eos; it may be archived again once the query has started. See SINK_FAILED in "
            "docs/runbooks.md.",
        )

    def _manifest(self, txn: SinkTxn, receipts: Sequence[StagedFile], staged: Staged) -> bytes:
        ending = formats.ENDINGS[self.format]
        content = {
            "id": str(txn),
            "application": txn.application_id,
            "cluster": txn.cluster,
            "sink": txn.sink,
            "sequence": txn.sequence,
            "rows": staged.rows,
            "schema": {field.name: str(field.type) for field in staged.schema},
            "files": [
                replace(each, name=f"part-{number:05d}{ending}").to_json()
                for number, each in enumerate(receipts)
            ],
        }
        return manifests.encode(content)

    def _gather(self, txn: SinkTxn, manifest: Manifest) -> None:
        """Moves the files of the batch into one folder; adds the manifest if the folder will be renamed."""
        at = self._at
        at.gather(txn, manifest.files)
        if at.renames_folders:
            at.write(f"{at.gathered(txn)}/{MANIFEST}", manifest.data)

    def _record(self, txn: SinkTxn, manifest: Manifest) -> None:
        """Records that all files of the batch are gathered."""
        at = self._at
        if not at.renames_folders:
            at.write(at.record(txn), manifest.data)
            return
        at.fs.create_dir(at.record(txn).rpartition("/")[0], recursive=True)
        try:
            at.fs.move(at.prepared(txn), at.record(txn))
        except FileNotFoundError:
            if not at.is_file(at.record(txn)):
                raise

    def _delete_gathered(self, txn: SinkTxn) -> None:
        """Deletes the gathered files after another process committed the batch.

        Tries several times, because a third process may add files while this one deletes the folder.
        """
        if not self._at.renames_folders:
            return  # the files are where readers look for them
        folder, pauses = self._at.gathered(txn), Pauses(None, 0.0, most=_MAX_DELETE_RETRIES)
        try:
            retry(lambda: self._at.delete_folder(folder), OSError, pauses)
        except OSError as failure:  # not empty: another process added a file during each deletion
            _log.info("%s is committed, but files gathered for it cannot be deleted: %s", txn, failure)


class _File:
    """`contract.Stage` that writes the rows of one task attempt to one file."""

    def __init__(self, sink: FilesystemSink, at: Layout, context: StageContext) -> None:
        self._at = at
        file = f"{context.task_attempt_id}{formats.ENDINGS[sink.format]}"
        self._name = f"{context.batch_id}/{file}"
        self._path = f"{at.staged(context.batch_id)}/{file}"
        self._rows = 0
        at.make_private()
        at.fs.create_dir(at.staged(context.batch_id), recursive=True)
        self._out = at.fs.open_output_stream(self._path)
        self._writer = formats.writer(sink.format, self._out, context.schema, sink.compression)
        self._rules = formats.unchecked_rules(sink.format, context)

    def write(self, batch: pa.RecordBatch) -> None:
        check_rules(self._rules, batch)
        self._writer.write_batch(batch)
        self._rows += batch.num_rows

    def finish(self) -> StagedFile:
        self._writer.close()
        self._out.close()
        self._at.flush(self._path)
        return StagedFile(self._name, self._rows, int(self._at.fs.get_file_info(self._path).size))

    def discard(self) -> None:
        """Deletes the file, even if closing it fails, as it does on a full disk."""
        try:
            self._writer.close()
            self._out.close()
        finally:
            self._at.delete(self._path)
