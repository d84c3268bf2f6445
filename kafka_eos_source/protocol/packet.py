"""Packets that carry a shard's state changes from the operator to the sink, in a reserved column of the rows.

The reserved column cannot be mistaken for data, and the ``topic`` option does not apply to it. Each value is
one packet:

::

    length of header (4 bytes, big endian) │ header (JSON) │ packed batch: key, value (null = tombstone)

The packed batch is a stream of `protocol.packed_batches`. The last packet of a shard has none; it carries the
report of the shard, by which the sink detects lost packets.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from kafka_eos_source.errors import InvalidRecordError, StateError
from kafka_eos_source.model import ShardReport, TopicPartition
from kafka_eos_source.protocol.packed_batches import pack_stream, unpack_stream, values
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json

#: Name of the reserved column in an operator's result. Its type is binary.
CHANGELOG = "__kafka_eos_changelog"

_VERSION = 1
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
        """Yields the changes, with the schema `uncommitted.CHANGES`.

        Raises:
            StateError: if the changes are damaged.
        """
        if self.changes.nbytes:
            try:
                yield from unpack_stream(self.changes, f"column {CHANGELOG!r}")
            except InvalidRecordError as error:
                raise StateError(error.message, error.fix) from error


def pack_packets(report: ShardReport, changes: Iterable[pa.RecordBatch]) -> Iterator[pa.Buffer]:
    """Packs the changes of one task attempt: one packet for each Arrow batch, and one for the report.

    Args:
        report: the report. This function fills in ``packets`` and ``records``.
        changes: Arrow batches with the schema `uncommitted.CHANGES`.
    """
    number = records = 0
    for each in changes:
        if each.num_rows:
            yield pack_stream(each, _head(report, number, None))
            number += 1
            records += each.num_rows
    done = {
        "packets": number + 1,
        "records": records,
        "app": report.application_id,
        "group": report.group_id,
        "store": report.store,
        "host": report.host,
        "topic_id": report.topic_id,
        "brokers": report.brokers,
        "shards": report.shards,
        "query": report.query_id,
        "batch": report.batch_id,
        "next": report.next_offset,
        "time": report.time_ms,
        "event": report.event_time_ms,
        "sequence": report.sequence,
        "ahead": report.clock_max_ahead_ms,
        "log_start": report.log_start,
        "skipped": report.skipped,
        "base": report.base_digest,
        "missing": report.missing_state,
        "failure": report.failure,
        "pressure": round(report.pressure, 4),
        "counts": dict(report.counts),
        **({} if report.due_ms is None else {"due": report.due_ms}),
        **({"in_read": True} if report.in_read else {}),
        **({"measured": _rounded(report.measured)} if report.measured else {}),
    }
    yield pa.py_buffer(_head(report, number, done))


def packets(column: pa.BinaryArray) -> Iterator[Packet]:
    """Reads the packets in a column. Raises: StateError: as `unpack`."""
    return (unpack_packet(memoryview(each)) for each in values(column))


def unpack_packet(packet: pa.Buffer | bytes | memoryview) -> Packet:
    """Reads a packet.

    Raises:
        StateError: if the value is not a packet, or has another version.
    """
    view = memoryview(packet)
    try:
        (length,) = _LENGTH.unpack_from(view)
        header = parse_json(bytes(view[4 : 4 + length]))
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
    except (*SHAPE_ERRORS, struct.error) as error:
        raise StateError(
            f"column {CHANGELOG!r} holds a value that no operator wrote ({error!r}): {bytes(view[:64])!r}.",
            fix=f"pass the column {CHANGELOG!r} on exactly as transform_with_changelog_state returned it.",
        ) from error
    raise StateError(
        f"column {CHANGELOG!r} has version {version}, but this sink reads version {_VERSION}.",
        fix="install the same version of kafka-eos on the driver and on all executors.",
    )


def _head(report: ShardReport, number: int, done: object) -> bytes:
    header = {
        "v": _VERSION,
        "topic": report.tp.topic,
        "shard": report.tp.partition,
        "attempt": report.task_attempt_id,
        "number": number,
        **({} if done is None else {"report": done}),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


def _integer_or_none(found: object) -> int | None:
    return None if found is None else int(str(found))


def _counts(found: object) -> dict[str, int]:
    if not isinstance(found, dict):
        raise TypeError(f"the key 'counts' has type {type(found).__name__}; expected an object")
    return {str(name): int(number) for name, number in found.items()}


def _rounded(measured: Mapping[str, float]) -> dict[str, float]:
    return {name: each if isinstance(each, int) else round(each, 3) for name, each in measured.items()}


def _measured(found: object) -> dict[str, float]:
    """Returns the measured numbers; without those that are none, because they are for metrics only."""
    numbers = found.items() if isinstance(found, dict) else ()
    return {str(name): each for name, each in numbers if type(each) in (int, float)}


def _report(tp: TopicPartition, task_attempt_id: str, found: dict[str, object] | None) -> ShardReport | None:
    if found is None:
        return None
    return ShardReport(
        tp=tp,
        task_attempt_id=task_attempt_id,
        application_id=str(found["app"]),
        group_id=str(found["group"]),
        store=str(found["store"]),
        host=str(found["host"]),
        topic_id=str(found["topic_id"]),
        brokers=str(found["brokers"]),
        shards=int(str(found["shards"])),
        query_id=str(found["query"]),
        batch_id=int(str(found["batch"])),
        next_offset=int(str(found["next"])),
        time_ms=int(str(found["time"])),
        event_time_ms=_integer_or_none(found["event"]),
        due_ms=_integer_or_none(found.get("due")),
        packets=int(str(found["packets"])),
        records=int(str(found["records"])),
        sequence=int(str(found["sequence"])),
        clock_max_ahead_ms=int(str(found["ahead"])),
        log_start=int(str(found["log_start"])),
        skipped=bool(found["skipped"]),
        base_digest=str(found["base"]),
        missing_state=str(found["missing"]),
        failure=str(found["failure"]),
        pressure=float(str(found["pressure"])),
        counts=_counts(found["counts"]),
        in_read=bool(found.get("in_read", False)),
        measured=_measured(found.get("measured")),
    )
