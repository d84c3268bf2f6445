"""``kafka-eos doctor | inspect | fence | adopt | sweep``: options in, a report out. Changes need --yes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from kafka_eos_source.operate.given import CONNECTION, YES, deadline_of, look_at, target_of, with_options

if TYPE_CHECKING:
    from kafka_eos_source.operate.inspect import Inspection
    from kafka_eos_source.operate.target import Target
    from kafka_eos_source.runtime.deadline import Deadline

#: What `inspect` exits with when a restart would fail, or Kafka did not answer.
NEEDS_A_PERSON = 3

_QUERY = (
    click.option("--application-id", metavar="ID", help="As the option application.id."),
    click.option("--topic", metavar="TOPIC", help="The sink's option anchor.topic or topic, if it matters."),
    click.option("--source-cluster", metavar="WHICH", help="The sink's option source.cluster."),
)
_CHECKPOINT = click.option("--checkpoint", metavar="URI", help="As the option checkpointLocation.")
_STAGING = click.option("--staging", metavar="URI", help="As the option staging.location.")


@click.command()
@with_options(_CHECKPOINT, *_QUERY, _STAGING, *CONNECTION)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def inspect(ctx: click.Context, /, as_json: bool, timeout: str, **given: Any) -> None:
    """One query in one view: Spark's logs, token, group offsets, staged parts, open transactions.

    Names the query by --checkpoint, --application-id or both. Ends with what a restart would do; exit code 3
    = it would fail, or Kafka did not answer.
    """
    from kafka_eos_source.operate import view

    _, found = _inspected(given, deadline_of(timeout))
    if as_json:
        click.echo(view.inspection_json(found))
    else:
        view.show_inspection(view.console(), found)
    if found.needs_a_person:
        ctx.exit(NEEDS_A_PERSON)


@click.command()
@click.option("--application-id", metavar="ID", required=True, help="As the option application.id.")
@with_options(*CONNECTION, YES)
def fence(application_id: str, yes: bool, timeout: str, **given: Any) -> None:
    """Fences whoever holds a transactional id, and aborts the transaction it left open.

    For a driver that is gone and does not come back: its open transaction keeps read_committed consumers
    waiting. A query that is started again does this by itself; one that runs is not stopped by it.
    """
    from kafka_eos_source.operate import fence as fencing

    deadline = deadline_of(timeout)
    target, found = _inspected({**given, "application_id": application_id}, deadline, ask=True)
    click.echo(_held(application_id, found))
    if not yes:
        click.echo(
            "With --yes: every older owner of it is fenced, and its open transaction, if there is one, is "
            "aborted. A driver that is alive takes the id back and writes its batch again, once: to end a "
            "query, stop its driver first."
        )
        return
    fencing.fence(target.kafka or {}, application_id, deadline)
    _, found = _inspected({**given, "application_id": application_id}, deadline, ask=True)
    click.echo("Fenced.")
    click.echo(_held(application_id, found))


@click.command()
@with_options(_CHECKPOINT, *_QUERY, *CONNECTION, YES)
@click.option(
    "--committed", "said", flag_value="COMMITTED", help="The batch without a token is in the output."
)
@click.option("--not-committed", "said", flag_value="NOT_COMMITTED", help="It is not in the output.")
@click.option(
    "--sinks-finished", is_flag=True, help="The sinks that the old token names have committed its batch."
)
@click.pass_context
def adopt(
    ctx: click.Context, /, said: str | None, sinks_finished: bool, yes: bool, timeout: str, **given: Any
) -> None:
    """Lets a checkpoint's query go on where Kafka stands: FOREIGN_QUERY and TOKEN_MISSING.

    For a new checkpoint in place of a lost one: shows where the group stands and the options to start with;
    once the query has planned its first batch there, --yes hands the application.id over to it. For a lost
    token: --committed or --not-committed says what a person found in the output, and --yes writes it down.
    """
    from kafka_eos_source.operate import adopt as adopting
    from kafka_eos_source.operate import view

    deadline = deadline_of(timeout)
    target, found = _inspected(given, deadline, ask=True)
    adoption = adopting.plan(found, target, adopting.Said[said] if said else None)
    view.show_adoption(view.console(), adoption)
    if adoption.refused is not None:
        ctx.exit(NEEDS_A_PERSON)
    if adoption.request is None:
        return
    batch = adoption.request.batch
    if not yes:
        click.echo(
            f"With --yes: the token of query {batch.query_id}, batch {batch.batch_id}, is written and no "
            "record; whoever runs under the application.id is fenced. Then start the query."
        )
        return
    adopting.perform(adoption, target.kafka or {}, deadline, sinks_finished=sinks_finished)
    click.echo(f"Done: Kafka holds batch {batch.batch_id} of query {batch.query_id}. Start the query.")


@click.command()
@with_options(_CHECKPOINT, _STAGING, *_QUERY, *CONNECTION, YES)
@click.option("--older-than", default="1d", show_default=True, help="Age from which orphans go.")
@click.pass_context
def sweep(ctx: click.Context, /, older_than: str, yes: bool, timeout: str, **given: Any) -> None:
    """Deletes staged batches that are in Kafka, and orphans of batch writes by age.

    Every commit does this for its own query; what is left is of queries that do not run, or of writes that
    died. Never touches a batch above the token. --staging must be the folder of this one query.
    """
    from kafka_eos_source.operate import sweep as sweeping
    from kafka_eos_source.operate import view
    from kafka_eos_source.option_values import duration_ms

    named = given["checkpoint"] is not None or given["application_id"] is not None
    target, found = _inspected(given, deadline_of(timeout)) if named else (target_of(given), None)
    swept = sweeping.plan(
        target.staging_location, found, duration_ms("--older-than", older_than) / 1000, time.time()
    )
    view.show_sweep(view.console(), swept)
    if not yes:
        click.echo("With --yes they are deleted.")
        return
    left = sweeping.perform(swept)
    for each in left:
        click.echo(f"not deleted: {each}", err=True)
    click.echo(f"Deleted {len(swept.going) - len(left)} entries.")
    if left:
        ctx.exit(1)


@click.command()
@with_options(*CONNECTION)
@click.pass_context
def doctor(ctx: click.Context, /, timeout: str, **given: Any) -> None:
    """Whether what a query needs is there: versions, Java, the C kernel, Spark's discovery, the broker.

    The broker is asked when it is named. Exit code 3 = something has to be done first.
    """
    from kafka_eos_source.operate import doctor as doctors

    fine = True
    for check in doctors.checks(target_of(given).kafka, deadline_of(timeout)):
        click.echo(f"{'ok ' if check.fine else 'BAD'} {check.name:<10} {check.text}")
        if not check.fine:
            fine = False
            click.echo(f"    fix: {check.fix}")
    if not fine:
        ctx.exit(NEEDS_A_PERSON)


def _held(application_id: str, found: Inspection) -> str:
    kafka = found.kafka
    if kafka is None:
        return f"What is under application.id={application_id!r} is not known: {found.findings[-1].text}"
    if kafka.token is None and not kafka.offsets:
        return f"Kafka knows no group of the name {application_id!r}: is it spelt right?"
    pending = "an unfinished transaction" if kafka.pending else "no unfinished transaction"
    held = (
        f"batch {kafka.token.batch_id} of query {kafka.token.query_id}, run {kafka.token.run_id or 'unknown'}"
        if kafka.token is not None
        else "no token"
    )
    return f"Group {found.group_id!r} holds {held}; {pending} is about to change it."


def _inspected(given: dict[str, Any], deadline: Deadline, *, ask: bool = False) -> tuple[Target, Inspection]:
    """``ask``: without Kafka there is nothing to do."""
    from kafka_eos_source.errors import InvalidOptionError
    from kafka_eos_source.operate.inspect import inspect as inspected

    target = target_of(given)
    if ask and target.kafka is None:
        raise InvalidOptionError(
            "no brokers were named.", fix="give --bootstrap-servers, or --kafka-properties with them."
        )
    with look_at(target) as look:
        return target, inspected(target, look, deadline)
