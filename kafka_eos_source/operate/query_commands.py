"""The commands ``kafka-eos inspect``, ``fence``, ``adopt`` and ``sweep``.

A command parses its options, calls a function of this package and prints the result. It changes Kafka or
files only with ``--yes``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from kafka_eos_source.operate.json_documents import print_document
from kafka_eos_source.operate.shared import (
    ANCHOR_TOPIC,
    CHECKPOINT,
    CONNECTION,
    OPTIONAL_QUERY,
    REQUIRED_QUERY,
    SOURCE_CLUSTER,
    STAGING,
    YES,
    ExitCode,
    console,
    deadline_of,
    facts_of,
    open_reader,
    table_of,
    target_of,
    with_options,
)
from kafka_eos_source.runtime.commands import JSON
from kafka_eos_source.secrets import shown_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kafka_eos_source.operate.inspection import (
        Finding,
        Inspection,
        PartitionView,
        StagedEntry,
    )
    from kafka_eos_source.operate.repair import Adoption, Sweep
    from kafka_eos_source.operate.shared import Target
    from kafka_eos_source.runtime.deadline import Deadline

_SINK = (ANCHOR_TOPIC, SOURCE_CLUSTER)


@click.command()
@with_options(OPTIONAL_QUERY, CHECKPOINT, *_SINK, STAGING, *CONNECTION, JSON)
@click.pass_context
def inspect(ctx: click.Context, /, as_json: bool, timeout: str, **options: Any) -> None:
    """Show the state of one query and what a restart would do.

    Reads Spark's offset and commit logs, the commit token, the group's offsets, the staged parts and open
    transactions. Changes nothing. Name the query by QUERY (its application.id), --checkpoint or both.

    Exit code: 0 = a restart continues; 3 = a restart would fail, or Kafka did not answer.
    """
    _, found = _inspect(options, deadline_of(timeout))
    if as_json:
        print_document("inspect", found)
    else:
        show_inspection(console(), found)
    if found.needs_a_person:
        ctx.exit(ExitCode.NEEDS_A_PERSON)


@click.command()
@with_options(REQUIRED_QUERY, *CONNECTION, YES, JSON)
@click.pass_context
def fence(
    ctx: click.Context, /, application_id: str, yes: bool, as_json: bool, timeout: str, **options: Any
) -> None:
    """Abort the open transaction of a driver that is gone.

    Until such a transaction ends, read_committed consumers of the output wait. With --yes, the command
    initialises the transactional id of QUERY, which is its application.id: Kafka fences older producers with
    this id and aborts their open transaction.

    A restart of the query does the same. A driver that is still alive is not stopped: it takes the id back
    and writes its batch again, once.

    Exit code: 3 = what Kafka holds cannot be read.
    """
    from kafka_eos_source.operate import repair as fencing

    deadline = deadline_of(timeout)
    query = {**options, "application_id": application_id}
    target, found = _inspect(query, deadline)
    if not as_json:
        click.echo(_group_state(application_id, found))
    if yes:
        fencing.fence(target.kafka or {}, application_id, deadline)
        _, found = _inspect(query, deadline)
    if as_json:
        print_document("fence", found, fenced=yes)
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
@with_options(OPTIONAL_QUERY, CHECKPOINT, *_SINK, *CONNECTION, YES, JSON)
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
    """Let a checkpoint continue from the last batch that Kafka holds of QUERY, its application.id.

    FOREIGN_QUERY, for a new checkpoint that replaces a lost one: shows which batch Kafka holds and the
    options to start the query with. After the query has planned its first batch, --yes hands the
    application.id over to it.

    TOKEN_MISSING: check whether the batch is in the output, then pass --committed or --not-committed. --yes
    records the answer in Kafka.

    Writes one commit token and no records.
    """
    from kafka_eos_source.operate import repair as adopting

    deadline = deadline_of(timeout)
    target, found = _inspect(options, deadline)
    adoption = adopting.plan_adoption(found, target, adopting.BatchOutcome[outcome] if outcome else None)
    writes = yes and adoption.refused is None and adoption.request is not None
    if not as_json:
        show_adoption(console(), adoption)
    if writes:
        adopting.perform_adoption(adoption, target.kafka or {}, deadline, sinks_finished=sinks_finished)
    if as_json:
        print_document("adopt", adoption, adopted=writes)
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
@with_options(OPTIONAL_QUERY, CHECKPOINT, STAGING, *_SINK, *CONNECTION, YES, JSON)
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
    from kafka_eos_source.operate import repair as sweeping
    from kafka_eos_source.option_values import duration_ms

    names_query = options["checkpoint"] is not None or options["application_id"] is not None
    if names_query:
        target, found = _inspect(options, deadline_of(timeout))
    else:
        target, found = target_of(options, needs_kafka=False), None
    swept = sweeping.plan_sweep(
        target.staging_location, found, duration_ms("--older-than", older_than) / 1000, time.time()
    )
    if not as_json:
        show_sweep(console(), swept)
    if yes:
        swept = sweeping.perform_sweep(swept)
    failed = [each for each in swept.deletable if yes and not each.deleted]
    if as_json:
        print_document("sweep", swept)
    elif yes:
        for each in failed:
            click.echo(f"Not deleted: {each.entry.name}: {each.reason}", err=True)
        click.echo(f"Deleted {len(swept.deletable) - len(failed)} entries.")
    else:
        click.echo("With --yes: the command deletes these entries.")
    if failed:
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


def _inspect(options: dict[str, Any], deadline: Deadline) -> tuple[Target, Inspection]:
    """Inspects the query that the options name."""
    from kafka_eos_source.operate.inspection import inspect as inspect_query

    target = target_of(options)
    with open_reader(target) as reader:
        return target, inspect_query(target, reader, deadline)


# -- what the commands print


def show_inspection(out: Console, found: Inspection) -> None:
    """Prints an inspection. The verdict comes last, so that it stays visible on the screen."""
    out.print(facts_of(f"application.id {found.application_id}", _facts(found)))
    if found.kafka is not None and found.kafka.partitions:
        out.print(_partitions(found.kafka.partitions))
    if found.staged:
        out.print(_staged(found.staged))
    for finding in reversed(found.findings):
        show_finding(out, finding)


def show_finding(out: Console, finding: Finding) -> None:
    """Prints one finding with its fix and its page in the runbooks."""
    name = f"{finding.condition}: " if finding.condition else ""
    out.print(f"{name}{finding.text}", style="bold red" if finding.condition else "bold")
    if finding.fix:
        out.print(f"  Fix: {finding.fix}")
    if finding.condition:
        out.print(f"  See docs/runbooks.md, {finding.condition}.")


def show_adoption(out: Console, adoption: Adoption) -> None:
    """Prints what `adopt` can do, or the options that the query needs."""
    for line in adoption.messages:
        out.print(line)
    if adoption.refused is not None:
        show_finding(out, adoption.refused)
    for side, options in adoption.options.items():
        out.print(f"{side}:")
        for name, value in options.items():
            out.print(f"  .option({name!r}, {value!r})")
    if any("onForeignQuery" in options for options in adoption.options.values()):
        out.print("Remove onForeignQuery again after the first batch.")


def show_sweep(out: Console, sweep: Sweep) -> None:
    """Prints what `sweep` deletes and keeps, with the reasons."""
    table = table_of(shown_text(sweep.location), "", "entry", ">files", ">bytes", "why")
    for each in sweep.decisions:
        entry = each.entry
        table.add_row(
            "delete" if each.delete else "keep",
            entry.name,
            f"{entry.files:,}",
            f"{entry.size_bytes:,}",
            each.reason,
        )
    if sweep.decisions:
        out.print(table)
    if sweep.why_unknown:
        out.print(f"All micro-batches are kept: {sweep.why_unknown}.")
    out.print(
        f"{len(sweep.deletable)} of {len(sweep.decisions)} entries can be deleted, "
        f"{sweep.size_bytes:,} bytes."
    )


def _facts(found: Inspection) -> Iterable[tuple[str, str]]:
    from kafka_eos_source.observe import wording

    yield "consumer group", found.group_id
    checkpoint, kafka = found.checkpoint, found.kafka
    if checkpoint is not None:
        yield "checkpoint", shown_text(checkpoint.location)
        yield "query", checkpoint.query_id
        yield "Spark's offset log", _batch(checkpoint.planned, checkpoint.planned_at_seconds)
        yield "Spark's commit log", _batch(checkpoint.committed)
        if checkpoint.identity is not None:
            yield "first batch committed", f"batch {checkpoint.identity.first_batch}"
    if kafka is not None:
        yield "cluster", kafka.cluster_id
        token = kafka.token
        if token is None:
            yield "token", "none"
        else:
            yield (
                "token",
                f"transaction {token.sequence}, batch {token.batch_id}, {token.rows:,} rows",
            )
            yield "  of query", f"{token.query_id}, run {token.run_id or 'unknown'}"
            yield "  digests", f"start {token.start_digest or '-'}, end {token.end_digest or '-'}"
            if token.due is not None:
                yield "  timers due", wording.utc(token.due.at_ms)
        yield (
            "transaction",
            "unfinished, about to change the group's offsets" if kafka.pending else "none on this group",
        )
        # librdkafka has no DescribeTransactions (KIP-664), so the command shows what to run instead.
        yield "  details", f"kafka-transactions.sh describe --transactional-id {found.application_id}"


def _batch(batch_id: int | None, at_seconds: float | None = None) -> str:
    if batch_id is None:
        return "no batch"
    if at_seconds is None:
        return f"batch {batch_id}"
    return (
        f"batch {batch_id}, planned {datetime.fromtimestamp(at_seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    )


def _partitions(partitions: Iterable[PartitionView]) -> Table:
    columns = (">batch from", ">to", ">group", ">token", ">log from", ">stable", ">log to")
    table = table_of("offsets", "partition", *columns)
    for each in partitions:
        log = each.log
        numbers = (
            each.start,
            each.end,
            each.group,
            each.token and each.token.batch_id,
            log and log.earliest,
            log and log.stable,
            log and log.end,
        )
        table.add_row(
            str(each.tp),
            *("" if number is None else str(number) for number in numbers),
            style="yellow" if each.transaction_since is not None else None,
        )
    return table


def _staged(staged: Iterable[StagedEntry]) -> Table:
    table = table_of("staged", "batch", ">files", ">bytes")
    for each in staged:
        table.add_row(each.name, f"{each.files:,}", f"{each.size_bytes:,}")
    return table
