"""Reads and prints the token topic, deletes a retired query's record, and restores a lost group from one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from kafka_eos_source.kafka.token_topic import TokenTopic
from kafka_eos_source.kafka.token_topic_reader import NewestRecord, Survey
from kafka_eos_source.kafka.wire.producer import RecordProducer
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.observe import wording
from kafka_eos_source.operate.cluster import MetadataReader
from kafka_eos_source.operate.topics import logs_json
from kafka_eos_source.operate.view import table_of
from kafka_eos_source.protocol.token_record import TokenRecord, tombstone_batch
from kafka_eos_source.runtime.deadline import Deadline


@dataclass(frozen=True)
class TokenTopicDescription:
    """A token topic, its configuration and its contents.

    Attributes:
        topic: the validated topic.
        config: the configuration that matters for a token topic; empty if we may not describe it.
        logs: bounds of each partition's log.
        survey: everything that can be read at this moment.
    """

    topic: TokenTopic
    config: Mapping[str, str]
    logs: Mapping[TopicPartition, LogEnds]
    survey: Survey


@dataclass(frozen=True)
class Entry:
    """The newest record of one query.

    Attributes:
        application_id: the key of the record.
        found: the record as read, with its partition and offset.
        record: the decoded record; None = it cannot be decoded.
        problem: why it cannot be decoded.
    """

    application_id: str
    found: NewestRecord
    record: TokenRecord | None = None
    problem: str = ""


def describe_token_topic(
    kafka: Mapping[str, Any], name: str, reader: MetadataReader, deadline: Deadline
) -> TokenTopicDescription:
    """Reads the topic without waiting for open transactions.

    Raises:
        KafkaEosError: as `token_topic.check` and `token_topic_reader.read` raise it.
    """
    topic = token_topic.check(kafka, name, deadline)
    config = token_topic.config(kafka, name, deadline) if topic.described else {}
    return TokenTopicDescription(
        topic,
        {key: config[key] for key in token_topic.PROPERTIES if key in config},
        reader.logs([TopicPartition(name, number) for number in range(topic.partitions)]),
        token_topic_reader.read(kafka, topic, deadline, certain=False),
    )


def entries(survey: Survey, application_id: str | None = None) -> list[Entry]:
    """Returns the newest record of each query, sorted by application.id.

    Args:
        survey: contents of the topic.
        application_id: return only this query; None = all queries.
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


def show_described(out: Console, described: TokenTopicDescription) -> None:
    """Prints a description of the topic."""
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
        ("records", f"{survey.records:,}, {survey.size_bytes:,} bytes, including outdated ones"),
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
    """Prints the newest record of each query."""
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
                wording.utc(record.time_ms),
                record.token.query_id,
                record.group_id,
                f"{len(record.ends):,}",
            )
    out.print(table)
    for each in found:
        if each.problem:
            out.print(f"{each.found.tp}, offset {each.found.offset}: {each.problem}")


def described_json(described: TokenTopicDescription) -> dict[str, Any]:
    """Returns a description of the topic as a JSON object."""
    topic, survey = described.topic, described.survey
    return {
        "topic": topic.name,
        "topic_id": topic.topic_id,
        "config": dict(described.config),
        "application_ids": len(entries(survey)),
        "records": survey.records,
        "bytes": survey.size_bytes,
        "partitions": logs_json(described.logs),
        "warnings": list(topic.warnings),
    }


def entries_json(found: Iterable[Entry]) -> list[dict[str, Any]]:
    """Returns the records as a JSON array; times are in ms since 1970, null = unknown."""
    return [
        {
            "application_id": each.application_id,
            "partition": each.found.tp.partition,
            "offset": each.found.offset,
            "problem": each.problem or None,
            **_record_json(each.record),
        }
        for each in found
    ]


def restored_json(record: TokenRecord, held: Held | None) -> dict[str, Any]:
    """Returns a query's record, and whether its group was restored from it, as a JSON object.

    Args:
        record: the newest record of the query.
        held: what the restored group holds; None = the group was not changed.
    """
    return {
        "group_id": record.group_id,
        "record": _record_json(record),
        "restored": held is not None and held.token is not None,
    }


def forget_query(
    kafka: Mapping[str, str], topic: TokenTopic, application_id: str, found: Survey, deadline: Deadline
) -> int:
    """Writes a tombstone for every record of a query.

    Args:
        kafka: librdkafka properties of a producer.
        topic: the validated topic.
        application_id: the query.
        found: contents of the topic.
        deadline: limits the wait for the brokers.

    Returns:
        The number of partitions that had a record.

    Raises:
        KafkaEosError: if it is unknown whether all tombstones were written.
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


def restore_group(
    clients: Clients,
    records: TokenRecords,
    application_id: str,
    group_id: str,
    deadline: Deadline,
    *,
    is_complete: bool,
) -> Held | None:
    """Commits the offsets of a query's record to its consumer group, if the group has lost them.

    A stateful query needs this, because its operators read the group before the commit could read the record.
    The function initialises the transactional id, which fences a driver that still runs. After a crash at any
    point, the group is either unchanged or complete.

    Args:
        clients: clients of the cluster.
        records: the token topic.
        application_id: the query's application.id.
        group_id: the query's consumer group.
        deadline: limits the wait for the brokers and for open transactions of other queries in the token
            topic.
        is_complete: whether the topic has a record of every transaction, according to the checkpoint.

    Returns:
        What the group holds now; None if it had lost nothing or the topic has no record.

    Raises:
        TokenMissingError: if the record may not be the newest.
        OperatorError: if group and record contradict each other.
        OutcomeUnknownError: if the broker did not confirm the commit; run the command again.
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


def _entry(found: NewestRecord) -> Entry:
    name = found.key.decode(errors="replace")
    try:
        return Entry(name, found, found.decode())
    except OperatorError as error:
        return Entry(name, found, problem=error.message)


def _sequence(entry: Entry) -> int:
    return -1 if entry.record is None else entry.record.token.sequence


def _record_json(record: TokenRecord | None) -> dict[str, Any]:
    return {
        "token": record and record.token.to_json(),
        "time_ms": record and record.time_ms,
        "group_id": record and record.group_id,
        "topic_id": record and record.topic_id,
        "anchor": record and str(record.anchor),
        "offsets": record and {str(tp): end for tp, end in sorted(record.ends.items())},
    }
