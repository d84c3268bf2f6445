"""Arrow batches as bytes with their schema, for packets, pending changes and initial state."""

from __future__ import annotations

import pyarrow as pa


def to_stream(rows: pa.RecordBatch) -> pa.Buffer:
    """Returns an Arrow IPC stream with this one batch; ``pa.ipc.open_stream`` reads it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return sink.getvalue()
