"""The manifest of a snapshot: its files with their checksums, and which state they hold.

A manifest is written after all its files, so that its presence means that the snapshot is complete. Its name
starts with the changelog offset, so that names in descending order are the snapshots from the newest on.

Whoever may write to the storage may write a manifest, so it is checked like every other foreign text. The
checksums in it find damage. They do not show who wrote the snapshot: Write on the storage equals Write on the
state, and `storage` refuses local folders that other users may change.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from dataclasses import asdict, dataclass, fields
from typing import Any

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
