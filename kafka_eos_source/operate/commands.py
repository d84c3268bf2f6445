"""The commands ``kafka-eos inspect``, ``fence``, ``adopt`` and ``sweep``.

A command parses its options, calls a function of this package and prints the result. It changes Kafka or
files only with ``--yes``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from kafka_eos_source.operate.exit_codes import ExitCode
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
    from kafka_eos_source.operate.inspect import Inspection
    from kafka_eos_source.operate.target import Target
    from kafka_eos_source.runtime.deadline import Deadline

_QUERY = (
    click.option("--application-id", metavar="ID", help="The query's option application.id."),
    click.option(
        "--topic", metavar="TOPIC", help="The sink's option anchor.topic; if that is not set, its topic."
    ),
    click.option("--source-cluster", metavar="WHICH", help="The sink's option source.cluster."),
)
_CHECKPOINT = click.option("--checkpoint", metavar="URI", help="The query's option checkpointLocation.")
_STAGING = click.option("--staging", metavar="URI", help="The sink's option staging.location.")


@click.command()
@with_options(_CHECKPOINT, *_QUERY, _STAGING, *CONNECTION, JSON)
@click.pass_context
def inspect(ctx: click.Context, /, as_json: bool, timeout: str, **options: Any) -> None:
    """Show the state of one query and what a restart would do.

    Reads Spark's offset and commit logs, the commit token, the group's offsets, the staged parts and open
    transactions. Changes nothing. Name the query by --checkpoint, --application-id or both.

    Exit code: 0 = a restart continues; 3 = a restart would fail, or Kafka did not answer.
    """
    from kafka_eos_source.operate import view

    _, found = _inspect(options, deadline_of(timeout))
    if as_json:
        print_json(view.inspection_json(found))
    else:
        view.show_inspection(view.console(), found)
    if found.needs_a_person:
        ctx.exit(ExitCode.NEEDS_A_PERSON)


@click.command()
@click.option("--application-id", metavar="ID", required=True, help="The query's option application.id.")
@with_options(*CONNECTION, YES, JSON)
@click.pass_context
def fence(
    ctx: click.Context, /, application_id: str, yes: bool, as_json: bool, timeout: str, **options: Any
) -> None:
    """Abort the open transaction of a driver that is gone.

    Until such a transaction ends, read_committed consumers of the output wait. With --yes, the command
    initialises the transactional id (= application.id): Kafka fences older producers with this id and aborts
    their open transaction.

    A restart of the query does the same. A driver that is still alive is not stopped: it takes the id back
    and writes its batch again, once.

    Exit code: 3 = what Kafka holds cannot be read.
    """
    from kafka_eos_source.operate import fence as fencing
    from kafka_eos_source.operate import view

    deadline = deadline_of(timeout)
    query = {**options, "application_id": application_id}
    target, found = _inspect(query, deadline, needs_kafka=True)
    if not as_json:
        click.echo(_group_state(application_id, found))
    if yes:
        fencing.fence(target.kafka or {}, application_id, deadline)
        _, found = _inspect(query, deadline, needs_kafka=True)
    if as_json:
        print_json(view.fence_json(found, fenced=yes))
    elif yes:
        click.echo("Fenced.")
        click.echo(_group_state(application_id, found))
    else:
        click.echo(
            "With --yes: Kafka fences every producer that holds this transactional id and aborts its open "
            "transaction, if any. A driver that is still alive takes the id back and writes its batch again, "
            "once. To end a query, stop its driver first."
        )
    if found.kafka is None:
        ctx.exit(ExitCode.NEEDS_A_PERSON)


@click.command()
@with_options(_CHECKPOINT, *_QUERY, *CONNECTION, YES, JSON)
@click.option(
    "--committed",
    "outcome",
    flag_value="COMMITTED",
    help="The token is lost, and you found the batch in the output.",
)
@click.option(
    "--not-committed",
    "outcome",
    flag_value="NOT_COMMITTED",
    help="The token is lost, and you found that the batch is not in the output.",
)
@click.option(
    "--sinks-finished",
    is_flag=True,
    help="You checked that all sinks outside Kafka have committed the last batch of the old query.",
)
@click.pass_context
def adopt(
    ctx: click.Context,
    /,
    outcome: str | None,
    sinks_finished: bool,
    yes: bool,
    as_json: bool,
    timeout: str,
    **options: Any,
) -> None:
    """Let a checkpoint continue from Kafka's last batch.

    FOREIGN_QUERY, for a new checkpoint that replaces a lost one: shows which batch Kafka holds and the
    options to start the query with. After the query has planned its first batch, --yes hands the
    application.id over to it.

    TOKEN_MISSING: check whether the batch is in the output, then pass --committed or --not-committed. --yes
    records the answer in Kafka.

    Writes one commit token and no records.
    """
    from kafka_eos_source.operate import adopt as adopting
    from kafka_eos_source.operate import view

    deadline = deadline_of(timeout)
    target, found = _inspect(options, deadline, needs_kafka=True)
    adoption = adopting.plan_adoption(found, target, adopting.BatchOutcome[outcome] if outcome else None)
    writes = yes and adoption.refused is None and adoption.request is not None
    if not as_json:
        view.show_adoption(view.console(), adoption)
    if writes:
        adopting.perform_adoption(adoption, target.kafka or {}, deadline, sinks_finished=sinks_finished)
    if as_json:
        print_json(view.adoption_json(adoption, adopted=writes))
    elif adoption.refused is None and adoption.request is not None:
        batch = adoption.request.batch
        click.echo(
            f"Done: Kafka holds batch {batch.batch_id} of query {batch.query_id}. Start the query."
            if writes
            else f"With --yes: the command commits a token for batch {batch.batch_id} of query "
            f"{batch.query_id}, without records. It fences any driver that runs with this application.id. "
            "Start the query afterwards."
        )
    if adoption.refused is not None:
        ctx.exit(ExitCode.NEEDS_A_PERSON)


@click.command()
@with_options(_CHECKPOINT, _STAGING, *_QUERY, *CONNECTION, YES, JSON)
@click.option(
    "--older-than",
    default="1d",
    show_default=True,
    metavar="DURATION",
    help="Minimum age of leftovers of dead batch writes, and of the newest batch in Kafka, to be deleted.",
)
@click.pass_context
def sweep(
    ctx: click.Context, /, older_than: str, yes: bool, as_json: bool, timeout: str, **options: Any
) -> None:
    """Delete staged rows that are no longer needed.

    Removes micro-batches that Kafka already holds, and leftovers of dead batch writes (df.write) by age. A
    running query removes its own staged rows after each commit; this command is for queries that no longer
    run.

    Never deletes a batch that Kafka does not hold yet. --staging must be the folder of this one query.
    """
    from kafka_eos_source.operate import sweep as sweeping
    from kafka_eos_source.operate import view
    from kafka_eos_source.option_values import duration_ms

    names_query = options["checkpoint"] is not None or options["application_id"] is not None
    target, found = _inspect(options, deadline_of(timeout)) if names_query else (target_of(options), None)
    swept = sweeping.plan_sweep(
        target.staging_location, found, duration_ms("--older-than", older_than) / 1000, time.time()
    )
    if not as_json:
        view.show_sweep(view.console(), swept)
    failures = sweeping.perform_sweep(swept) if yes else {}
    if as_json:
        print_json(view.sweep_json(swept, failures, performed=yes))
    elif yes:
        for name, reason in failures.items():
            click.echo(f"Not deleted: {name}: {reason}", err=True)
        click.echo(f"Deleted {len(swept.deletable) - len(failures)} entries.")
    else:
        click.echo("With --yes: the command deletes these entries.")
    if failures:
        ctx.exit(ExitCode.FAILED)


def _group_state(application_id: str, found: Inspection) -> str:
    kafka = found.kafka
    if kafka is None:
        return f"Cannot read what application.id={application_id!r} holds: {found.findings[-1].text}"
    if kafka.token is None and not kafka.offsets:
        return f"Kafka has no offsets of a group {found.group_id!r}. Check the spelling."
    token = kafka.token
    held = (
        f"batch {token.batch_id} of query {token.query_id}, run {token.run_id or 'unknown'}"
        if token is not None
        else "no token"
    )
    transaction = "an unfinished transaction is" if kafka.pending else "no unfinished transaction is"
    return f"Group {found.group_id!r} holds {held}; {transaction} about to change it."


def _inspect(
    options: dict[str, Any], deadline: Deadline, *, needs_kafka: bool = False
) -> tuple[Target, Inspection]:
    """Inspects the query that the options name.

    Raises:
        InvalidOptionError: if ``needs_kafka`` is set and the options name no brokers.
    """
    from kafka_eos_source.operate.inspect import inspect as inspect_query

    target = target_of(options)
    if needs_kafka:
        require_brokers(target)
    with open_reader(target) as reader:
        return target, inspect_query(target, reader, deadline)
