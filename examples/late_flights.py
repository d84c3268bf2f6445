"""Writes the flights that left late to a topic of their own, exactly once, in SQL.

python examples/late_flights.py BROKERS FOLDER   # reads the topic "flights", writes "late"

Needs the extra ``sql`` of this package. The program prints that no row passes through Spark.
"""

from __future__ import annotations

import sys

import pyarrow as pa

from kafka_eos_source import App

brokers, folder = sys.argv[1:]
airlines = pa.table({"carrier": ["AA", "UA", "DL"], "name": ["American", "United", "Delta"]})

app = App("late", brokers, checkpoint=f"{folder}/checkpoint")
flights = app.read("flights", schema="carrier STRING, dest STRING, dep_delay INT", keep="key")
late = app.sql(
    "SELECT key, name, dest, dep_delay FROM {flights} LEFT JOIN {airlines} USING (carrier) "
    "WHERE dep_delay > 60",
    flights=flights,
    airlines=airlines,
)
app.explain(late, "late", key="key")
app.write(late, "late", key="key").trigger(availableNow=True).start().awaitTermination()
