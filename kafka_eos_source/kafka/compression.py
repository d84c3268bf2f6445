"""Compresses the records of batches, and decompresses what Java's clients accept.

Java's clients read all members of a gzip stream, all frames of a zstd stream and all parts of a snappy
stream, but only the first frame of an lz4 stream. They ignore what follows a gzip or lz4 stream; behind a
zstd frame, it is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pyarrow as pa

_SNAPPY_MARK = b"\x82SNAPPY\x00"
_SNAPPY_FRAME_BYTES = 16
#: Three bytes of a snappy block repeat at most 64.
_MOST_SNAPPY_RATIO = 22
#: How a member of a gzip stream begins. Java looks for another one only if there are more bytes than this.
_GZIP_MEMBER, _LEAST_GZIP_MEMBER = b"\x1f\x8b\x08", 19
#: Flags in the header of an lz4 frame, and the bits of a block's size.
_LZ4_DICTIONARY, _LZ4_CONTENT_CHECKSUM, _LZ4_CONTENT_SIZE, _LZ4_BLOCK_CHECKSUM = 0x01, 0x04, 0x08, 0x10
_LZ4_BLOCK_SIZE = 0x7FFFFFFF
#: The decompressed parts of a stream double in size up to this one. The C library returns memory of more
#: than 32 MiB to the system as soon as it is freed.
_FIRST_PART_BYTES, _LARGEST_PART_BYTES = 64 << 10, 48 << 20
#: By codec: records rarely have more bytes for each compressed one, so that one part is enough.
_USUAL_RATIO = {1: 8, 3: 4, 4: 8}
#: How much of a gzip stream is looked at behind a member, because the rest of that is copied for each member.
_MEMBER_BYTES = 4 << 10
#: How much of a gzip stream is decompressed at a time behind the first part; zlib needs twice as much.
_GZIP_PART_BYTES = 8 << 20


#: Bytes that are compressed at a time.
_LZ4_BLOCK_BYTES = 64 << 10
_SNAPPY_BLOCK_BYTES = 32 << 10
#: gzip's highest level. As in librdkafka, higher ones, which other codecs have, mean the same.
_GZIP_LEVEL = 9

#: An LZ4 frame's magic number and descriptor: version 1, independent blocks of 64 KiB, no checksums (Kafka
#: refuses dependent blocks). The last byte is the descriptor's checksum.
_LZ4_FRAME = b"\x04\x22\x4d\x18\x60\x40\x82"
#: The frame that Java's snappy library (xerial) expects.
_SNAPPY_FRAME = _SNAPPY_MARK + b"\x00\x00\x00\x01\x00\x00\x00\x01"


def compressor(name: str, level: int | None) -> tuple[int, Callable[[memoryview], bytes] | None]:
    """Returns the number of a compression in a batch's attributes, and the function that compresses."""
    if name == "none":
        return 0, None
    if name == "gzip":
        return 1, lambda data: _gzip(data, -1 if level is None else min(level, _GZIP_LEVEL))
    if name == "snappy":
        return 2, _snappy
    if name == "lz4":
        return 3, lambda data: _lz4(data, level)
    if name != "zstd":
        raise ValueError(f"unknown compression {name!r}")
    codec = pa.Codec("zstd", compression_level=3 if level is None else level)
    return 4, lambda data: codec.compress(pa.py_buffer(data), asbytes=True)


def _gzip(data: memoryview, level: int) -> bytes:
    packer = zlib.compressobj(level, wbits=31)
    return packer.compress(data) + packer.flush()


def _snappy(data: memoryview) -> bytes:
    codec = pa.Codec("snappy")
    parts = [_SNAPPY_FRAME]
    for start in range(0, len(data), _SNAPPY_BLOCK_BYTES):
        block = codec.compress(pa.py_buffer(data[start : start + _SNAPPY_BLOCK_BYTES]), asbytes=True)
        parts += [len(block).to_bytes(4, "big"), block]
    return b"".join(parts)


def _lz4(data: memoryview, level: int | None) -> bytes:
    codec = pa.Codec("lz4_raw", compression_level=level)
    parts = [_LZ4_FRAME]
    for start in range(0, len(data), _LZ4_BLOCK_BYTES):
        block = data[start : start + _LZ4_BLOCK_BYTES]
        packed = codec.compress(pa.py_buffer(block), asbytes=True)
        if len(packed) < len(block):
            parts += [len(packed).to_bytes(4, "little"), packed]
        else:
            parts += [(len(block) | 1 << 31).to_bytes(4, "little"), bytes(block)]
    parts.append(bytes(4))
    return b"".join(parts)


class TooLargeError(ValueError):
    """The records of a batch have more bytes than the reader allows."""


def decompressed(codec: int, packed: memoryview, most_bytes: int) -> memoryview:
    """Decompresses the records of a batch, and stops as soon as they are too large.

    It needs little more memory than the result has.

    Args:
        codec: the compression in the attributes of the batch: 1 = gzip, 2 = snappy, 3 = lz4, 4 = zstd.
        packed: the compressed records.
        most_bytes: the most bytes of the result. Brokers limit batches only before decompression.

    Raises:
        TooLargeError: if there are more.
        OSError, ValueError, zlib.error: if the bytes are damaged, or the codec is unknown.
    """
    if most_bytes < 0:
        raise TooLargeError
    if codec == 1:
        return _from_gzip(packed, most_bytes)
    if codec == 2:
        return _from_snappy(packed, most_bytes)
    if codec not in (3, 4):
        raise ValueError(f"its compression {codec} is unknown")
    if codec == 3:
        packed = packed[: _past_lz4_frame(packed)]
    stream = pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(packed)), "lz4" if codec == 3 else "zstd")
    parts: list[memoryview] = []
    room, size = most_bytes + 1, max(_FIRST_PART_BYTES, _USUAL_RATIO[codec] * len(packed))
    while True:
        size = min(room, size)
        part, filled = np.empty(size, np.uint8), 0
        while count := stream.readinto(part[filled:]):
            filled += count
        room -= filled
        if not room:
            raise TooLargeError
        has_ended = filled < size
        if 2 * filled < size:  # because an answer may have thousands of small batches
            part.resize(filled, refcheck=False)
        parts.append(part.data[:filled])
        if has_ended:
            return _joined(parts)
        size = max(_FIRST_PART_BYTES, min(2 * size, _LARGEST_PART_BYTES))


def _joined(parts: list[memoryview]) -> memoryview:
    """Returns the parts as one; frees each one as soon as it was copied."""
    if len(parts) == 1:
        return parts.pop()
    whole, at = memoryview(bytearray(sum(map(len, parts)))), 0
    parts.reverse()
    while parts:
        part = parts.pop()
        whole[at : at + len(part)] = part
        at += len(part)
    return whole


def _from_gzip(packed: memoryview, most_bytes: int) -> memoryview:
    """Decompresses the members of a stream, up to something that does not look like another one."""
    parts: list[memoryview] = []
    at, room, first = 0, most_bytes + 1, max(_FIRST_PART_BYTES, _USUAL_RATIO[1] * len(packed))
    while True:
        unpacker, has_more, tail = zlib.decompressobj(wbits=31), False, b""
        while not unpacker.eof:
            chunk: bytes | memoryview = tail
            if not tail and not has_more:
                if at == len(packed):
                    raise ValueError("its end is missing")
                chunk = packed[at : at + _MEMBER_BYTES] if parts else packed
                at += len(chunk)
            most = min(room, _GZIP_PART_BYTES if parts else first)
            part = unpacker.decompress(chunk, most)
            parts.append(memoryview(part))
            room -= len(part)
            if not room:
                raise TooLargeError
            has_more, tail = len(part) == most, unpacker.unconsumed_tail
        at -= len(unpacker.unused_data)
        if len(packed) - at < _LEAST_GZIP_MEMBER or packed[at : at + len(_GZIP_MEMBER)] != _GZIP_MEMBER:
            return _joined(parts)


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


def _from_snappy(packed: memoryview, most_bytes: int) -> memoryview:
    """Decompresses Java's frames of blocks (xerial), or a block without a frame, as librdkafka writes it."""
    codec = pa.Codec("snappy")
    if packed[: len(_SNAPPY_MARK)] != _SNAPPY_MARK:
        size = _snappy_bytes(packed, most_bytes)
        return memoryview(codec.decompress(pa.py_buffer(packed), size)).cast("B")
    parts: list[memoryview] = []
    at, room = _SNAPPY_FRAME_BYTES, most_bytes
    while at + 4 <= len(packed):
        if packed[at : at + len(_SNAPPY_MARK)] == _SNAPPY_MARK:
            at += _SNAPPY_FRAME_BYTES
            continue
        size = int.from_bytes(packed[at : at + 4], "big")
        at += 4
        if size > len(packed) - at:
            raise ValueError("a block is cut off")
        block = packed[at : at + size]
        part = codec.decompress(block, _snappy_bytes(block, room), asbytes=True)
        parts.append(memoryview(part))
        room -= len(part)
        at += size
    return _joined(parts)


def _snappy_bytes(block: memoryview, most_bytes: int) -> int:
    """Returns the decompressed size with which a block begins.

    Raises:
        TooLargeError: if that is more than ``most_bytes``.
        ValueError: if no block of this length can have so much.
    """
    size = shift = 0
    for byte in block[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if size > _MOST_SNAPPY_RATIO * len(block):  # memory would be allocated for it
        raise ValueError(f"a block of {len(block)} bytes cannot have {size}")
    if size > most_bytes:
        raise TooLargeError
    return size
