"""Decompresses the records of fetched batches, and accepts what Java's clients accept.

They read all members of a gzip stream, all frames of a zstd stream and all parts of a snappy stream, but only
the first frame of an lz4 stream. They ignore what follows a gzip or lz4 stream; behind a zstd frame, it is an
error.
"""

from __future__ import annotations

import zlib

import pyarrow as pa

_SNAPPY_FRAME = b"\x82SNAPPY\x00"
_SNAPPY_FRAME_BYTES = 16
#: Three bytes of a snappy block repeat at most 64.
_MOST_SNAPPY_RATIO = 22
#: How a member of a gzip stream begins. Java looks for another one only if there are more bytes than this.
_GZIP_MEMBER, _LEAST_GZIP_MEMBER = b"\x1f\x8b\x08", 19
#: Flags in the header of an lz4 frame, and the bits of a block's size.
_LZ4_DICTIONARY, _LZ4_CONTENT_CHECKSUM, _LZ4_CONTENT_SIZE, _LZ4_BLOCK_CHECKSUM = 0x01, 0x04, 0x08, 0x10
_LZ4_BLOCK_SIZE = 0x7FFFFFFF
#: The most bytes of a decompressed batch. Brokers limit batches only before decompression.
_MOST_DECOMPRESSED_BYTES = 1 << 30
_CHUNK_BYTES = 64 << 10
#: How much of a gzip stream is looked at behind a member, because the rest of that is copied for each member.
_MEMBER_BYTES = 4 << 10


def decompressed(codec: int, packed: memoryview) -> memoryview:
    """Decompresses the records of a batch.

    Args:
        codec: the compression in the attributes of the batch: 1 = gzip, 2 = snappy, 3 = lz4, 4 = zstd.
        packed: the compressed records.

    Raises:
        OSError, ValueError, zlib.error: if the bytes are damaged, or the codec is unknown.
    """
    if codec == 1:
        return _from_gzip(packed)
    if codec == 2:
        return _from_snappy(packed)
    if codec not in (3, 4):
        raise ValueError(f"its compression {codec} is unknown")
    if codec == 3:
        packed = packed[: _past_lz4_frame(packed)]
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


def _from_gzip(packed: memoryview) -> memoryview:
    """Decompresses the members of a stream, up to something that does not look like another one."""
    parts: list[bytes] = []
    at, room = 0, _MOST_DECOMPRESSED_BYTES
    while True:
        unpacker = zlib.decompressobj(wbits=31)
        while not unpacker.eof:
            if at == len(packed):
                raise ValueError("its end is missing")
            chunk = packed[at : at + _MEMBER_BYTES] if parts else packed
            at += len(chunk)
            parts.append(unpacker.decompress(chunk, room + 1))
            room -= len(parts[-1])
            if room < 0:
                raise ValueError("it has more than 1 GiB")
        at -= len(unpacker.unused_data)
        if len(packed) - at < _LEAST_GZIP_MEMBER or packed[at : at + len(_GZIP_MEMBER)] != _GZIP_MEMBER:
            return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))


def _past_lz4_frame(packed: memoryview) -> int:
    """Returns where the first frame ends; the decoder finds out whether the frame is right.

    A frame has a header, blocks with their sizes in front, a size of zero, and perhaps a checksum.
    """
    if len(packed) < 7:
        return len(packed)
    flags = packed[4]
    at = 7 + (8 if flags & _LZ4_CONTENT_SIZE else 0) + (4 if flags & _LZ4_DICTIONARY else 0)
    while at + 4 <= len(packed):
        size = int.from_bytes(packed[at : at + 4], "little") & _LZ4_BLOCK_SIZE
        at += 4
        if size == 0:
            return at + (4 if flags & _LZ4_CONTENT_CHECKSUM else 0)
        at += size + (4 if flags & _LZ4_BLOCK_CHECKSUM else 0)
    return len(packed)


def _from_snappy(packed: memoryview) -> memoryview:
    """Decompresses Java's frames of blocks (xerial), or a block without a frame, as librdkafka writes it."""
    codec = pa.Codec("snappy")
    if packed[: len(_SNAPPY_FRAME)] != _SNAPPY_FRAME:
        return memoryview(codec.decompress(pa.py_buffer(packed), _snappy_bytes(packed, 0)))
    out, at = bytearray(), _SNAPPY_FRAME_BYTES
    while at + 4 <= len(packed):
        if packed[at : at + len(_SNAPPY_FRAME)] == _SNAPPY_FRAME:
            at += _SNAPPY_FRAME_BYTES
            continue
        size = int.from_bytes(packed[at : at + 4], "big")
        at += 4
        if size > len(packed) - at:
            raise ValueError("a block is cut off")
        block = packed[at : at + size]
        out += codec.decompress(block, _snappy_bytes(block, len(out)), asbytes=True)
        at += size
    return memoryview(out)


def _snappy_bytes(block: memoryview, before: int) -> int:
    """Returns the decompressed size with which a block begins.

    Args:
        block: the block, which may lie.
        before: how much the blocks before it had.

    Raises:
        ValueError: if no block of this length can have so much, or it is more than the limit.
    """
    size = shift = 0
    for byte in block[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if before + size > _MOST_DECOMPRESSED_BYTES:
        raise ValueError("it has more than 1 GiB")
    if size > _MOST_SNAPPY_RATIO * len(block):  # memory would be allocated for it
        raise ValueError(f"a block of {len(block)} bytes cannot have {size}")
    return size
