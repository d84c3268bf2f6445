"""Sends lines as records, and prints records as lines."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.kafka.cluster_reader import ClusterReader, LogEnds
from kafka_eos_source.kafka.config import admin_config, producer_config
from kafka_eos_source.kafka.producer import RecordProducer
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.kafka.topic_reader import TopicReader, TopicRecord
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate.topics import no_topic
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.schema import STAGED_ARROW

_LINES_AT_ONCE = 10_000
#: Columns of a record that the producer sends; timestamps are milliseconds.
_ROW = pa.schema([STAGED_ARROW.field(name) for name in ("key", "value", "partition", "headers", "timestamp")])
#: Fields of a record in JSON. The last three are written by `record_json`, and ignored when it is sent again.
_FIELDS = frozenset(
    {"key", "value", "headers", "partition", "timestamp_ms", "key_base64", "value_base64"}
    | {"topic", "offset", "state"}
)


def newest(
    kafka: Mapping[str, Any], logs: Mapping[TopicPartition, LogEnds], *, count: int, uncommitted: bool
) -> list[TopicRecord]:
    """Returns the newest records of a topic, oldest first.

    Args:
        kafka: librdkafka properties that say how to reach the cluster.
        logs: bounds of each partition's log; `follow` can continue at their ends without a gap or an overlap.
        count: how many records.
        uncommitted: whether to include records of open and aborted transactions.

    Raises:
        UnavailableError, AuthorizationError: the cluster does not answer, or refuses to.
    """
    with TopicReader(kafka) as reader:
        return reader.newest(logs, count, uncommitted=uncommitted)


def follow(
    kafka: Mapping[str, Any],
    start: Mapping[TopicPartition, int],
    *,
    uncommitted: bool,
    wait: Callable[[], bool],
) -> Iterator[TopicRecord]:
    """Yields new records as they become readable.

    Args:
        kafka: librdkafka properties that say how to reach the cluster.
        start: first offset of each partition.
        uncommitted: whether to yield records at once, marked as open, and not after their commit.
        wait: called between two reads; returns False to end.
    """
    positions = dict(start)
    with ClusterReader(admin_config(kafka)) as cluster, TopicReader(kafka) as reader:
        while wait():
            bounds = cluster.logs(list(positions))
            ranges = {}
            for tp, position in positions.items():
                end = bounds[tp].end if uncommitted else bounds[tp].stable
                ranges[tp] = (max(position, bounds[tp].earliest), end)
                positions[tp] = max(position, end)
            yield from reader.read(ranges, bounds, uncommitted=uncommitted)


def record_json(record: TopicRecord) -> str:
    """Returns one line of JSON. Bytes that are not UTF-8 are written as base64 (``value_base64``)."""
    fields: dict[str, Any] = {
        "topic": record.tp.topic,
        "partition": record.tp.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
    }
    fields.update(contents_json(record.key, record.value, record.headers))
    fields["state"] = record.state
    return json.dumps(fields, ensure_ascii=False)


def contents_json(
    key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, bytes | None]]
) -> dict[str, Any]:
    """Returns key, value and headers of a record as fields of a JSON object."""
    fields = {**_text_field("key", key), **_text_field("value", value)}
    listed = [_text_field("value", each) | {"key": name} for name, each in headers]
    return {**fields, "headers": listed} if listed else fields


def record_line(record: TopicRecord) -> str:
    """Returns one line for people: partition, offset, time, key, value."""
    at = (
        "-"
        if record.timestamp_ms is None
        else datetime.fromtimestamp(record.timestamp_ms / 1000, timezone.utc).strftime("%H:%M:%S.%f")[:-3]
    )
    state = "" if record.state == "committed" else f"[{record.state}] "
    key = "null" if record.key is None else record.key.decode(errors="replace")
    value = "null" if record.value is None else record.value.decode(errors="replace")
    return f"{record.tp.partition}:{record.offset} {at} {state}{key} {value}"


def _text_field(name: str, value: bytes | None) -> dict[str, Any]:
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}


def produce(
    kafka: Mapping[str, Any], name: str, batches: Iterable[pa.RecordBatch], deadline: Deadline
) -> int:
    """Sends records with an idempotent producer, and returns how many were acknowledged.

    Args:
        kafka: librdkafka properties.
        name: of an existing topic.
        batches: columns ``value`` and, if present, ``key``, ``partition``, ``headers``, ``timestamp``.
        deadline: for each batch of records.

    Raises:
        InvalidOptionError: there is no such topic.
        KafkaEosError: a record is too large, or the brokers do not take it.
    """
    with TopicAdmin(kafka, starts=True) as admin:
        if admin.shape(name, deadline) is None:
            raise no_topic(kafka, name, deadline)
    sent = 0
    producer = RecordProducer(producer_config({"log_level": "0", **kafka}), "kafka-eos produce")
    try:
        for batch in batches:
            patience = Deadline.after_seconds(deadline.budget_seconds)
            producer.send(batch, name, patience)
            producer.flush(patience)
            sent += batch.num_rows
    finally:
        producer.close()
    return sent


def from_lines(lines: Iterable[str], separator: str | None = None) -> Iterator[pa.RecordBatch]:
    """Turns lines of text into records: each line is a value, or a key and a value.

    Raises:
        InvalidRecordError: a line has no ``separator``; names the number of the line.
    """
    for first, chunk in _chunks(lines):
        keys: list[bytes | None] = []
        values: list[bytes] = []
        for number, line in enumerate(chunk, first):
            key, found, value = line.partition(separator) if separator else ("", "", line)
            if separator and not found:
                raise InvalidRecordError(
                    f"line {number} has no {separator!r} between key and value.",
                    fix="add it, or leave out --key-separator to send whole lines as values.",
                )
            keys.append(key.encode() if separator else None)
            values.append(value.encode())
        yield pa.record_batch({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


def from_json(lines: Iterable[str], *, keep_partitions: bool = False) -> Iterator[pa.RecordBatch]:
    """Turns lines of JSON into records, as `record_json` writes them.

    A ``value`` or ``key`` that is an object, an array or a number is sent as its JSON text.

    Args:
        lines: one JSON object each; empty lines are left out.
        keep_partitions: whether records go to the partition that their field ``partition`` names. If not, the
            producer chooses it by the key.

    Raises:
        InvalidRecordError: a line is not such an object; names the number of the line.
    """
    for first, chunk in _chunks(lines):
        rows = [_row(number, line) for number, line in enumerate(chunk, first) if line.strip()]
        if not keep_partitions:
            rows = [{**row, "partition": None} for row in rows]
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=_ROW)


def _chunks(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    chunk: list[str] = []
    first = 1
    for line in lines:
        chunk.append(line.rstrip("\r\n"))
        if len(chunk) == _LINES_AT_ONCE:
            yield first, chunk
            first += len(chunk)
            chunk = []
    if chunk:
        yield first, chunk


def _row(number: int, line: str) -> dict[str, Any]:
    def refuse(why: str) -> InvalidRecordError:
        return InvalidRecordError(
            f"line {number} is not a record: {why}.",
            fix='write one JSON object on each line, such as {"key": "AA", "value": {"delay": 12}}.',
        )

    try:
        found = json.loads(line)
    except ValueError as error:
        raise refuse(f"it is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise refuse(f"it is {type(found).__name__}, expected an object")
    unknown = sorted(set(found) - _FIELDS)
    if unknown:
        raise refuse(f"field {unknown[0]!r} is unknown")
    if "value" not in found and "value_base64" not in found:
        raise refuse("it has no field 'value'")
    timestamp = found.get("timestamp_ms")
    if not (timestamp is None or type(timestamp) is int):
        raise refuse(f"timestamp_ms is {timestamp!r}, expected milliseconds since the epoch")
    partition = found.get("partition")
    if not (partition is None or type(partition) is int):
        raise refuse(f"partition is {partition!r}, expected a number")
    headers = found.get("headers") or []
    if isinstance(headers, dict):
        headers = [{"key": key, "value": value} for key, value in headers.items()]
    try:
        return {
            "key": _bytes(found, "key"),
            "value": _bytes(found, "value"),
            "partition": partition,
            "headers": [{"key": str(each["key"]), "value": _bytes(each, "value")} for each in headers]
            or None,
            "timestamp": timestamp,
        }
    except (KeyError, TypeError, ValueError) as error:
        raise refuse(f"{type(error).__name__}: {error}") from None


def _bytes(found: Mapping[str, Any], name: str) -> bytes | None:
    encoded = found.get(f"{name}_base64")
    if encoded is not None:
        return base64.b64decode(encoded, validate=True)
    value = found.get(name)
    if value is None:
        return None
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
