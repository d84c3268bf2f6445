"""Partial rows on their way to their shard: a parcel for each shard, not a row for each key.

What a read or a step after it has combined is of no interest to Spark, which would turn each row from Arrow
into a row of its own, shuffle it, and turn it back. So the combining task sorts its rows by shard, with
Spark's own hash, and hands over one row for each shard:

======================  ======  ===============================================================
column
======================  ======  ===============================================================
``__kafka_eos_route``   int     a number that ``repartition(shards, route)`` sends to the shard
``__kafka_eos_shard``   int     the shard
``__kafka_eos_parcel``  binary  a record batch of Arrow IPC, without its schema
======================  ======  ===============================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa

from kafka_eos_source.state.encoding.spark_hash import shards_of

#: The column that says of which shard a row is.
SHARD = "__kafka_eos_shard"
ROUTE = "__kafka_eos_route"
PARCEL = "__kafka_eos_parcel"

#: Columns of parcels, as Spark has them.
PARCELS = pa.schema([pa.field(ROUTE, pa.int32()), pa.field(SHARD, pa.int32()), pa.field(PARCEL, pa.binary())])

#: Bytes of rows in a parcel, about: Spark holds a few of them at a time.
PARCEL_BYTES = 4 << 20


def pack(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, keys: Sequence[str], shards: int
) -> Iterator[pa.RecordBatch]:
    """Parcels of rows, of schema `PARCELS`; rows of a shard keep their order.

    Args:
        batches: of ``schema``.
        schema: that `unpack` is given too.
        keys: columns of the key, in their order.
        shards: how many.
    """
    for batch in batches:
        if not batch.num_rows:
            continue
        batch = _conform(batch, schema)
        shard = shards_of([batch.column(name) for name in keys], shards)
        order = np.argsort(shard, kind="stable")
        counts = np.bincount(shard, minlength=shards)
        batch = batch.take(pa.array(order))
        rows = max(1, PARCEL_BYTES * batch.num_rows // max(1, batch.nbytes))
        found: list[tuple[int, bytes]] = []
        start = 0
        for number in np.flatnonzero(counts).tolist():
            end = start + int(counts[number])
            for at in range(start, end, rows):
                part = batch.slice(at, min(rows, end - at))
                found.append((number, part.serialize().to_pybytes()))
            start = end
        yield parcel_rows([parcel for _, parcel in found], [number for number, _ in found], shards)


def parcel_rows(parcels: Sequence[bytes | None], numbers: Sequence[int], shards: int) -> pa.RecordBatch:
    """Rows of `PARCELS`: each parcel on its way to the shard of its number."""
    known = routes(shards)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([known[number] for number in numbers], pa.int32()),
            pa.array(numbers, pa.int32()),
            pa.array(parcels, pa.binary()),
        ],
        schema=PARCELS,
    )


def unpack(parcels: pa.BinaryArray, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows that were packed, of ``schema``; null is no parcel."""
    for parcel in parcels:
        if parcel.is_valid:
            yield pa.ipc.read_record_batch(parcel.as_buffer(), schema)


@lru_cache(maxsize=8)
def routes(shards: int) -> tuple[int, ...]:
    """For each shard the smallest number that Spark's hash sends there.

    Numbers hash like dice, so all shards are found within about ``shards × ln(shards)`` of them.
    """
    found: dict[int, int] = {}
    start, step = 0, 4 * shards + 64
    while len(found) < shards:
        numbers = np.arange(start, start + step, dtype=np.int32)
        for number, shard in zip(
            numbers.tolist(), shards_of([pa.array(numbers)], shards).tolist(), strict=True
        ):
            found.setdefault(shard, number)
        start += step
    return tuple(found[shard] for shard in range(shards))


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns as `unpack` will take them; nullable or not is the schema's to say."""
    columns = [batch.column(field.name).cast(field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
