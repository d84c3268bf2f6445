"""Packed batches: Arrow record batches as bytes, which Spark and Kafka pass on without looking into them.

A packed batch is one value of a binary column, or one value in Kafka or a database. There are two forms, both
in Arrow's IPC format:

========  =================================  ===========================================================
form      content                            where
========  =================================  ===========================================================
message   a record batch, without a schema   in a binary column between two tasks of one micro-batch:
                                             `in_read.step`, `state.shard_batches`
stream    the schema, then a record batch    in what is stored: packets (`protocol.packet`), pending
                                             changes, and the records of an initial state
========  =================================  ===========================================================

Both ends of a message know its schema, so it is smaller and cheaper to read. A stream may be read by a later
version, which finds the schema in it. Stored streams must stay readable, so their bytes must not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import InvalidRecordError

#: Arrow needs buffers that begin at a multiple of this address; packed batches are padded to it.
_ALIGNMENT = 8
#: Most bytes in a binary column, because its offsets are signed 32-bit numbers.
_COLUMN_BYTES = 2**31 - 1

#: What Arrow raises for bytes that it cannot read.
_UNREADABLE = (pa.ArrowException, OSError, EOFError)


def slices(rows: pa.RecordBatch, size_bytes: int) -> Iterator[pa.RecordBatch]:
    """Cuts a batch into slices of about ``size_bytes``, with one row at least; copies nothing."""
    count = max(1, size_bytes * rows.num_rows // max(1, rows.nbytes))
    return (rows.slice(start, count) for start in range(0, rows.num_rows, count))


def pack(rows: pa.RecordBatch) -> pa.Buffer:
    """Packs a batch as a message."""
    return rows.serialize()


def unpack(packed: pa.Buffer, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Reads a message without copying its buffers.

    Args:
        packed: what `pack` returned.
        schema: exact schema of the batch that was packed.
        where: the column that contains the message, for errors.

    Raises:
        InvalidRecordError: if it is not a message, or its buffers are too short for its rows.
    """
    try:
        return _checked(pa.ipc.read_record_batch(packed, schema))
    except _UNREADABLE as error:
        raise _damaged(where, packed.size, error) from error


def pack_stream(rows: pa.RecordBatch, head: bytes = b"") -> pa.Buffer:
    """Packs a batch as a stream that follows ``head``."""
    sink = pa.BufferOutputStream()
    sink.write(head)
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return sink.getvalue()


def unpack_stream(packed: pa.Buffer | bytes | memoryview, where: str) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a stream without copying their buffers.

    Args:
        packed: what `pack_stream` returned, without its head.
        where: the place that contains the stream, for errors.

    Raises:
        InvalidRecordError: if it is not a stream, or the buffers of a batch are too short for its rows.
    """
    batch = None
    try:
        for batch in pa.ipc.open_stream(packed):
            yield _checked(batch)
        if batch is None:  # Arrow reads a stream that was cut off between two messages without an error
            raise EOFError("the stream ends before its first batch")
    except _UNREADABLE as error:
        raise _damaged(where, memoryview(packed).nbytes, error) from error


def column(packed: Sequence[pa.Buffer]) -> pa.BinaryArray:
    """Returns a binary column of packed batches; copies nothing if there is only one.

    Raises:
        InvalidRecordError: if they have 2 GiB or more in total.
    """
    offsets = np.zeros(len(packed) + 1, np.int64)
    np.cumsum([each.size for each in packed], out=offsets[1:])
    if offsets[-1] > _COLUMN_BYTES:
        raise InvalidRecordError(
            f"{len(packed)} packed batch(es) have {offsets[-1]:,} bytes; a binary column holds at most "
            f"{_COLUMN_BYTES:,}.",
            fix="return smaller record batches, or rows with smaller values.",
        )
    data = packed[0] if len(packed) == 1 else pa.py_buffer(b"".join(packed))
    return pa.Array.from_buffers(
        pa.binary(), len(packed), [None, pa.py_buffer(offsets.astype(np.int32)), data]
    )


def values(packed: pa.BinaryArray | pa.LargeBinaryArray) -> Iterator[pa.Buffer]:
    """Yields the values of a binary column, which are not copied unless they are unaligned; skips nulls.

    With ``spark.sql.execution.arrow.useLargeVarTypes``, Spark passes the column with 64-bit offsets.
    """
    _, offsets, data = packed.buffers()
    if data is None or packed.null_count == len(packed):
        return
    # a scalar of Arrow's is a copy of its value
    width = np.dtype(np.int64 if pa.types.is_large_binary(packed.type) else np.int32)
    bounds = np.frombuffer(offsets, width, len(packed) + 1, packed.offset * width.itemsize).tolist()
    for index, is_valid in enumerate(packed.is_valid().to_pylist()):
        if is_valid:
            value = data.slice(bounds[index], bounds[index + 1] - bounds[index])
            yield value if value.address % _ALIGNMENT == 0 else pa.py_buffer(value.to_pybytes())


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Checks the lengths of the buffers, because Arrow would read beyond the end of one that is too short."""
    batch.validate()
    return batch


def _damaged(where: str, size_bytes: int, error: Exception) -> InvalidRecordError:
    return InvalidRecordError(
        f"{where} contains {size_bytes:,} bytes that are not a packed batch: {error}.",
        fix="do not change packed batches on their way, and install the same version of kafka-eos on the "
        "driver and on all executors.",
    )
