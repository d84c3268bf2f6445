"""What the column family ``offsets`` holds, and how it is written.

::

    fmt                        version of all formats in this database
    ident                      whose state it is                      (StoreIdentity)
    off/<topic>/<partition>    next changelog offset: all before it is in the data      (8 bytes, big endian)
    pos                        largest input offset of each partition that the data reflects (KIP-796)
    batch                      the micro-batch that wrote last        (BatchRecord)
    saved                      when that was, ms since the epoch      (8 bytes, big endian)
    status                     idle, or restoring: the data is between two batches

Each value starts with a byte for its version, then JSON unless said otherwise. Nothing is guessed from
content.
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
from kafka_eos_source.state.model import BatchRecord, StoreIdentity

#: Of the databases that this release writes, and the newest that it reads.
FORMAT = 1

_VERSION = b"\x01"
_NUMBER = struct.Struct(">Q")
_OFFSET = "off/"

Offsets = Mapping[TopicPartition, int]
_Record = TypeVar("_Record", BatchRecord, StoreIdentity)


@dataclass(frozen=True)
class Committed:
    """The content of the column family: all that a database says about its data.

    Attributes:
        offsets: changelog offset to go on from, by partition.
        position: largest input offset that the data reflects, by partition.
        batch: the last micro-batch.
        saved_ms: when the last commit was, ms since the epoch; 0 = never.
        restoring: a restore was begun and not finished; the data is between two batches.
    """

    identity: StoreIdentity | None = None
    offsets: Offsets = field(default_factory=lambda: MappingProxyType({}))
    position: Offsets = field(default_factory=lambda: MappingProxyType({}))
    batch: BatchRecord | None = None
    saved_ms: int = 0
    restoring: bool = False


def encode(old: Committed, new: Committed) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """What to put and what to delete, to get from one to the other."""
    puts: list[tuple[bytes, bytes]] = []
    if new.identity is not None and new.identity != old.identity:
        puts += [(b"fmt", _VERSION + _NUMBER.pack(FORMAT)), (b"ident", _json(asdict(new.identity)))]
    puts += [
        (_offset_key(tp), _VERSION + _NUMBER.pack(offset))
        for tp, offset in new.offsets.items()
        if old.offsets.get(tp) != offset
    ]
    gone = [_offset_key(tp) for tp in old.offsets if tp not in new.offsets]
    if new.position != old.position:
        puts.append((b"pos", encode_position(new.position)))
    if new.batch is not None and new.batch != old.batch:
        puts.append((b"batch", _json(asdict(new.batch))))
    elif new.batch is None and old.batch is not None:
        gone.append(b"batch")
    if new.saved_ms != old.saved_ms:
        puts.append((b"saved", _VERSION + _NUMBER.pack(new.saved_ms)))
    if new.restoring != old.restoring:
        puts.append((b"status", _json("restoring" if new.restoring else "idle")))
    return puts, gone


def decode(pairs: Iterable[tuple[bytes, bytes]]) -> Committed:
    """What a column family says.

    Raises:
        StateFormatError: it was written by a newer release.
        StateCorruptedError: it is not readable.
    """
    values = dict(pairs)
    try:
        check_format(_number(values.pop(b"fmt")) if b"fmt" in values else FORMAT)
        offsets = {}
        for key, value in values.items():
            if key.startswith(_OFFSET.encode()):
                topic, _, partition = key.decode().removeprefix(_OFFSET).rpartition("/")
                offsets[TopicPartition(topic, int(partition))] = _number(value)
        return Committed(
            identity=record(StoreIdentity, _parsed(values[b"ident"])) if b"ident" in values else None,
            offsets=MappingProxyType(offsets),
            position=decode_position(values[b"pos"]) if b"pos" in values else MappingProxyType({}),
            batch=record(BatchRecord, _parsed(values[b"batch"])) if b"batch" in values else None,
            saved_ms=_number(values[b"saved"]) if b"saved" in values else 0,
            restoring=b"status" in values and _parsed(values[b"status"]) == "restoring",
        )
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise StateCorruptedError(f"the records of a store are not readable: {error}") from error


def check_format(found: int) -> None:
    """Raises: StateFormatError: a newer release wrote it."""
    if found > FORMAT:
        raise StateFormatError(
            f"the state was written in format {found}; this release reads up to {FORMAT}",
            fix="use the newer release, or remove the state folder: it is restored from the changelog",
        )


def encode_position(position: Offsets) -> bytes:
    return _json(sorted([tp.topic, tp.partition, offset] for tp, offset in position.items()))


def decode_position(value: bytes) -> Offsets:
    return MappingProxyType({TopicPartition(topic, partition): at for topic, partition, at in _parsed(value)})


def record(cls: type[_Record], values: Mapping[str, Any]) -> _Record:
    """A record from its fields, without those that a newer release added within the same format."""
    return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


def _offset_key(tp: TopicPartition) -> bytes:
    return f"{_OFFSET}{tp.topic}/{tp.partition}".encode()


def _json(value: Any) -> bytes:
    return _VERSION + json.dumps(value, separators=(",", ":")).encode()


def _parsed(value: bytes) -> Any:
    return json.loads(_body(value))


def _number(value: bytes) -> int:
    (number,) = _NUMBER.unpack(_body(value))
    return int(number)


def _body(value: bytes) -> bytes:
    if value[:1] != _VERSION:
        raise ValueError(f"version byte {value[:1]!r}, expected {_VERSION!r}")
    return value[1:]
