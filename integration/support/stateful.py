"""Stateful queries for the tests: a count per key whose every intermediate result can be judged.

Each output row says the key, its count after the batch, and how many rows the batch brought. So one look at
the output finds a lost, doubled or reordered batch, and a state that was applied twice or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from integration.support.kafka import Record
from kafka_eos_source.protocol.packet import CHANGELOG
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.state import layout
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.operator.frame import grouping, with_operator

_COUNTS = 1


class RunningCounts:
    """A processor without helpers: what the operator itself does is under test."""

    output = pa.schema([("key", pa.binary()), ("value", pa.string())])
    schema = "running-counts"

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        seen: Counter[bytes] = Counter()
        for batch in batches:
            counted = pc.value_counts(batch.column("key").cast(pa.binary()))
            for each in counted.to_pylist():
                seen[each["values"]] += each["counts"]
        failpoints.reach("test.within_process")
        keys, values = [], []
        for key, more in sorted(seen.items()):
            entry = layout.keyed(_COUNTS, key)
            before = int(state.get(entry) or 0)
            state.put(entry, str(before + more).encode())
            keys.append(key)
            values.append(f"{before + more} +{more}")
        if keys:
            yield pa.record_batch([pa.array(keys), pa.array(values)], schema=self.output)


def running_counts(
    frame: DataFrame, options: Mapping[str, str], *, store: str = "counts", shards: int = 2
) -> DataFrame:
    """``frame`` (a column ``key``) behind the operator, with the columns that the sink takes."""
    rows, keys = grouping(frame, "key")
    return with_operator(rows, keys, RunningCounts(), store=store, shards=shards, options=options)


def check_running_counts(wanted: Mapping[str, int], found: Sequence[Record]) -> None:
    """Every key was counted up without a gap, from nothing to all of its rows.

    Args:
        wanted: rows of each key in the input.
        found: the output, read committed, in the order of each partition.
    """
    at: dict[str, int] = {}
    for record in found:
        key = (record.key or b"").decode()
        count, _, more = (record.value or b"").decode().partition(" +")
        assert at.get(key, 0) + int(more) == int(count), (
            f"key {key!r} was at {at.get(key, 0)}, then {record.value!r}"
        )
        at[key] = int(count)
    assert at == dict(wanted)


def apply(frame: DataFrame, spec: Mapping[str, Any]) -> DataFrame:
    """The stateful part of a driver's spec: ``{"options": …, "shards": 2, "drop": "column"}``."""
    result = running_counts(frame, spec["options"], shards=spec.get("shards", 2))
    if spec.get("drop") == "column":
        return result.drop(CHANGELOG)
    return result
