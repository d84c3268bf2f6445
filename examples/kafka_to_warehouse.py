"""Writes delays per route to Kafka, a warehouse (SQL) and a lake (Iceberg), exactly once in all three.

The query reads flights from a topic. Each micro-batch writes the new totals of the routes that it changed to
an output topic, to a database table that holds the newest row of each route, and to an Iceberg table that
keeps every revision. The driver is killed at each step of a commit. At the end, all three systems are read
back: they must hold the same revisions, each once, and the last revisions must match the data set.

    python examples/kafka_to_warehouse.py                                  # starts a broker, uses SQLite
    python examples/kafka_to_warehouse.py --warehouse postgresql+psycopg://eos@db/flights
    python examples/kafka_to_warehouse.py --events 336776 --kills 3        # all of 2013

Needs the extras ``demo``, ``sql`` and ``iceberg`` of this package. The exit code is the verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from kafka_eos_source import iceberg, sink_options, sql
from kafka_eos_source.demo import query
from kafka_eos_source.demo.query import Spec
from kafka_eos_source.demo.run import EXACTLY_ONCE, History, Kill, Run, schedule
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.kafka import playground
from kafka_eos_source.state import aggregate

from flight_delays import in_order, prepare

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SHARDS = 2
TABLE, LAKE = "route_delays", "flights.route_delays"
#: Environment variable with the database's URL, for the driver process that is killed.
WAREHOUSE = "KAFKA_TO_WAREHOUSE_URL"
#: Failpoints at which the driver is killed, once each: sinks are prepared, Kafka has committed, one sink has
#: committed.
EXACT_KILLS = ("commit.after_prepare", "commit.before_commit", "commit.after_commit", "commit.after_finish")


class Revision(NamedTuple):
    """The totals of a route after a micro-batch."""

    route: str
    flights: int
    minutes: int
    longest: int


def route_delays(events: DataFrame, options: Mapping[str, str]) -> DataFrame:
    """Returns the new totals of each route that a micro-batch changes."""
    from pyspark.sql import functions as F

    flight = F.from_json(F.col("value").cast("string"), "origin STRING, dest STRING, dep_delay INT")
    flights = events.select(flight.alias("f")).where("f.dep_delay IS NOT NULL")
    routes = flights.selectExpr("concat(f.origin, '-', f.dest) AS route", "f.dep_delay AS delay")
    totals = aggregate(
        routes.groupBy("route"),
        {"flights": F.count("*"), "minutes": F.sum("delay"), "longest": F.max("delay")},
        shards=SHARDS,
        options=options,
    )
    revision = "to_json(struct(route, flights, minutes, longest)) AS value"
    return totals.selectExpr("route AS key", revision, *Revision._fields)


def start(spark: SparkSession, spec: Spec) -> StreamingQuery:
    """Starts the query over the whole input."""
    kafka = {"kafka.bootstrap.servers": spec.bootstrap_servers, "application.id": spec.application_id}
    columns = Revision._fields
    sinks = sink_options(
        {
            "warehouse": sql(os.environ[WAREHOUSE], TABLE, mode="upsert", keys="route", columns=columns),
            "lake": iceberg(LAKE, catalog=lake(spec.checkpoints), columns=columns),
        }
    )
    delays = route_delays(query.events(spark, spec), {**kafka, "state.dir": f"{spec.checkpoints}/state"})
    return (
        delays.writeStream.format("kafka-eos")
        .options(**kafka, **sinks)
        .option("topic", spec.outputs[EXACTLY_ONCE])
        .option("checkpointLocation", f"{spec.checkpoints}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )


def lake(folder: str) -> dict[str, str]:
    """Returns the options of the Iceberg catalog: here a file; in production `type=rest` and a URI."""
    return {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/lake",
    }


def expected(frame: pd.DataFrame) -> set[Revision]:
    """Computes every route's last totals directly from the data set."""
    table = pa.table(
        {
            "route": pa.array(frame["origin"] + "-" + frame["dest"], pa.string()),
            "delay": pa.array(frame["dep_delay"], pa.int64(), from_pandas=True),
        }
    ).drop_null()
    grouped = table.group_by("route").aggregate([([], "count_all"), ("delay", "sum"), ("delay", "max")])
    names = ("route", "count_all", "delay_sum", "delay_max")
    return {Revision(*row) for row in zip(*(grouped[name].to_pylist() for name in names), strict=True)}


def in_kafka(spec: Spec) -> Counter[Revision]:
    """Returns what a ``read_committed`` consumer finds in the output topic."""
    topic = {spec.outputs[EXACTLY_ONCE]: SHARDS}
    return Counter(
        Revision(**json.loads(value)) for _, value in playground.read_back(spec.bootstrap_servers, topic)
    )


def in_warehouse(url: str) -> Counter[Revision]:
    """Returns the rows of the database table."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        found = connection.execute(sqlalchemy.text(f"SELECT {', '.join(Revision._fields)} FROM {TABLE}"))
        rows = Counter(Revision(*row) for row in found)
    engine.dispose()
    return rows


def in_lake(spec: Spec) -> Counter[Revision]:
    """Returns the rows of the Iceberg table."""
    from pyiceberg.catalog import load_catalog

    table = load_catalog("default", **lake(spec.checkpoints)).load_table(LAKE)
    return Counter(
        Revision(**row) for row in table.scan(selected_fields=Revision._fields).to_arrow().to_pylist()
    )


def newest(revisions: Counter[Revision]) -> set[Revision]:
    """Returns the newest revision of each route, which is the one with the most flights."""
    found: dict[str, Revision] = {}
    for each in revisions:
        known = found.get(each.route)
        if known is None or known.flights < each.flights:
            found[each.route] = each
    return set(found.values())


def verdict(frame: pd.DataFrame, spec: Spec, url: str) -> bool:
    """Prints the contents; returns whether all three systems agree with each other and the data set."""
    wanted, topic, rows, revisions = expected(frame), in_kafka(spec), in_warehouse(url), in_lake(spec)
    checks = {
        "last totals in Kafka are those of the data set": newest(topic) == wanted,
        "rows of the warehouse are those of the data set, each once": rows == Counter(wanted),
        "Kafka has each revision once": max(topic.values(), default=0) == 1,
        "the lake has the same revisions as Kafka, each once": revisions == topic,
    }
    print(f"{len(frame):,} flights, {len(wanted):,} routes")
    print(f"revisions: {topic.total():,} in Kafka, {revisions.total():,} in the lake")
    print(f"rows in the warehouse: {rows.total():,}")
    for what, holds in checks.items():
        print(f"{'yes' if holds else 'NO ':4}{what}")
    for each in sorted(wanted, key=lambda route: -route.minutes / route.flights)[:3]:
        print(
            f"{each.route}: {each.minutes / each.flights:.0f} min late in the mean of {each.flights} flights"
        )
    return all(checks.values())


def demo(servers: str, url: str, events: int | None, kills: int, seed: int, folder: Path) -> bool:
    """Runs the example, including the kills."""
    frame = in_order(events)
    spec = prepare(servers, frame, folder, batches=10)
    os.environ[WAREHOUSE] = url
    moments = [
        *(Kill(None, failpoint=name) for name in EXACT_KILLS),
        *(each for each in schedule(seed, kills, compare=False) if not each.failpoint),
    ]
    told = 0

    def tell(history: History) -> None:
        nonlocal told
        for at, what in history.kills[told:]:
            where = "at a random moment" if what == "random" else f"exactly at {what}"
            print(f"{at:6.1f} s  driver killed {where}")
        told = len(history.kills)

    Run(spec, len(frame), list(moments), folder, tell, [__file__, "--driver"]).to_the_end()
    return verdict(frame, spec, url)


def driver(spec: Spec) -> None:
    """Runs the query to the end of the input, in the process that is killed."""
    query.end_with_parent()
    spark = query.session()
    start(spark, spec).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=20_000, help="only the first flights (20000)")
    parser.add_argument("--kills", type=int, default=1, help="at random moments, beside exact ones (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (0)")
    parser.add_argument("--bootstrap-servers", help="a Kafka of your own; topics get new names there")
    parser.add_argument("--warehouse", help="SQLAlchemy URL of a database of your own; else a file of SQLite")
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.driver:
        driver(Spec.read(Path(given.driver)))
        sys.exit()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kafka-to-warehouse-")))
        servers = given.bootstrap_servers or stack.enter_context(EmbeddedKafka()).bootstrap_servers
        url = given.warehouse or f"sqlite:///{folder}/warehouse.db"
        good = demo(servers, url, given.events, given.kills, given.seed, folder)
    sys.exit(0 if good else 1)
