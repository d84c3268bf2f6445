"""Computes departure delays per airport and hour: number of flights, mean delay and longest delay.

The input is a data set of real flights. A flight counts in the hour it was scheduled for, but flights arrive
in the order of their departure, and cancelled ones at the end of their day, so they are up to a day out of
order. Each hour's result is written once, when its grace period is over. The driver is killed several times
on the way. At the end, the results in the topic and the hours still open in the state are compared with a
direct computation over the data set.

    python examples/flight_delays.py                                      # starts a broker
    python examples/flight_delays.py --events 336776 --kills 3 --seed 1   # all of 2013
    python examples/flight_delays.py --bootstrap-servers 127.0.0.1:9092

Needs the extra ``demo`` of this package (the data set). The exit code is the verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.demo import flights, query
from kafka_eos_source.demo.query import Spec
from kafka_eos_source.demo.run import EXACTLY_ONCE, SOURCE_PARTITIONS, History, Kill, Run, schedule
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.kafka import playground
from kafka_eos_source.state import aggregate, tumbling
from kafka_eos_source.state.reading.query import StateQuery
from kafka_eos_source.testing.verdict import judge

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

HOUR_MS = 3_600_000
SHARDS = 2
STORE = "delays"
#: Failpoints at which the driver is killed, once each.
EXACT_KILLS = ("state.after_pending", "commit.before_commit", "commit.after_commit")


def hourly_delays(events: DataFrame, options: Mapping[str, str]) -> DataFrame:
    """Returns the query as a streaming DataFrame."""
    from pyspark.sql import functions as F

    flight = F.from_json(F.col("value").cast("string"), "origin STRING, dep_delay INT, time_hour TIMESTAMP")
    parsed = events.select(flight.alias("flight")).select("flight.*")
    hours = aggregate(
        parsed.groupBy("origin"),
        {"flights": F.count("*"), "mean_delay": F.avg("dep_delay"), "max_delay": F.max("dep_delay")},
        window=tumbling("1 hour", on="time_hour", grace="2 days"),
        emit="on_close",
        store=STORE,
        shards=SHARDS,
        options=options,
    )
    return hours.selectExpr(
        "concat(origin, '@', unix_millis(window_start)) AS key",
        "to_json(struct(origin, unix_millis(window_start) AS hour_ms, flights, mean_delay, max_delay)) "
        "AS value",
    )


class Hour(NamedTuple):
    """The result for one airport and hour; delays are None if all of its flights were cancelled."""

    origin: str
    hour_ms: int
    flights: int
    mean_delay: float | None
    max_delay: int | None


def start(spark: SparkSession, spec: Spec) -> StreamingQuery:
    """Starts the query over the whole input."""
    kafka = {"kafka.bootstrap.servers": spec.bootstrap_servers, "application.id": spec.application_id}
    delays = hourly_delays(query.events(spark, spec), {**kafka, "state.dir": f"{spec.checkpoints}/state"})
    return (
        delays.writeStream.format("kafka-eos")
        .options(**kafka)
        .option("topic", spec.outputs[EXACTLY_ONCE])
        .option("checkpointLocation", f"{spec.checkpoints}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )


def prepare(servers: str, frame: pd.DataFrame, folder: Path, batches: int) -> Spec:
    """Creates the topics, sends the flights, and returns the spec for a driver."""
    name = f"flight-delays-{uuid.uuid4().hex[:6]}"
    output = f"{name}-hourly"
    playground.create_topics(servers, {name: SOURCE_PARTITIONS, output: SHARDS})
    keys = (frame["carrier"] + "-" + frame["flight"].astype(str)).tolist()
    playground.send(servers, name, flights.as_json(frame), keys, lambda _more: None)
    return Spec(
        bootstrap_servers=servers,
        source=name,
        outputs={EXACTLY_ONCE: output},
        checkpoints=str(folder),
        application_id=name,
        offsets_per_trigger=-(-len(frame) // batches),
        names=flights.Names({}, {}),
    )


def in_order(limit: int | None) -> pd.DataFrame:
    """Returns flights ordered by day, and within a day by departure, as in the data set."""
    import pandas as pd

    frame = flights.events()
    new_york = pd.to_datetime(frame["time_hour"]) - pd.Timedelta(hours=5)
    frame = frame.iloc[new_york.dt.date.argsort(kind="stable")]
    return frame if limit is None else frame.head(limit)


def expected(frame: pd.DataFrame) -> list[Hour]:
    """Computes every hour's result directly from the data set."""
    hours = pc.strptime(pa.array(frame["time_hour"]), format="%Y-%m-%dT%H:%M:%SZ", unit="ms")
    delays = pa.array(frame["dep_delay"], pa.int64())
    table = pa.table({"origin": pa.array(frame["origin"]), "hour": hours.cast(pa.int64()), "delay": delays})
    grouped = table.group_by(["origin", "hour"]).aggregate(
        [([], "count_all"), ("delay", "mean"), ("delay", "max")]
    )
    columns = ("origin", "hour", "count_all", "delay_mean", "delay_max")
    return [Hour(*row) for row in zip(*(grouped[name].to_pylist() for name in columns), strict=True)]


def complete(spec: Spec) -> Iterator[Hour]:
    """Returns the closed hours, which a ``read_committed`` consumer finds in the output."""
    for _, value in playground.read_back(spec.bootstrap_servers, {spec.outputs[EXACTLY_ONCE]: SHARDS}):
        row = json.loads(value)
        yield Hour(row["origin"], row["hour_ms"], row["flights"], row.get("mean_delay"), row.get("max_delay"))


def still_open(state: StateQuery) -> Iterator[Hour]:
    """Returns the open hours, which are in the state because their grace period is not over."""
    for row in state.to_arrow().to_pylist():
        key, value = row["key"], row["value"]
        yield Hour(key["origin"], int(key["window_start"].timestamp() * 1000), *value.values())


def state_of(spec: Spec) -> StateQuery:
    """Returns the state, read from its changelog."""
    return StateQuery(spec.application_id, STORE, kafka={"kafka.bootstrap.servers": spec.bootstrap_servers})


def verdict(frame: pd.DataFrame, spec: Spec) -> bool:
    """Prints the results next to the expected ones, and returns whether they agree."""
    closed = list(complete(spec))
    with state_of(spec) as state:
        opened, late = list(still_open(state)), state.counts.get("late_rows", 0)
    found = judge(expected(frame), [*closed, *opened])
    for label, number in (
        ("flights", len(frame)),
        ("airports and hours in the data set", found.expected),
        ("complete, in the topic", len(closed)),
        ("still open, in the state", len(opened)),
        ("missing", found.missing),
        ("twice", found.doubled),
        ("with another result", found.foreign),
        ("flights dropped as too late", late),
    ):
        print(f"{label:38}{number:>9,}")
    print(*found.examples, sep="\n", end="\n" if found.examples else "")
    for each in sorted(closed, key=lambda hour: -(hour.mean_delay or 0))[:3]:
        at = pa.scalar(each.hour_ms, pa.timestamp("ms", "UTC")).as_py()
        late_by = f"{each.mean_delay:.0f} min late in the mean of {each.flights}"
        print(f"{each.origin}, {at:%Y-%m-%d %H:00} UTC: {late_by}")
    good = found.exactly_once and not late
    print("every hour once, and right" if good else "NOT right")
    return good


def demo(servers: str, events: int | None, kills: int, seed: int, folder: Path) -> bool:
    """Runs the example, including the kills."""
    frame = in_order(events)
    spec = prepare(servers, frame, folder, batches=12)
    moments: Iterable[Kill] = [
        *(Kill(None, failpoint=name) for name in EXACT_KILLS),
        *(each for each in schedule(seed, kills, compare=False) if not each.failpoint),
    ]
    told = 0

    def tell(history: History) -> None:
        nonlocal told
        for at, what in history.kills[told:]:
            where = "at a random moment" if what == "random" else f"exactly at {what}"
            print(f"{at:6.1f} s  driver killed {where}, {history.committed[-1]:,} flights committed")
        told = len(history.kills)

    Run(spec, len(frame), list(moments), folder, tell, [__file__, "--driver"]).to_the_end()
    return verdict(frame, spec)


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
    parser.add_argument("--events", type=int, default=50_000, help="only the first flights (50000)")
    parser.add_argument("--kills", type=int, default=1, help="at random moments, beside exact ones (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (0)")
    parser.add_argument("--bootstrap-servers", help="a Kafka of your own; topics get new names there")
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.driver:
        driver(Spec.read(Path(given.driver)))
        sys.exit()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flight-delays-")))
        servers = given.bootstrap_servers or stack.enter_context(EmbeddedKafka()).bootstrap_servers
        good = demo(servers, given.events, given.kills, given.seed, folder)
    sys.exit(0 if good else 1)
