"""Shard batches: partial rows travel to their shard as one Spark row per shard, not one row per key.

Spark does not need to see the rows that a read, or a step after it, has combined. As ordinary rows, each of
them would be converted from Arrow to Spark's row format, shuffled, and converted back. So the combining task
sorts its rows by shard, with Spark's own hash, and sends each shard one Spark row with a packed batch:

============================  ======  ===============================================================
column                        type    content
============================  ======  ===============================================================
``__kafka_eos_route``         int     a number that ``repartition(shards, route)`` sends to the shard
``__kafka_eos_shard``         int     the shard
``__kafka_eos_packed_batch``  binary  the rows as a message of `protocol.packed_batches`
============================  ======  ===============================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa

from kafka_eos_source.protocol import packed_batches
from kafka_eos_source.spark.arrow import fit
from kafka_eos_source.state.encoding.spark_hash import shards_of

#: Names of the columns in the table above.
ROUTE = "__kafka_eos_route"
SHARD = "__kafka_eos_shard"
PACKED_BATCH = "__kafka_eos_packed_batch"
#: Name of the column with Spark's time of the micro-batch, for operators that use event times.
BATCH_TIME = "__kafka_eos_batch_time"

#: Schema of a frame that holds packed batches.
PACKED_SCHEMA = pa.schema(
    [pa.field(ROUTE, pa.int32()), pa.field(SHARD, pa.int32()), pa.field(PACKED_BATCH, pa.binary())]
)

#: Approximate size of the rows in a packed batch, in bytes. Spark holds a few packed batches in memory.
PACKED_BATCH_BYTES = 4 << 20


def pack(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, keys: Sequence[str], shards: int
) -> Iterator[pa.RecordBatch]:
    """Packs rows by shard. The rows of a shard keep their order.

    Args:
        batches: the rows, with the columns of ``schema``.
        schema: schema of the packed rows; `unpack` needs the same one.
        keys: names of the key columns, in grouping order.
        shards: number of shards.

    Yields:
        Batches of `PACKED_SCHEMA`.
    """
    for batch in batches:
        if not batch.num_rows:
            continue
        batch = fit(batch, schema, "the aggregation returned")
        shard_of_row = shards_of([batch.column(name) for name in keys], shards)
        order = np.argsort(shard_of_row, kind="stable")
        counts = np.bincount(shard_of_row, minlength=shards)
        batch = batch.take(pa.array(order))
        packed: list[pa.Buffer] = []
        destinations: list[int] = []
        start = 0
        for shard in np.flatnonzero(counts).tolist():
            count = int(counts[shard])
            of_shard = packed_batches.slices(batch.slice(start, count), PACKED_BATCH_BYTES)
            packed += map(packed_batches.pack, of_shard)
            destinations += [shard] * (len(packed) - len(destinations))
            start += count
        yield routed(packed_batches.column(packed), destinations, shards)


def routed(packed: pa.BinaryArray, destinations: Sequence[int], shards: int) -> pa.RecordBatch:
    """Returns rows of `PACKED_SCHEMA` that carry each packed batch to the shard of the same position."""
    route_of_shard = routes(shards)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([route_of_shard[shard] for shard in destinations], pa.int32()),
            pa.array(destinations, pa.int32()),
            packed,
        ],
        schema=PACKED_SCHEMA,
    )


def unpack(packed: pa.BinaryArray, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yields the rows that `pack` packed, with the same ``schema``. Nulls are skipped.

    Raises:
        InvalidRecordError: if a value is not a packed batch.
    """
    where = f"column {PACKED_BATCH!r}"
    return (packed_batches.unpack(each, schema, where) for each in packed_batches.values(packed))


@lru_cache(maxsize=8)
def routes(shards: int) -> tuple[int, ...]:
    """Returns, for each shard, the smallest number that Spark's hash sends there.

    Spark's hash spreads consecutive numbers like a random function, so about ``shards × ln(shards)`` numbers
    reach every shard.
    """
    smallest: dict[int, int] = {}
    start, step = 0, 4 * shards + 64
    while len(smallest) < shards:
        numbers = np.arange(start, start + step, dtype=np.int32)
        for number, shard in zip(
            numbers.tolist(), shards_of([pa.array(numbers)], shards).tolist(), strict=True
        ):
            smallest.setdefault(shard, number)
        start += step
    return tuple(smallest[shard] for shard in range(shards))
