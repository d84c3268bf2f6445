"""``kafka-eos``: the command line."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

import click

from kafka_eos_source.errors import KafkaEosError


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


@main.command()
@click.option("--port", default=9092, show_default=True, help="Of the first broker; 0 = any free one.")
@click.option("--brokers", default=1, show_default=True, help="How many, in KRaft mode.")
@click.option("--dir", "directory", type=click.Path(file_okay=False), help="Keep the data here.")
@click.option("--config", multiple=True, metavar="KEY=VALUE", help="Broker property; may be repeated.")
def broker(port: int, brokers: int, directory: str | None, config: tuple[str, ...]) -> None:
    """Runs a real Kafka until Ctrl-C, SIGTERM or the end of the process that started it."""
    from kafka_eos_source.embedded import EmbeddedKafka

    properties = {}
    for each in config:
        name, separator, value = each.partition("=")
        if not separator:
            raise click.BadParameter(f"{each!r}; expected KEY=VALUE", param_hint="--config")
        properties[name] = value
    end = _end_of_parent_or_signal()
    with EmbeddedKafka(brokers, port, directory, properties, auto_create_topics=True) as kafka:
        click.echo(f"bootstrap.servers={kafka.bootstrap_servers}")
        sys.stdout.flush()
        click.echo(f"data in {kafka.directory}; Ctrl-C ends it", err=True)
        end.wait()


def _end_of_parent_or_signal() -> threading.Event:
    """Set on SIGINT, SIGTERM, SIGHUP, or when the process that started us is gone."""
    end = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        end.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    parent = os.getppid()

    def watch() -> None:
        while not end.wait(0.5):
            if os.getppid() != parent:
                end.set()

    threading.Thread(target=watch, daemon=True).start()
    return end


if __name__ == "__main__":
    main()
