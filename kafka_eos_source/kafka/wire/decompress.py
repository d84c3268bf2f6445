"""Decompresses the records of fetched batches."""

from __future__ import annotations

import zlib

import pyarrow as pa

_SNAPPY_FRAME = b"\x82SNAPPY\x00"
_SNAPPY_FRAME_BYTES = 16
#: The most bytes of a decompressed batch. Brokers limit batches only before decompression.
_MOST_DECOMPRESSED_BYTES = 1 << 30
_CHUNK_BYTES = 64 << 10


def decompressed(codec: int, packed: memoryview) -> memoryview:
    """Decompresses the records of a batch.

    Args:
        codec: the compression in the attributes of the batch: 1 = gzip, 2 = snappy, 3 = lz4, 4 = zstd.
        packed: the compressed records.

    Raises:
        OSError, ValueError, zlib.error: if the bytes are damaged, or the codec is unknown.
    """
    if codec == 1:
        unpacker = zlib.decompressobj(wbits=31)
        data = unpacker.decompress(packed, _MOST_DECOMPRESSED_BYTES)
        if not unpacker.eof:
            raise ValueError("the end is missing, or it has more than 1 GiB")
        return memoryview(data)
    if codec == 2:
        return _from_snappy(packed)
    if codec not in (3, 4):
        raise ValueError(f"its compression {codec} is unknown")
    stream = pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(packed)), "lz4" if codec == 3 else "zstd")
    out = bytearray(max(_CHUNK_BYTES, 4 * len(packed)))
    size = 0
    while count := stream.readinto(memoryview(out)[size:]):
        size += count
        if size > _MOST_DECOMPRESSED_BYTES:
            raise ValueError("it has more than 1 GiB")
        if size == len(out):
            out += bytes(len(out))
    # not the whole buffer, because an answer may have thousands of small batches
    return memoryview(bytes(memoryview(out)[:size]) if 2 * size < len(out) else out)[:size]


def _from_snappy(packed: memoryview) -> memoryview:
    """Decompresses Java's frame of blocks (xerial), or one block without a frame, as librdkafka writes it."""
    if bytes(packed[: len(_SNAPPY_FRAME)]) != _SNAPPY_FRAME:
        return _snappy_block(packed)
    parts, at = [], _SNAPPY_FRAME_BYTES
    while at < len(packed):
        size = int.from_bytes(packed[at : at + 4], "big")
        at += 4
        if size > len(packed) - at:
            raise ValueError("a block is cut off")
        parts.append(_snappy_block(packed[at : at + size]))
        at += size
    return memoryview(b"".join(parts))


def _snappy_block(packed: memoryview) -> memoryview:
    size = shift = 0
    for byte in packed[:5]:  # a block begins with its decompressed size
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if size > _MOST_DECOMPRESSED_BYTES:
        raise ValueError("it has more than 1 GiB")
    return memoryview(pa.Codec("snappy").decompress(pa.py_buffer(packed), size))
