"""The files of a shard's snapshots on shared storage: their names, and the manifest that describes them.

A manifest is written after all its files, so that its presence means that the snapshot is complete. Its name
starts with the changelog offset, so that names in descending order are the snapshots from the newest on.

Whoever may write to the storage may write a manifest, so it is checked like every other foreign text. The
checksums in it find damage. They do not show who wrote the snapshot: Write on the storage equals Write on the
state. So on a local file system, folders that another user owns or may change are refused, and so are links.
On an object store, its policies decide who may write.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.fs as pafs

from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.file_systems import (
    file_system,
    fsync,
    make_folder,
    new_file,
    without_secrets,
)
from kafka_eos_source.runtime.folders import open_regular_file, refuse_folder_of_others
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.state.model import BatchRecord, StoreIdentity

#: Format of the manifests that this release writes, and the newest format that it reads.
FORMAT = 1

_NAME = re.compile(r"(\d{20})-([0-9a-f]{16})-[0-9a-f]{32}\.json", re.ASCII)
#: Names of the files of a database that a snapshot may contain. No name leads out of the folder.
_DATABASE_FILE = re.compile(r"\d+\.(?:sst|log)|MANIFEST-\d+|CURRENT", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_BITS = 64


class UnusableSnapshotError(Exception):
    """A snapshot is damaged, incomplete, or holds other state. The caller goes on without it."""


@dataclass(frozen=True)
class SnapshotFile:
    """One file of a snapshot.

    Attributes:
        name: of the file in the database's folder.
        size_bytes: its size.
        sha256: SHA-256 of its contents, which is also its name on the storage.
    """

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A snapshot of a shard.

    Attributes:
        identity: which state it holds.
        next_offset: changelog offset from which to continue.
        batch: the committed micro-batch whose state it holds.
        created_ms: when the copy was made, ms since the epoch.
        files: all files of the database.
    """

    identity: StoreIdentity
    next_offset: int
    batch: BatchRecord
    created_ms: int
    files: tuple[SnapshotFile, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files)

    def encode(self) -> bytes:
        """Returns the manifest as JSON. A part of it is never valid JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """Returns the manifest that `encode` encoded; ignores fields that a newer release added.

        Raises:
            UnusableSnapshotError: if the content is damaged, or a newer release wrote it in another format.
        """
        try:
            found = parse_json(content)
            if _typed("format", "int", found["format"]) > FORMAT:
                raise UnusableSnapshotError(
                    f"a newer release wrote it in format {found['format']}; this release reads formats up to "
                    f"{FORMAT}"
                )
            manifest = cls(
                identity=_record(StoreIdentity, found["identity"]),
                next_offset=_typed("next_offset", "int", found["next_offset"]),
                batch=_record(BatchRecord, found["batch"]),
                created_ms=_typed("created_ms", "int", found["created_ms"]),
                files=tuple(_record(SnapshotFile, each) for each in _typed("files", "list", found["files"])),
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UnusableSnapshotError(f"its manifest is damaged: {repr(error)[:200]}") from error
        names = set[str]()
        for file in manifest.files:
            is_file = _DATABASE_FILE.fullmatch(file.name) and _SHA256.fullmatch(file.sha256)
            if not is_file or file.size_bytes < 0 or file.name in names:
                raise UnusableSnapshotError(f"its manifest has an illegal file {file.name[:200]!r}")
            names.add(file.name)
        return manifest


@dataclass(frozen=True)
class ManifestName:
    """What the name of a manifest says.

    Attributes:
        text: the name.
        next_offset: changelog offset of the snapshot.
        topic: hash of the changelog topic's id. Offsets of another topic mean nothing.
    """

    text: str
    next_offset: int
    topic: str

    @classmethod
    def parse(cls, text: str) -> ManifestName | None:
        """Returns what a name says; None if it is no name of a manifest."""
        match = _NAME.fullmatch(text)
        return None if match is None else cls(text, int(match[1]), match[2])

    @classmethod
    def of(cls, manifest: Manifest) -> ManifestName:
        """Returns a new name, which no other process chooses."""
        offset, topic = manifest.next_offset, topic_hash(manifest.identity)
        return cls(f"{offset:020d}-{topic}-{uuid.uuid4().hex}.json", offset, topic)


def topic_hash(identity: StoreIdentity) -> str:
    """Returns the part of a manifest's name that identifies the changelog topic."""
    return hashlib.sha256(identity.topic_id.encode()).hexdigest()[:16]


def _record(cls: Any, values: Any) -> Any:
    """Returns a record from its JSON object. Raises ValueError or TypeError for values of other types."""
    if type(values) is not dict:
        raise TypeError(f"{type(values).__name__} instead of an object")
    return cls(
        **{
            field.name: _typed(field.name, str(field.type), values[field.name])
            for field in fields(cls)
            if field.name in values
        }
    )


def _typed(name: str, kind: str, value: Any) -> Any:
    """Returns a value of JSON if it has the type that a dataclass declares; integers have 64 bits."""
    if kind == "int | None":
        return None if value is None else _typed(name, "int", value)
    if kind == "Mapping[str, int]" and type(value) is dict:
        return {each: _typed(name, "int", number) for each, number in value.items()}
    if type(value).__name__ == kind and (type(value) is not int or value.bit_length() < _BITS):
        return value
    raise TypeError(f"the field {name!r} has a {type(value).__name__}; expected {kind}")


_CHUNK_BYTES = 4 << 20
#: Largest manifest that is read. 10 GB of state have about 1,300 files, 150 bytes each in the manifest.
_LARGEST_MANIFEST_BYTES = 16 << 20
#: File systems where a new file appears only when it is complete, and renaming means copying.
_APPEARS_WHOLE = ("s3", "gcs", "abfs")
_UNFINISHED = ".unfinished"

#: What a file system raises.
StorageError = (OSError, pa.ArrowException)


class SnapshotStorage:
    """The snapshots of one shard. Errors of the file system are `StorageError`.

    Args:
        location: option ``state.snapshot.location``.
        identity: of the shard's store.
        only_reads: whether `fetch` leaves damaged files in their place.

    Attributes:
        path: the shard's folder, for log lines.
    """

    def __init__(self, location: str, identity: StoreIdentity, *, only_reads: bool = False) -> None:
        folder = f"{identity.application_id}/{identity.store}/{identity.shard}"
        self.path = f"{without_secrets(location).rstrip('/')}/{folder}"
        self._fs, root = file_system(location)
        self._root = f"{root.rstrip('/')}/{folder}"
        self._only_reads = only_reads
        self._location = root
        # they show the same mode for all files; Databricks decides who may write
        is_of_databricks = location.startswith("dbfs:") or (
            "DATABRICKS_RUNTIME_VERSION" in os.environ and root.startswith(("/dbfs/", "/Volumes/"))
        )
        self._has_modes = isinstance(self._fs, pafs.LocalFileSystem) and not is_of_databricks

    def manifests(self) -> list[ManifestName]:
        """Returns the names of all snapshots, from the highest changelog offset to the lowest."""
        names = (ManifestName.parse(each.base_name) for each in self._list(""))
        found = [name for name in names if name is not None]
        return sorted(found, key=lambda name: name.text, reverse=True)

    def read(self, name: ManifestName) -> Manifest:
        """Returns a manifest.

        Raises:
            UnusableSnapshotError: if it was removed, is damaged, or its name belongs to another one.
        """
        try:
            with self._open(name.text) as source:
                content = source.read(_LARGEST_MANIFEST_BYTES)
        except FileNotFoundError:
            raise UnusableSnapshotError("somebody removed it") from None
        manifest = Manifest.decode(content)
        if manifest.next_offset != name.next_offset:
            raise UnusableSnapshotError(
                f"its manifest has changelog offset {manifest.next_offset}, its name {name.next_offset}"
            )
        return manifest

    def files(self) -> dict[str, pafs.FileInfo]:
        """Returns the files of all snapshots, and what dead uploads left, by name."""
        return {each.base_name: each for each in self._list("files")}

    def put_file(self, source: Path, file: SnapshotFile) -> None:
        """Uploads a file of a database. Several processes may upload the same one.

        Raises:
            UnusableSnapshotError: if its contents are not those of ``file``.
        """
        with source.open("rb") as opened:
            self._write("files", file.sha256, iter(lambda: opened.read(_CHUNK_BYTES), b""), file)

    def put_manifest(self, manifest: Manifest) -> ManifestName:
        """Completes a snapshot, whose files are all uploaded."""
        name = ManifestName.of(manifest)
        self._write("", name.text, iter([manifest.encode()]))
        return name

    def fetch(self, file: SnapshotFile, target: Path, deadline: Deadline) -> None:
        """Downloads a file of a database; it is on disk when the call returns.

        The download ends where the file is larger than the manifest says. A damaged file is removed, so that
        the next upload sends it again; unless the storage is only read.

        Raises:
            UnusableSnapshotError: if it was removed, its contents are damaged, or the deadline passed.
        """
        digest, size_bytes = hashlib.sha256(), 0
        try:
            with (
                self._open(f"files/{file.sha256}") as source,
                target.open("xb") as opened,
            ):
                while chunk := source.read(min(_CHUNK_BYTES, file.size_bytes - size_bytes + 1)):
                    size_bytes += len(chunk)
                    if size_bytes > file.size_bytes:
                        raise UnusableSnapshotError(
                            f"its file {file.name} ({file.sha256}) is larger than the {file.size_bytes} "
                            "bytes in its manifest"
                        )
                    digest.update(chunk)
                    opened.write(chunk)
                    if deadline.expired:
                        raise UnusableSnapshotError(
                            f"downloading it took over {deadline.budget_seconds:.0f} s (in tasks: "
                            "state.timeout.ms)"
                        )
                opened.flush()
                os.fsync(opened.fileno())
        except FileNotFoundError:
            raise UnusableSnapshotError(f"its file {file.name} ({file.sha256}) is missing") from None
        if digest.hexdigest() != file.sha256:
            # an upload replaces a file of another size
            if size_bytes == file.size_bytes and not self._only_reads:
                with suppress(*StorageError):
                    self.remove(f"files/{file.sha256}")
            raise UnusableSnapshotError(f"its file {file.name} ({file.sha256}) is damaged")

    def remove(self, name: str) -> None:
        """Removes a manifest, or a file of the folder ``files`` if the name begins so. It may be gone."""
        try:
            self._fs.delete_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return

    def _open(self, name: str) -> BinaryIO | pa.NativeFile:
        path = f"{self._root}/{name}"
        if not self._has_modes:
            return self._fs.open_input_stream(path)
        refuse_folder_of_others(self._location, os.path.dirname(path))
        return open_regular_file(path)

    def _list(self, folder: str) -> list[pafs.FileInfo]:
        """Lists a folder.

        Raises:
            PermissionError: if another user owns the folder, or may change it.
        """
        if self._has_modes:
            refuse_folder_of_others(self._location, f"{self._root}/{folder}".rstrip("/"))
        selector = pafs.FileSelector(f"{self._root}/{folder}".rstrip("/"), allow_not_found=True)
        return [each for each in self._fs.get_file_info(selector) if each.type == pafs.FileType.File]

    def _write(
        self, folder: str, name: str, chunks: Iterator[bytes], expected: SnapshotFile | None = None
    ) -> None:
        """Writes a file that appears under its name only when it is complete.

        If this process is killed, an object store shows nothing, and another file system shows a file that
        `upload` removes after a day. If writing to an object store fails, pyarrow may complete a file that is
        too short; readers compare size and checksum.
        """
        where = f"{self._root}/{folder}".rstrip("/")
        make_folder(self._fs, where)
        is_renamed = self._fs.type_name not in _APPEARS_WHOLE
        path = f"{where}/{name}.{uuid.uuid4().hex}{_UNFINISHED}" if is_renamed else f"{where}/{name}"
        digest = hashlib.sha256()
        with new_file(self._fs, path) as out:
            for chunk in chunks:
                digest.update(chunk)
                out.write(chunk)
                failpoints.reach("snapshot.within_file")
        if expected is not None and digest.hexdigest() != expected.sha256:
            self._fs.delete_file(path)
            raise UnusableSnapshotError(f"the file {expected.name} changed while it was uploaded")
        if isinstance(self._fs, pafs.LocalFileSystem):
            fsync(path)
        if is_renamed:
            self._fs.move(path, f"{where}/{name}")
