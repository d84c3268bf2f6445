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

After a restart, the sink believes the names that it lists, and nothing in a manifest unless its digest is in
the token in Kafka. Only the owner may open the local folder ``<owner>``, so only that user can change staged
files; on other file systems, whoever may write to the folder vouches for them.

Readers recognise a committed batch by its folder. The sink also recognises it after somebody has archived
the folder: the hidden manifest becomes the *record* when all files are gathered, just before the rename. So
if the record exists, and the files are neither staged nor gathered, the rename has happened.
"""

from __future__ import annotations

import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs

from kafka_eos_source.errors import SinkFailedError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.file_systems import file_system, fsync, new_file
from kafka_eos_source.runtime.folders import OWNERS_FOLDER
from kafka_eos_source.sinks import manifest as manifests
from kafka_eos_source.sinks.contract import SinkContext, SinkTxn

MANIFEST = "_manifest.json"
HIDDEN = "_kafka_eos"
_BATCH = "batch="
_NAME = re.compile(r"part-[0-9]{5,9}\.(parquet|jsonl|csv)")
_STAGED = re.compile(r"[0-9]{1,19}/[0-9a-f]{1,64}\.(parquet|jsonl|csv)")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class StagedFile:
    """A file of a batch: the receipt of the task attempt that wrote it, and its entry in a manifest.

    Attributes:
        staged: path below the folder of staged files: Spark's batch id, then the file name.
        rows, size_bytes: number of rows, and size of the file.
        name: name in the folder of the committed batch; empty in the receipt of a task.
    """

    staged: str
    rows: int
    size_bytes: int
    name: str = ""

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> StagedFile:
        """Returns the file of an entry.

        Raises:
            ValueError, KeyError: if the entry is not one that `to_json` wrote.
        """
        if not (isinstance(entry["staged"], str) and _STAGED.fullmatch(entry["staged"])):
            raise ValueError(f"not the name of a staged file: {str(entry['staged'])[:100]!r}")
        if not (isinstance(entry["name"], str) and _NAME.fullmatch(entry["name"])):
            raise ValueError(f"not the name of a file of rows: {str(entry['name'])[:100]!r}")
        rows, size_bytes = manifests.count(entry["rows"]), manifests.count(entry["bytes"])
        return cls(entry["staged"], rows, size_bytes, entry["name"])

    def to_json(self) -> dict[str, Any]:
        """Describes the file for a manifest."""
        return {"name": self.name, "staged": self.staged, "rows": self.rows, "bytes": self.size_bytes}


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read.

    Attributes:
        data: its bytes. Each place where a batch has its manifest holds the same ones.
        files: the files of the batch.
    """

    data: bytes
    files: tuple[StagedFile, ...]

    @property
    def digest(self) -> str:
        """The digest that the token in Kafka holds."""
        return manifests.digest(self.data)


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

    def is_published(self, txn: SinkTxn) -> bool:
        """Returns whether readers see the batch as it was prepared. Others may put one beside a hidden one.

        Raises:
            SinkFailedError: if a manifest is a link, or too large.
        """
        visible, *hidden = (
            self._stored(path)
            for path in (f"{self.committed(txn)}/{MANIFEST}", self.prepared(txn), self.record(txn))
        )
        return visible is not None and all(each in (None, visible) for each in hidden)

    def committed(self, txn: SinkTxn) -> str:
        """Returns the folder of a committed batch, which readers see."""
        return f"{self.root}/{_BATCH}{txn}"

    @property
    def renames_folders(self) -> bool:
        """Whether the file system renames a folder atomically. Object stores copy file by file."""
        return self.fs.type_name in ("local", "hdfs")

    def is_committed(self, txn: SinkTxn) -> bool:
        """Returns whether the batch is committed, even if somebody has moved or deleted its folder since."""
        if self.read(f"{self.committed(txn)}/{MANIFEST}", txn) is not None:
            return True
        record = self.read(self.record(txn), txn)
        if record is None:
            return False
        places = [
            path
            for each in record.files
            for path in (f"{self.gathered(txn)}/{each.name}", self.staged_file(each.staged))
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
        ids = (self.context.own(name.removesuffix(".json")) for name in names)
        return {txn for txn in ids if txn is not None}

    def files(self, folder: str) -> list[pafs.FileInfo]:
        """Lists the files and folders in a folder; returns an empty list if the folder does not exist."""
        return list(self.fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True)))

    def read(self, path: str, txn: SinkTxn) -> Manifest | None:
        """Reads a manifest.

        Args:
            path: place of the manifest.
            txn: id of the batch; if it has a digest, the manifest must have the same one.

        Returns:
            The manifest, or None if the file does not exist.

        Raises:
            SinkFailedError: if the manifest is not the one that was prepared, is damaged, or is a link.
        """
        data = self._stored(path)
        if data is None:
            return None

        def files(content: Mapping[str, Any]) -> tuple[StagedFile, ...]:
            if content["id"] != str(txn):
                raise ValueError(f"it belongs to another batch, {str(content['id'])[:200]!r}")
            return tuple(map(StagedFile.from_json, manifests.objects(content["files"])))

        return Manifest(data, manifests.parsed(data, txn.digest, f"the manifest {path}", files))

    def _stored(self, path: str) -> bytes | None:
        try:
            return manifests.stored(self.fs, path)
        except FileNotFoundError:
            return None

    def write(self, path: str, data: bytes) -> None:
        """Writes a manifest under a temporary name and renames it, so no reader sees a partial file."""
        folder = path.rpartition("/")[0]
        self.fs.create_dir(folder, recursive=True)
        temporary = f"{folder}/.{uuid.uuid4().hex}.new"
        try:
            with new_file(self.fs, temporary) as out:
                out.write(data)
            self.flush(temporary)
            self.fs.move(temporary, path)
        except BaseException:
            self.delete(temporary)
            raise
        self.flush(folder)

    def gather(self, txn: SinkTxn, files: Sequence[StagedFile]) -> None:
        """Moves staged files to `gathered`, except those that an earlier call moved. No link is followed.

        Raises:
            SinkFailedError: if a file is not the one that its task wrote.
            FileNotFoundError: if one is in neither place.
        """
        self.make_private()
        self.fs.create_dir(self.gathered(txn), recursive=True)
        with ExitStack() as opened:
            is_local = isinstance(self.fs, pafs.LocalFileSystem)
            target = opened.enter_context(self._opened("ending", str(txn))) if is_local else None
            sources: dict[str, int | None] = {}
            for file in files:
                batch, _, name = file.staged.partition("/")
                if target is not None and batch not in sources:
                    sources[batch] = None  # if the folder is gone, its files were gathered
                    with suppress(FileNotFoundError):
                        sources[batch] = opened.enter_context(self._opened("staged", batch))
                self._move(file, sources.get(batch), name, target, f"{self.gathered(txn)}/{file.name}")
                failpoints.reach("sink.filesystem.within_gather")

    def _move(self, file: StagedFile, source: int | None, name: str, target: int | None, path: str) -> None:
        """Moves a file between two open folders; by its path if the file system is not local."""
        staged = self.staged_file(file.staged)
        with suppress(FileNotFoundError):  # another process moved it
            if target is None and self._is_whole(staged, file):
                self.fs.move(staged, path)
                return
            if source is not None and target is not None:
                found = os.stat(name, dir_fd=source, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode) or found.st_size != file.size_bytes:
                    raise _another_file(staged, found.st_size, file)
                os.rename(name, file.name, src_dir_fd=source, dst_dir_fd=target)
                return
        if not self._is_whole(path, file):
            raise FileNotFoundError(f"neither {staged} nor {path} exists")

    def _is_whole(self, path: str, file: StagedFile) -> bool:
        found = self.fs.get_file_info(path)
        if found.type == pafs.FileType.File and found.size != file.size_bytes:
            raise _another_file(path, found.size, file)
        return bool(found.type == pafs.FileType.File)

    def make_private(self) -> None:
        """Creates the sink's hidden folder; of a local one, takes the rights of other users away.

        Raises:
            SinkFailedError: if it is a link, or belongs to another user.
            OSError: if it cannot be created.
        """
        if not isinstance(self.fs, pafs.LocalFileSystem):
            self.fs.create_dir(self.folder, recursive=True)
            return
        os.makedirs(self.folder.rpartition("/")[0], exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(self.folder, OWNERS_FOLDER)
        with self._opened():
            return

    @contextmanager
    def _opened(self, *names: str) -> Iterator[int]:
        """Opens a folder below the sink's local hidden folder by descriptor, without following a link.

        Raises:
            SinkFailedError: if another user owns a folder on the way, or one is a link.
            OSError: if it cannot be opened.
        """
        path, folder = self.folder, -1
        try:
            for name in (self.folder, *names):
                path = path if name == self.folder else f"{path}/{name}"
                try:
                    inner = os.open(name, _FOLDER_FLAGS, dir_fd=None if folder < 0 else folder)
                except OSError as error:
                    if os.path.islink(path):
                        raise manifests.refused(f"the folder {path}", "is a symbolic link") from error
                    raise
                if folder >= 0:
                    os.close(folder)
                folder = inner
                _check_owner(path, folder)
                if name == self.folder and stat.S_IMODE(os.fstat(folder).st_mode) & ~OWNERS_FOLDER:
                    with suppress(PermissionError):  # a file system without modes
                        os.fchmod(folder, OWNERS_FOLDER)
            yield folder
        finally:
            if folder >= 0:
                os.close(folder)

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

    Raises:
        SinkFailedError: if a manifest is damaged, or names files in another folder.
    """
    fs, root = file_system(path)
    layout = Layout(fs, root, SinkContext("", "", ""))
    found: list[tuple[str, str, int, str, list[str]]] = []
    for folder in layout.files(root):
        if folder.type == pafs.FileType.Directory and folder.base_name.startswith(_BATCH):
            txn = SinkTxn.parse(folder.base_name.removeprefix(_BATCH))
            manifest = None if txn is None else layout.read(f"{folder.path}/{MANIFEST}", txn)
            if txn is not None and manifest is not None:
                files = [f"{folder.path}/{each.name}" for each in manifest.files]
                found.append((txn.application_id, txn.cluster, txn.sequence, txn.sink, files))
    return [file for *_, files in sorted(found) for file in files]


def _another_file(path: str, size_bytes: int, file: StagedFile) -> SinkFailedError:
    wrote = f"but its task wrote {file.size_bytes}"
    return manifests.refused(f"the file {path}", f"is a link, or has {size_bytes} bytes, {wrote}")


def _check_owner(path: str, folder: int) -> None:
    """Checks that an open folder belongs to whoever owns the files that this process creates there."""
    found = os.fstat(folder)
    if found.st_uid in (os.geteuid(), _owner_of_new_files(folder)):
        return
    raise SinkFailedError(
        f"the folder {path} belongs to user id {found.st_uid}, and this process runs as user id "
        f"{os.geteuid()}. Who owns it could replace the rows of a batch. Nothing was moved.",
        fix="run driver and executors as one user; or, if somebody else created the folder, move it away.",
    )


def _owner_of_new_files(folder: int) -> int | None:
    """Returns the owner that a file system gives to new files, which need not be this user (NFS, FUSE)."""
    name = f".{uuid.uuid4().hex}.new"
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=folder)
