"""``kafka-eos topics | produce | tail | lag``: topics, their records, and how far a group is behind them."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import click

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate.json_documents import GROUP_LAG, document, print_document
from kafka_eos_source.operate.shared import (
    CHECKPOINT,
    CONNECTION,
    INTERNAL_PREFIX,
    OPTIONAL_QUERY,
    REGISTRY,
    console,
    deadline_of,
    kafka_of,
    parse_pairs,
    registry_of,
    table_of,
    with_options,
)
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime.commands import JSON

if TYPE_CHECKING:
    from kafka_eos_source.kafka.admin import ClusterReader
    from kafka_eos_source.operate.records import TopicDescription, TopicRecord
    from kafka_eos_source.runtime.deadline import Deadline

_PAUSE_SECONDS = 0.5


@click.group()
def topics() -> None:
    """List, create and describe topics."""


@topics.command("list")
@with_options(*CONNECTION, JSON)
@click.option("--internal", is_flag=True, help="Include Kafka's own topics.")
def list_topics(internal: bool, as_json: bool, timeout: str, **given: Any) -> None:
    """List the topics and their numbers of partitions."""
    from kafka_eos_source.operate import records as operating

    found = operating.partition_counts(kafka_of(given), deadline_of(timeout), internal=internal)
    if as_json:
        listed = [{"topic": name, "partitions": count} for name, count in found.items()]
        print_document("topics list", listed)
        return
    for name, count in found.items():
        click.echo(f"{name}  {count} partition{'s' if count != 1 else ''}")


@topics.command()
@click.argument("names", metavar="TOPIC...", nargs=-1, required=True)
@with_options(*CONNECTION, JSON)
@click.option(
    "--partitions", default=1, show_default=True, type=click.IntRange(min=1), help="Number of partitions."
)
@click.option(
    "--replication-factor",
    default=-1,
    show_default=True,
    help="Number of replicas; -1 = the broker's default.",
)
@click.option("--config", multiple=True, metavar="KEY=VALUE", help="Property of the topic; may be repeated.")
def create(
    names: tuple[str, ...],
    partitions: int,
    replication_factor: int,
    config: tuple[str, ...],
    as_json: bool,
    timeout: str,
    **given: Any,
) -> None:
    """Create topics. Existing topics are left as they are."""
    from kafka_eos_source.operate import records as operating

    properties = parse_pairs(config, "--config")
    kafka = kafka_of(given)
    results = []
    for name in names:
        created = operating.create_topic(
            kafka,
            name,
            deadline_of(timeout),
            partitions=partitions,
            replication_factor=replication_factor,
            config=properties,
        )
        results.append({"topic": name, "created": created})
        if not as_json:
            click.echo(
                f"Created topic {name!r}." if created else f"Topic {name!r} exists and was left as it is."
            )
    if as_json:
        print_document("topics create", results)


@topics.command()
@click.argument("name", metavar="TOPIC")
@with_options(*CONNECTION, JSON)
def describe(name: str, as_json: bool, timeout: str, **given: Any) -> None:
    """Show a topic's partitions, transactions and properties."""
    from kafka_eos_source.operate import records as operating

    found = operating.describe_topic(kafka_of(given), name, deadline_of(timeout))
    if as_json:
        print_document("topics describe", found)
    else:
        _show_topic(found)


@click.command()
@click.argument("topic")
@click.argument("file", type=click.File(encoding="utf-8"), default="-")
@with_options(*CONNECTION, JSON)
@click.option(
    "--format",
    "written",
    type=click.Choice(["lines", "json"]),
    default="lines",
    show_default=True,
    help="lines: each line is a value. json: each line is an object with value, key, headers, partition, "
    "timestamp_ms, as `kafka-eos tail --json` prints it.",
)
@click.option("--key-separator", metavar="TEXT", help="With --format lines: text between key and value.")
@click.option(
    "--keep-partitions",
    is_flag=True,
    help="With --format json: send each record to the partition in its field 'partition'.",
)
def produce(
    topic: str,
    file: TextIO,
    written: str,
    key_separator: str | None,
    keep_partitions: bool,
    as_json: bool,
    timeout: str,
    **given: Any,
) -> None:
    """Send the lines of FILE, or of the standard input, to TOPIC.

    The producer is idempotent and not transactional: records are visible as they arrive.
    """
    from kafka_eos_source.operate import records as operating

    if written == "json" and key_separator is not None:
        raise click.UsageError(
            "--key-separator requires --format lines; in JSON, the field 'key' is the key."
        )
    if written == "json":
        batches = operating.from_json(file, keep_partitions=keep_partitions)
    else:
        batches = operating.from_lines(file, key_separator)
    sent = operating.produce(kafka_of(given), topic, batches, deadline_of(timeout))
    if as_json:
        print_document("produce", topic=topic, records=sent)
    else:
        click.echo(f"{sent:,} record{'s' if sent != 1 else ''} sent to {topic!r}.", err=True)


@click.command()
@click.argument("topic")
@with_options(*CONNECTION, JSON)
@click.option(
    "-n", "--records", default=10, show_default=True, type=click.IntRange(min=0), help="Number of records."
)
@click.option("-f", "--follow", is_flag=True, help="Wait for new records until Ctrl-C.")
@click.option(
    "--uncommitted", is_flag=True, help="Include records of open and aborted transactions, marked as such."
)
@with_options(*REGISTRY)
def tail(
    topic: str,
    records: int,
    follow: bool,
    uncommitted: bool,
    registry: str | None,
    registry_pairs: tuple[str, ...],
    as_json: bool,
    timeout: str,
    **given: Any,
) -> None:
    """Print the newest records of TOPIC.

    Prints partition, offset, time, key and value. Only committed records are shown, as a read_committed
    consumer sees them. With --registry, records with the id of a schema are decoded and shown as JSON.
    """
    from kafka_eos_source.operate import records as operating

    kafka = kafka_of(given)
    _, logs = operating.log_ends(kafka, topic, deadline_of(timeout))
    schemas = registry_of(registry, registry_pairs)
    _print(operating.newest(kafka, logs, count=records, uncommitted=uncommitted), as_json, schemas)
    if not follow:
        return
    start = {tp: log.end if uncommitted else log.stable for tp, log in logs.items()}
    pause = threading.Event()

    def wait() -> bool:
        sys.stdout.flush()
        pause.wait(_PAUSE_SECONDS)
        return True

    try:
        for record in operating.follow(kafka, start, uncommitted=uncommitted, wait=wait):
            _print([record], as_json, schemas)
    except KeyboardInterrupt:
        return


@click.command()
@OPTIONAL_QUERY
@CHECKPOINT
@click.option("--group", "group_id", metavar="ID", help="A consumer group: a query's, or any other.")
@with_options(*CONNECTION, JSON)
@click.option("--watch", is_flag=True, help="Measure again every two seconds until Ctrl-C.")
def lag(
    checkpoint: str | None,
    application_id: str | None,
    group_id: str | None,
    watch: bool,
    as_json: bool,
    timeout: str,
    **given: Any,
) -> None:
    """Show how far a query is behind its source topics.

    Name the query by QUERY (its application.id), --checkpoint or --group.
    """
    from kafka_eos_source.kafka.admin import ClusterReader
    from kafka_eos_source.kafka.config import admin_config
    from kafka_eos_source.operate.inspection import known_application_id, read_checkpoint

    if (checkpoint, application_id, group_id) == (None, None, None):
        raise click.UsageError("name the query: QUERY (its application.id), --checkpoint or --group.")
    kafka = kafka_of(given)
    found = read_checkpoint(checkpoint) if checkpoint is not None else None
    if group_id is None:
        group_id = kafka.get("group.id")
    if group_id is None:
        group_id = group_of(known_application_id(application_id, found))
    sources = [tp for each in (found.sources() if found is not None else ()) for tp in each.end or ()]
    pause = threading.Event()
    with ClusterReader(admin_config(kafka)) as cluster:
        while True:
            measured = measure_lag(cluster, group_id, deadline_of(timeout), sources=sources)
            if as_json:
                click.echo(json.dumps(document(GROUP_LAG, measured)))
            else:
                _show_lag(measured)
            if not watch:
                return
            sys.stdout.flush()
            try:
                pause.wait(2.0)
            except KeyboardInterrupt:
                return


def _print(records: list[TopicRecord], as_json: bool, registry: Mapping[str, str] | None) -> None:
    from kafka_eos_source.operate.records import decoded, record_json, record_line

    if registry is not None:
        records = decoded(records, registry)
    for record in records:
        click.echo(record_json(record) if as_json else record_line(record))


def _show_topic(found: TopicDescription) -> None:
    out = console()
    out.print(f"id {found.topic_id}, replication factor {found.replication_factor}")
    for name, value in sorted(found.config.items()):
        out.print(f"{name}={value}")
    table = table_of(f"topic {found.name}", ">partition", ">earliest", ">stable", ">end", "")
    for tp, log in sorted(found.logs.items()):
        open_since = "open transaction" if log.stable < log.end else ""
        table.add_row(str(tp.partition), str(log.earliest), str(log.stable), str(log.end), open_since)
    out.print(table)


def _show_lag(measured: GroupLag) -> None:
    out = console()
    out.print(f"group {measured.group_id}: {measured.total:,} behind")
    table = table_of("", "partition", ">committed", ">end", ">lag", "")
    for each in measured.partitions:
        table.add_row(
            str(each.tp),
            str(each.committed),
            str(each.end),
            f"{each.lag:,}",
            "open transaction" if each.is_open else "",
        )
    out.print(table)


# -- lag


@dataclass(frozen=True)
class PartitionLag:
    """How far a consumer group is behind in one partition.

    Attributes:
        tp: the partition.
        committed: next offset that the group will read.
        end: the last stable offset: what a read_committed consumer can read up to.
        is_open: whether a transaction is open in the partition, so that more records wait behind ``end``.
    """

    tp: TopicPartition
    committed: int
    end: int
    is_open: bool

    @property
    def lag(self) -> int:
        """Offsets from ``committed`` to ``end``, including control records."""
        return max(0, self.end - self.committed)


@dataclass(frozen=True)
class GroupLag:
    """The lag of a consumer group.

    Attributes:
        group_id: the group.
        at_seconds: when it was measured, in seconds since the epoch.
        partitions: of the topics that the group reads.
    """

    group_id: str
    at_seconds: float
    partitions: Sequence[PartitionLag]

    @property
    def total(self) -> int:
        return sum(each.lag for each in self.partitions)


def measure_lag(
    cluster: ClusterReader,
    group_id: str,
    deadline: Deadline,
    *,
    sources: Iterable[TopicPartition] = (),
) -> GroupLag:
    """Measures how far the committed offsets of a group are behind the topics it reads.

    Args:
        cluster: a reader of the group's cluster.
        group_id: the group of a query, or of any consumer.
        deadline: for the brokers.
        sources: partitions that the query is known to read, from its checkpoint.

    Raises:
        InvalidOptionError: the group has committed no offsets.
    """
    offsets, _ = cluster.group(group_id, (), deadline)
    if not offsets:
        raise InvalidOptionError(
            f"consumer group {group_id!r} has no committed offsets.",
            fix="check the name; the group of a query is 'kafka-eos.' and its application.id, unless "
            "kafka.group.id is set.",
        )
    read = {tp: offsets[tp].offset for tp in source_partitions(offsets.values(), sources)}
    _, known = cluster.topics(deadline)
    read = {tp: at for tp, at in read.items() if tp.partition < known.get(tp.topic, 0)}
    bounds = cluster.logs(list(read)) if read else {}
    return GroupLag(
        group_id,
        time.time(),
        [
            PartitionLag(tp, read[tp], bounds[tp].stable, bounds[tp].stable < bounds[tp].end)
            for tp in sorted(read)
        ],
    )


def source_partitions(
    offsets: Collection[GroupOffset], known: Iterable[TopicPartition] = ()
) -> set[TopicPartition]:
    """Returns the partitions that a group reads.

    The group of a query also holds offsets that are no positions of a reader: those of changelog
    partitions, and that of the anchor partition, which is the batch id. The anchor and one source partition
    carry the full token; the other source partitions carry marks.

    Args:
        offsets: all committed offsets of the group.
        known: partitions that the query is known to read, from its checkpoint.
    """
    from kafka_eos_source.protocol.token import Mark, Token

    found = set(known)
    full_tokens = []
    for each in offsets:
        token = Token.decode(each.metadata)
        if token is None and (Mark.decode(each.metadata) or not each.tp.topic.startswith(INTERNAL_PREFIX)):
            found.add(each.tp)
        elif token is not None and token.shard is None:
            full_tokens.append((each, token))
    topics = {tp.topic for tp in found}
    for each, token in full_tokens:
        if each.tp.topic in topics or each.offset != max(0, token.batch_id):
            found.add(each.tp)
    return found & {each.tp for each in offsets}
