"""The query of the tour: orders in Avro become invoices in Protobuf. ``python -m integration.tour.query SPEC``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from integration.support.driver import end_with_parent
from integration.support.session import builder
from kafka_eos_source import from_registry, invalid_record, local_checkpoints, to_registry


def invoices(orders: DataFrame, registry: str) -> DataFrame:
    order = from_registry("value", registry, subject="orders-value", mode="permissive")
    decoded = orders.withColumn("order", order)
    invoice = F.struct(
        "order.value.number",
        "order.value.customer",
        (F.col("order.value.amount") * 100).cast("long").alias("cents"),
        F.coalesce("order.value.note", F.lit("")).alias("note"),
    )
    good = F.when(F.col("order.error").isNull(), invoice)
    return decoded.select(
        "key",
        F.coalesce(to_registry(good, registry, subject="invoices-value"), "value").alias("value"),
        invalid_record(F.col("order.error").isNotNull(), F.col("order.error"), error="NotAnOrder"),
    )


def main(spec: dict[str, Any]) -> None:
    """Runs the query until this process is killed or its parent ends."""
    end_with_parent()
    spark = builder().config(map=local_checkpoints()).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    kafka = {"kafka.bootstrap.servers": spec["broker"]}
    orders = (
        spark.readStream.format("kafka-eos")
        .options(**kafka, subscribe=spec["orders"], startingOffsets="earliest")
        .option("metrics.port", spec["metrics_port"])
        .load()
    )
    (
        invoices(orders, spec["registry"])
        .writeStream.format("kafka-eos")
        .options(**kafka, topic=spec["invoices"], checkpointLocation=spec["checkpoint"])
        .options(**{"onInvalidRecord": "dead-letter", "deadLetter.topic": spec["dead"]})
        .option("application.id", spec["application_id"])
        .start()
        .awaitTermination()
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
