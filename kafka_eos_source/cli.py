"""``kafka-eos``: the command line."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType

import click

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.operate import (
    commands,
    sink_commands,
    state_commands,
    token_topic_commands,
    topic_commands,
)

_LOOK_SECONDS = 0.1


class _Command(click.Group):
    """Our errors are messages, not tracebacks."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KafkaEosError as error:
            click.echo(str(error), err=True)
            ctx.exit(1)


@click.group(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kafka-eos-source")
def main() -> None:
    """Exactly-once Kafka for Spark Structured Streaming."""
    # Errors reach the user as messages. Without a handler, Python would print what librdkafka logs as well.
    logging.getLogger("kafka_eos_source").addHandler(logging.NullHandler())


@main.command()
@click.option("--port", default=9092, show_default=True, help="Of the first broker; 0 = any free one.")
@click.option("--brokers", default=1, show_default=True, help="How many, in KRaft mode.")
@click.option("--dir", "directory", type=click.Path(file_okay=False), help="Keep the data here.")
@click.option("--config", multiple=True, metavar="KEY=VALUE", help="Broker property; may be repeated.")
def broker(port: int, brokers: int, directory: str | None, config: tuple[str, ...]) -> None:
    """Runs a real Kafka until Ctrl-C, SIGTERM or the end of the process that started it.

    Topics are made by writing to them, unless --config auto.create.topics.enable=false.
    """
    from kafka_eos_source.embedded import EmbeddedKafka

    properties = {}
    for each in config:
        name, separator, value = each.partition("=")
        if not separator:
            raise click.BadParameter(f"{each!r}; expected KEY=VALUE", param_hint="--config")
        properties[name.strip()] = value.strip()
    asked = _AskedToEnd()
    look = threading.Event()
    with EmbeddedKafka(brokers, port, directory, properties, auto_create_topics=True) as kafka:
        asked.breaks_off = False
        click.echo(f"bootstrap.servers={kafka.bootstrap_servers}")
        sys.stdout.flush()
        click.echo(f"data in {kafka.directory}; Ctrl-C ends it", err=True)
        while not asked.to_end:
            look.wait(_LOOK_SECONDS)
            kafka.check()


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Real flights through a driver that is killed again and again (--help lists its options)."""
    from kafka_eos_source.demo.__main__ import main as run

    run(list(arguments), prog_name="kafka-eos demo")


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def flights(arguments: tuple[str, ...]) -> None:
    """Creates a topic of real flights to try queries on (--help lists its options)."""
    from kafka_eos_source.demo.flights_topic import main as run

    run(list(arguments), prog_name="kafka-eos flights")


for _each in (
    commands.doctor,
    commands.inspect,
    commands.fence,
    commands.adopt,
    commands.sweep,
    state_commands.state,
    sink_commands.sinks,
    token_topic_commands.group,
    topic_commands.topics,
    topic_commands.produce,
    topic_commands.tail,
    topic_commands.lag,
):
    main.add_command(_each)


class _AskedToEnd:
    """By SIGINT, SIGTERM or SIGHUP, or because the process that started us is gone.

    Attributes:
        to_end: whether we were asked. A plain flag: a signal may come while a lock is held.
        breaks_off: whether being asked ends what is under way, by `SystemExit`.
    """

    def __init__(self) -> None:
        self.to_end = False
        self.breaks_off = True
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._watch, args=(os.getppid(),), daemon=True).start()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        again, self.to_end = self.to_end, True
        if self.breaks_off and not again:
            raise SystemExit(128 + number)

    def _watch(self, parent: int) -> None:
        look = threading.Event()
        while os.getppid() == parent:
            look.wait(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
