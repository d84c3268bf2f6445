"""Several rows in one value: what a key has any number of, such as its open sessions.

::

    version (1) │ due (8, big endian, sign flipped) │ number of rows (4, big endian) │ cells │ bodies

Cells of all rows and bodies of all rows are those of `rows`. *due* is the time of the key's entry in the
table of what is due (`due`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kafka_eos_source.state.encoding import binary, cells
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.rows import RowCodec

_VERSION = 1
_HEAD = 13


class Lists(NamedTuple):
    """The rows of several keys, one key's after another's.

    Attributes:
        due_ms: of each key; null where it has no entry.
        counts: rows of each key.
        columns: of all rows.
    """

    due_ms: pa.Int64Array
    counts: Ints
    columns: list[pa.Array]


class ListCodec:
    """Rows of each key to one value, and back; of a schema as `rows.RowCodec` takes it."""

    def __init__(self, schema: pa.Schema) -> None:
        self.rows = RowCodec(schema)

    def encode(self, due_ms: Ints, counts: Ints, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """One value a key; null for a key of no rows, which is how it is deleted."""
        head, bodies = self.rows.split(columns)
        firsts = np.concatenate([[0], np.cumsum(counts)])
        lead = np.empty((len(counts), _HEAD), np.uint8)
        lead[:, 0] = _VERSION
        lead[:, 1:9] = cells.pack(pa.array(due_ms))
        lead[:, 9:] = counts.astype(">u4").view(np.uint8).reshape(-1, 4)
        parts = [binary.from_matrix(lead), binary.from_parts(firsts * self.rows.width, head.reshape(-1))]
        if bodies:
            whole = binary.join(*bodies)
            parts.append(binary.from_parts(binary.offsets(whole)[firsts], binary.data(whole)))
        values = binary.join(*parts)
        some = counts > 0
        if bool(some.all()):
            return values
        return pa.Array.from_buffers(values.type, len(values), [binary.bitmap(some), *values.buffers()[1:]])

    def decode(self, values: pa.BinaryArray) -> Lists:
        """What `encode` was given; a null is a key of no rows.

        Raises:
            ValueError: a value is not one of this codec.
        """
        present = binary.valid(values)
        if not bool(present.all()):
            values = values.drop_null()
        head = binary.head(values, _HEAD)
        if not bool((head[:, 0] == _VERSION).all()):
            raise ValueError(f"a list whose version is not {_VERSION}")
        own = np.ascontiguousarray(head[:, 9:]).reshape(-1).view(">u4").astype(np.int64)
        counts = np.zeros(len(present), np.int64)
        counts[present] = own
        due = np.zeros(len(present), np.int64)
        due[present] = cells.raw(cells.unpack(head[:, 1:9], pa.int64()), np.int64)
        begins = binary.offsets(values).astype(np.int64)
        columns = self._columns(values, begins, own)
        return Lists(pa.array(due, mask=~present), counts, columns)

    def _columns(self, values: pa.BinaryArray, begins: Ints, counts: Ints) -> list[pa.Array]:
        """The columns of all rows: those of a value stand side by side, and then their bodies."""
        width = self.rows.width
        ends_of_cells = begins[:-1] + _HEAD + counts * width
        if bool((ends_of_cells > begins[1:]).any()):
            raise ValueError("a list is shorter than its rows")
        firsts = np.cumsum(counts) - counts
        number = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
        starts = np.repeat(begins[:-1] + _HEAD, counts) + number * width
        head = binary.head(binary.substrings(starts, starts + width, binary.data(values)), width)
        lengths = self.rows.body_lengths(head)
        before = np.cumsum(lengths) - lengths
        of_value = np.concatenate([before, [lengths.sum()]])[firsts]
        bodies = np.repeat(ends_of_cells - of_value, counts) + before
        totals = np.add.reduceat(np.append(lengths, 0), firsts) * (counts > 0) if len(counts) else counts
        if not bool((ends_of_cells + totals == begins[1:]).all()):
            raise ValueError("a list is longer or shorter than its rows")
        columns, _ = self.rows.cut(head, values, bodies)
        return columns
