"""Encoder of a batch as the body of a request: JSON lines or an Arrow IPC stream."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from kafka_eos_source.sinks import formats

FORMATS = {"json": "application/x-ndjson", "arrow": "application/vnd.apache.arrow.stream"}


def encode(kind: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> memoryview:
    """Encodes the rows of a batch.

    The same rows always result in the same bytes, because a service may compare a repeated body with the
    first one.

    Args:
        kind: one of `FORMATS`.
        schema: schema of the rows.
        batches: rows.
    """
    out = pa.BufferOutputStream()
    if kind == "arrow":
        with pa.ipc.new_stream(out, schema) as stream:
            for batch in batches:
                stream.write_batch(batch)
    else:
        lines = formats.JsonLinesWriter(out)
        for batch in batches:
            lines.write_batch(batch)
    return memoryview(out.getvalue())


def headers(kind: str, rows: int) -> dict[str, str]:
    """Returns the headers that describe a body: its content type and its number of rows."""
    return {"Content-Type": FORMATS[kind], "Kafka-Eos-Rows": str(rows)}
