"""Says how many JSON documents can be decoded at once, from an upper bound of their size in columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.registry.json_schema.shapes import Kind, Shape

#: Texts are in a column of text first, and times then become numbers. Bytes that are not UTF-8 become longer.
_COPIES = 3
#: A number or an offset, and the bit that says whether the value is null.
_VALUE_BYTES = 9
#: What stands between the values of a document, or begins an array or an object.
_SEPARATORS = (",", "[", "{")


def fitting_rows(shape: Shape, messages: pa.Array, most_bytes: int) -> int:
    """Returns how many of the first messages surely fit into columns of `most_bytes`.

    A null or missing property takes memory, too, so an array of a few bytes can become a wide column.

    Args:
        shape: the shape of the documents.
        messages: the messages (binary).
        most_bytes: the most memory.
    """
    row, item = _bytes_of(shape), _bytes_of_items(shape)
    _, offsets, data = messages.buffers()
    if data is None or not len(messages):
        return len(messages)
    width = np.int64 if pa.types.is_large_binary(messages.type) else np.int32
    ends = np.frombuffer(offsets, width)[messages.offset : messages.offset + len(messages) + 1]
    used = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
    values = 0 if not item else sum(int(np.count_nonzero(used == ord(each))) for each in _SEPARATORS)
    if _COPIES * len(used) + row * len(messages) + item * values <= most_bytes:  # the usual case
        return len(messages)
    found: npt.NDArray[np.int64] = _COPIES * np.diff(ends).astype(np.int64) + row
    for each in _SEPARATORS if item else ():
        counts = pc.count_substring(messages, each).fill_null(0)
        found += item * counts.to_numpy(zero_copy_only=False).astype(np.int64)
    return int(np.searchsorted(np.cumsum(found), most_bytes, side="right"))


def _bytes_of(shape: Shape) -> int:
    """Returns the memory of a value without its text and its items."""
    return _VALUE_BYTES + sum(_bytes_of(each) for each in shape.properties.values())


def _bytes_of_items(shape: Shape) -> int:
    """Returns the memory of the largest item of an array or a map inside a shape; 0 if it has neither."""
    inside = [_bytes_of_items(each) for each in shape.properties.values()]
    if shape.items is not None:
        key = _VALUE_BYTES if shape.kind is Kind.MAP else 0
        inside += [key + _bytes_of(shape.items), _bytes_of_items(shape.items)]
    return max(inside, default=0)
