"""Helpers for tests of the source: they fill topics without Spark, and run reads to their end."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StreamingQuery

from integration.support.kafka import TIMEOUT_SECONDS, Admin, await_stable, produce, transaction

FORMAT = "kafka-eos"


class Topics:
    """Creates and fills topics, plainly or in transactions that commit, abort or stay open.

    When a method has ended a transaction, the topic has its control records.
    """

    def __init__(self, bootstrap_servers: str, admin: Admin) -> None:
        self._servers = bootstrap_servers
        self.admin = admin

    def new(self, partitions: int = 1, *, prefix: str = "t", name: str = "", **config: str) -> str:
        return self.admin.create(name or f"{prefix}-{uuid.uuid4().hex[:10]}", partitions, **config)

    def send(self, topic: str, values: Iterable[Any], *, partition: int = 0, **more: Any) -> None:
        produce(self._servers, topic, map(_text, values), partition=partition, **more)

    @contextmanager
    def open_transaction(
        self, topic: str, values: Iterable[Any], *, partition: int = 0
    ) -> Iterator[Producer]:
        """Sends records in a transaction that stays open during the block; aborts it unless committed."""
        producer = transaction(self._servers, f"test-{uuid.uuid4()}")
        for value in values:
            producer.produce(topic, _text(value), partition=partition)
        assert producer.flush(TIMEOUT_SECONDS) == 0
        try:
            yield producer
        finally:
            producer.abort_transaction(TIMEOUT_SECONDS)
            await_stable(self._servers, topic)

    def aborted(self, topic: str, values: Iterable[Any], *, partition: int = 0) -> None:
        with self.open_transaction(topic, values, partition=partition):
            pass

    def committed(self, topic: str, values: Iterable[Any], *, partition: int = 0) -> None:
        producer = transaction(self._servers, f"test-{uuid.uuid4()}")
        for value in values:
            producer.produce(topic, _text(value), partition=partition)
        producer.commit_transaction(TIMEOUT_SECONDS)
        await_stable(self._servers, topic)


def _text(value: Any) -> bytes | None:
    return value if value is None or isinstance(value, bytes) else str(value).encode()


class Reader:
    """Reads one cluster as a user would; options keep their dots and capitals."""

    def __init__(self, spark: SparkSession, bootstrap_servers: str, folder: Path) -> None:
        self.spark = spark
        self._servers = bootstrap_servers
        self._folder = folder

    def batch(self, **options: Any) -> DataFrame:
        return self.spark.read.format(FORMAT).options(**self._options(options)).load()

    def stream(self, **options: Any) -> DataFrame:
        return self.spark.readStream.format(FORMAT).options(**self._options(options)).load()

    def run(self, checkpoint: str = "c", *, once: bool = False, **options: Any) -> list[list[Row]]:
        """Reads everything that is there now; returns the rows of each non-empty batch."""
        batches: list[list[Row]] = []
        trigger: dict[str, bool] = {"once": True} if once else {"availableNow": True}
        query = (
            self.stream(**options)
            .writeStream.foreachBatch(_keep(batches))
            .option("checkpointLocation", str(self._folder / checkpoint))
            .trigger(**trigger)  # type: ignore[arg-type]
            .start()
        )
        try:
            assert query.awaitTermination(90), "the query did not end"
        finally:
            query.stop()
        return batches

    def run_all(self, checkpoint: str = "c", **options: Any) -> list[list[Row]]:
        """Runs twice, because before PySpark 4.2 a run is one batch, which may be a replay."""
        return self.run(checkpoint, **options) + self.run(checkpoint, **options)

    @contextmanager
    def running(
        self, checkpoint: str = "c", **options: Any
    ) -> Iterator[tuple[StreamingQuery, list[list[Row]]]]:
        """Runs a query until the block ends."""
        batches: list[list[Row]] = []
        query = (
            self.stream(**options)
            .writeStream.foreachBatch(_keep(batches))
            .option("checkpointLocation", str(self._folder / checkpoint))
            .start()
        )
        try:
            yield query, batches
        finally:
            query.stop()

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"kafka.bootstrap.servers": self._servers, **options}


def _keep(batches: list[list[Row]]) -> Callable[[DataFrame, int], None]:
    def keep(frame: DataFrame, _batch_id: int) -> None:
        rows = frame.collect()
        if rows:
            batches.append(rows)

    return keep


def values(rows: list[Row] | list[list[Row]] | DataFrame) -> list[str | None]:
    """Returns the values as text, ordered by topic, partition and offset."""
    if isinstance(rows, DataFrame):
        rows = rows.collect()
    flat: list[Row] = []
    for each in rows:
        flat.extend(each if isinstance(each, list) else [each])
    ordered = sorted(flat, key=lambda row: (row["topic"], row["partition"], row["offset"]))
    return [None if row["value"] is None else bytes(row["value"]).decode() for row in ordered]


def texts(numbers: range) -> list[str]:
    return [str(number) for number in numbers]
