"""Packets that carry a shard's state changes from the operator to the sink, in a reserved column of the rows.

The reserved column cannot be mistaken for data, and the ``topic`` option does not apply to it. Each value is
one packet:

::

    length of header (4 bytes, big endian) │ header (JSON) │ Arrow IPC stream: key, value (null = tombstone)

The last packet of a shard carries the report of the shard, by which the sink detects lost packets.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from kafka_eos_source.errors import StateError
from kafka_eos_source.model import ShardReport, TopicPartition
from kafka_eos_source.protocol.ipc import to_stream

#: Name of the reserved column in an operator's result. Its type is binary.
CHANGELOG = "__kafka_eos_changelog"

_VERSION = 2
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class Packet:
    """One packet. Its changes are still packed.

    Attributes:
        tp: partition of the changelog.
        task_attempt_id: id of the task attempt that created the packet (UUID, hex).
        number: number of this packet in its task attempt, from 0.
        report: report of the whole task attempt; only its last packet has one.
        changes: an Arrow IPC stream; empty if the packet has no changes.
    """

    tp: TopicPartition
    task_attempt_id: str
    number: int
    report: ShardReport | None
    changes: memoryview

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Unpacks the changes; their schema is `changes.CHANGES`."""
        if self.changes.nbytes:
            yield from pa.ipc.open_stream(pa.py_buffer(self.changes))


def pack(report: ShardReport, changes: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
    """Packs the changes of one task attempt: one packet for each Arrow batch, and one for the report.

    Args:
        report: the report. This function fills in ``packets`` and ``records``.
        changes: Arrow batches with the schema `changes.CHANGES`.
    """
    number = records = 0
    for each in changes:
        if each.num_rows:
            yield _packet(report, number, None, to_stream(each))
            number += 1
            records += each.num_rows
    done = {
        "packets": number + 1,
        "records": records,
        "shards": report.shards,
        "query": report.query_id,
        "batch": report.batch_id,
        "next": report.next_offset,
        "time": report.time_ms,
        "event": report.event_time_ms,
        "sequence": report.sequence,
        "skipped": report.skipped,
        "gap": report.accepts_gap,
        "failure": report.failure,
        "pressure": round(report.pressure, 4),
        "counts": dict(report.counts),
    }
    yield _packet(report, number, done, b"")


def unpack(packet: bytes | memoryview) -> Packet:
    """Reads a packet.

    Raises:
        StateError: if the value is not a packet, or has another version.
    """
    view = memoryview(packet)
    try:
        (length,) = _LENGTH.unpack_from(view)
        header = json.loads(bytes(view[4 : 4 + length]))
        version = header["v"]
        if version == _VERSION:
            tp = TopicPartition(header["topic"], header["shard"])
            return Packet(
                tp,
                header["attempt"],
                header["number"],
                _report(tp, header["attempt"], header.get("report")),
                view[4 + length :],
            )
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise StateError(
            f"column {CHANGELOG!r} holds a value that no operator wrote ({error!r}): {bytes(view[:64])!r}.",
            fix=f"pass the column {CHANGELOG!r} on exactly as transform_with_changelog_state returned it.",
        ) from error
    raise StateError(
        f"column {CHANGELOG!r} has version {version}, but this sink reads version {_VERSION}.",
        fix="install the same version of kafka-eos on the driver and on all executors.",
    )


def _packet(report: ShardReport, number: int, done: object, changes: pa.Buffer | bytes) -> bytes:
    header = {
        "v": _VERSION,
        "topic": report.tp.topic,
        "shard": report.tp.partition,
        "attempt": report.task_attempt_id,
        "number": number,
        **({} if done is None else {"report": done}),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((_LENGTH.pack(len(text)), text, changes))


def _counts(found: object) -> dict[str, int]:
    if not isinstance(found, dict):
        raise TypeError(f"the key 'counts' has type {type(found).__name__}; expected an object")
    return {str(name): int(number) for name, number in found.items()}


def _report(tp: TopicPartition, task_attempt_id: str, found: dict[str, object] | None) -> ShardReport | None:
    if found is None:
        return None
    return ShardReport(
        tp=tp,
        task_attempt_id=task_attempt_id,
        shards=int(str(found["shards"])),
        query_id=str(found["query"]),
        batch_id=int(str(found["batch"])),
        next_offset=int(str(found["next"])),
        time_ms=int(str(found["time"])),
        event_time_ms=None if found["event"] is None else int(str(found["event"])),
        packets=int(str(found["packets"])),
        records=int(str(found["records"])),
        sequence=int(str(found["sequence"])),
        skipped=bool(found["skipped"]),
        accepts_gap=bool(found["gap"]),
        failure=str(found["failure"]),
        pressure=float(str(found["pressure"])),
        counts=_counts(found["counts"]),
    )
