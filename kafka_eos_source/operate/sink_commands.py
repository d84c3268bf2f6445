"""``kafka-eos sinks``: what systems outside Kafka hold prepared, and a person's word on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kafka_eos_source.operate.given import YES, deadline_of, with_options

if TYPE_CHECKING:
    from kafka_eos_source.sinks.contract import SinkTxn

_GIVEN = (
    click.option(
        "--options",
        "file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        required=True,
        help="A file with the options of the query's sink, name=value a line: kafka.…, sinks, sink.…, "
        "checkpointLocation, application.id.",
    ),
    click.option("--timeout", default="30s", show_default=True, help="For the answers."),
)
_WHICH = (
    click.option("--sink", "name", metavar="NAME", required=True, help="As the option sinks has it."),
    click.option("--id", "text", metavar="ID", required=True, help="As `sinks list` shows it."),
)

#: What `list` exits with when a person must say what becomes of something.
NEEDS_A_PERSON = 3


@click.group()
def sinks() -> None:
    """Batches that systems outside Kafka hold prepared: SINK_UNDECIDED, SINK_UNFINISHED."""


@sinks.command("list")
@with_options(*_GIVEN)
@click.pass_context
def list_(ctx: click.Context, /, file: Path, timeout: str) -> None:
    """What is prepared, neither committed nor aborted, and what a start of the query makes of it.

    Of a query that runs, its batch of this moment is among them. Exit code 3 = a person must say.
    """
    from kafka_eos_source.operate import sinks as operating

    deadline = deadline_of(timeout)
    which = operating.query(file.read_text(encoding="utf-8"))
    found = operating.held(which, operating.kafka_of(which, deadline), deadline)
    for each in found:
        says = {"?": "no token: say `sinks commit` or `sinks abort`"}.get(
            each.becomes, f"a start: {each.becomes}"
        )
        click.echo(f"{each.sink}\t{each.txn}\t{says}")
    if not found:
        click.echo("Nothing is held.")
    if any(each.becomes == "?" for each in found):
        ctx.exit(NEEDS_A_PERSON)


@sinks.command()
@with_options(*_GIVEN, *_WHICH, YES)
def commit(file: Path, timeout: str, name: str, text: str, yes: bool) -> None:
    """The batch is in Kafka's output: lets a sink commit it. Refused where the token tells."""
    _end(file, timeout, name, text, yes, commit=True)


@sinks.command()
@with_options(*_GIVEN, *_WHICH, YES)
def abort(file: Path, timeout: str, name: str, text: str, yes: bool) -> None:
    """The batch is not in Kafka's output: lets a sink take it back. Refused where the token tells."""
    _end(file, timeout, name, text, yes, commit=False)


def _end(file: Path, timeout: str, name: str, text: str, yes: bool, *, commit: bool) -> None:
    from kafka_eos_source.operate import sinks as operating

    txn = _txn(text)
    what = "committed" if commit else "aborted"
    if not yes:
        click.echo(f"With --yes: {txn} in {name!r} is {what}, which nothing undoes.")
        return
    deadline = deadline_of(timeout)
    which = operating.query(file.read_text(encoding="utf-8"))
    operating.end(which, operating.kafka_of(which, deadline), name, txn, deadline, commit=commit)
    click.echo(f"{txn} in {name!r} is {what}.")


def _txn(text: str) -> SinkTxn:
    from kafka_eos_source.sinks.contract import SinkTxn

    found = SinkTxn.parse(text)
    if found is None:
        raise click.BadParameter(
            f"{text!r}; expected <application.id>-<sink>-<sequence>-<attempt>", param_hint="--id"
        )
    return found
