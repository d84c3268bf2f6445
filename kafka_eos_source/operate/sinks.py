"""``kafka-eos sinks list | commit | abort``: the prepared batches of sinks outside Kafka."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kafka_eos_source.errors import InvalidOptionError, OperatorError, SinkFailedError
from kafka_eos_source.operate.json_documents import print_document
from kafka_eos_source.operate.shared import (
    YES,
    ExitCode,
    Target,
    deadline_of,
    java_properties,
    open_reader,
    target_from_options,
    with_options,
)
from kafka_eos_source.runtime.commands import JSON

if TYPE_CHECKING:
    from kafka_eos_source.commit.two_phase import Fate
    from kafka_eos_source.operate.inspection import KafkaView
    from kafka_eos_source.options.checked import WriteOptions
    from kafka_eos_source.runtime.deadline import Deadline
    from kafka_eos_source.sinks.contract import SinkTxn, TwoPhaseSink

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
#: The id of a prepared batch, as `sinks list` shows it. It contains the name of the sink.
_TRANSACTION = click.argument("text", metavar="ID")


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
    deadline = deadline_of(timeout)
    query = parse_query(file.read_text(encoding="utf-8"))
    kafka = read_kafka(query, deadline)
    prepared = list_prepared(query, kafka, deadline)
    if as_json:
        print_document(
            "sinks list",
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
            ],
        )
    else:
        owner = f"application.id={query.application_id!r} on the Kafka cluster {kafka.cluster_id!r}"
        none = f"The sinks hold no batch that was prepared by {owner}."
        click.echo(f"Prepared by {owner}:" if prepared else none)
        for each in prepared:
            text = (
                "no token decides its fate: run `sinks commit` or `sinks abort`"
                if each.needs_a_person
                else f"the next start of the query will {each.fate.value} it"
            )
            click.echo(f"{each.sink}\t{each.txn}\t{text}")
    if any(each.needs_a_person for each in prepared):
        ctx.exit(ExitCode.NEEDS_A_PERSON)


@sinks.command()
@with_options(_TRANSACTION, *_QUERY, YES, JSON)
def commit(file: Path, timeout: str, text: str, yes: bool, as_json: bool) -> None:
    """Commit a prepared batch whose token is lost.

    ID is what `sinks list` shows. Use it if the batch is in Kafka's output. Refused if Kafka holds a token
    that decides the batch's fate, and for a batch of another application.id or Kafka cluster. Without --yes,
    it only checks this.
    """
    _resolve(file, timeout, text, yes=yes, as_json=as_json, commit=True)


@sinks.command()
@with_options(_TRANSACTION, *_QUERY, YES, JSON)
def abort(file: Path, timeout: str, text: str, yes: bool, as_json: bool) -> None:
    """Abort a prepared batch whose token is lost.

    ID is what `sinks list` shows. Use it if the batch is not in Kafka's output. Refused if Kafka holds a
    token that decides its fate, and for a batch of another application.id or Kafka cluster. Without --yes, it
    only checks this.
    """
    _resolve(file, timeout, text, yes=yes, as_json=as_json, commit=False)


def _resolve(file: Path, timeout: str, text: str, *, yes: bool, as_json: bool, commit: bool) -> None:
    txn = _parse_id(text)
    deadline = deadline_of(timeout)
    query = parse_query(file.read_text(encoding="utf-8"))
    kafka = read_kafka(query, deadline)
    resolve(query, kafka, txn.sink, txn, deadline, commit=commit, only_check=not yes)
    batch = f"{txn} of application.id={query.application_id!r} on the Kafka cluster {kafka.cluster_id!r}"
    if as_json:
        action = "commit" if commit else "abort"
        print_document(
            f"sinks {action}",
            sink=txn.sink,
            id=str(txn),
            application_id=query.application_id,
            cluster_id=kafka.cluster_id,
            action=action,
            done=yes,
        )
    elif yes:
        click.echo(f"Sink {txn.sink!r} has {'committed' if commit else 'aborted'} {batch}.")
    else:
        verb = "commits" if commit else "aborts"
        click.echo(f"With --yes: sink {txn.sink!r} {verb} {batch}. This cannot be undone.")


def _parse_id(text: str) -> SinkTxn:
    from kafka_eos_source.sinks.contract import SinkTxn

    txn = SinkTxn.parse(text)
    if txn is None:
        raise click.BadParameter(
            f"{text!r} is not an id; expected <application.id>-<cluster>-<sink>-<sequence>-<attempt>",
            param_hint="ID",
        )
    return txn


# -- prepared batches

_TARGET_OPTIONS = (
    "checkpointLocation",
    "application.id",
    "topic",
    "anchor.topic",
    "staging.location",
    "source.cluster",
)


@dataclass(frozen=True)
class Query:
    """A query, from the file with its sink's options.

    Attributes:
        target: the query in the form that the other commands use.
        options: the parsed options.
        application_id: the query's application.id, which is part of each prepared id.
    """

    target: Target
    options: WriteOptions
    application_id: str


@dataclass(frozen=True)
class Prepared:
    """A batch that a sink holds prepared.

    Attributes:
        sink: name of the sink.
        txn: the sink transaction id.
        fate: what a start of the query does with it; `Fate.LEAVE` if only a person can decide.
    """

    sink: str
    txn: SinkTxn
    fate: Fate

    @property
    def needs_a_person(self) -> bool:
        """Whether no token decides what happens to the batch."""
        from kafka_eos_source.commit.two_phase import Fate

        return self.fate is Fate.LEAVE


def parse_query(text: str) -> Query:
    """Reads a query from the options of its sink, one ``name=value`` per line.

    Raises:
        InvalidOptionError: if an option is unknown or malformed, or the options name no sink outside Kafka.
    """
    from kafka_eos_source.operate.inspection import known_application_id, read_checkpoint
    from kafka_eos_source.options.parse import parse_write

    given = {name.lower(): value for name, value in java_properties(text)}
    options = parse_write(given, streaming=True)
    if not options.sinks:
        raise InvalidOptionError(
            "the options name no sinks outside Kafka.", fix="add the query's options 'sinks' and 'sink.…'."
        )
    target = target_from_options(
        {name: given.get(name.lower()) for name in _TARGET_OPTIONS},
        {name: value for name, value in given.items() if name.startswith("kafka.")},
    )
    checkpoint = read_checkpoint(target.checkpoint) if target.checkpoint is not None else None
    return Query(target, options, known_application_id(target.application_id, checkpoint))


def list_prepared(query: Query, kafka: KafkaView, deadline: Deadline) -> list[Prepared]:
    """Lists the prepared batches of every sink of the query.

    Raises:
        SinkFailedError: if a sink cannot list its prepared batches.
    """
    from kafka_eos_source.commit.two_phase import fate

    prepared = []
    with _opened(query, kafka) as sinks:
        for name, sink in sinks.items():
            try:
                txns = sink.recover(deadline)
            except Exception as error:
                raise SinkFailedError(
                    f"sink {name!r} cannot list its prepared batches: {sink.context.secrets.hide(str(error))}"
                ) from error
            prepared += [Prepared(name, txn, fate(sink.context, txn, kafka.token)) for txn in txns]
    return prepared


def resolve(
    query: Query,
    kafka: KafkaView,
    sink_name: str,
    txn: SinkTxn,
    deadline: Deadline,
    *,
    commit: bool,
    only_check: bool = False,
) -> None:
    """Commits or aborts a prepared batch whose fate no token decides.

    Args:
        query: the query that prepared it.
        kafka: what the query's cluster holds of it.
        sink_name: the sink that holds it.
        txn: its id.
        deadline: time limit of the calls to the sink.
        commit: whether to commit it.
        only_check: whether to change nothing.

    Raises:
        OperatorError: if another query prepared the batch, or this one on another cluster; if the token
            decides the fate of the batch; or if the sink does not hold it.
        SinkFailedError: if the sink cannot commit or abort it.
    """
    from kafka_eos_source.commit.two_phase import Fate, fate
    from kafka_eos_source.sinks.contract import Fatal, Retryable, SinkContext

    context = SinkContext(sink_name, query.application_id, kafka.cluster_id)
    if not context.owns(txn):
        own = context.txn(txn.sequence, txn.attempt)
        raise OperatorError(
            f"{txn} belongs to {_owner_text(txn)}, but the options are those of {_owner_text(own)}: cluster "
            f"{kafka.cluster_id!r}. Nothing was changed.",
            fix="leave it to the query that prepared it; if that query cannot resolve it, run the command "
            "with that query's options, on its cluster.",
        )
    decided = fate(context, txn, kafka.token)
    if kafka.token is not None and decided is not Fate.LEAVE:
        raise OperatorError(
            f"Kafka holds the token of batch {kafka.token.batch_id}, by which the next start of the query "
            f"will {decided.value} {txn}.",
            fix="start the query.",
        )
    if sink_name not in {each.name for each in query.options.sinks}:
        raise OperatorError(
            f"the options have no sink {sink_name!r}, which prepared {txn}. Nothing was changed.",
            fix="add it to the option sinks, with its options sink.…, as they were when it prepared.",
        )
    with _opened(query, kafka) as sinks:
        sink = sinks[sink_name]
        if txn not in sink.recover(deadline):
            raise OperatorError(
                f"sink {sink_name!r} does not hold {txn}.",
                fix="run `kafka-eos sinks list`, which shows the ids that each sink holds.",
            )
        if only_check:
            return
        outcome = sink.commit(txn, deadline) if commit else sink.abort(txn, deadline)
    if isinstance(outcome, Retryable | Fatal):
        verb = "commit" if commit else "abort"
        raise SinkFailedError(
            f"sink {sink_name!r} cannot {verb} {txn}: {sink.context.secrets.hide(outcome.why)}",
            fix="run the command again.",
        )


def read_kafka(query: Query, deadline: Deadline) -> KafkaView:
    """Reads what Kafka holds of the query.

    Raises:
        OperatorError: if Kafka does not answer.
    """
    from kafka_eos_source.operate.inspection import inspect

    with open_reader(query.target) as reader:
        found = inspect(query.target, reader, deadline)
    if found.kafka is None:
        raise OperatorError(
            found.findings[-1].text, fix="check the brokers, and the right to describe the consumer group."
        )
    return found.kafka


def _owner_text(txn: SinkTxn) -> str:
    return (
        f"sink {txn.sink!r} of application.id={txn.application_id!r} on the Kafka cluster with the hash "
        f"{txn.cluster}"
    )


@contextmanager
def _opened(query: Query, kafka: KafkaView) -> Iterator[Mapping[str, TwoPhaseSink]]:
    """Opens the sinks of the query, and closes all of them at the end, also after an error."""
    from kafka_eos_source.commit import open_sinks

    with ExitStack() as stack:
        sinks = open_sinks.open_all(
            query.options.sinks, query.application_id, kafka.cluster_id, query.options.checkpoint_location
        )
        for sink in sinks.values():
            stack.callback(sink.close)
        yield sinks
