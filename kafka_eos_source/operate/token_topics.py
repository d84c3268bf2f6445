"""The token topic as `kafka-eos token-topic` shows it, and the deletion of a retired query's record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from rich.console import Console

from kafka_eos_source.commit.facts import Held
from kafka_eos_source.commit.interfaces import Clients
from kafka_eos_source.commit.recovered import TokenRecords, recover
from kafka_eos_source.commit.request import Cluster
from kafka_eos_source.errors import OperatorError
from kafka_eos_source.kafka import token_topic, token_topic_reader
from kafka_eos_source.kafka.cluster_reader import LogEnds
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.producer import RecordProducer
from kafka_eos_source.kafka.token_topic import TokenTopic
from kafka_eos_source.kafka.token_topic_reader import Found, Survey
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate.cluster import Look
from kafka_eos_source.operate.view import table_of
from kafka_eos_source.protocol.token_record import TokenRecord, tombstone_batch
from kafka_eos_source.runtime.deadline import Deadline


@dataclass(frozen=True)
class Described:
    """A token topic, its configuration and its contents.

    Attributes:
        topic: the checked topic.
        config: the properties that matter to a token topic; empty if they may not be described.
        logs: bounds of each partition's log.
        survey: all that can be read at this moment.
    """

    topic: TokenTopic
    config: Mapping[str, str]
    logs: Mapping[TopicPartition, LogEnds]
    survey: Survey


@dataclass(frozen=True)
class Entry:
    """The newest record of one query.

    Attributes:
        application_id: the record's key.
        found: where it is.
        record: None if it cannot be read.
        problem: why it cannot be read.
    """

    application_id: str
    found: Found
    record: TokenRecord | None = None
    problem: str = ""


def describe(kafka: Mapping[str, Any], name: str, look: Look, deadline: Deadline) -> Described:
    """Looks at the topic without waiting for anybody's transaction.

    Raises:
        KafkaEosError: as `token_topic.check` and `token_topic_reader.read`.
    """
    topic = token_topic.check(kafka, name, deadline)
    config = token_topic.config(kafka, name, deadline) if topic.described else {}
    return Described(
        topic,
        {key: config[key] for key in token_topic.PROPERTIES if key in config},
        look.logs([TopicPartition(name, number) for number in range(topic.partitions)]),
        token_topic_reader.read(kafka, topic, deadline, certain=False),
    )


def entries(survey: Survey, application_id: str | None = None) -> list[Entry]:
    """The newest record of each query, by application.id.

    Args:
        survey: of the topic.
        application_id: of one query; None = all.
    """
    newest: dict[str, Entry] = {}
    for found in survey.newest.values():
        if found is None:
            continue
        entry = _entry(found)
        if application_id not in (None, entry.application_id):
            continue
        known = newest.get(entry.application_id)
        if known is None or _sequence(known) < _sequence(entry):
            newest[entry.application_id] = entry
    return [newest[name] for name in sorted(newest)]


def show_described(out: Console, described: Described) -> None:
    """For people."""
    topic, survey = described.topic, described.survey
    table = table_of(f"token topic {topic.name}")
    table.show_header = False
    table.add_column(style="dim")
    table.add_column()
    for name, value in [
        ("topic id", topic.topic_id),
        ("partitions", str(topic.partitions)),
        *described.config.items(),
        ("application ids", str(len(entries(survey)))),
        ("records", f"{survey.records:,}, {survey.size_bytes:,} bytes; compaction removes outdated ones"),
    ]:
        table.add_row(name, value)
    out.print(table)
    logs = table_of("logs")
    for column in ("partition", "from", "stable", "to"):
        logs.add_column(column, justify="left" if column == "partition" else "right")
    for tp, log in sorted(described.logs.items()):
        is_held = log.stable < log.end
        numbers = (str(number) for number in (log.earliest, log.stable, log.end))
        logs.add_row(str(tp), *numbers, style="yellow" if is_held else None)
    out.print(logs)
    for warning in topic.warnings:
        out.print(f"Warning: {warning}")


def show_entries(out: Console, name: str, found: Sequence[Entry]) -> None:
    """For people."""
    table = table_of(f"records of {name}")
    for column in ("application.id", "sequence", "batch", "time", "query", "group", "partitions"):
        table.add_column(column, justify="right" if column in ("sequence", "batch", "partitions") else "left")
    for each in found:
        record = each.record
        if record is not None:
            table.add_row(
                each.application_id,
                str(record.token.sequence),
                str(record.token.batch_id),
                _time(record.time_ms),
                record.token.query_id,
                record.group_id,
                f"{len(record.ends):,}",
            )
    out.print(table)
    for each in found:
        if each.problem:
            out.print(f"{each.found.tp}, offset {each.found.offset}: {each.problem}")


def entries_json(found: Iterable[Entry]) -> str:
    """A JSON array; times are in ms since 1970, null = unknown."""
    return json.dumps(
        [
            {
                "application_id": each.application_id,
                "partition": each.found.tp.partition,
                "offset": each.found.offset,
                "problem": each.problem or None,
                **({} if each.record is None else _record_json(each.record)),
            }
            for each in found
        ],
        indent=2,
    )


def forget(
    kafka: Mapping[str, str], topic: TokenTopic, application_id: str, found: Survey, deadline: Deadline
) -> int:
    """Writes a tombstone over every record of a query.

    Args:
        kafka: librdkafka properties of a producer.
        topic: the checked topic.
        application_id: of the query.
        found: what the topic holds.
        deadline: for the brokers.

    Returns:
        In how many partitions there was a record.

    Raises:
        KafkaEosError: the tombstones may not have been written.
    """
    key = application_id.encode()
    partitions = [tp.partition for (each, tp), value in found.newest.items() if each == key and value]
    if not partitions:
        return 0
    producer = RecordProducer(producer_config(kafka), f"token topic {topic.name}")
    try:
        producer.begin_count()
        for partition in partitions:
            producer.send(tombstone_batch(key, partition), topic.name, deadline)
        producer.flush(deadline)
    finally:
        producer.close()
    return len(partitions)


def restore(
    clients: Clients,
    records: TokenRecords,
    application_id: str,
    group_id: str,
    deadline: Deadline,
    *,
    is_complete: bool,
) -> Held | None:
    """Commits the offsets of a query's record to its consumer group, if the group has lost them.

    A stateful query needs this: its operators read the group before the commit could look for a record. The
    transactional id is initialised, so a driver that still runs is fenced. Crash at any point ⇒ the group is
    either as before or whole.

    Args:
        clients: of the cluster.
        records: the token topic.
        application_id, group_id: of the query.
        deadline: for the brokers, and for other queries' open transactions in the token topic.
        is_complete: whether the topic has a record of every transaction, as the checkpoint says.

    Returns:
        What the group holds now; None if it had lost nothing, or if there is no record.

    Raises:
        TokenMissingError: the record may not be the newest.
        OperatorError: group and record contradict each other.
        OutcomeUnknownError: the commit was not confirmed; run the command again.
    """
    producer = clients.producer(application_id)
    try:
        producer.init(deadline)
        cluster = Cluster(*producer.cluster(deadline))
        expected = records.last(application_id, deadline, certain=True)
        certainly = [] if expected is None else [tp for tp in expected.ends if cluster.has(tp)]
        held = Held.of(application_id, clients.group_offsets(group_id, certainly, deadline))
        found = recover(held, group_id, records, deadline, is_complete=is_complete)
        if found is held:
            return None
        own = [each for tp, each in sorted(found.offsets.items()) if found.is_marked(tp) and cluster.has(tp)]
        producer.begin()
        producer.send_offsets(own, group_id, deadline)
        producer.commit(deadline)
        return found
    finally:
        producer.close()


def _entry(found: Found) -> Entry:
    name = found.key.decode(errors="replace")
    try:
        return Entry(name, found, found.decode())
    except OperatorError as error:
        return Entry(name, found, problem=error.message)


def _sequence(entry: Entry) -> int:
    return -1 if entry.record is None else entry.record.token.sequence


def _record_json(record: TokenRecord) -> dict[str, Any]:
    return {
        "token": json.loads(record.token.encode()),
        "time_ms": record.time_ms,
        "group_id": record.group_id,
        "topic_id": record.topic_id,
        "anchor": str(record.anchor),
        "offsets": {str(tp): end for tp, end in sorted(record.ends.items())},
    }


def _time(time_ms: int) -> str:
    return f"{datetime.fromtimestamp(time_ms / 1000, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
