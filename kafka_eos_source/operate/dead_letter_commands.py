"""``kafka-eos dead-letters list | replay``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from kafka_eos_source.operate.json_documents import print_document
from kafka_eos_source.operate.shared import (
    CONNECTION,
    console,
    deadline_of,
    kafka_of,
    table_of,
    with_options,
)
from kafka_eos_source.runtime.commands import JSON, json_text

if TYPE_CHECKING:
    from kafka_eos_source.operate.dead_letters import Filter, Letter, Summary
    from kafka_eos_source.operate.replay import Outcome, Replay

#: Letters in the table, unless the command line says otherwise.
_IN_TABLE = 50
_LONGEST_CELL = 60
_PLACE = re.compile(r"([0-9]{1,10}):([0-9]{1,19})")
_COLUMNS = ("written (UTC)", "at", "error", "message", "holds", "read from", "query", "batch")


def _moment(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """Turns a time in ISO 8601, in UTC unless it names a zone, into milliseconds since 1970."""
    if value is None:
        return None
    try:
        at = datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a time; expected one such as 2026-01-31T14:00") from None
    return round((at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp() * 1000)


def _place(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Checks the place of a letter, and returns it without leading zeros."""
    if value is None:
        return None
    found = _PLACE.fullmatch(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is no place; expected PARTITION:OFFSET, such as 0:17")
    return f"{int(found[1])}:{int(found[2])}"


_FILTERS = (
    click.option(
        "--at",
        callback=_place,
        metavar="PARTITION:OFFSET",
        help="Only the letter at this place in TOPIC, as the column 'at' of list shows it.",
    ),
    click.option(
        "--error", metavar="CLASS", help="Only letters of this error class, such as RecordTooLarge."
    ),
    click.option("--application-id", metavar="ID", help="Only letters of this query."),
    click.option("--origin-topic", metavar="TOPIC", help="Only records that were read from this topic."),
    click.option("--batch", type=click.IntRange(min=0), help="Only letters of this micro-batch."),
    click.option(
        "--holds",
        type=click.Choice(["input", "output"]),
        help="Only letters that hold a record that was read (input), or a row of the query's output.",
    ),
    click.option(
        "--since",
        "since_ms",
        callback=_moment,
        metavar="TIME",
        help="Only letters written then or later.",
    ),
    click.option(
        "--until", "until_ms", callback=_moment, metavar="TIME", help="Only letters written before."
    ),
)


@click.group("dead-letters")
def group() -> None:
    """List the records that a query could not process, and send them again.

    A query with the option onInvalidRecord=dead-letter writes them to deadLetter.topic. Times are written in
    ISO 8601, such as 2026-01-31T14:00, and are in UTC unless they name a zone.
    """


@group.command("list")
@click.argument("topic")
@with_options(*_FILTERS, *CONNECTION, JSON)
@click.option(
    "-n",
    "--letters",
    "count",
    metavar="N",
    type=click.IntRange(min=0),
    help=f"Show only the newest N letters. Default: {_IN_TABLE}; with --json, all.",
)
def list_letters(topic: str, count: int | None, as_json: bool, timeout: str, **given: Any) -> None:
    """Show the dead letters in TOPIC, and count them by error, query and contents.

    Shows only committed letters. Reads the whole topic.
    """
    from kafka_eos_source.operate import dead_letters
    from kafka_eos_source.operate.records import log_ends

    selection, deadline, kafka = _filter(given), deadline_of(timeout), kafka_of(given)
    _, logs = log_ends(kafka, topic, deadline)
    committed = {tp: (log.earliest, log.stable) for tp, log in logs.items()}
    letters = dead_letters.read_letters(kafka, committed, logs, deadline.budget_seconds)
    selected = (each for each in letters if selection.selects(each))
    if as_json:
        for each in selected if count is None else dead_letters.newest(selected, count):
            click.echo(json_text(each.to_json()))
        return
    summary = dead_letters.Summary()
    shown = dead_letters.newest(_counted(selected, summary), _IN_TABLE if count is None else count)
    _show(shown, summary, topic)


@group.command()
@click.argument("topic")
@with_options(*_FILTERS, *CONNECTION, JSON)
@click.option("--to", "output_to", metavar="TOPIC", help="Send rows of a query's output to this topic.")
@click.option(
    "--input-to",
    metavar="TOPIC",
    help="Send input records to this topic. Default: the topic from which each was read.",
)
@click.option(
    "--timestamps",
    type=click.Choice(["origin", "now"]),
    default="origin",
    show_default=True,
    help="Timestamps of the records: those with which they were read, as far as known, or the present time.",
)
@click.option(
    "--group",
    "group_id",
    metavar="ID",
    help="Consumer group that remembers what was sent. Default: named after TOPIC and the filters.",
)
@click.option(
    "--new-partitions",
    is_flag=True,
    help="Send all letters of partitions without an offset: TOPIC got them since the group's last replay.",
)
@click.option("--skip-refused", is_flag=True, help="Pass over letters that cannot be sent.")
@click.option(
    "--at-once",
    default=1000,
    show_default=True,
    type=click.IntRange(min=1),
    help="Largest number of records in a transaction.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be sent.")
def replay(
    topic: str,
    output_to: str | None,
    input_to: str | None,
    timestamps: str,
    group_id: str | None,
    new_partitions: bool,
    skip_refused: bool,
    at_once: int,
    dry_run: bool,
    as_json: bool,
    timeout: str,
    **given: Any,
) -> None:
    """Send dead letters in TOPIC again, as the records that they were.

    Each transaction commits records together with the offsets of a consumer group. So the same command sends
    each letter once, however often it is run or killed, and continues with letters that arrived since.

    A group belongs to one set of filters: letters that the filters do not select count as passed. Other
    filters have another group, and a letter that two groups select is sent twice.

    Kafka deletes the offsets of a group offsets.retention.minutes after its last replay, 7 days by default.
    After that, the same command sends all letters again. Each run renews the offsets, also one that has
    nothing to send.

    Letters of which only the beginning was kept are refused, and so are those that no topic takes: none is
    known, it does not exist, or it refuses the size, the key or the timestamp.
    """
    from kafka_eos_source.commit.micro_batch import KafkaClients
    from kafka_eos_source.operate import replay as operating
    from kafka_eos_source.operate.records import log_ends

    selection, deadline, kafka = _filter(given), deadline_of(timeout), kafka_of(given)
    topic_id, logs = log_ends(kafka, topic, deadline)
    request = operating.Replay(
        topic,
        topic_id,
        logs,
        group_id or operating.group_of(topic, selection),
        selection,
        output_to,
        input_to,
        records_at_once=at_once,
        keeps_time=timestamps == "origin",
        new_partitions=new_partitions,
    )
    operating.check_group(kafka, request, deadline)
    if dry_run:
        found = operating.preview(kafka, request, deadline)
    else:
        found = operating.run(kafka, KafkaClients, request, deadline, skip_refused=skip_refused)
    if as_json:
        print_document("dead-letters replay", found, group_id=request.group_id, sent=not dry_run)
    else:
        _show_outcome(request, found, sent=not dry_run)


def _filter(given: dict[str, Any]) -> Filter:
    """Returns the filter that the command line names, and removes its options."""
    from kafka_eos_source.operate.dead_letters import Filter

    return Filter(**{name: given.pop(name) for name in Filter.__dataclass_fields__})


def _counted(letters: Iterator[Letter], summary: Summary) -> Iterator[Letter]:
    """Yields letters as the table shows them, without their contents, and counts them."""
    for each in letters:
        summary.add(each)
        yield replace(each, record=replace(each.record, key=None, value=None, headers=()))


def _show(letters: list[Letter], summary: Summary, topic: str) -> None:
    from kafka_eos_source.observe.wording import visible
    from kafka_eos_source.operate.dead_letters import time_text

    out = console()
    of = f"the newest {len(letters):,} of " if len(letters) < summary.total else ""
    table = table_of(f"{topic}: {of}{summary.total:,} dead letters", *_COLUMNS, fold=True)
    for each in letters:
        about, record = each.about, each.record
        origin = "-" if about.origin_topic is None else about.origin_topic
        if about.origin_offset is not None:
            origin += f" {about.origin_partition}:{about.origin_offset}"
        table.add_row(
            time_text(record.timestamp_ms),
            f"{record.tp.partition}:{record.offset}",
            visible(about.error or "-"),
            _short(about.message or "-"),
            visible(about.holds or "-") + ("" if about.value_bytes is None else ", incomplete"),
            visible(origin),
            visible(about.application_id or "-"),
            "-" if about.batch is None else str(about.batch),
        )
    if letters:
        out.print(table)
    title = "" if letters else f"{topic}: {summary.total:,} dead letters"
    counts = table_of(title, ">letters", "error", "query", "holds", fold=True)
    for (error, query, holds), number in summary.counts.most_common():
        counts.add_row(f"{number:,}", *map(visible, (error, query, holds)))
    if summary.others:
        counts.add_row(f"{summary.others:,}", "others", "", "")
    out.print(counts)


def _short(text: str) -> str:
    from kafka_eos_source.observe.wording import visible

    line = visible(" ".join(text.split()))
    return line if len(line) <= _LONGEST_CELL else f"{line[: _LONGEST_CELL - 1]}…"


def _show_outcome(request: Replay, found: Outcome, *, sent: bool) -> None:
    from kafka_eos_source.operate.replay import REFUSALS

    click.echo(f"Group {request.group_id!r}:")
    if found.new_group:
        click.echo("  the group had no offsets (it is new, or they expired): it starts at the first letter")
    verb = "sent" if sent else "to send"
    for topic, number in sorted(found.sent.items()):
        click.echo(f"  {number:,} record{'s' if number != 1 else ''} {verb} to {topic!r}")
    if not found.sent:
        click.echo(f"  no records {verb}")
    for name, number in sorted(found.refused.items()):
        click.echo(f"  {number:,} {'passed over' if sent else 'refused'}, {name}: {REFUSALS[name]}")
    if found.missing_topics:
        click.echo(f"  topics that do not exist: {', '.join(map(repr, found.missing_topics))}")
    if found.unselected:
        click.echo(f"  {found.unselected:,} not selected by the filters; they count as passed")
    if found.expired:
        click.echo(f"  up to {found.expired:,} letters were deleted by retention before this group read them")
    if found.waiting:
        click.echo(f"  {found.waiting:,} offsets wait for an open transaction; run the command again later")
