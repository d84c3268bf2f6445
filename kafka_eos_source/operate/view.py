"""Prints an inspection, an adoption or a sweep, as text or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kafka_eos_source.observe import wording
from kafka_eos_source.operate.adopt import Adoption
from kafka_eos_source.operate.checkpoint import Checkpoint
from kafka_eos_source.operate.cluster import KafkaView, PartitionView
from kafka_eos_source.operate.inspect import Inspection
from kafka_eos_source.operate.staging import StagedEntry
from kafka_eos_source.operate.sweep import Sweep
from kafka_eos_source.operate.verdict import Finding
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.secrets import shown_text

#: Characters per line when the output is a file or a pipe, which has no width of its own.
_WIDTH = 160


def console() -> Console:
    """Returns a console that writes to standard output."""
    return Console(
        markup=False, highlight=False, soft_wrap=False, width=None if writes_to_terminal() else _WIDTH
    )


def writes_to_terminal() -> bool:
    """Returns whether standard output is a terminal. It is None if the caller has closed it."""
    return sys.stdout is not None and sys.stdout.isatty()


def show_inspection(out: Console, found: Inspection) -> None:
    """Prints an inspection. The verdict comes last, so that it stays visible on the screen."""
    facts = table_of(f"application.id {found.application_id}")
    facts.show_header = False
    facts.add_column(style="dim")
    facts.add_column()
    for name, value in _facts(found):
        facts.add_row(name, value)
    out.print(facts)
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
    table = table_of(shown_text(sweep.location))
    for column in ("", "entry", "files", "bytes", "why"):
        table.add_column(column, justify="right" if column in ("files", "bytes") else "left")
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


def inspection_json(found: Inspection) -> dict[str, Any]:
    """Returns an inspection as a JSON object.

    Names follow the dataclasses; times are in seconds since 1970.
    """
    checkpoint, kafka = found.checkpoint, found.kafka
    return {
        "application_id": found.application_id,
        "group_id": found.group_id,
        "checkpoint": None if checkpoint is None else _checkpoint_json(checkpoint),
        "kafka": None if kafka is None else _kafka_json(kafka),
        "staged": [
            {"name": each.name, "batch_id": each.batch_id, "files": each.files, "bytes": each.size_bytes}
            for each in found.staged
        ],
        "findings": [_finding_json(each) for each in found.findings],
    }


def fence_json(found: Inspection, *, fenced: bool) -> dict[str, Any]:
    """Returns what a group holds, and whether its transactional id was fenced, as a JSON object."""
    kafka = found.kafka
    return {
        "application_id": found.application_id,
        "group_id": found.group_id,
        "fenced": fenced,
        "token": None if kafka is None else _token_json(kafka.token),
        "pending": None if kafka is None else kafka.pending,
    }


def adoption_json(adoption: Adoption, *, adopted: bool) -> dict[str, Any]:
    """Returns what `adopt` can do, and whether it did it, as a JSON object."""
    batch = None if adoption.request is None else adoption.request.batch
    return {
        "adopted": adopted,
        "batch": batch and {"batch_id": batch.batch_id, "query_id": batch.query_id},
        "messages": list(adoption.messages),
        "options": {side: dict(options) for side, options in adoption.options.items()},
        "refused": None if adoption.refused is None else _finding_json(adoption.refused),
    }


def sweep_json(sweep: Sweep, failures: Mapping[str, str], *, performed: bool) -> dict[str, Any]:
    """Returns what `sweep` deletes and keeps as a JSON object.

    Args:
        sweep: the decisions.
        failures: why entries could not be deleted, by name.
        performed: whether the entries were deleted; False = the command only showed them.
    """
    return {
        "location": shown_text(sweep.location),
        "token_batch": sweep.token_batch,
        "why_unknown": sweep.why_unknown or None,
        "entries": [
            {
                "name": each.entry.name,
                "batch_id": each.entry.batch_id,
                "files": each.entry.files,
                "bytes": each.entry.size_bytes,
                "delete": each.delete,
                "deleted": performed and each.delete and each.entry.name not in failures,
                "reason": failures.get(each.entry.name, each.reason),
            }
            for each in sweep.decisions
        ],
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {"condition": finding.condition or None, "text": finding.text, "fix": finding.fix or None}


def _checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    first = checkpoint.identity
    return {
        "location": shown_text(checkpoint.location),
        "query_id": checkpoint.query_id,
        "planned": checkpoint.planned,
        "planned_at_seconds": checkpoint.planned_at_seconds,
        "committed": checkpoint.committed,
        "next_batch": checkpoint.next_batch,
        "replays": checkpoint.replays,
        "identity_file": first
        and {
            "application_id": first.application_id,
            "query_id": first.query_id,
            "first_batch": first.first_batch,
            "location": shown_text(first.location),
            "unproven_since": first.unproven_since,
        },
    }


def _kafka_json(kafka: KafkaView) -> dict[str, Any]:
    return {
        "cluster_id": kafka.cluster_id,
        "token": _token_json(kafka.token),
        "pending": kafka.pending,
        "partitions": [
            {
                "topic": each.tp.topic,
                "partition": each.tp.partition,
                "start": each.start,
                "end": each.end,
                "group": each.group,
                "token_batch": each.token and each.token.batch_id,
                "earliest": each.log and each.log.earliest,
                "stable": each.log and each.log.stable,
                "log_end": each.log and each.log.end,
                "transaction_since": each.transaction_since,
            }
            for each in kafka.partitions
        ],
        "losses": [{"kind": each.kind, "text": each.text} for each in kafka.losses],
    }


def _token_json(token: Token | None) -> Mapping[str, Any] | None:
    return None if token is None else token.to_json()


def _facts(found: Inspection) -> Iterable[tuple[str, str]]:
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
                f"transaction {token.sequence}, batch {token.batch_id}, {token.rows:,} rows, try "
                f"{token.transaction_number}",
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
    table = table_of("offsets")
    table.add_column("partition")
    for column in ("batch from", "to", "group", "token", "log from", "stable", "log to"):
        table.add_column(column, justify="right")
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
    table = table_of("staged")
    table.add_column("batch")
    table.add_column("files", justify="right")
    table.add_column("bytes", justify="right")
    for each in staged:
        table.add_row(each.name, f"{each.files:,}", f"{each.size_bytes:,}")
    return table


def table_of(title: str) -> Table:
    """Returns an empty table in the style of all commands."""
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE)
