"""The command line ``kafka-eos``: its groups, its errors, and the commands ``broker`` and ``completion``.

The module of each command group is imported whenever the command line starts, also when a shell asks for
completions. So it imports Kafka's client, PyArrow and rich only inside the functions that need them.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from importlib import import_module
from types import FrameType, TracebackType

import click
from click.shell_completion import get_completion_class

from kafka_eos_source import native
from kafka_eos_source.errors import KafkaEosError, KernelUnavailableError
from kafka_eos_source.operate import (
    dead_letter_commands,
    query_commands,
    rights,
    sinks,
    state_commands,
    token_topics,
    top,
    topics,
)
from kafka_eos_source.operate.doctor.command import doctor
from kafka_eos_source.operate.json_documents import print_document
from kafka_eos_source.operate.shared import ExitCode, parse_pairs, warn_of_secrets
from kafka_eos_source.runtime.commands import JSON, handling, print_error, wants_json
from kafka_eos_source.runtime.watchdog import on_end_of_parent

_POLL_SECONDS = 0.1
#: The lines that install the script, by shell.
INSTALL = {
    "bash": 'add  eval "$(kafka-eos completion bash)"  to ~/.bashrc',
    "zsh": 'add  eval "$(kafka-eos completion zsh)"  to ~/.zshrc, after compinit',
    "fish": "kafka-eos completion fish > ~/.config/fish/completions/kafka-eos.fish",
}
_PROGRAM = "kafka-eos"
#: The variable by which the shell asks the program for words; click derives the same name.
_VARIABLE = "_KAFKA_EOS_COMPLETE"


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
        if not ctx.resilient_parsing and found[0] != doctor.name:
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
    they would do. Brokers are those of --bootstrap-servers, else of the variable KAFKA_EOS_BOOTSTRAP_SERVERS,
    else 127.0.0.1:9092. What to do about each error condition: docs/runbooks.md.
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
    help="Keep the data in this folder, without end. Default: a temporary folder, deleted at the end.",
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
    from kafka_eos_source.embedded.cluster import lasting
    from kafka_eos_source.embedded.java import KAFKA_VERSION

    properties = parse_pairs(config, "--config")
    if directory is not None:
        properties = lasting(properties)  # somebody may go on with the data and its checkpoints after weeks
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
            print_document(
                "broker", bootstrap_servers=kafka.bootstrap_servers, directory=str(kafka.directory)
            )
        else:
            click.echo(f"bootstrap.servers={kafka.bootstrap_servers}")
        sys.stdout.flush()
        click.echo(f"Data folder: {kafka.directory}. Press Ctrl-C to stop.", err=True)
        while not stop.requested:
            pause.wait(_POLL_SECONDS)
            kafka.check()


@main.command()
@click.argument("shell", type=click.Choice(list(INSTALL)))
@JSON
@click.pass_context
def completion(ctx: click.Context, /, shell: str, as_json: bool) -> None:
    r"""Print the script that completes commands in a shell.

    Supported are bash (4.4 or newer), zsh and fish.

    \b
    bash: add  eval "$(kafka-eos completion bash)"  to ~/.bashrc
    zsh:  add  eval "$(kafka-eos completion zsh)"  to ~/.zshrc, after compinit
    fish: kafka-eos completion fish > ~/.config/fish/completions/kafka-eos.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, f"click completes in {shell}"
    # click's source() of bash also runs bash to check its version; the shell that reads the script may be
    # another one, so the version is documented instead
    made = kind(ctx.find_root().command, {}, _PROGRAM, _VARIABLE)
    script = made.source_template % made.source_vars()
    if as_json:
        print_document("completion", shell=shell, script=script, install=INSTALL[shell])
    else:
        click.echo(script)


for _each in (
    doctor,
    rights.acls,
    top.top,
    top.metrics,
    query_commands.inspect,
    query_commands.fence,
    query_commands.adopt,
    query_commands.sweep,
    state_commands.state,
    sinks.sinks,
    token_topics.group,
    dead_letter_commands.group,
    topics.topics,
    topics.produce,
    topics.tail,
    topics.lag,
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
