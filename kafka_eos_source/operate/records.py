"""Topics and records, for people: lists and creates topics, reads, prints and sends records."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa

from kafka_eos_source.errors import DataLossError, InvalidOptionError, InvalidRecordError, UnavailableError
from kafka_eos_source.kafka.admin import ClusterReader
from kafka_eos_source.kafka.config import admin_config, producer_config
from kafka_eos_source.kafka.producer import RecordProducer
from kafka_eos_source.kafka.reader import POOL, LogEnds
from kafka_eos_source.kafka.schema_registry import id_bytes
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.observe.wording import utc, visible
from kafka_eos_source.operate.shared import INTERNAL_PREFIX
from kafka_eos_source.read.columns import Contents, Run
from kafka_eos_source.read.fetch import Progress, Reading, ReadSettings
from kafka_eos_source.registry.catalog import catalog
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.frames import KEY_HEADER, OF_GLUE, VALUE_HEADER, Frame, Framed, Naming
from kafka_eos_source.registry.glue import is_glue
from kafka_eos_source.registry.records import decode_foreign, foreign_decoder
from kafka_eos_source.runtime.commands import json_text
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.json_input import JsonError, parse_json
from kafka_eos_source.spark.arrow import HEADERS_ARROW, STAGED_ARROW

_LINES_AT_ONCE = 10_000
#: How long brokers may be silent during a read.
_SILENCE_SECONDS = 30.0
#: Columns of a record that the producer sends; timestamps are milliseconds.
_ROW = pa.schema([STAGED_ARROW.field(name) for name in ("key", "value", "partition", "headers", "timestamp")])
#: Fields of a record in JSON. The last three are written by `record_json`, and ignored when it is sent again.
_FIELDS = frozenset(
    {"key", "value", "headers", "partition", "timestamp_ms", "key_base64", "value_base64"}
    | {"topic", "offset", "state"}
)


#: ``committed``: read_committed consumers see the record. ``open``: its transaction has not ended, or a
#: transaction before it in the partition has not. ``aborted``: no read_committed consumer will ever see it.
State = Literal["committed", "open", "aborted"]


@dataclass(frozen=True)
class TopicRecord:
    """One record as it is in the log.

    Attributes:
        tp, offset: where the record is.
        timestamp_ms: milliseconds since the epoch; None if the record has no timestamp.
        key, value: bytes; None is Kafka's null.
        headers: names and values in their order.
        state: whether read_committed consumers see the record.
    """

    tp: TopicPartition
    offset: int
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    state: State = "committed"


def newest(
    kafka: Mapping[str, Any], logs: Mapping[TopicPartition, LogEnds], *, count: int, uncommitted: bool
) -> list[TopicRecord]:
    """Returns the newest records of a topic, oldest first.

    Offsets are no record numbers, because control records and compaction leave gaps. So the first read starts
    some offsets before the end, and further ones go back until they have found enough.

    Args:
        kafka: librdkafka properties that say how to reach the cluster.
        logs: bounds of each partition's log; `follow` can continue at their ends without a gap or an overlap.
        count: how many records.
        uncommitted: whether to include records of open and aborted transactions.
    """
    back = 2 * count + 10
    while True:
        ranges = {}
        for tp, log in logs.items():
            end = log.end if uncommitted else log.stable
            ranges[tp] = (max(log.earliest, end - back), end)
        found = list(read(kafka, ranges, logs, uncommitted=uncommitted))
        whole = all(ranges[tp][0] == log.earliest for tp, log in logs.items())
        if len(found) >= count or whole:
            return _in_time_order(found)[-count:] if count else []
        back *= 8


def read(
    kafka: Mapping[str, Any],
    ranges: Mapping[TopicPartition, tuple[int, int]],
    logs: Mapping[TopicPartition, LogEnds],
    *,
    uncommitted: bool = False,
    silence_seconds: float = _SILENCE_SECONDS,
) -> Iterator[TopicRecord]:
    """Yields the records of offset ranges; of one partition in offset order.

    Args:
        kafka: librdkafka properties that say how to reach the cluster.
        ranges: for each partition the first offset, and the offset after the last one.
        logs: bounds of each partition's log, which tell open transactions from ended ones.
        uncommitted: whether to include records of open and aborted transactions, marked as such.
        silence_seconds: how long brokers may be silent.

    Raises:
        UnavailableError: if no broker sends more of the ranges for too long.
        AuthorizationError: if the principal may not read the topic.
        DataLossError: if records were removed since the caller looked up the bounds.
        RecordsDamagedError: if a record batch is damaged.
    """
    if not uncommitted:
        yield from _read(kafka, ranges, "read_committed", silence_seconds)
        return
    stable = {tp: (start, min(end, logs[tp].stable)) for tp, (start, end) in ranges.items()}
    committed = _read(kafka, stable, "read_committed", silence_seconds)
    seen = {(record.tp, record.offset) for record in committed}
    for record in _read(kafka, ranges, "read_uncommitted", silence_seconds):
        state: State = "committed"
        if record.offset >= logs[record.tp].stable:
            state = "open"
        elif (record.tp, record.offset) not in seen:
            state = "aborted"
        yield replace(record, state=state)


def _read(
    kafka: Mapping[str, Any],
    ranges: Mapping[TopicPartition, tuple[int, int]],
    isolation_level: str,
    silence_seconds: float,
) -> Iterator[TopicRecord]:
    conf = {**admin_config(kafka), "isolation.level": isolation_level}
    settings = ReadSettings(
        conf, include_headers=True, poll_timeout_ms=int(silence_seconds * 1000), skip_damaged=None
    )
    progress = Progress([OffsetRange(tp, *bounds) for tp, bounds in ranges.items() if bounds[0] < bounds[1]])
    if progress.done:
        return
    with POOL.borrow(conf) as consumer:
        reading = Reading(consumer, progress, settings)
        while not reading.done:
            try:
                runs = reading.next_runs()
            except DataLossError as error:
                raise DataLossError(error.message, fix="run the command again.") from error
            except UnavailableError as error:
                fix = "check that the leaders of the partitions are up."
                raise UnavailableError(error.message, fix=fix) from error
            for run in runs:
                yield from _records(run)


def _records(run: Run) -> Iterator[TopicRecord]:
    contents = Contents([run])
    ms, types = contents.timestamps()
    columns = (run.offsets, ms, types, contents.keys(), contents.values(), contents.headers())
    for offset, at, kind, key, value, headers in zip(*(each.tolist() for each in columns), strict=True):
        named = tuple((header["key"], header["value"]) for header in headers or ())
        yield TopicRecord(run.tp, offset, at if kind >= 0 and at >= 0 else None, key, value, named)


def _in_time_order(records: list[TopicRecord]) -> list[TopicRecord]:
    """Merges partitions by time, and keeps the offset order within each of them."""
    latest: dict[TopicPartition, int] = {}
    times = []
    for record in records:
        latest[record.tp] = max(record.timestamp_ms or 0, latest.get(record.tp, 0))
        times.append((latest[record.tp], record.tp, record.offset))
    return [record for _, record in sorted(zip(times, records, strict=True), key=lambda pair: pair[0])]


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
    with ClusterReader(admin_config(kafka)) as cluster:
        while wait():
            bounds = cluster.logs(list(positions))
            ranges = {}
            for tp, position in positions.items():
                end = bounds[tp].end if uncommitted else bounds[tp].stable
                ranges[tp] = (max(position, bounds[tp].earliest), end)
                positions[tp] = max(position, end)
            yield from read(kafka, ranges, bounds, uncommitted=uncommitted)


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
    return json_text(fields)


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
        else utc(record.timestamp_ms, f"%H:%M:%S.{record.timestamp_ms % 1000:03d}")
    )
    state = "" if record.state == "committed" else f"[{record.state}] "
    key, value = (
        "null" if each is None else visible(each.decode(errors="replace"))
        for each in (record.key, record.value)
    )
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
    producer = RecordProducer(producer_config(kafka), "kafka-eos produce")
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
        found = parse_json(line)
    except JsonError as error:
        raise refuse(f"it is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise refuse(f"it is {type(found).__name__}, expected an object")
    unknown = sorted(set(found) - _FIELDS)
    if unknown:
        raise refuse(f"field {unknown[0]!r} is unknown")
    if "value" not in found and "value_base64" not in found:
        raise refuse("it has no field 'value'")
    timestamp = found.get("timestamp_ms")
    if not (timestamp is None or (type(timestamp) is int and -1 <= timestamp < 1 << 63)):
        raise refuse(f"timestamp_ms is {timestamp!r}, expected milliseconds since the epoch")
    partition = found.get("partition")
    if not (partition is None or (type(partition) is int and 0 <= partition < 1 << 31)):
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


# -- topics


@dataclass(frozen=True)
class TopicDescription:
    """A topic, its logs, and the properties that were set on it.

    Attributes:
        name: of the topic.
        topic_id: Kafka's id of the topic (KIP-516).
        replication_factor: number of replicas of each partition.
        logs: bounds of each partition's log.
        config: properties that were set on the topic itself.
    """

    name: str
    topic_id: str
    replication_factor: int
    logs: Mapping[TopicPartition, LogEnds]
    config: Mapping[str, str]


def partition_counts(
    kafka: Mapping[str, Any], deadline: Deadline, *, internal: bool = False
) -> dict[str, int]:
    """Returns the number of partitions of each topic, by name.

    Args:
        kafka: librdkafka properties that say how to reach the cluster.
        deadline: for the brokers.
        internal: whether to include Kafka's own topics.
    """
    with ClusterReader(admin_config(kafka)) as cluster:
        _, found = cluster.topics(deadline)
    return {name: found[name] for name in sorted(found) if internal or not name.startswith(INTERNAL_PREFIX)}


def create_topic(
    kafka: Mapping[str, Any],
    name: str,
    deadline: Deadline,
    *,
    partitions: int = 1,
    replication_factor: int = -1,
    config: Mapping[str, str] | None = None,
) -> bool:
    """Creates a topic and waits until each partition has a leader. Leaves an existing topic as it is.

    Returns:
        False if a topic of that name exists.
    """
    with TopicAdmin(kafka, starts=True) as admin:
        # looked up first, because a request that changes nothing fails sooner if no broker answers
        exists = admin.shape(name, deadline) is not None
        created = not exists and admin.create(name, partitions, replication_factor, config or {}, deadline)
        admin.await_led(name, deadline)
    return created


def describe_topic(kafka: Mapping[str, Any], name: str, deadline: Deadline) -> TopicDescription:
    """Describes one topic.

    Raises:
        InvalidOptionError: there is no such topic.
    """
    topic_id, ends = log_ends(kafka, name, deadline)
    with TopicAdmin(kafka, starts=True) as admin:
        replication_factor, config = admin.creation_settings(name, deadline)
    return TopicDescription(name, topic_id, replication_factor, ends, config)


def log_ends(
    kafka: Mapping[str, Any], name: str, deadline: Deadline
) -> tuple[str, Mapping[TopicPartition, LogEnds]]:
    """Returns the id of a topic, and the bounds of each partition's log. Needs no more than Describe.

    Raises:
        InvalidOptionError: there is no such topic.
    """
    with TopicAdmin(kafka, starts=True) as admin:
        shape = admin.shape(name, deadline)
    if shape is None:
        raise no_topic(kafka, name, deadline)
    with ClusterReader(admin_config(kafka)) as cluster:
        ends = cluster.logs([TopicPartition(name, number) for number in range(shape.partitions)])
    return shape.topic_id, ends


def no_topic(kafka: Mapping[str, Any], name: str, deadline: Deadline) -> InvalidOptionError:
    """Returns the error for a topic that does not exist; it names those that do."""
    others = list(partition_counts(kafka, deadline))
    known = ", ".join(repr(each) for each in others[:10]) or "none"
    more = f" and {len(others) - 10} more" if len(others) > 10 else ""
    return InvalidOptionError(
        f"topic {name!r} does not exist. Topics of this cluster: {known}{more}.",
        fix=f"create it: kafka-eos topics create {name}",
    )


# -- records of a schema registry, as JSON: each is decoded with its own writer schema


def decoded(records: Iterable[TopicRecord], registry: Mapping[str, Any]) -> list[TopicRecord]:
    """Returns records with keys and values as JSON, where they name a schema of a registry.

    Bytes that name none, that their schema does not describe, or of which Python has no object, stay as they
    are: the reader wants to see them too.

    Args:
        records: the records.
        registry: options of the registry.

    Raises:
        RegistryUnavailableError: if the registry does not answer.
        AuthorizationError, OperatorError: if it refuses the request.
    """
    found = list(records)
    own = [
        [{"key": name, "value": value} for name, value in each.headers if name.isascii()] for each in found
    ]
    headers = pa.array(own, HEADERS_ARROW)
    keys = _texts([each.key for each in found], headers, KEY_HEADER, registry)
    values = _texts([each.value for each in found], headers, VALUE_HEADER, registry)
    return [
        replace(record, key=key, value=value) for record, key, value in zip(found, keys, values, strict=True)
    ]


def _texts(
    messages: list[bytes | None], headers: pa.Array, header: str, registry: Mapping[str, Any]
) -> list[bytes | None]:
    naming = OF_GLUE if is_glue(registry) else Naming(header, id_bytes(registry))
    column = Framed.of(pa.array(messages, pa.binary()), headers, naming)
    groups, _ = column.frames()
    schemas = catalog(registry).of_ids(each.schema_id for each in groups) if groups else {}
    texts = list(messages)
    for group in groups:
        writer = schemas[group.schema_id]
        if isinstance(writer, str):
            continue
        deeper = column.paths(group)[0] if writer.format == "PROTOBUF" else [group]
        for frame in deeper:
            _decode(column, frame, writer, texts)
    return texts


def _decode(column: Framed, frame: Frame, writer: Schema, texts: list[bytes | None]) -> None:
    """Replaces the messages of a frame in ``texts`` by their JSON."""
    decoder = foreign_decoder(frame, writer, None, None)
    if isinstance(decoder, str):
        return
    done = decode_foreign(decoder, column.messages.column.take(pa.array(frame.rows)), frame.start)
    for at, (row, value) in enumerate(zip(frame.rows.tolist(), done.values, strict=True)):
        if at not in done.errors:
            with suppress(OverflowError, ValueError):  # of a time after the year 9999, as a rule
                texts[row] = json.dumps(value.as_py(), ensure_ascii=False, default=_as_json).encode()


def _as_json(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
