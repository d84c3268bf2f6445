"""``kafka-eos token-topic create | describe | show | restore | forget``. Changes need --yes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kafka_eos_source.operate.given import CONNECTION, YES, deadline_of, look_at, target_of, with_options

if TYPE_CHECKING:
    from collections.abc import Mapping

_TOPIC = click.option("--topic", "name", metavar="TOPIC", required=True, help="As the option token.topic.")


@click.group("token-topic")
def group() -> None:
    """The compacted topic that keeps tokens when a consumer group is lost."""


@group.command()
@with_options(_TOPIC, *CONNECTION, YES)
@click.option("--partitions", default=1, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--replication-factor",
    default=-1,
    show_default=True,
    help="-1 = the broker's default. Three in production.",
)
@click.option(
    "--min-insync-replicas", type=click.IntRange(min=1), help="Default: the broker's. Two in production."
)
def create(
    name: str,
    partitions: int,
    replication_factor: int,
    min_insync_replicas: int | None,
    yes: bool,
    timeout: str,
    **given: Any,
) -> None:
    """Creates the topic, compacted and with small segments; checks one that exists."""
    from kafka_eos_source.kafka import token_topic

    deadline, kafka = deadline_of(timeout), _kafka(given, name)
    if yes:
        topic, made = token_topic.create(
            kafka,
            name,
            deadline,
            partitions=partitions,
            replication_factor=replication_factor,
            min_insync=min_insync_replicas,
        )
    else:
        try:
            topic, made = token_topic.check(kafka, name, deadline), False
        except token_topic.NoTokenTopicError:
            said = ", ".join(f"{key}={value}" for key, value in token_topic.PROPERTIES.items())
            click.echo(f"With --yes: topic {name!r} is created with {partitions} partitions and {said}.")
            return
    click.echo(
        f"Created topic {name!r}, id {topic.topic_id}."
        if made
        else f"Topic {name!r} exists and is left as it is, id {topic.topic_id}."
    )
    for warning in topic.warnings:
        click.echo(f"Warning: {warning}", err=True)


@group.command()
@with_options(_TOPIC, *CONNECTION)
def describe(name: str, timeout: str, **given: Any) -> None:
    """Cleanup policy, segments, size and open transactions. Waits for nobody."""
    from kafka_eos_source.operate import token_topics, view

    deadline, kafka = deadline_of(timeout), _kafka(given, name)
    with look_at(target_of({**given, "topic": name})) as look:
        assert look is not None, "brokers were named"
        described = token_topics.describe(kafka, name, look, deadline)
    token_topics.show_described(view.console(), described)


@group.command()
@with_options(_TOPIC, *CONNECTION)
@click.option("--application-id", metavar="ID", help="Show only this query.")
@click.option("--json", "as_json", is_flag=True, help="For programs; with all offsets.")
def show(name: str, application_id: str | None, as_json: bool, timeout: str, **given: Any) -> None:
    """The newest record of each query. Waits for nobody: a batch being committed is not shown yet."""
    from kafka_eos_source.kafka import token_topic, token_topic_reader
    from kafka_eos_source.operate import token_topics, view

    deadline, kafka = deadline_of(timeout), _kafka(given, name)
    topic = token_topic.check(kafka, name, deadline)
    found = token_topics.entries(
        token_topic_reader.read(kafka, topic, deadline, certain=False), application_id
    )
    if as_json:
        click.echo(token_topics.entries_json(found))
    elif not found:
        which = "" if application_id is None else f" of application.id={application_id!r}"
        click.echo(f"Topic {name!r} holds no record{which}.")
    else:
        token_topics.show_entries(view.console(), name, found)


@group.command()
@with_options(_TOPIC, *CONNECTION, YES)
@click.option("--application-id", metavar="ID", required=True, help="The query's application.id.")
def forget(name: str, application_id: str, yes: bool, timeout: str, **given: Any) -> None:
    """Deletes the record of a retired query, so that its application.id can be used anew.

    A query that still runs writes its record again with its next batch.
    """
    from kafka_eos_source.kafka import token_topic, token_topic_reader
    from kafka_eos_source.operate import token_topics, view

    deadline, kafka = deadline_of(timeout), _kafka(given, name)
    topic = token_topic.check(kafka, name, deadline)
    survey = token_topic_reader.read(kafka, topic, deadline, certain=True, key=application_id.encode())
    found = token_topics.entries(survey)
    if not found:
        click.echo(f"Topic {name!r} holds no record of application.id={application_id!r}.")
        return
    token_topics.show_entries(view.console(), name, found)
    if not yes:
        click.echo(
            "With --yes the record is deleted. If the consumer group is lost too, nothing tells any more "
            "which batch of this query is in Kafka."
        )
        return
    token_topics.forget(kafka, topic, application_id, survey, deadline)
    click.echo("Deleted.")


@group.command()
@with_options(_TOPIC, *CONNECTION, YES)
@click.option("--application-id", metavar="ID", required=True, help="The query's application.id.")
@click.option("--checkpoint", metavar="URI", help="As the option checkpointLocation; not for batch writes.")
@click.pass_context
def restore(
    ctx: click.Context,
    /,
    name: str,
    application_id: str,
    checkpoint: str | None,
    yes: bool,
    timeout: str,
    **given: Any,
) -> None:
    """Commits a query's record to its lost consumer group, as a stateful query needs it before a restart.

    Other queries restore their group with their next batch. A group that has lost nothing is left as it is.
    """
    from kafka_eos_source.commit.first_batch import read_first_batch
    from kafka_eos_source.commit.session import KafkaClients
    from kafka_eos_source.kafka import token_topic_reader
    from kafka_eos_source.operate import token_topics, view
    from kafka_eos_source.protocol.identity import is_series

    deadline, kafka = deadline_of(timeout), _kafka(given, name)
    records = token_topic_reader.TopicRecords.checked(kafka, name, deadline)
    survey = token_topic_reader.read(
        kafka, records.topic, deadline, certain=False, key=application_id.encode()
    )
    found = token_topics.entries(survey)
    if not found or found[0].record is None:
        click.echo(f"Topic {name!r} holds no readable record of application.id={application_id!r}.", err=True)
        ctx.exit(1)
    token_topics.show_entries(view.console(), name, found)
    record = found[0].record
    first = None if checkpoint is None else read_first_batch(checkpoint)
    if not is_series(record.token.query_id) and first is None:
        click.echo(
            "Give the --checkpoint of the query: it says whether the topic has a record of every batch.",
            err=True,
        )
        ctx.exit(1)
    if not yes:
        click.echo(
            "With --yes whoever runs under the application.id is fenced, and the offsets are committed to "
            f"group {record.group_id!r} if it has lost them. Stop the query first."
        )
        return
    held = token_topics.restore(
        KafkaClients(kafka),
        records,
        application_id,
        record.group_id,
        deadline,
        is_complete=first is None or first.token_topic == name,
    )
    if held is None or held.token is None:
        click.echo(f"Group {record.group_id!r} has lost nothing and is left as it is.")
    else:
        click.echo(f"Group {record.group_id!r} holds batch {held.token.batch_id} again. Start the query.")


def _kafka(given: dict[str, Any], name: str) -> Mapping[str, str]:
    """Properties of the connection; the name of the topic is checked on the way."""
    from kafka_eos_source.errors import InvalidOptionError

    kafka = target_of({**given, "topic": name}).kafka
    if kafka is None:
        raise InvalidOptionError(
            "no brokers were named.", fix="give --bootstrap-servers, or --kafka-properties with them."
        )
    return kafka
