"""Folder layout of a filesystem sink, and the reader that lists committed files.

::

    <path>/batch=<id>/part-00000.parquet     committed rows; the folder appears with all its files at once
    <path>/batch=<id>/_manifest.json         lists the files; a folder without it is not committed
    <path>/_kafka_eos/<owner>/staged/<batch>/<task attempt>.parquet   files that tasks wrote
    <path>/_kafka_eos/<owner>/prepared/<id>.json                      lists the staged files of a batch
    <path>/_kafka_eos/<owner>/ending/<id>/                            files gathered for the final rename
    <path>/_kafka_eos/<owner>/committed/<id>.json                     record: all files were gathered

Spark, Hive and Arrow ignore names that begin with an underscore, and treat ``batch=…`` as a partition.
``<owner>`` is `SinkContext.owner`. Staged files need it too, because tasks name them by Spark's batch id.

Readers recognise a committed batch by its folder. The sink also recognises it after somebody has archived
the folder: the hidden manifest becomes the *record* when all files are gathered, just before the rename. So
if the record exists, and the files are neither staged nor gathered, the rename has happened.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs

from kafka_eos_source.runtime.file_systems import file_system, fsync, new_file
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.sinks.contract import SinkContext, SinkTxn

MANIFEST = "_manifest.json"
HIDDEN = "_kafka_eos"
_BATCH = "batch="


@dataclass(frozen=True)
class Layout:
    """Folders and files of one sink of one query.

    Attributes:
        fs: file system.
        root: path of the sink's folder in the file system, without a slash at the end.
        context: context of the sink.
    """

    fs: pafs.FileSystem
    root: str
    context: SinkContext

    @classmethod
    def at(cls, uri: str, context: SinkContext) -> Layout:
        """Returns the layout under a URI.

        Raises:
            InvalidOptionError: if pyarrow has no file system for the URI.
        """
        fs, root = file_system(uri)
        return cls(fs, root.rstrip("/"), context)

    @property
    def folder(self) -> str:
        """Hidden folder of this sink."""
        return f"{self.root}/{HIDDEN}/{self.context.owner}"

    def staged(self, batch_id: int) -> str:
        """Returns the folder where tasks write the files of a batch, by Spark's batch id."""
        return f"{self.folder}/staged/{batch_id}"

    def staged_file(self, name: str) -> str:
        """Returns the path of a staged file by its name in a manifest, which begins with the batch id."""
        return f"{self.folder}/staged/{name}"

    def prepared(self, txn: SinkTxn) -> str:
        """Returns the path of the manifest of a prepared batch."""
        return f"{self.folder}/prepared/{txn}.json"

    def gathered(self, txn: SinkTxn) -> str:
        """Returns the folder where a commit gathers the files of the batch.

        On an object store this is already the folder that readers see, which no manifest makes valid yet.
        """
        return f"{self.folder}/ending/{txn}" if self.renames_folders else self.committed(txn)

    def record(self, txn: SinkTxn) -> str:
        """Returns the path of the record that all files of a batch were gathered."""
        return f"{self.folder}/committed/{txn}.json"

    def is_visible(self, txn: SinkTxn) -> bool:
        """Returns whether the batch's folder contains a manifest, so that readers see the batch."""
        return self.is_file(f"{self.committed(txn)}/{MANIFEST}")

    def committed(self, txn: SinkTxn) -> str:
        """Returns the folder of a committed batch, which readers see."""
        return f"{self.root}/{_BATCH}{txn}"

    @property
    def renames_folders(self) -> bool:
        """Whether the file system renames a folder atomically. Object stores copy file by file."""
        return self.fs.type_name in ("local", "hdfs")

    def is_committed(self, txn: SinkTxn) -> bool:
        """Returns whether the batch is committed, even if somebody has moved or deleted its folder since."""
        if self.is_visible(txn):
            return True
        record = self.read(self.record(txn))
        if record is None:
            return False
        places = [
            path
            for each in record["files"]
            for path in (f"{self.gathered(txn)}/{each['name']}", self.staged_file(each["staged"]))
        ]
        return not any(self.is_file(each) for each in places)

    def is_file(self, path: str) -> bool:
        """Returns whether the path exists and is a file."""
        return bool(self.fs.get_file_info(path).type == pafs.FileType.File)

    def txns(self) -> set[SinkTxn]:
        """Lists the ids of this sink whose preparation, commit or abort has begun but not ended."""
        names = [
            each.base_name
            for folder in ("prepared", "ending")
            for each in self.files(f"{self.folder}/{folder}")
        ]
        ids = (SinkTxn.parse(name.removesuffix(".json")) for name in names)
        return {txn for txn in ids if txn is not None and self.context.owns(txn)}

    def files(self, folder: str) -> list[pafs.FileInfo]:
        """Lists the files and folders in a folder; returns an empty list if the folder does not exist."""
        return list(self.fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True)))

    def read(self, path: str) -> dict[str, Any] | None:
        """Reads a manifest; returns None if the file does not exist."""
        try:
            with self.fs.open_input_stream(path) as source:
                return dict(parse_json(source.read()))
        except FileNotFoundError:
            return None

    def write(self, path: str, content: Mapping[str, Any]) -> None:
        """Writes a manifest under a temporary name and renames it, so no reader sees a partial file."""
        folder = path.rpartition("/")[0]
        self.fs.create_dir(folder, recursive=True)
        temporary = f"{folder}/.{uuid.uuid4().hex}.new"
        try:
            with new_file(self.fs, temporary) as out:
                out.write(json.dumps(content, indent=1).encode())
            self.flush(temporary)
            self.fs.move(temporary, path)
        except BaseException:
            self.delete(temporary)
            raise
        self.flush(folder)

    def delete(self, path: str) -> None:
        """Deletes a file, if it exists."""
        try:
            self.fs.delete_file(path)
        except FileNotFoundError:
            return

    def delete_folder(self, path: str) -> None:
        """Deletes a folder and its content, if it exists."""
        try:
            self.fs.delete_dir(path)
        except FileNotFoundError:
            return

    def flush(self, path: str) -> None:
        """Flushes a file or folder to disk, if the file system is local."""
        if isinstance(self.fs, pafs.LocalFileSystem):
            fsync(path)


def committed_files(path: str) -> list[str]:
    """Lists the files of all committed batches under a sink's path, as paths in its file system.

    Readers on object stores need this list, because the files of a batch do not appear all at once there. On
    other file systems they can read the folder instead.

    Args:
        path: value of the option ``sink.<name>.path``.

    Returns:
        Files ordered by application id, cluster and sequence number of the batch.
    """
    fs, root = file_system(path)
    layout = Layout(fs, root, SinkContext("", "", ""))
    found: list[tuple[str, str, int, str, list[str]]] = []
    for folder in layout.files(root):
        if folder.type == pafs.FileType.Directory and folder.base_name.startswith(_BATCH):
            txn = SinkTxn.parse(folder.base_name.removeprefix(_BATCH))
            manifest = layout.read(f"{folder.path}/{MANIFEST}")
            if txn is not None and manifest is not None:
                files = [f"{folder.path}/{each['name']}" for each in manifest["files"]]
                found.append((txn.application_id, txn.cluster, txn.sequence, txn.sink, files))
    return [file for *_, files in sorted(found) for file in files]
