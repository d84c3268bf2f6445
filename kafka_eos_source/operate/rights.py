"""The least rights of each part of a query: one table for ``kafka-eos acls``, ``doctor`` and the docs.

A test with a real broker takes each right of a query away, and of most commands, and expects the error that
names it. The rights of commands that change much follow from the requests that they send.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.operate.json_documents import print_document
from kafka_eos_source.operate.shared import (
    CHECKPOINT,
    CONNECTION,
    DEAD_LETTER_TOPIC,
    INTERNAL_PREFIX,
    OPTIONAL_QUERY,
    REPLAY_PREFIX,
    SOURCE_TOPICS,
    TOKEN_TOPIC,
    Target,
    console,
    deadline_of,
    open_reader,
    table_of,
    target_of,
    with_options,
)
from kafka_eos_source.protocol.identity import ONE_WRITE_NAMES, anchor, group_of
from kafka_eos_source.runtime.commands import JSON

if TYPE_CHECKING:
    from kafka_eos_source.operate.inspection import Inspection

#: The parts of a query, each of which may log in as a principal of its own.
QUERY = ("source", "sink", "operator")
#: Batch writes need the rights of the sink, and these.
BATCH = "batch write"
#: What else may need rights: commands of ``kafka-eos`` that a person runs.
COMMANDS = (
    *("inspect", "fence", "adopt", "tail", "topics create", "topics describe"),
    *("dead-letters list", "dead-letters replay", "sinks list"),
    *("state restore", "state rescale", "state lower-time"),
    *("token-topic show", "token-topic forget", "token-topic restore"),
)


class Right(NamedTuple):
    """One row of the table.

    Attributes:
        part: who needs it: one of `QUERY`, `BATCH` or `COMMANDS`.
        resource: a key of `RESOURCES`.
        operation: Kafka's name of the operation, such as ``READ``.
        purpose: what it is for.
        without: what happens without it; "" = the part ends with ``NOT_AUTHORIZED``.
    """

    part: str
    resource: str
    operation: str
    purpose: str
    without: str = ""


#: The resources of the table: Kafka's kind of resource, and its name for the documentation.
RESOURCES = {
    "read": ("topic", "topics read"),
    "committed": ("topic", "topics read on the same cluster"),
    "written": ("topic", "topics written"),
    "limited": ("topic", "topics written, and `deadLetter.topic` if it is set"),
    "anchor": ("topic", "`anchor.topic`, else `topic`"),
    "token": ("topic", "`token.topic`"),
    "dead": ("topic", "`deadLetter.topic`"),
    "changelog": ("topic", "changelogs"),
    "copy": ("topic", "changelogs with `-rescale` after their names"),
    "id": ("transactional id", "transactional id"),
    "group": ("group", "group"),
    "replay id": ("transactional id", "ids that begin with `kafka-eos-replay-` and `deadLetter.topic`"),
    "replay group": ("group", "groups that begin with `kafka-eos-replay-` and `deadLetter.topic`"),
    "cluster": ("cluster", "the cluster"),
}

TABLE = (
    Right("source", "read", "READ", "planning and reading; the source joins no group"),
    Right(
        "source",
        "group",
        "DESCRIBE",
        "finding out where a group stands",
        "no `startingOffsets=group`, no `onRolledBackCheckpoint=jump`, and after a restart an idle stream "
        "does not know which timers are due",
    ),
    Right(
        "source",
        "cluster",
        "DESCRIBE_CONFIGS",
        "looking up `offsets.retention.minutes`",
        "four hours are assumed",
    ),
    Right("sink", "id", "WRITE", "the transactions"),
    Right("sink", "group", "READ", "token and source offsets, and a look at the members"),
    Right("sink", "written", "WRITE", "the records"),
    Right("sink", "committed", "READ", "committing the source offsets"),
    Right("sink", "anchor", "READ", "committing the token, which is an offset of partition 0"),
    Right("sink", "token", "WRITE", "the record of the token"),
    Right("sink", "token", "READ", "finding the newest record on each start"),
    Right("sink", "token", "DESCRIBE_CONFIGS", "looking up whether it is compacted", "the sink only warns"),
    Right("sink", "dead", "WRITE", "dead letters"),
    Right(
        "sink",
        "limited",
        "DESCRIBE_CONFIGS",
        "looking up `max.message.bytes`, with `onInvalidRecord=dead-letter`",
        "a record that is too large fails its batch",
    ),
    Right("sink", "changelog", "WRITE", "the changes of the state"),
    Right("sink", "changelog", "READ", "committing how far the state is complete"),
    Right(
        "operator", "changelog", "CREATE", "creating them, unless you do: compacted, one partition per shard"
    ),
    Right("operator", "changelog", "DESCRIBE_CONFIGS", "looking up how long it keeps deletes"),
    Right("operator", "changelog", "READ", "restoring a shard"),
    Right("operator", "group", "DESCRIBE", "finding out which batch the changelog holds"),
    Right("operator", "id", "WRITE", "ending the transaction of a driver that died in it"),
    Right(BATCH, "group", "DELETE", "removing the group of the write", "the group expires"),
    Right("inspect", "group", "DESCRIBE", "the token and the offsets"),
    Right("inspect", "anchor", "DESCRIBE", "the offset that carries the token"),
    Right("inspect", "committed", "DESCRIBE", "the offsets of the sources, and where the logs end"),
    Right("inspect", "token", "READ", "the record of the token"),
    Right("fence", "id", "WRITE", "fencing producers, and aborting their transaction"),
    Right("fence", "group", "DESCRIBE", "the token"),
    Right("adopt", "id", "WRITE", "the transaction"),
    Right("adopt", "group", "READ", "the token and the offsets"),
    Right("adopt", "committed", "READ", "committing the source offsets"),
    Right("adopt", "anchor", "READ", "committing the token"),
    Right("adopt", "token", "WRITE", "the record of the token"),
    Right("adopt", "token", "READ", "its newest record"),
    Right("tail", "written", "READ", "the records"),
    Right("topics create", "written", "CREATE", "creating them"),
    Right("topics create", "written", "DESCRIBE", "finding out whether they exist and have leaders"),
    Right("topics describe", "written", "DESCRIBE", "the partitions and their logs"),
    Right("topics describe", "written", "DESCRIBE_CONFIGS", "their properties"),
    Right("dead-letters list", "dead", "READ", "the letters"),
    Right("dead-letters replay", "dead", "READ", "the letters, and committing how far they were sent"),
    Right(
        "dead-letters replay",
        "committed",
        "WRITE",
        "sending input records to where they were read; the same for the topics of `--to` and `--input-to`",
    ),
    Right("dead-letters replay", "committed", "DESCRIBE_CONFIGS", "finding out which records they take"),
    Right("dead-letters replay", "replay id", "WRITE", "the transactions"),
    Right("dead-letters replay", "replay group", "READ", "how far the letters were sent"),
    Right("sinks list", "group", "DESCRIBE", "the token; also `sinks commit` and `sinks abort`"),
    Right("sinks list", "anchor", "DESCRIBE", "the offset that carries the token"),
    Right("sinks list", "committed", "DESCRIBE", "the offsets of the sources, and where the logs end"),
    Right("sinks list", "token", "READ", "the record of the token"),
    Right("state restore", "changelog", "READ", "the state; also `state get` and `state verify`"),
    Right("state restore", "changelog", "DESCRIBE_CONFIGS", "how long it keeps deletes"),
    Right("state restore", "group", "DESCRIBE", "how far the state is complete"),
    Right("state rescale", "id", "WRITE", "the transactions"),
    Right("state rescale", "group", "READ", "the tokens, and committing how far the state is moved"),
    *(
        Right("state rescale", topic, operation, purpose)
        for topic in ("changelog", "copy")
        for operation, purpose in (
            ("CREATE", "creating them with the new number of partitions"),
            ("DELETE", "deleting them before that, and the copies at the end"),
            ("DESCRIBE_CONFIGS", "the properties with which the others are created"),
            ("READ", "the state, and committing offsets"),
            ("WRITE", "the state"),
        )
    ),
    Right("state lower-time", "id", "WRITE", "the transaction"),
    Right("state lower-time", "group", "READ", "the tokens of the shards"),
    Right("state lower-time", "changelog", "READ", "committing the tokens"),
    Right("token-topic show", "token", "READ", "the records; also `token-topic describe`"),
    Right("token-topic forget", "token", "READ", "the record"),
    Right("token-topic forget", "token", "WRITE", "deleting it"),
    Right("token-topic restore", "token", "READ", "the record"),
    Right("token-topic restore", "id", "WRITE", "the transaction"),
    Right("token-topic restore", "group", "READ", "finding out what it has lost"),
    Right("token-topic restore", "committed", "READ", "committing the source offsets"),
    Right("token-topic restore", "anchor", "READ", "committing the token"),
    Right("token-topic restore", "changelog", "READ", "committing how far the state is complete"),
)

#: Operations that contain another one, as Kafka's authorizer sees it.
_CONTAINED = {"DESCRIBE": {"READ", "WRITE", "DELETE", "ALTER"}, "DESCRIBE_CONFIGS": {"ALTER_CONFIGS"}}
_FLAGS = {"topic": "--topic", "group": "--group", "transactional id": "--transactional-id"}


@dataclass(frozen=True)
class Names:
    """The resources that a query uses.

    Attributes:
        application_id: the transactional id.
        group_id: the consumer group.
        read: topics that it reads.
        written: output topics.
        anchor_topic: topic whose partition 0 carries the token; None = not known.
        token_topic: the option ``token.topic``; None = not set.
        changelogs: changelog topics of its stateful operators.
        dead_letter_topic: the option ``deadLetter.topic``; None = not set.
        elsewhere: whether the topics read are on another cluster, so that the sink commits no such offsets.
        prefixes: whether id and group are prefixes of the names that batch writes generate.
    """

    application_id: str
    group_id: str
    read: Collection[str] = ()
    written: Collection[str] = ()
    anchor_topic: str | None = None
    token_topic: str | None = None
    changelogs: Collection[str] = ()
    dead_letter_topic: str | None = None
    elsewhere: bool = False
    prefixes: bool = False

    @property
    def topics(self) -> set[str]:
        """All topics on the sink's cluster."""
        read = () if self.elsewhere else self.read
        some = (self.anchor_topic, self.token_topic, self.dead_letter_topic)
        return {*read, *self.written, *self.changelogs, *(each for each in some if each is not None)}

    def of(self, resource: str) -> Collection[str]:
        """Returns the names that a resource of the table stands for; there may be none."""
        single = {
            "anchor": self.anchor_topic,
            "token": self.token_topic,
            "dead": self.dead_letter_topic,
            "id": self.application_id,
            "group": self.group_id,
            "cluster": "kafka-cluster",
        }
        if resource.startswith("replay"):
            return () if self.dead_letter_topic is None else (f"{REPLAY_PREFIX}{self.dead_letter_topic}",)
        if resource in single:
            name = single[resource]
            return () if name is None else (name,)
        return {
            "read": self.read,
            "committed": () if self.elsewhere else self.read,
            "written": self.written,
            "limited": () if self.dead_letter_topic is None else {*self.written, self.dead_letter_topic},
            "changelog": self.changelogs,
            "copy": [f"{each}-rescale" for each in self.changelogs],
        }[resource]


def of_batch_writes(application_id: str | None, group_id: str | None, **topics: Any) -> Names:
    """Returns the resources of batch writes, which generate their names without an ``application.id``."""
    own = application_id or ONE_WRITE_NAMES
    return Names(own, group_of(own, group_id), prefixes=application_id is None, **topics)


@dataclass(frozen=True, order=True)
class Need:
    """A right that a part of a query needs.

    Attributes:
        kind: ``topic``, ``group``, ``transactional id`` or ``cluster``.
        name: name of the resource.
        operation: Kafka's name of the operation, such as ``READ``.
        without: what happens without it; "" = the part ends with ``NOT_AUTHORIZED``.
        purpose: what the query needs it for.
        prefixed: whether ``name`` is a prefix of the names meant.
        part: who needs it.
    """

    kind: str
    name: str
    operation: str
    without: str
    purpose: str
    prefixed: bool = False
    part: str = ""

    @property
    def title(self) -> str:
        """The operation as Kafka's tools write it."""
        return title(self.operation)


def title(operation: str) -> str:
    """Returns an operation as Kafka's tools write it, such as ``DescribeConfigs``."""
    return operation.replace("_", " ").title().replace(" ", "")


def needs(names: Names, parts: Collection[str]) -> list[Need]:
    """Returns the rights that these parts of a query need together, each once.

    A right that another one contains is left out: whoever may read a topic may describe it.
    """
    found: dict[tuple[str, str, str], Need] = {}
    for each in TABLE:
        if each.part not in parts or (each.part == "operator" and not names.changelogs):
            continue
        kind = RESOURCES[each.resource][0]
        for name in sorted(names.of(each.resource)):
            prefixed = each.resource.startswith("replay") or (
                names.prefixes and kind in ("group", "transactional id")
            )
            need = Need(kind, name, each.operation, each.without, each.purpose, prefixed, each.part)
            kept = found.setdefault((kind, name, each.operation), need)
            if kept.without and not need.without:
                found[kind, name, each.operation] = need
    return [each for each in found.values() if not _is_contained(each, found)]


def _is_contained(need: Need, found: Mapping[tuple[str, str, str], Need]) -> bool:
    larger = (found.get((need.kind, need.name, each)) for each in _CONTAINED.get(need.operation, ()))
    return any(each is not None and not each.without for each in larger)


def arguments(need: Need, *more: str) -> str:
    """Returns the arguments with which ``kafka-acls.sh`` names a right.

    Args:
        need: the right.
        more: operations on the same resource.
    """
    operations = " ".join(f"--operation {title(each)}" for each in (need.operation, *more))
    where = "--cluster" if need.kind == "cluster" else f"{_FLAGS[need.kind]} {shlex.quote(need.name)}"
    return f"{operations} {where}" + (" --resource-pattern-type prefixed" if need.prefixed else "")


@dataclass(frozen=True)
class Grant:
    """A right and who gets it.

    Attributes:
        principal: such as ``User:sink``.
        need: the right.
        elsewhere: whether it is a right on the cluster of the topics read, which is not the sink's.
    """

    principal: str
    need: Need
    elsewhere: bool = False


def grants(names: Names, principals: Mapping[str, str]) -> list[Grant]:
    """Returns what each principal needs.

    Args:
        names: the query's resources.
        principals: who each part logs in as, by part. Parts may share a principal.

    Raises:
        InvalidOptionError: if a name or a principal would grant more than it says.
    """
    for each in (names.application_id, names.group_id, *names.topics, *names.read):
        if each == "*" or not each.isprintable():
            raise InvalidOptionError(
                f"no least rights for the name {each!r}: in an ACL, '*' stands for every resource, and "
                "control characters hide what a command does.",
                fix="give the topic, the group or the application.id another name.",
            )
    for each in principals.values():
        kind, separator, name = each.partition(":")
        if not (kind and separator and name and each.isprintable()) or name == "*":
            raise InvalidOptionError(
                f"{each!r} is no principal; expected a type and a name such as User:sink, and not everybody.",
                fix="use the name that the broker's log shows for the login.",
            )
    by_principal: dict[tuple[str, bool], list[str]] = {}
    for part, principal in principals.items():
        by_principal.setdefault((principal, names.elsewhere and part == "source"), []).append(part)
    return [
        Grant(who, each, elsewhere)
        for (who, elsewhere), parts in by_principal.items()
        for each in needs(names, parts)
    ]


def script(found: Sequence[Grant], brokers: str | None) -> Iterator[str]:
    """Yields a shell script that grants these rights with Kafka's own tool; optional ones are comments in it.

    Args:
        found: the grants.
        brokers: addresses of the sink's brokers; None = a variable of the shell.
    """
    servers = {True: '"$SOURCE_BROKERS"', False: '"$BROKERS"' if brokers is None else shlex.quote(brokers)}
    together: dict[tuple[str, bool, str, str, str], list[Need]] = {}
    for each in found:
        key = (each.principal, each.elsewhere, each.need.kind, each.need.name, each.need.without)
        together.setdefault(key, []).append(each.need)
    for (principal, elsewhere, _, _, without), (first, *others) in together.items():
        tool = (
            f"kafka-acls.sh --bootstrap-server {servers[elsewhere]} --command-config admin.properties --add"
        )
        line = f"{tool} --allow-principal {shlex.quote(principal)} "
        line += arguments(first, *(each.operation for each in others))
        if without:
            yield f"# optional, for {first.purpose}; without it: {without}".replace("`", "")
        yield f"# {line}" if without else line


def documented() -> str:
    """Returns the table for docs/security.md; ``python -m`` with this module prints it."""
    rows = ["| who | right | on | for |", "|---|---|---|---|"]
    for each in TABLE:
        last = f" Without it: {each.without}." if each.without else ""
        on = RESOURCES[each.resource][1]
        rows.append(f"| {each.part} | {title(each.operation)} | {on} | {each.purpose}.{last} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(documented(), end="")


def names_of(
    target: Target,
    inspection: Inspection | None,
    topics: Mapping[str, int],
    source_topics: Collection[str] = (),
    token_topic: str | None = None,
    dead_letter_topic: str | None = None,
) -> Names | None:
    """Returns the resources of a query, as far as its options, its checkpoint and its group name them.

    Args:
        target: the query.
        inspection: its state; None = not known.
        topics: number of partitions of each topic on the cluster.
        source_topics, token_topic, dead_letter_topic: what the query's options name, if it is known.

    Returns:
        None if the ``application.id`` is not known.
    """
    from kafka_eos_source.operate.stores import stores_of

    application_id = inspection.application_id if inspection is not None else target.application_id
    if application_id is None:
        return None
    checkpoint = inspection.checkpoint if inspection is not None else None
    held = inspection.kafka if inspection is not None else None
    in_group = {tp.topic for tp in (held.offsets if held is not None else ())}
    # The name alone may also be that of a store of another query, whose id begins with this one. Each batch
    # commits offsets of all its changelogs, so only a query without a batch has others than its group.
    changelogs = set(stores_of(application_id, topics).values())
    changelogs = changelogs & in_group if in_group else changelogs
    read = {*source_topics, *(tp.topic for tp in (held.own.ends if held is not None else ()))}
    # the group has offsets of the topics read, of changelogs, and of the anchor topic
    known = in_group - read - changelogs
    anchors = {each for each in known if not each.startswith(INTERNAL_PREFIX)}
    anchor = target.anchor_topic or (anchors.pop() if len(anchors) == 1 else None)
    first = checkpoint.identity if checkpoint is not None else None
    return Names(
        application_id,
        group_of(application_id, target.group_id),
        read=read,
        written={anchor} if anchor is not None else set(),
        anchor_topic=anchor,
        token_topic=token_topic or (None if first is None else first.token_topic),
        changelogs=changelogs,
        dead_letter_topic=dead_letter_topic,
    )


# -- kafka-eos acls


@click.command()
@OPTIONAL_QUERY
@CHECKPOINT
@click.option("--group", "group_id", metavar="ID", help="The query's option kafka.group.id.")
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

    The names come from QUERY (an application.id), the checkpoint and the options. With --bootstrap-servers,
    --kafka-properties or the variable KAFKA_EOS_BOOTSTRAP_SERVERS, the command looks up in the query's group
    what they do not say: the output topic and the changelogs. Changes nothing. Optional rights are printed as
    comments.
    """
    names, asked = _names(options, batch=batch)
    query = {
        "source": source_principal,
        "sink": sink_principal,
        "operator": operator_principal or sink_principal,
    }
    principals = {"sink": sink_principal, BATCH: sink_principal} if batch else query
    found = grants(names, {**principals, **dict.fromkeys(commands, command_principal)})
    if as_json:
        print_document("acls", looked_up=asked, rights=found)
    elif as_table:
        _show(found)
    else:
        if asked:
            click.echo("# Topics were looked up in the group: compare them with the options of the query.")
        for line in script(found, options["bootstrap_servers"]):
            click.echo(line)


def _names(options: dict[str, Any], *, batch: bool) -> tuple[Names, bool]:
    """Returns the resources of the query, and whether some were looked up in Kafka.

    Raises:
        InvalidOptionError: if the output topic or the ``application.id`` is not known.
    """
    from kafka_eos_source.operate.inspection import inspect, known_application_id, read_checkpoint
    from kafka_eos_source.option_values import application_id

    topics, stores = options["topics"], options["stores"]
    only = topics[0] if len(topics) == 1 else None
    # several topics, or none: rows name them in a column
    anchor_topic = anchor(options["anchor_topic"], only).topic if topics or batch else None
    given = {"token_topic": options["token_topic"], "dead_letter_topic": options["dead_letter_topic"]}
    target = target_of({**options, "topic": options["anchor_topic"] or only}, needs_kafka=False)
    asked = False
    if batch:
        own = options["application_id"] and application_id("QUERY", options["application_id"])
        names = of_batch_writes(own, options["group_id"], **given)
    else:
        found = None if target.checkpoint is None else read_checkpoint(target.checkpoint)
        own = known_application_id(target.application_id, found)
        names = Names(own, group_of(own, options["group_id"] or target.group_id), **given)
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
                seen = names_of(target, inspect(target, reader, deadline), known)
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
    table = table_of("Least rights", "principal", "right", "on", "name", "for", "without it")
    for each in found:
        need = each.need
        name = need.name + ("*" if need.prefixed else "")
        text = (need.purpose.replace("`", ""), need.without.replace("`", "") or "NOT_AUTHORIZED")
        on = f"{need.kind} (other cluster)" if each.elsewhere else need.kind
        table.add_row(each.principal, need.title, on, name, *text)
    console().print(table)
