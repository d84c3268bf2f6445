"""Revenue per category and minute: to Kafka, a Delta table and a database, exactly once in all three.

python examples/revenue.py BROKERS FOLDER   # reads the topic "orders", writes "revenue"
"""

import sys

from pyspark.sql import functions as F

from kafka_eos_source import App, delta, sql, tumbling

brokers, folder = sys.argv[1:]
app = App("revenue", brokers, checkpoint=f"{folder}/checkpoint")
orders = app.read("orders", schema="id BIGINT, category STRING, amount DOUBLE, ts TIMESTAMP")
minute = tumbling("1 minute", on="ts", grace="1 hour")
revenue = app.aggregate(
    orders.groupBy("category"), orders=F.count("*"), revenue=F.sum("amount"), window=minute
)
sinks = {"lake": delta(f"{folder}/lake"), "db": sql(f"sqlite:///{folder}/shop.db", "revenue")}
app.write(revenue, "revenue", key="category", sinks=sinks).start().awaitTermination()
