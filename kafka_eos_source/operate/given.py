"""What stands on a command line: which query, how its cluster is reached, and that it is meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kafka_eos_source.operate.cluster import Look
    from kafka_eos_source.operate.target import Target
    from kafka_eos_source.runtime.deadline import Deadline

F = TypeVar("F", bound=Callable[..., Any])

CONNECTION = (
    click.option("--bootstrap-servers", metavar="HOST:PORT,…", help="As kafka.bootstrap.servers."),
    click.option(
        "--kafka",
        "stated",
        multiple=True,
        metavar="KEY=VALUE",
        help="As the option kafka.KEY of the query; may be repeated. Others on this machine can read it: "
        "no passwords.",
    ),
    click.option(
        "--kafka-properties",
        "properties",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="A file of such options, as Kafka's own tools take it (--command-config).",
    ),
    click.option("--timeout", default="30s", show_default=True, help="For the brokers' answers."),
)
YES = click.option("--yes", is_flag=True, help="Do it. Without it nothing is changed.")


def with_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def deadline_of(timeout: str) -> Deadline:
    from kafka_eos_source.option_values import duration_ms
    from kafka_eos_source.runtime.deadline import Deadline

    return Deadline.after_ms(duration_ms("--timeout", timeout))


def target_of(given: dict[str, Any]) -> Target:
    from kafka_eos_source.kafka.secrets import is_secret
    from kafka_eos_source.operate.target import kafka_options, target

    stated = given["stated"]
    if any(is_secret(each.partition("=")[0]) for each in stated):
        click.echo("A secret on a command line can be read by others: use --kafka-properties.", err=True)
    file = given["properties"]
    kafka = kafka_options(
        given["bootstrap_servers"], stated, file.read_text(encoding="utf-8") if file is not None else None
    )
    sink = {
        "checkpointLocation": given.get("checkpoint"),
        "application.id": given.get("application_id"),
        "topic": given.get("topic"),
        "staging.location": given.get("staging"),
        "source.cluster": given.get("source_cluster"),
    }
    return target(sink, kafka)


@contextmanager
def look_at(target: Target) -> Iterator[Look | None]:
    if target.kafka is None:
        yield None
        return
    from kafka_eos_source.kafka.cluster_reader import ClusterReader
    from kafka_eos_source.kafka.config import admin_config

    with ClusterReader(admin_config(target.kafka)) as look:
        yield look
