"""``kafka-eos flights``: creates a topic of real flights to try queries on."""

from __future__ import annotations

import click

from kafka_eos_source.demo import flights
from kafka_eos_source.kafka import playground
from kafka_eos_source.runtime.commands import JSON, print_json

_PARTITIONS = 3


@click.command()
@click.option(
    "--bootstrap-servers",
    default="127.0.0.1:9092",
    show_default=True,
    help="Kafka brokers; by default those of `kafka-eos broker`.",
)
@click.option("--topic", default="flights", show_default=True, help="Name of the topic.")
@click.option(
    "--records",
    default=10_000,
    show_default=True,
    type=click.IntRange(1, 336_776),
    help="How many flights to send.",
)
@JSON
def main(bootstrap_servers: str, topic: str, records: int, as_json: bool) -> None:
    """Create a topic of real flights (New York, 2013) to try queries on.

    Waits up to a minute for the broker. Keys are carrier and flight number, as in AA-1141; values are JSON.
    Refuses to add to a topic that exists.
    """
    sent = fill(bootstrap_servers, topic, records)
    if as_json:
        print_json({"topic": topic, "records": sent, "partitions": _PARTITIONS})
        return
    click.echo(f"{sent:,} flights sent to topic {topic!r}, {_PARTITIONS} partitions.")


def fill(bootstrap_servers: str, topic: str, records: int) -> int:
    """Creates the topic, sends the first flights of the data set, and returns how many were sent.

    Raises:
        KafkaEosError: the data set is not installed, the topic exists, or the brokers do not answer.
    """
    frame = flights.events(records)
    playground.create_topics(bootstrap_servers, {topic: _PARTITIONS})
    keys = (frame["carrier"] + "-" + frame["flight"].astype(str)).tolist()
    playground.send(bootstrap_servers, topic, flights.as_json(frame), keys, lambda _sent: None)
    return len(frame)
