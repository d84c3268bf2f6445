"""The command line ``kafka-eos``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from importlib import import_module
from types import FrameType, TracebackType

import click

from kafka_eos_source import native
from kafka_eos_source.errors import KafkaEosError, KernelUnavailableError
from kafka_eos_source.operate import (
    acls_command,
    commands,
    completion,
    dead_letter_commands,
    doctor_command,
    metrics_command,
    sink_commands,
    state_commands,
    token_topic_commands,
    top_command,
    topic_commands,
)
from kafka_eos_source.operate.exit_codes import ExitCode
from kafka_eos_source.operate.shared_options import parse_pairs, warn_of_secrets
from kafka_eos_source.runtime.commands import JSON, handling, print_error, print_json, wants_json
from kafka_eos_source.runtime.watchdog import on_end_of_parent

_POLL_SECONDS = 0.1


class _Lazy(click.Command):
    """A command whose module is imported when it runs, because it needs PySpark or pandas.

    Args:
        name: name of the command.
        module: module whose ``main`` is the command.
        text: what ``kafka-eos --help`` shows.
    """

    def __init__(self, name: str, module: str, text: str) -> None:
        super().__init__(name, help=f"{text}\n\n`kafka-eos {name} --help` lists the options.")
        self._module = module

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: object
    ) -> click.Context:
        """Returns a context of the imported command, which click then completes or invokes."""
        command: click.Command = import_module(self._module).main
        return command.make_context(info_name, args, parent, **extra)


class _Group(click.Group):
    """Prints errors of this package instead of a traceback. Only doctor runs without the C kernel."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            warn_of_secrets(args)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        found = super().resolve_command(ctx, args)
        if not ctx.resilient_parsing and found[0] != doctor_command.doctor.name:
            try:
                native.check()
            except KernelUnavailableError as error:
                print_error(error, as_json="--json" in args)
                ctx.exit(ExitCode.FAILED)
        return found

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KafkaEosError as error:
            print_error(error, as_json=wants_json(ctx))
            ctx.exit(ExitCode.FAILED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kafka-eos-source")
def main() -> None:
    """Operate exactly-once Kafka queries of Spark Structured Streaming.

    Commands that change a query, its state or its sinks do so only with --yes; without it, they show what
    they would do. What to do about each error condition: docs/runbooks.md.
    """
    # Errors reach the user as messages. Without a handler, Python would print what librdkafka logs as well.
    logging.getLogger("kafka_eos_source").addHandler(logging.NullHandler())


@main.command()
@click.option("--port", default=9092, show_default=True, help="Port of the first broker; 0 = any free port.")
@click.option("--brokers", default=1, show_default=True, help="Number of brokers.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False),
    help="Keep the data in this folder. Default: a temporary folder, deleted at the end.",
)
@click.option("--config", multiple=True, metavar="KEY=VALUE", help="Broker property; may be repeated.")
@click.option("--kafka-version", help="Kafka's version, 3.7.0 or newer. Default: the newest that was tested.")
@click.option(
    "--feature",
    "features",
    multiple=True,
    metavar="NAME=LEVEL",
    help="Finalized level of a feature, such as transaction.version=1; may be repeated.",
)
@JSON
def broker(
    port: int,
    brokers: int,
    directory: str | None,
    config: tuple[str, ...],
    kafka_version: str | None,
    features: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run a local Kafka cluster for development.

    The brokers run in KRaft mode until Ctrl-C or SIGTERM, or until the process that started it ends. Kafka
    creates topics on first write; --config auto.create.topics.enable=false turns that off.
    """
    from kafka_eos_source.embedded import EmbeddedKafka
    from kafka_eos_source.embedded.java import KAFKA_VERSION

    properties = parse_pairs(config, "--config")
    levels = parse_pairs(features, "--feature", "NAME=LEVEL")
    for name, level in levels.items():
        if not level.isdecimal():
            raise click.BadParameter(f"{name}={level!r} is not a whole number", param_hint="--feature")
    pause = threading.Event()
    cluster = EmbeddedKafka(
        brokers,
        port,
        directory,
        properties,
        auto_create_topics=True,
        version=kafka_version or KAFKA_VERSION,
        features={name: int(level) for name, level in levels.items()},
    )
    with _StopRequest() as stop, cluster as kafka:
        stop.raises = False
        if as_json:
            print_json({"bootstrap_servers": kafka.bootstrap_servers, "directory": str(kafka.directory)})
        else:
            click.echo(f"bootstrap.servers={kafka.bootstrap_servers}")
        sys.stdout.flush()
        click.echo(f"Data folder: {kafka.directory}. Press Ctrl-C to stop.", err=True)
        while not stop.requested:
            pause.wait(_POLL_SECONDS)
            kafka.check()


for _each in (
    doctor_command.doctor,
    acls_command.acls,
    top_command.top,
    metrics_command.metrics,
    commands.inspect,
    commands.fence,
    commands.adopt,
    commands.sweep,
    completion.completion,
    state_commands.state,
    sink_commands.sinks,
    token_topic_commands.group,
    dead_letter_commands.group,
    topic_commands.topics,
    topic_commands.produce,
    topic_commands.tail,
    topic_commands.lag,
    _Lazy("demo", "kafka_eos_source.demo.__main__", "Kill a query's driver repeatedly, and count the rows."),
    _Lazy("flights", "kafka_eos_source.demo.flights", "Create a topic of real flights to try queries on."),
):
    main.add_command(_each)


class _StopRequest:
    """A request to stop: SIGINT, SIGTERM or SIGHUP, or the end of the parent process. A context manager.

    Attributes:
        requested: whether a request has arrived. A plain flag, because a signal handler may interrupt code
            that holds a lock.
        raises: whether the first request also interrupts the main thread, by `SystemExit`.
    """

    def __init__(self) -> None:
        self.requested = False
        self.raises = True
        self._over = threading.Event()
        self._handling = handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._on_signal)

    def __enter__(self) -> _StopRequest:
        self._handling.__enter__()
        on_end_of_parent(lambda: os.kill(os.getpid(), signal.SIGTERM), self._over)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._handling.__exit__(kind, error, trace)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        if self.raises and not again:
            raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
