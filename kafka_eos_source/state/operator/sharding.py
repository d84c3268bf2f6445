"""Repartitions rows by shard, the same way for a stream and for its initial state. Runs on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions

from kafka_eos_source.state.shard_rows import PACKED_BATCH, ROUTE, SHARD

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def by_shard(rows: DataFrame, keys: Sequence[str], shards: int) -> DataFrame:
    """Returns the rows, each in the Spark partition of its shard, with the shard in the column `SHARD`.

    Spark's hash decides the shard. ``repartition`` uses the same hash (``HashPartitioning``), so the number
    of the partition is the number of the shard.

    Args:
        rows: rows, or packed batches (`state.shard_rows`), which already contain their shard.
        keys: the key columns, in grouping order.
        shards: number of shards.
    """
    if PACKED_BATCH in rows.columns:
        # ROUTE stays in the frame: adaptive execution replaces a projection over an empty shuffle by an empty
        # relation, and the operator would then run for no shard.
        return rows.repartition(shards, ROUTE)
    columns = [functions.col(f"`{name}`") for name in keys]
    shard = functions.pmod(functions.hash(*columns), functions.lit(shards))
    return rows.withColumn(SHARD, shard).repartition(shards, *columns)
