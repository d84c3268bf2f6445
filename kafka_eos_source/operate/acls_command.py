"""The command ``kafka-eos acls``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from kafka_eos_source.operate.rights import BATCH, COMMANDS
from kafka_eos_source.operate.shared_options import (
    CONNECTION,
    DEAD_LETTER_TOPIC,
    SOURCE_TOPICS,
    TOKEN_TOPIC,
    deadline_of,
    open_reader,
    target_of,
    with_options,
)
from kafka_eos_source.runtime.json_output import JSON, print_json

if TYPE_CHECKING:
    from kafka_eos_source.operate.rights import Grant, Names


@click.command()
@click.argument("folder", required=False, metavar="[CHECKPOINT]")
@click.option("--checkpoint", metavar="URI", help="The same as the argument CHECKPOINT.")
@click.option("--application-id", metavar="ID", help="The query's option application.id.")
@click.option("--group-id", metavar="ID", help="The query's option kafka.group.id.")
@SOURCE_TOPICS
@click.option(
    "--other-cluster", is_flag=True, help="The query reads another cluster than the one to which it writes."
)
@click.option(
    "--topic", "topics", metavar="TOPIC", multiple=True, help="A topic that it writes; may be repeated."
)
@click.option("--anchor-topic", metavar="TOPIC", help="The sink's option anchor.topic.")
@TOKEN_TOPIC
@DEAD_LETTER_TOPIC
@click.option(
    "--store",
    "stores",
    metavar="NAME",
    multiple=True,
    help="A store of its operators; may be repeated.",
)
@click.option("--batch", is_flag=True, help="The rights of batch writes (df.write).")
@click.option(
    "--source-principal", metavar="TYPE:NAME", default="User:source", show_default=True, help="Who reads."
)
@click.option(
    "--sink-principal", metavar="TYPE:NAME", default="User:sink", show_default=True, help="Who writes."
)
@click.option(
    "--operator-principal", metavar="TYPE:NAME", help="Who keeps the state. Default: the sink's principal."
)
@click.option(
    "--command",
    "commands",
    type=click.Choice(COMMANDS),
    multiple=True,
    help="Also the rights of this command of kafka-eos; may be repeated.",
)
@click.option(
    "--command-principal", metavar="TYPE:NAME", default="User:ops", show_default=True, help="Who runs it."
)
@click.option("--table", "as_table", is_flag=True, help="Print a table with the purpose of each right.")
@with_options(*CONNECTION, JSON)
def acls(
    folder: str | None,
    batch: bool,
    source_principal: str,
    sink_principal: str,
    operator_principal: str | None,
    commands: tuple[str, ...],
    command_principal: str,
    as_table: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Print the least rights of each part of a query, as lines of kafka-acls.sh.

    The names come from the checkpoint and the options. With --bootstrap-servers or --kafka-properties, the
    command looks up in the query's group what they do not say: the output topic and the changelogs. Changes
    nothing. Optional rights are printed as comments.
    """
    from kafka_eos_source.operate import rights

    names, asked = _names({**options, "checkpoint": options["checkpoint"] or folder}, batch=batch)
    query = {
        "source": source_principal,
        "sink": sink_principal,
        "operator": operator_principal or sink_principal,
    }
    principals = {"sink": sink_principal, BATCH: sink_principal} if batch else query
    found = rights.grants(names, {**principals, **dict.fromkeys(commands, command_principal)})
    if as_json:
        print_json({"looked_up": asked, "rights": [each.to_json() for each in found]})
    elif as_table:
        _show(found)
    else:
        if asked:
            click.echo("# Topics were looked up in the group: compare them with the options of the query.")
        for line in rights.script(found, options["bootstrap_servers"]):
            click.echo(line)


def _names(options: dict[str, Any], *, batch: bool) -> tuple[Names, bool]:
    """Returns the resources of the query, and whether some were looked up in Kafka.

    Raises:
        InvalidOptionError: if the output topic or the ``application.id`` is not known.
    """
    from kafka_eos_source.errors import InvalidOptionError
    from kafka_eos_source.operate import checkpoint as checkpoints
    from kafka_eos_source.operate import inspect as inspecting
    from kafka_eos_source.operate import rights
    from kafka_eos_source.operate.doctor.run import names_of
    from kafka_eos_source.option_values import application_id
    from kafka_eos_source.protocol.identity import anchor, group_of

    topics, stores = options["topics"], options["stores"]
    only = topics[0] if len(topics) == 1 else None
    # several topics, or none: rows name them in a column
    anchor_topic = anchor(options["anchor_topic"], only).topic if topics or batch else None
    given = {"token_topic": options["token_topic"], "dead_letter_topic": options["dead_letter_topic"]}
    target = target_of({**options, "topic": options["anchor_topic"] or only})
    asked = False
    if batch:
        own = options["application_id"] and application_id("--application-id", options["application_id"])
        names = rights.of_batch_writes(own, options["group_id"], **given)
    else:
        found = None if target.checkpoint is None else checkpoints.read_checkpoint(target.checkpoint)
        own = checkpoints.known_application_id(target.application_id, found)
        names = rights.Names(own, group_of(own, options["group_id"] or target.group_id), **given)
        if found is not None:
            read = {tp.topic for each in found.sources() for tp in each.end or ()}
            token_topic = found.identity.token_topic if found.identity is not None else None
            names = replace(names, read=read, token_topic=names.token_topic or token_topic)
        if target.kafka is not None and not (topics and stores):
            asked = True
            deadline = deadline_of(options["timeout"])
            target = replace(target, application_id=own, group_id=names.group_id)
            with open_reader(target) as reader:
                assert reader is not None, "the target names brokers"
                _, known = reader.topics(deadline)
                seen = names_of(target, inspecting.inspect(target, reader, deadline), known)
            if seen is not None:
                anchor_topic = anchor_topic or seen.anchor_topic
                topics, names = topics or seen.written, replace(names, changelogs=seen.changelogs)
    if not topics:
        raise InvalidOptionError(
            "the topics that the query writes are not known: a checkpoint does not name them.",
            fix="add --topic for each, or --bootstrap-servers, to look them up in the query's group.",
        )
    if stores:
        names = replace(names, changelogs={f"{names.application_id}-{each}-changelog" for each in stores})
    read = {*names.read, *options["source_topics"]}
    names = replace(names, read=read, written=set(topics), anchor_topic=anchor_topic)
    return replace(names, elsewhere=options["other_cluster"]), asked


def _show(found: list[Grant]) -> None:
    from kafka_eos_source.operate.view import console, table_of

    table = table_of("Least rights")
    for name in ("principal", "right", "on", "name", "for", "without it"):
        table.add_column(name)
    for each in found:
        need = each.need
        name = need.name + ("*" if need.prefixed else "")
        text = (need.purpose.replace("`", ""), need.without.replace("`", "") or "NOT_AUTHORIZED")
        on = f"{need.kind} (other cluster)" if each.elsewhere else need.kind
        table.add_row(each.principal, need.title, on, name, *text)
    console().print(table)
