"""Takes Confluent's frames off a column of messages, without Python code for each row.

::

    0          magic byte, always 0
    1 … 4      schema id, big-endian
    5 …        Protobuf only: the path of the message type inside its file, as zigzag varints: the number of
               indices, then the indices; a single 0 means the path [0]
    …          payload

Rows are grouped by frame, because all messages of one frame share one writer schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

#: Length of magic byte and schema id.
HEADER_BYTES = 5
#: Registries number schemas with Java's int. They answer a larger number as if their path was wrong.
_LARGEST_ID = (1 << 31) - 1
#: Message types are nested at most this deep; a longer path is no Protobuf frame.
_DEEPEST = 64
_LONGEST_VARINT = 5

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Frame:
    """Rows whose messages begin with the same bytes.

    Attributes:
        schema_id: id of the writer schema.
        start: length of the frame.
        rows: numbers of the rows, ascending.
        path: path of the message type inside its file; empty except for Protobuf.
    """

    schema_id: int
    start: int
    rows: Rows
    path: tuple[int, ...] = ()


@dataclass(frozen=True)
class Messages:
    """A column of framed messages with NumPy views of its buffers.

    Attributes:
        column: the messages; binary or large binary.
        begins: position of each message in ``data``.
        ends: position behind each message in ``data``.
        data: the bytes of all messages.
        present: rows that are not null.
    """

    column: pa.Array
    begins: Rows
    ends: Rows
    data: npt.NDArray[np.uint8]
    present: Rows

    @classmethod
    def of(cls, column: pa.Array | pa.ChunkedArray) -> Messages:
        """Returns views of a column of bytes, which may be a slice."""
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
            if isinstance(column, pa.ChunkedArray):  # older versions of PyArrow return a single chunk
                column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
        if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
            column = column.cast(pa.binary())
        number = len(column)
        large = pa.types.is_large_binary(column.type)
        _, offsets_buffer, data_buffer = column.buffers()
        if number:
            offsets = np.frombuffer(offsets_buffer, np.int64 if large else np.int32)
            offsets = offsets[column.offset : column.offset + number + 1].astype(np.int64)
        else:
            offsets = np.zeros(1, np.int64)
        empty = data_buffer is None or not data_buffer.size
        data = np.zeros(0, np.uint8) if empty else np.frombuffer(data_buffer, np.uint8)
        present = np.arange(number)
        if column.null_count:
            present = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        return cls(column, offsets[:-1], offsets[1:], data, present)


def frames(messages: Messages) -> tuple[list[Frame], dict[int, str]]:
    """Groups the rows of a column by schema id.

    Returns:
        The groups, and an error for each row that has no frame. Null rows are in neither.
    """
    rows = messages.present
    lengths = messages.ends[rows] - messages.begins[rows]
    short = lengths < HEADER_BYTES
    errors: dict[int, str] = {}
    if short.any():
        for row, length in zip(rows[short].tolist(), lengths[short].tolist(), strict=True):
            errors[row] = _too_short(length)
        rows = rows[~short]
    if not len(rows):
        return [], errors
    begins = messages.begins[rows]
    magic = messages.data[begins]
    if magic.any():
        wrong = magic != 0
        for row, byte in zip(rows[wrong].tolist(), magic[wrong].tolist(), strict=True):
            errors[row] = (
                "the message does not begin with the magic byte 0x00 of a schema registry, but with "
                f"{byte:#04x}"
            )
        rows, begins = rows[~wrong], begins[~wrong]
        if not len(rows):
            return [], errors
    ids = np.zeros(len(rows), np.int64)
    for place in range(1, HEADER_BYTES):
        ids = (ids << 8) | messages.data[begins + place]
    large = ids > _LARGEST_ID
    if large.any():
        for row, schema_id in zip(rows[large].tolist(), ids[large].tolist(), strict=True):
            errors[row] = f"the message has the schema id {schema_id}; ids of a registry end at {_LARGEST_ID}"
        rows, ids = rows[~large], ids[~large]
        if not len(rows):
            return [], errors
    return [Frame(int(ids[each[0]]), HEADER_BYTES, rows[each]) for each in _groups(ids)], errors


def paths(messages: Messages, frame: Frame) -> tuple[list[Frame], dict[int, str]]:
    """Groups the rows of a frame of Protobuf further, by the path of the message type.

    Returns:
        The groups, and an error for each row whose path is malformed.
    """
    rows = frame.rows
    position = messages.begins[rows] + frame.start
    ends = messages.ends[rows]
    if _all_zero(messages.data, position, ends):  # what serializers write for the first type of a file
        return [Frame(frame.schema_id, frame.start + 1, rows, (0,))], {}
    cursor = _Varints(messages.data, position.copy(), ends)
    every = np.arange(len(rows))
    counts = cursor.next(every)
    cursor.fail((counts < 0) | (counts > _DEEPEST), counts, "has {} message indices; expected 0 to 64")
    most = int(counts[cursor.good].max(initial=0))
    indices = np.full((len(rows), max(most, 1)), -1, np.int64)
    indices[counts == 0, 0] = 0
    for place in range(most):
        having = np.flatnonzero(cursor.good & (counts > place))
        found = cursor.next(having)
        indices[having, place] = found
        negative = np.zeros(len(rows), bool)
        negative[having] = found < 0
        cursor.fail(negative, indices[:, place], "has the message index {}; expected 0 or more")
    errors = {int(rows[at]): text for at, text in cursor.errors.items()}
    good = np.flatnonzero(cursor.good)
    starts = cursor.position[good] - messages.begins[rows[good]]
    keys = np.column_stack([starts, indices[good]])
    if not len(keys):
        return [], errors
    _, numbers = np.unique(keys, axis=0, return_inverse=True)
    groups = []
    for each in _groups(numbers.reshape(-1).astype(np.int64)):
        path = tuple(int(index) for index in indices[good[each[0]]] if index >= 0)
        groups.append(Frame(frame.schema_id, int(starts[each[0]]), rows[good[each]], path))
    return groups, errors


def frame_prefix(schema_id: int, path: Sequence[int] = ()) -> bytes:
    """Returns the frame of messages of a schema.

    Args:
        schema_id: id of the schema.
        path: path of the message type for Protobuf; empty for other formats.
    """
    header = b"\0" + schema_id.to_bytes(4, "big")
    if not path:
        return header
    if list(path) == [0]:
        return header + b"\0"
    return header + b"".join(_zigzag(each) for each in (len(path), *path))


def _zigzag(value: int) -> bytes:
    left = value << 1
    found = bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


def _all_zero(data: npt.NDArray[np.uint8], position: Rows, ends: Rows) -> bool:
    return bool((position < ends).all()) and not data[position].any()


class _Varints:
    """Reads the next zigzag varint of many messages at once.

    Attributes:
        position: place of the next byte of each message.
        good: messages that were well-formed so far.
        errors: what is wrong with the others.
    """

    def __init__(self, data: npt.NDArray[np.uint8], position: Rows, ends: Rows) -> None:
        self._data = data
        self._ends = ends
        self.position = position
        self.good = np.ones(len(position), bool)
        self.errors: dict[int, str] = {}

    def next(self, which: Rows) -> Rows:
        """Reads one varint of each of these messages; the result is 0 where there is none."""
        raw = np.zeros(len(self.position), np.int64)
        more = which
        for place in range(_LONGEST_VARINT):
            over = more[self.position[more] >= self._ends[more]]
            self._fail_at(over, "ends inside the Protobuf message indices")
            more = more[self.position[more] < self._ends[more]]
            byte = self._data[self.position[more]].astype(np.int64)
            raw[more] |= (byte & 0x7F) << (7 * place)
            self.position[more] += 1
            more = more[byte >= 0x80]
            if not len(more):
                break
        self._fail_at(more, "has a Protobuf message index of more than 5 bytes")
        values = (raw >> 1) ^ -(raw & 1)
        return values[which]

    def fail(self, bad: npt.NDArray[np.bool_], values: Rows, text: str) -> None:
        """Sets messages aside; ``text`` has a place for the value that is wrong."""
        for at in np.flatnonzero(bad & self.good).tolist():
            self.errors[at] = f"the message {text.format(int(values[at]))}"
        self.good &= ~bad

    def _fail_at(self, which: Rows, text: str) -> None:
        for at in which.tolist():
            self.errors.setdefault(at, f"the message {text}")
        self.good[which] = False


def _groups(keys: Rows) -> list[Rows]:
    """Returns the positions of each distinct key, ascending, in the order of their first occurrence."""
    if (keys == keys[0]).all():
        return [np.arange(len(keys))]
    order = np.argsort(keys, kind="stable")
    cuts = np.flatnonzero(np.diff(keys[order])) + 1
    return sorted(np.split(order, cuts), key=lambda each: int(each[0]))


def _too_short(length: int) -> str:
    if length == 0:
        return "the message is empty; expected the magic byte and a schema id"
    return f"the message has {length} bytes; expected at least {HEADER_BYTES} for magic byte and schema id"
