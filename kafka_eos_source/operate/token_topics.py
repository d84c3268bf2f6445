"""``kafka-eos token-topic create | describe | show | restore | forget``: the topic that keeps tokens safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from kafka_eos_source.errors import InvalidOptionError, OperatorError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate.json_documents import print_document
from kafka_eos_source.operate.shared import (
    CONNECTION,
    OPTIONAL_QUERY,
    REQUIRED_QUERY,
    YES,
    console,
    deadline_of,
    facts_of,
    open_reader,
    require_brokers,
    table_of,
    target_of,
    with_options,
)
from kafka_eos_source.runtime.commands import JSON

if TYPE_CHECKING:
    from rich.console import Console

    from kafka_eos_source.commit.request import Clients, TokenRecords
    from kafka_eos_source.commit.verdict import Held
    from kafka_eos_source.kafka.admin import ClusterReader
    from kafka_eos_source.kafka.reader import LogEnds
    from kafka_eos_source.kafka.token_topic import NewestRecord, Survey, TokenTopic
    from kafka_eos_source.protocol.token import TokenRecord
    from kafka_eos_source.runtime.deadline import Deadline

#: The option token.topic of the queries.
_TOPIC = click.argument("name", metavar="TOPIC")


@click.group("token-topic")
def group() -> None:
    """Manage the compacted topic that keeps commit tokens safe.

    If Kafka loses a consumer group, a query with the option token.topic continues from its record in this
    topic.
    """


@group.command()
@with_options(_TOPIC, *CONNECTION, JSON)
@click.option(
    "--partitions",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of partitions.",
)
@click.option(
    "--replication-factor",
    default=-1,
    show_default=True,
    help="Number of replicas; -1 = the broker's default. Use 3 in production.",
)
@click.option(
    "--min-insync-replicas",
    type=click.IntRange(min=1),
    help="min.insync.replicas of the topic. Default: the broker's. Use 2 in production.",
)
def create(
    name: str,
    partitions: int,
    replication_factor: int,
    min_insync_replicas: int | None,
    as_json: bool,
    timeout: str,
    **options: Any,
) -> None:
    """Create the topic, or check an existing one.

    The topic is compacted and has small segments, which keeps it fast to read. An existing topic is not
    changed.
    """
    from kafka_eos_source.kafka import token_topic

    deadline, kafka = deadline_of(timeout), _kafka(options, name)
    topic, created = token_topic.create(
        kafka,
        name,
        deadline,
        partitions=partitions,
        replication_factor=replication_factor,
        min_insync=min_insync_replicas,
    )
    if as_json:
        print_document("token-topic create", topic, topic=name, created=created)
        return
    click.echo(
        f"Created topic {name!r}, id {topic.topic_id}."
        if created
        else f"Topic {name!r} exists and was not changed, id {topic.topic_id}."
    )
    for warning in topic.warnings:
        click.echo(f"Warning: {warning}", err=True)


@group.command()
@with_options(_TOPIC, *CONNECTION, JSON)
def describe(name: str, as_json: bool, timeout: str, **options: Any) -> None:
    """Show configuration, size and open transactions of the topic.

    Does not wait for open transactions.
    """
    deadline, kafka = deadline_of(timeout), _kafka(options, name)
    with open_reader(target_of({**options, "topic": name})) as reader:
        assert reader is not None, "_kafka has checked the brokers"
        described = describe_token_topic(kafka, name, reader, deadline)
    if as_json:
        print_document("token-topic describe", described, application_ids=len(entries(described.survey)))
    else:
        show_described(console(), described)


@group.command()
@with_options(_TOPIC, OPTIONAL_QUERY, *CONNECTION, JSON)
def show(name: str, application_id: str | None, as_json: bool, timeout: str, **options: Any) -> None:
    """Show the newest record of each query in TOPIC, or that of QUERY, an application.id.

    Does not wait for open transactions: a batch that is being committed is not shown yet.
    """
    from kafka_eos_source.kafka import token_topic

    deadline, kafka = deadline_of(timeout), _kafka(options, name)
    topic = token_topic.check(kafka, name, deadline)
    found = entries(token_topic.read(kafka, topic, deadline, certain=False), application_id)
    if as_json:
        print_document("token-topic show", found)
    elif not found:
        of_query = "" if application_id is None else f" of application.id={application_id!r}"
        click.echo(f"Topic {name!r} holds no record{of_query}.")
    else:
        show_entries(console(), name, found)


@group.command()
@with_options(_TOPIC, REQUIRED_QUERY, *CONNECTION, YES, JSON)
def forget(name: str, application_id: str, yes: bool, as_json: bool, timeout: str, **options: Any) -> None:
    """Delete from TOPIC the record of a retired QUERY, an application.id.

    After that, its application.id can be reused. A query that still runs writes its record again with its
    next batch.
    """
    from kafka_eos_source.kafka import token_topic

    deadline, kafka = deadline_of(timeout), _kafka(options, name)
    topic = token_topic.check(kafka, name, deadline)
    survey = token_topic.read(kafka, topic, deadline, certain=True, key=application_id.encode())
    found = entries(survey)
    forgets = yes and bool(found)
    if found and not as_json:
        show_entries(console(), name, found)
    if forgets:
        forget_query(kafka, topic, application_id, survey, deadline)
    if as_json:
        print_document("token-topic forget", topic=name, records=found, deleted=forgets)
    elif forgets:
        click.echo("Deleted.")
    elif found:
        click.echo(
            "With --yes: the command deletes this record. If the consumer group is lost too, nothing then "
            "shows which batch of this query Kafka holds."
        )
    else:
        click.echo(f"Topic {name!r} holds no record of application.id={application_id!r}.")


@group.command()
@with_options(_TOPIC, REQUIRED_QUERY, *CONNECTION, YES, JSON)
@click.option(
    "--checkpoint", metavar="URI", help="The query's option checkpointLocation; omit it for batch writes."
)
def restore(
    name: str,
    application_id: str,
    checkpoint: str | None,
    yes: bool,
    as_json: bool,
    timeout: str,
    **options: Any,
) -> None:
    """Restore the lost consumer group of QUERY, an application.id, from its record in TOPIC.

    Only stateful queries need this before a restart; other queries restore their group with their next batch.
    A group that has lost nothing is not changed.
    """
    from kafka_eos_source.commit.identity_file import read_identity
    from kafka_eos_source.commit.micro_batch import KafkaClients
    from kafka_eos_source.kafka import token_topic
    from kafka_eos_source.operate.inspection import reachable
    from kafka_eos_source.protocol.identity import is_series

    deadline, kafka = deadline_of(timeout), _kafka(options, name)
    records = token_topic.TopicRecords.checked(kafka, name, deadline)
    survey = token_topic.read(kafka, records.topic, deadline, certain=False, key=application_id.encode())
    found = entries(survey)
    if not found or found[0].record is None:
        raise OperatorError(
            f"topic {name!r} holds no readable record of application.id={application_id!r}.",
            fix="check both names: `kafka-eos token-topic show` lists the records.",
        )
    if not as_json:
        show_entries(console(), name, found)
    record = found[0].record
    first = None
    if checkpoint is not None:
        with reachable("the checkpoint", checkpoint):
            first = read_identity(checkpoint)
    if not is_series(record.token.query_id) and first is None:
        raise InvalidOptionError(
            "it is not known whether the topic has a record of every batch of the query.",
            fix="add --checkpoint: it shows whether the query always wrote to this topic.",
        )
    if not yes:
        if as_json:
            print_document("token-topic restore", record, record=record, restored=False)
            return
        click.echo(
            "With --yes: the command fences any driver that runs with this application.id, and commits the "
            f"record's offsets to group {record.group_id!r} if the group has lost them. Stop the query first."
        )
        return
    held = restore_group(
        KafkaClients(kafka),
        records,
        application_id,
        record.group_id,
        deadline,
        is_complete=first is None or first.token_topic == name,
    )
    if as_json:
        restored = held is not None and held.token is not None
        print_document("token-topic restore", record, record=record, restored=restored)
    elif held is None or held.token is None:
        click.echo(f"Group {record.group_id!r} has lost nothing and was not changed.")
    else:
        click.echo(f"Restored group {record.group_id!r} at batch {held.token.batch_id}. Start the query.")


def _kafka(options: dict[str, Any], name: str) -> Mapping[str, str]:
    """Returns the librdkafka properties of the cluster, and validates the name of the topic."""
    return require_brokers(target_of({**options, "topic": name}))


# -- what the commands read and change


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
    kafka: Mapping[str, Any], name: str, reader: ClusterReader, deadline: Deadline
) -> TokenTopicDescription:
    """Reads the topic without waiting for open transactions.

    Raises:
        KafkaEosError: as `token_topic.check` and `token_topic.read` raise it.
    """
    from kafka_eos_source.kafka import token_topic

    topic = token_topic.check(kafka, name, deadline)
    config = token_topic.config(kafka, name, deadline) if topic.described else {}
    return TokenTopicDescription(
        topic,
        {key: config[key] for key in token_topic.PROPERTIES if key in config},
        reader.logs([TopicPartition(name, number) for number in range(topic.partitions)]),
        token_topic.read(kafka, topic, deadline, certain=False),
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
    facts = [
        ("topic id", topic.topic_id),
        ("partitions", str(topic.partitions)),
        *described.config.items(),
        ("application ids", str(len(entries(survey)))),
        ("records", f"{survey.records:,}, {survey.size_bytes:,} bytes, including outdated ones"),
    ]
    out.print(facts_of(f"token topic {topic.name}", facts))
    logs = table_of("logs", "partition", ">from", ">stable", ">to")
    for tp, log in sorted(described.logs.items()):
        is_held = log.stable < log.end
        numbers = (str(number) for number in (log.earliest, log.stable, log.end))
        logs.add_row(str(tp), *numbers, style="yellow" if is_held else None)
    out.print(logs)
    for warning in topic.warnings:
        out.print(f"Warning: {warning}")


def show_entries(out: Console, name: str, found: Sequence[Entry]) -> None:
    """Prints the newest record of each query."""
    from kafka_eos_source.observe import wording

    columns = ("application.id", ">sequence", ">batch", "time", "query", "group", ">partitions")
    table = table_of(f"records of {name}", *columns)
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
    from kafka_eos_source.kafka.config import producer_config
    from kafka_eos_source.kafka.producer import RecordProducer
    from kafka_eos_source.protocol.token import tombstone_batch

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
    from kafka_eos_source.commit.ownership import recover
    from kafka_eos_source.commit.request import Cluster
    from kafka_eos_source.commit.verdict import Held

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
