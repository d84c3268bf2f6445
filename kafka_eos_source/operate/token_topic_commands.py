"""The commands ``kafka-eos token-topic create``, ``describe``, ``show``, ``restore`` and ``forget``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kafka_eos_source.operate.shared_options import (
    CONNECTION,
    YES,
    deadline_of,
    open_reader,
    require_brokers,
    target_of,
    with_options,
)
from kafka_eos_source.runtime.json_output import JSON, print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

_TOPIC = click.option(
    "--topic", "name", metavar="TOPIC", required=True, help="Token topic: the option token.topic."
)
_APPLICATION_ID = click.option(
    "--application-id", metavar="ID", required=True, help="The query's option application.id."
)


@click.group("token-topic")
def group() -> None:
    """Manage the compacted topic that keeps commit tokens safe.

    If Kafka loses a consumer group, a query with the option token.topic continues from its record in this
    topic.
    """


@group.command()
@with_options(_TOPIC, *CONNECTION, YES, JSON)
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
    yes: bool,
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
    if yes:
        topic, created = token_topic.create(
            kafka,
            name,
            deadline,
            partitions=partitions,
            replication_factor=replication_factor,
            min_insync=min_insync_replicas,
        )
    else:
        try:
            topic, created = token_topic.check(kafka, name, deadline), False
        except token_topic.NoTokenTopicError:
            if as_json:
                print_json({"topic": name, "topic_id": None, "created": False, "warnings": []})
                return
            config = ", ".join(f"{key}={value}" for key, value in token_topic.PROPERTIES.items())
            click.echo(
                f"With --yes: the command creates topic {name!r} with {partitions} partition(s) and {config}."
            )
            return
    if as_json:
        print_json(
            {"topic": name, "topic_id": topic.topic_id, "created": created, "warnings": list(topic.warnings)}
        )
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
    from kafka_eos_source.operate import token_topics, view

    deadline, kafka = deadline_of(timeout), _kafka(options, name)
    with open_reader(target_of({**options, "topic": name})) as reader:
        assert reader is not None, "_kafka has checked the brokers"
        described = token_topics.describe_token_topic(kafka, name, reader, deadline)
    if as_json:
        print_json(token_topics.described_json(described))
    else:
        token_topics.show_described(view.console(), described)


@group.command()
@with_options(_TOPIC, *CONNECTION, JSON)
@click.option("--application-id", metavar="ID", help="Show only the query with this application.id.")
def show(name: str, application_id: str | None, as_json: bool, timeout: str, **options: Any) -> None:
    """Show the newest record of each query.

    Does not wait for open transactions: a batch that is being committed is not shown yet.
    """
    from kafka_eos_source.kafka import token_topic, token_topic_reader
    from kafka_eos_source.operate import token_topics, view

    deadline, kafka = deadline_of(timeout), _kafka(options, name)
    topic = token_topic.check(kafka, name, deadline)
    found = token_topics.entries(
        token_topic_reader.read(kafka, topic, deadline, certain=False), application_id
    )
    if as_json:
        print_json(token_topics.entries_json(found))
    elif not found:
        of_query = "" if application_id is None else f" of application.id={application_id!r}"
        click.echo(f"Topic {name!r} holds no record{of_query}.")
    else:
        token_topics.show_entries(view.console(), name, found)


@group.command()
@with_options(_TOPIC, *CONNECTION, YES, JSON)
@_APPLICATION_ID
def forget(name: str, application_id: str, yes: bool, as_json: bool, timeout: str, **options: Any) -> None:
    """Delete the record of a retired query.

    After that, its application.id can be reused. A query that still runs writes its record again with its
    next batch.
    """
    from kafka_eos_source.kafka import token_topic, token_topic_reader
    from kafka_eos_source.operate import token_topics, view

    deadline, kafka = deadline_of(timeout), _kafka(options, name)
    topic = token_topic.check(kafka, name, deadline)
    survey = token_topic_reader.read(kafka, topic, deadline, certain=True, key=application_id.encode())
    found = token_topics.entries(survey)
    forgets = yes and bool(found)
    if found and not as_json:
        token_topics.show_entries(view.console(), name, found)
    if forgets:
        token_topics.forget_query(kafka, topic, application_id, survey, deadline)
    if as_json:
        print_json({"topic": name, "records": token_topics.entries_json(found), "deleted": forgets})
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
@with_options(_TOPIC, *CONNECTION, YES, JSON)
@_APPLICATION_ID
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
    """Restore a lost consumer group from the query's record.

    Only stateful queries need this before a restart; other queries restore their group with their next batch.
    A group that has lost nothing is not changed.
    """
    from kafka_eos_source.commit.identity_file import read_identity
    from kafka_eos_source.commit.session import KafkaClients
    from kafka_eos_source.errors import InvalidOptionError, OperatorError
    from kafka_eos_source.kafka import token_topic_reader
    from kafka_eos_source.operate import token_topics, view
    from kafka_eos_source.protocol.identity import is_series

    deadline, kafka = deadline_of(timeout), _kafka(options, name)
    records = token_topic_reader.TopicRecords.checked(kafka, name, deadline)
    survey = token_topic_reader.read(
        kafka, records.topic, deadline, certain=False, key=application_id.encode()
    )
    found = token_topics.entries(survey)
    if not found or found[0].record is None:
        raise OperatorError(
            f"topic {name!r} holds no readable record of application.id={application_id!r}.",
            fix="check both names: `kafka-eos token-topic show` lists the records.",
        )
    if not as_json:
        token_topics.show_entries(view.console(), name, found)
    record = found[0].record
    first = None if checkpoint is None else read_identity(checkpoint)
    if not is_series(record.token.query_id) and first is None:
        raise InvalidOptionError(
            "it is not known whether the topic has a record of every batch of the query.",
            fix="add --checkpoint: it shows whether the query always wrote to this topic.",
        )
    if not yes:
        if as_json:
            print_json(token_topics.restored_json(record, None))
            return
        click.echo(
            "With --yes: the command fences any driver that runs with this application.id, and commits the "
            f"record's offsets to group {record.group_id!r} if the group has lost them. Stop the query first."
        )
        return
    held = token_topics.restore_group(
        KafkaClients(kafka),
        records,
        application_id,
        record.group_id,
        deadline,
        is_complete=first is None or first.token_topic == name,
    )
    if as_json:
        print_json(token_topics.restored_json(record, held))
    elif held is None or held.token is None:
        click.echo(f"Group {record.group_id!r} has lost nothing and was not changed.")
    else:
        click.echo(f"Restored group {record.group_id!r} at batch {held.token.batch_id}. Start the query.")


def _kafka(options: dict[str, Any], name: str) -> Mapping[str, str]:
    """Returns the librdkafka properties of the cluster, and validates the name of the topic."""
    return require_brokers(target_of({**options, "topic": name}))
