"""The folders of a filesystem sink, and how readers see whole batches only.

::

    <path>/batch=<id>/part-00000.parquet     committed; the folder appeared with all its files at once
    <path>/batch=<id>/_manifest.json         says so, and what is in it: without it, it is not committed
    <path>/_kafka_eos/<sink>/staged/<batch>/<task attempt>.parquet    the tasks'
    <path>/_kafka_eos/<sink>/prepared/<id>.json                       which of them are the batch
    <path>/_kafka_eos/<sink>/ending/<id>/                             gathered, about to be renamed

Spark, Hive and Arrow pass over names that begin with an underscore, and take ``batch=…`` for a partition.
``<sink>`` is a hash of the application id and the name of the sink: an ``application.id`` may be of any
length. Old ids (`SinkTxn.is_old`) lie in a folder that is named by the application id alone.
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
from kafka_eos_source.sinks.contract import SinkContext, SinkTxn

MANIFEST = "_manifest.json"
HIDDEN = "_kafka_eos"
_BATCH = "batch="


def hashed(*parts: str) -> str:
    """A short name for an application id, or for it and the name of a sink."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Layout:
    """The folders of one sink of one query.

    Attributes:
        fs: the file system.
        root: path in it.
        context: of the sink.
    """

    fs: pafs.FileSystem
    root: str
    context: SinkContext

    @classmethod
    def at(cls, uri: str, context: SinkContext) -> Layout:
        """Raises: InvalidOptionError: there is no file system for the URI."""
        fs, root = file_system(uri)
        return cls(fs, root.rstrip("/"), context)

    @property
    def own(self) -> str:
        """The hidden folder of this sink."""
        return f"{self.root}/{HIDDEN}/{hashed(self.context.application_id, self.context.name)}"

    @property
    def own_before(self) -> str:
        """The hidden folder where old ids lie."""
        return f"{self.root}/{HIDDEN}/{hashed(self.context.application_id)}"

    def staged(self, batch_id: int) -> str:
        """Where tasks write the files of a batch, by Spark's batch id."""
        return f"{self.own}/staged/{batch_id}"

    def staged_file(self, manifest: Mapping[str, Any], name: str) -> str:
        """A file that a manifest names; an older version's manifest has the folder apart."""
        own = f"{self.own_before}/staged/{manifest['batch']}" if "batch" in manifest else f"{self.own}/staged"
        return f"{own}/{name}"

    def prepared(self, txn: SinkTxn) -> str:
        return f"{self._own_of(txn)}/prepared/{txn}.json"

    def ending(self, txn: SinkTxn) -> str:
        return f"{self._own_of(txn)}/ending/{txn}"

    def committed(self, txn: SinkTxn) -> str:
        return f"{self.root}/{_BATCH}{txn}"

    def _own_of(self, txn: SinkTxn) -> str:
        return self.own_before if txn.is_old else self.own

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

    def txns(self) -> set[SinkTxn]:
        """The ids of this sink that are prepared, or half prepared or half ended."""
        names = [
            each.base_name
            for own in (self.own, self.own_before)
            for folder in ("prepared", "ending")
            for each in self.files(f"{own}/{folder}")
        ]
        ids = (SinkTxn.parse(name.removesuffix(".json")) for name in names)
        return {txn for txn in ids if txn is not None and self.context.owns(txn)}

    def files(self, folder: str) -> list[pafs.FileInfo]:
        """What lies in a folder; nothing if there is no such folder."""
        return list(self.fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True)))

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
    layout = Layout(fs, root, SinkContext("", ""))
    found: list[tuple[str, int, str, list[str]]] = []
    for folder in layout.files(root):
        if folder.type == pafs.FileType.Directory and folder.base_name.startswith(_BATCH):
            txn = SinkTxn.parse(folder.base_name.removeprefix(_BATCH))
            manifest = layout.read(f"{folder.path}/{MANIFEST}")
            if txn is not None and manifest is not None:
                files = [f"{folder.path}/{each['name']}" for each in manifest["files"]]
                found.append((txn.application_id, txn.sequence, txn.sink, files))
    return [file for *_, files in sorted(found) for file in files]
