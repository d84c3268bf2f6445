"""Rows sent to their shards: what a stream and an initial state must share. Runs on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions

from kafka_eos_source.state.packed_batches import PARCEL, ROUTE, SHARD

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def by_shard(rows: DataFrame, keys: Sequence[str], shards: int) -> DataFrame:
    """The rows, each in the partition of its shard, whose number is in the column `SHARD`.

    Spark's own hash decides, as in its ``HashPartitioning``: so ``repartition`` sends a row to the partition
    that has its shard's number.

    Args:
        rows: or parcels of them (`state.packed_batches`), which know their shard.
        keys: columns, in the order in which the state is grouped.
        shards: how many.
    """
    if PARCEL in rows.columns:
        # ROUTE stays: adaptive execution takes a projection over an empty shuffle for empty itself, and the
        # operator would run for no shard
        return rows.repartition(shards, ROUTE)
    columns = [functions.col(f"`{name}`") for name in keys]
    shard = functions.pmod(functions.hash(*columns), functions.lit(shards))
    return rows.withColumn(SHARD, shard).repartition(shards, *columns)
