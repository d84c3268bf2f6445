"""The metadata of a store, and how the column family ``offsets`` encodes it.

::

    fmt                        version of all formats in this database (8 bytes, big endian)
    ident                      which state this is: `StoreIdentity`
    off/<topic>/<partition>    next changelog offset; the data has all records before it (8 bytes, big endian)
    batch                      the micro-batch that wrote last: `BatchRecord`
    saved                      time of the last write, ms since the epoch (8 bytes, big endian)
    status                     "idle", or "restoring" while the data is between two batches
    apply                      the large batch that is being written to the data: `Applying`

Each value starts with one byte for the version of its encoding. JSON follows unless stated otherwise.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

from kafka_eos_source.errors import StateCorruptedError, StateFormatError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.store.files import RESTORE_FIX

#: Format of the databases that this release writes, and the newest format that it reads.
FORMAT = 1

_VERSION = b"\x01"
_NUMBER = struct.Struct(">Q")
_OFFSET = "off/"
#: Fields that the database does not spell as `BatchRecord` does.
_SPELLING = {"task_attempt_id": "attempt"}

Offsets = Mapping[TopicPartition, int]
_Record = TypeVar("_Record", BatchRecord, StoreIdentity)


@dataclass(frozen=True)
class Applying:
    """A committed batch whose changes are too large for one write, and are being written to the data.

    While it lasts, `StoreMetadata.restoring` is set, because the data is between two batches. Opening the
    store continues, so the record has everything that the end writes.

    Attributes:
        spill_id: name of the changes on disk.
        offsets, batch: of the metadata at the end.
    """

    spill_id: str
    offsets: Offsets
    batch: BatchRecord | None


@dataclass(frozen=True)
class StoreMetadata:
    """What a database records about its data.

    Attributes:
        identity: which state this is; None for a new database.
        offsets: changelog offset from which to continue, by partition.
        batch: the last micro-batch.
        saved_ms: time of the last write, ms since the epoch; 0 = never.
        restoring: a restore began and did not finish, so the data is between two batches.
        applying: a large batch is being written to the data; None = no.
    """

    identity: StoreIdentity | None = None
    offsets: Offsets = field(default_factory=lambda: MappingProxyType({}))
    batch: BatchRecord | None = None
    saved_ms: int = 0
    restoring: bool = False
    applying: Applying | None = None


def encode_metadata(old: StoreMetadata, new: StoreMetadata) -> dict[bytes, bytes | None]:
    """Returns the records that turn old metadata into new; None deletes a record."""
    changes: dict[bytes, bytes | None] = {
        _offset_key(tp): None for tp in old.offsets if tp not in new.offsets
    }
    if new.identity is not None and new.identity != old.identity:
        changes[b"fmt"] = _VERSION + _NUMBER.pack(FORMAT)
        changes[b"ident"] = _json(asdict(new.identity))
    for tp, offset in new.offsets.items():
        if old.offsets.get(tp) != offset:
            changes[_offset_key(tp)] = _VERSION + _NUMBER.pack(offset)
    if new.batch != old.batch:
        changes[b"batch"] = None if new.batch is None else _json(batch_fields(new.batch))
    if new.saved_ms != old.saved_ms:
        changes[b"saved"] = _VERSION + _NUMBER.pack(new.saved_ms)
    if new.restoring != old.restoring:
        changes[b"status"] = _json("restoring" if new.restoring else "idle")
    if new.applying != old.applying:
        changes[b"apply"] = None if new.applying is None else _applying_bytes(new.applying)
    return changes


def decode_metadata(pairs: Iterable[tuple[bytes, bytes]]) -> StoreMetadata:
    """Returns the metadata that all pairs of the column family encode.

    Raises:
        StateFormatError: if a newer release wrote the database.
        StateCorruptedError: if a record cannot be decoded.
    """
    values = dict(pairs)
    try:
        check_format(_number(values.pop(b"fmt")) if b"fmt" in values else FORMAT)
        offsets = {}
        for key, value in values.items():
            if key.startswith(_OFFSET.encode()):
                topic, _, partition = key.decode().removeprefix(_OFFSET).rpartition("/")
                offsets[TopicPartition(topic, int(partition))] = _number(value)
        return StoreMetadata(
            identity=record(StoreIdentity, _parsed(values[b"ident"])) if b"ident" in values else None,
            offsets=MappingProxyType(offsets),
            batch=record(BatchRecord, _parsed(values[b"batch"])) if b"batch" in values else None,
            saved_ms=_number(values[b"saved"]) if b"saved" in values else 0,
            restoring=b"status" in values and _parsed(values[b"status"]) == "restoring",
            applying=_applying(values[b"apply"]) if b"apply" in values else None,
        )
    except (*SHAPE_ERRORS, struct.error) as error:
        raise StateCorruptedError(
            f"the metadata of a state database cannot be decoded: {error!r}.",
            fix=RESTORE_FIX,
        ) from error


def check_format(found: int) -> None:
    """Raises `StateFormatError` if a newer release wrote this format."""
    if found > FORMAT:
        raise StateFormatError(
            f"the state was written in format {found}; this release reads formats up to {FORMAT}.",
            fix="use the newer release, or remove the folder: the state is restored from the changelog.",
        )


def batch_fields(batch: BatchRecord) -> dict[str, Any]:
    """Returns the fields of a batch record as the database spells them."""
    return {_SPELLING.get(name, name): value for name, value in asdict(batch).items()}


def record(cls: type[_Record], values: Mapping[str, Any]) -> _Record:
    """Returns a record from its fields; ignores fields that a newer release added."""
    spelled = {f.name: _SPELLING.get(f.name, f.name) for f in fields(cls)}
    return cls(**{name: values[key] for name, key in spelled.items() if key in values})


def _applying_bytes(applying: Applying) -> bytes:
    return _json(
        {
            "spill": applying.spill_id,
            "offsets": _listed(applying.offsets),
            "batch": None if applying.batch is None else batch_fields(applying.batch),
        }
    )


def _applying(value: bytes) -> Applying:
    found = _parsed(value)
    batch = found["batch"]
    return Applying(
        found["spill"],
        _offsets_of(found["offsets"]),
        None if batch is None else record(BatchRecord, batch),
    )


def _listed(offsets: Offsets) -> list[list[Any]]:
    return sorted([tp.topic, tp.partition, offset] for tp, offset in offsets.items())


def _offsets_of(listed: list[tuple[str, int, int]]) -> Offsets:
    return MappingProxyType({TopicPartition(topic, partition): at for topic, partition, at in listed})


def _offset_key(tp: TopicPartition) -> bytes:
    return f"{_OFFSET}{tp.topic}/{tp.partition}".encode()


def _json(value: Any) -> bytes:
    return _VERSION + json.dumps(value, separators=(",", ":")).encode()


def _parsed(value: bytes) -> Any:
    return parse_json(_body(value))


def _number(value: bytes) -> int:
    (number,) = _NUMBER.unpack(_body(value))
    return int(number)


def _body(value: bytes) -> bytes:
    if value[:1] != _VERSION:
        raise ValueError(f"the version byte is {value[:1]!r}; expected {_VERSION!r}")
    return value[1:]
