"""The query of the tour: orders in Avro become invoices in Protobuf."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from integration.support.driver import end_with_parent
from integration.support.session import builder
from kafka_eos_source import from_registry, local_checkpoints, to_registry, undecodable_record


def invoices(orders: DataFrame, registry: str) -> DataFrame:
    order = from_registry("value", registry, topic="orders", mode="permissive")
    invoice = f.struct(
        "order.value.number",
        "order.value.customer",
        (f.col("order.value.amount") * 100).cast("long").alias("cents"),
        f.coalesce("order.value.note", f.lit("")).alias("note"),
    )
    encoded = to_registry(invoice, registry, topic="invoices")
    return orders.withColumn("order", order).select(
        "key",
        f.when(f.col("order.error").isNull(), encoded).otherwise(f.col("value")).alias("value"),
        undecodable_record("order"),
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
