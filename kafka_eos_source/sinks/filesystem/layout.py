"""The folders of a filesystem sink, and how readers see whole batches only.

::

    <path>/batch=<id>/part-00000.parquet     committed; the folder appeared with all its files at once
    <path>/batch=<id>/_manifest.json         says so, and what is in it: without it, it is not committed
    <path>/_kafka_eos/<application>/staged/<batch>/<task attempt>.parquet    the tasks'
    <path>/_kafka_eos/<application>/prepared/<id>.json                       which of them are the batch
    <path>/_kafka_eos/<application>/ending/<id>/                             gathered, about to be renamed

Spark, Hive and Arrow pass over names that begin with an underscore, and take ``batch=…`` for a partition.
``<application>`` is a hash: an ``application.id`` may have any length.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs

from kafka_eos_source.runtime.file_systems import file_system, new_file
from kafka_eos_source.sinks.contract import SinkTxn

MANIFEST = "_manifest.json"
HIDDEN = "_kafka_eos"
_BATCH = "batch="


@dataclass(frozen=True)
class Layout:
    """Of one sink of one query.

    Attributes:
        fs: the file system.
        root: path in it.
        application_id: of the query.
    """

    fs: pafs.FileSystem
    root: str
    application_id: str

    @classmethod
    def at(cls, uri: str, application_id: str) -> Layout:
        """Raises: InvalidOptionError: no file system for the URI."""
        fs, root = file_system(uri)
        return cls(fs, root.rstrip("/"), application_id)

    @property
    def own(self) -> str:
        """The query's hidden folder."""
        name = hashlib.sha256(self.application_id.encode()).hexdigest()[:16]
        return f"{self.root}/{HIDDEN}/{name}"

    def staged(self, batch_id: int) -> str:
        return f"{self.own}/staged/{batch_id}"

    def prepared(self, txn: SinkTxn) -> str:
        return f"{self.own}/prepared/{txn}.json"

    def ending(self, txn: SinkTxn) -> str:
        return f"{self.own}/ending/{txn}"

    def committed(self, txn: SinkTxn) -> str:
        return f"{self.root}/{_BATCH}{txn}"

    @property
    def renames_folders(self) -> bool:
        """Whether a folder is renamed in one step: object stores copy file by file."""
        return self.fs.type_name in ("local", "hdfs")

    def is_committed(self, txn: SinkTxn) -> bool:
        return self.is_file(f"{self.committed(txn)}/{MANIFEST}")

    def is_file(self, path: str) -> bool:
        return bool(self.fs.get_file_info(path).type == pafs.FileType.File)

    def is_folder(self, path: str) -> bool:
        return bool(self.fs.get_file_info(path).type == pafs.FileType.Directory)

    def txns(self, folder: str) -> set[SinkTxn]:
        """The ids that name files or folders there."""
        found = self.fs.get_file_info(pafs.FileSelector(f"{self.own}/{folder}", allow_not_found=True))
        ids = (SinkTxn.parse(each.base_name.removesuffix(".json")) for each in found)
        return {each for each in ids if each is not None and each.application_id == self.application_id}

    def read(self, path: str) -> dict[str, Any] | None:
        """A manifest; None = there is none."""
        try:
            with self.fs.open_input_stream(path) as source:
                return dict(json.loads(source.read()))
        except FileNotFoundError:
            return None

    def write(self, path: str, content: Mapping[str, Any]) -> None:
        """A manifest: whole, or not there."""
        folder, _, name = path.rpartition("/")
        self.fs.create_dir(folder, recursive=True)
        own = f"{folder}/.{name}.{uuid.uuid4().hex}.new"
        try:
            with new_file(self.fs, own) as out:
                out.write(json.dumps(content, indent=1).encode())
            self.to_disk(own)
            self.fs.move(own, path)
        except BaseException:
            self.delete(own)
            raise
        self.to_disk(folder)

    def delete(self, path: str) -> None:
        """A file, if it is there."""
        try:
            self.fs.delete_file(path)
        except FileNotFoundError:
            return

    def delete_folder(self, path: str) -> None:
        """A folder with all that is in it, if it is there."""
        try:
            self.fs.delete_dir(path)
        except FileNotFoundError:
            return

    def to_disk(self, path: str) -> None:
        """What was promised outlives a power cut."""
        if isinstance(self.fs, pafs.LocalFileSystem):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def committed_files(path: str) -> list[str]:
    """The files of every committed batch under a sink's path, batch by batch: paths in its file system.

    For readers on object stores, where a batch does not appear at once; elsewhere it is the same as reading
    the folder.

    Args:
        path: option ``sink.<name>.path``.
    """
    fs, root = file_system(path)
    found: list[tuple[str, int, list[str]]] = []
    for folder in fs.get_file_info(pafs.FileSelector(root, allow_not_found=True)):
        if folder.type == pafs.FileType.Directory and folder.base_name.startswith(_BATCH):
            txn = SinkTxn.parse(folder.base_name.removeprefix(_BATCH))
            manifest = Layout(fs, root, "").read(f"{folder.path}/{MANIFEST}")
            if txn is not None and manifest is not None:
                files = [f"{folder.path}/{each['name']}" for each in manifest["files"]]
                found.append((txn.application_id, txn.batch_id, files))
    return [file for _, _, files in sorted(found) for file in files]
