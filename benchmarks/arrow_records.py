"""Makes many records as Arrow batches and sends them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.producer import RecordProducer
from kafka_eos_source.runtime.deadline import Deadline

ROWS = 50_000
_KEY_BYTES = 16
_SECONDS = 900.0


def random_changes(records: int, value_bytes: int, seed: int) -> Iterator[pa.RecordBatch]:
    """Returns records of a changelog: random keys of 16 bytes in the users' table, and random values."""
    random = np.random.default_rng(seed)
    for first in range(0, records, ROWS):
        rows = min(ROWS, records - first)
        keys = random.integers(0, 256, (rows, 1 + _KEY_BYTES), np.uint8)
        keys[:, 0] = 1  # the table of users' keys
        values = random.integers(0, 256, (rows, value_bytes), np.uint8)
        yield pa.record_batch({"key": binary_column(keys), "value": binary_column(values)})


def binary_column(rows: NDArray[np.uint8]) -> pa.BinaryArray:
    """Returns the rows of a matrix of bytes as one column."""
    kind = pa.binary(rows.shape[1])
    return pa.FixedSizeBinaryArray.from_buffers(kind, len(rows), [None, pa.py_buffer(rows.tobytes())]).cast(
        pa.binary()
    )


def send(bootstrap: str, topic: str, batches: Iterable[pa.RecordBatch]) -> None:
    """Sends batches with the columns ``key`` and ``value``; returns when the broker has all of them."""
    deadline = Deadline.after_seconds(_SECONDS)
    producer = RecordProducer(producer_config({"bootstrap.servers": bootstrap}), "benchmark")
    try:
        producer.begin_count()
        for batch in batches:
            producer.send(batch, topic, deadline)
        producer.flush(deadline)
    finally:
        producer.close()
