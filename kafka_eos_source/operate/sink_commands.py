"""The commands ``kafka-eos sinks list``, ``commit`` and ``abort``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kafka_eos_source.operate.exit_codes import ExitCode
from kafka_eos_source.operate.shared_options import (
    YES,
    deadline_of,
    with_options,
)
from kafka_eos_source.runtime.commands import JSON, print_json

if TYPE_CHECKING:
    from kafka_eos_source.sinks.contract import SinkTxn

_QUERY = (
    click.option(
        "--options",
        "file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        required=True,
        help="File with the options of the query's sink, one name=value per line: kafka.…, sinks, sink.…, "
        "checkpointLocation, application.id.",
    ),
    click.option(
        "--timeout",
        metavar="DURATION",
        default="30s",
        show_default=True,
        help="How long to wait for answers from Kafka and from the sinks.",
    ),
)
_TRANSACTION = (
    click.option(
        "--sink", "name", metavar="NAME", required=True, help="Name of the sink in the option sinks."
    ),
    click.option("--id", "text", metavar="ID", required=True, help="Id, as `sinks list` shows it."),
)


@click.group()
def sinks() -> None:
    """Resolve prepared batches of sinks outside Kafka.

    These sinks first prepare a batch, and commit it after Kafka has committed. For SINK_UNFINISHED
    and SINK_UNDECIDED, see docs/runbooks.md.
    """


@sinks.command("list")
@with_options(*_QUERY, JSON)
@click.pass_context
def list_(ctx: click.Context, /, file: Path, as_json: bool, timeout: str) -> None:
    """List prepared batches and how the next start resolves each.

    Only batches of this application.id on this Kafka cluster are listed. Prepared means: neither
    committed nor aborted in the sink. While the query runs, the list includes the batch in progress.

    Exit code: 0 = the next start resolves all of them; 3 = a person must decide at least one.
    """
    from kafka_eos_source.operate import sinks as operating

    deadline = deadline_of(timeout)
    query = operating.parse_query(file.read_text(encoding="utf-8"))
    kafka = operating.read_kafka(query, deadline)
    prepared = operating.list_prepared(query, kafka, deadline)
    if as_json:
        print_json(
            [
                {
                    "sink": each.sink,
                    "id": str(each.txn),
                    "application_id": query.application_id,
                    "cluster_id": kafka.cluster_id,
                    "fate": each.fate.value,
                    "needs_a_person": each.needs_a_person,
                }
                for each in prepared
            ]
        )
    owner = f"application.id={query.application_id!r} on the Kafka cluster {kafka.cluster_id!r}"
    if prepared and not as_json:
        click.echo(f"Prepared by {owner}:")
    for each in () if as_json else prepared:
        text = (
            "no token decides its fate: run `sinks commit` or `sinks abort`"
            if each.needs_a_person
            else f"the next start of the query will {each.fate.value} it"
        )
        click.echo(f"{each.sink}\t{each.txn}\t{text}")
    if not prepared and not as_json:
        click.echo(f"The sinks hold no batch that was prepared by {owner}.")
    if any(each.needs_a_person for each in prepared):
        ctx.exit(ExitCode.NEEDS_A_PERSON)


@sinks.command()
@with_options(*_QUERY, *_TRANSACTION, YES, JSON)
def commit(file: Path, timeout: str, name: str, text: str, yes: bool, as_json: bool) -> None:
    """Commit a prepared batch whose token is lost.

    Use it if the batch is in Kafka's output. Refused if Kafka holds a token that decides the batch's fate,
    and for a batch of another application.id or Kafka cluster. Without --yes, it only checks this.
    """
    _resolve(file, timeout, name, text, yes=yes, as_json=as_json, commit=True)


@sinks.command()
@with_options(*_QUERY, *_TRANSACTION, YES, JSON)
def abort(file: Path, timeout: str, name: str, text: str, yes: bool, as_json: bool) -> None:
    """Abort a prepared batch whose token is lost.

    Use it if the batch is not in Kafka's output. Refused if Kafka holds a token that decides its fate,
    and for a batch of another application.id or Kafka cluster. Without --yes, it only checks this.
    """
    _resolve(file, timeout, name, text, yes=yes, as_json=as_json, commit=False)


def _resolve(
    file: Path, timeout: str, name: str, text: str, *, yes: bool, as_json: bool, commit: bool
) -> None:
    from kafka_eos_source.operate import sinks as operating

    txn = _parse_id(text)
    deadline = deadline_of(timeout)
    query = operating.parse_query(file.read_text(encoding="utf-8"))
    kafka = operating.read_kafka(query, deadline)
    operating.resolve(query, kafka, name, txn, deadline, commit=commit, only_check=not yes)
    batch = f"{txn} of application.id={query.application_id!r} on the Kafka cluster {kafka.cluster_id!r}"
    if as_json:
        print_json(
            {
                "sink": name,
                "id": str(txn),
                "application_id": query.application_id,
                "cluster_id": kafka.cluster_id,
                "action": "commit" if commit else "abort",
                "done": yes,
            }
        )
    elif yes:
        click.echo(f"Sink {name!r} has {'committed' if commit else 'aborted'} {batch}.")
    else:
        verb = "commits" if commit else "aborts"
        click.echo(f"With --yes: sink {name!r} {verb} {batch}. This cannot be undone.")


def _parse_id(text: str) -> SinkTxn:
    from kafka_eos_source.sinks.contract import SinkTxn

    txn = SinkTxn.parse(text)
    if txn is None:
        raise click.BadParameter(
            f"{text!r} is not an id; expected <application.id>-<cluster>-<sink>-<sequence>-<attempt>",
            param_hint="--id",
        )
    return txn
