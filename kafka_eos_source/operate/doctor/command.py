"""The command ``kafka-eos doctor``, and the findings of its checks."""

from __future__ import annotations

from typing import Any

import click

from kafka_eos_source.operate.doctor.finding import Finding, Repair, exit_code, worst
from kafka_eos_source.operate.json_documents import print_document
from kafka_eos_source.operate.shared import (
    ANCHOR_TOPIC,
    CHECKPOINT,
    CONNECTION,
    DEAD_LETTER_TOPIC,
    OPTIONAL_QUERY,
    REGISTRY,
    SOURCE_CLUSTER,
    SOURCE_TOPICS,
    STAGING,
    TOKEN_TOPIC,
    deadline_of,
    parse_pairs,
    registry_of,
    target_of,
    with_options,
)
from kafka_eos_source.runtime.commands import JSON

_MARKS = {"ok": "ok  ", "note": "note", "warning": "WARN", "bad": "BAD "}
_INDENT = " " * 18


@click.command()
@with_options(OPTIONAL_QUERY, CHECKPOINT, ANCHOR_TOPIC, SOURCE_CLUSTER, STAGING)
@with_options(TOKEN_TOPIC, DEAD_LETTER_TOPIC, SOURCE_TOPICS)
@click.option(
    "--principal",
    type=click.Choice(["query", "source", "sink", "operator"]),
    default="query",
    show_default=True,
    help="Whose rights the credentials must have: those of the whole query, or of one part.",
)
@click.option(
    "--clock-topic",
    metavar="TOPIC",
    help="Write two records to this topic to compare clocks; it needs message.timestamp.type=LogAppendTime.",
)
@click.option("--spark", is_flag=True, help="Run a small Spark job to check the executors.")
@click.option(
    "--spark-conf", metavar="KEY=VALUE", multiple=True, help="Setting of that job's session; may be repeated."
)
@click.option("--check", "only", metavar="NAME", multiple=True, help="Run only this check; may be repeated.")
@click.option("--fix", is_flag=True, help="Repair what can be repaired safely; each repair is named first.")
@with_options(*REGISTRY)
@with_options(*CONNECTION, JSON)
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    token_topic: str | None,
    dead_letter_topic: str | None,
    source_topics: tuple[str, ...],
    principal: str,
    clock_topic: str | None,
    spark: bool,
    spark_conf: tuple[str, ...],
    only: tuple[str, ...],
    fix: bool,
    registry: str | None,
    registry_pairs: tuple[str, ...],
    as_json: bool,
    timeout: str,
    **options: Any,
) -> None:
    """Check that this machine, the cluster and a query's rights are as a query needs them.

    Without arguments: this machine. With --bootstrap-servers, --kafka-properties or the variable
    KAFKA_EOS_BOOTSTRAP_SERVERS: the cluster as well. With QUERY (an application.id) or --checkpoint: the
    rights of these credentials, the age of the token and the staging folder. With --spark: the executors.
    With --registry: the schema registry.

    Exit code: 0 = ready; 4 = ready, but look at the warnings; 3 = fix what is marked BAD first.
    """
    from kafka_eos_source.operate.doctor import run

    unknown = [name for name in only if name not in run.CHECKS]
    if unknown:
        known = ", ".join(run.CHECKS)
        raise click.BadParameter(f"{unknown[0]!r} is no check; expected one of {known}", param_hint="--check")
    patient = run.Patient(
        target_of(options, needs_kafka=False),
        source_topics,
        token_topic,
        dead_letter_topic,
        principal,
        clock_topic,
        parse_pairs(spark_conf, "--spark-conf") if spark or spark_conf else None,
        only,
        registry_of(registry, registry_pairs),
    )
    found: list[Finding] = []
    for each in run.diagnose(patient, deadline_of(timeout)):
        found.append(each)
        if not as_json:
            _show(each)
    repairs: list[dict[str, Any]] = []
    if fix:

        def announce(repair: Repair) -> None:
            if not as_json:
                click.echo(f"Repair: {repair.what}")

        for done, problem in run.repair(found, announce):
            repairs.append({"repair": done.what, "done": not problem, "problem": problem or None})
            if not as_json:
                click.echo(f"  {'failed: ' + problem if problem else 'done'}")
    done_now = {each["repair"] for each in repairs if each["done"]}
    left = [each for each in found if each.repair is None or each.repair.what not in done_now]
    severity = worst(left)
    if as_json:
        print_document("doctor", severity=severity.value, findings=found, repairs=repairs)
    elif not fix and any(each.repair is not None for each in found):
        click.echo("With --fix: doctor does what it lists after 'repair'.")
    ctx.exit(exit_code(severity))


def _show(finding: Finding) -> None:
    click.echo(f"{_MARKS[finding.severity.value]} {finding.check:<12} {finding.what}")
    if finding.why:
        click.echo(f"{_INDENT}why: {finding.why}")
    if finding.fix:
        click.echo(f"{_INDENT}fix: {finding.fix}")
    if finding.repair is not None:
        click.echo(f"{_INDENT}repair: {finding.repair.what}")
