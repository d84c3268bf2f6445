"""Encodes a list of rows as one value, for keys that have any number of rows, such as open sessions.

Layout of a value, with sizes in bytes::

    lead │ due (8, big endian, sign flipped) │ number of rows (4, big endian) │ cells │ bodies

*lead* names the version of the rows (`versions`). `encoding.binary` defines the cells and bodies; here the
cells of all rows precede the bodies of all rows. *due* is the time of the key's due entry (see `due`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Ints, RowCodec

#: Bytes between the lead and the cells.
_COUNTED = 12


class Lists(NamedTuple):
    """Rows of several keys, key after key.

    Attributes:
        due_ms: time of each key's due entry, ms since the epoch; null = the key has no value.
        counts: number of rows of each key.
        columns: columns of all rows.
    """

    due_ms: pa.Int64Array
    counts: Ints
    columns: list[pa.Array]


class ListCodec:
    """Encodes the rows of each key as one value, and decodes them.

    Args:
        schema: columns of the rows; the same types as for `RowCodec`.
        lead: bytes with which every value begins: its version.
    """

    def __init__(self, schema: pa.Schema, lead: bytes = b"\x01") -> None:
        self.rows = RowCodec(schema)
        self._lead = np.frombuffer(lead, np.uint8)
        self._head = len(lead) + _COUNTED

    def encode(self, due_ms: Ints, counts: Ints, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """Encodes one value per key; a key without rows gets null, which deletes it from the state.

        Args:
            due_ms: time of each key's due entry, ms since the epoch.
            counts: number of rows of each key.
            columns: columns of all rows, key after key.
        """
        head, bodies = self.rows.split(columns)
        firsts = np.concatenate([[0], np.cumsum(counts)])
        lead = np.empty((len(counts), self._head), np.uint8)
        lead[:, :-_COUNTED] = self._lead
        lead[:, -_COUNTED:-4] = binary.pack(pa.array(due_ms))
        lead[:, -4:] = counts.astype(">u4").view(np.uint8).reshape(-1, 4)
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
        """Decodes values that `encode` returned; null is a key without rows.

        Raises:
            ValueError: if a value is damaged or has another version.
        """
        present = binary.valid(values)
        if not bool(present.all()):
            values = values.drop_null()
        head = binary.head(values, self._head)
        if not bool((head[:, :-_COUNTED] == self._lead).all()):
            raise ValueError(f"an encoded list does not begin with {self._lead.tobytes()!r}")
        own = np.ascontiguousarray(head[:, -4:]).reshape(-1).view(">u4").astype(np.int64)
        counts = np.zeros(len(present), np.int64)
        counts[present] = own
        due = np.zeros(len(present), np.int64)
        due[present] = binary.raw(binary.unpack(head[:, -_COUNTED:-4], pa.int64()), np.int64)
        begins = binary.offsets(values).astype(np.int64)
        columns = self._columns(values, begins, own)
        return Lists(pa.array(due, mask=~present), counts, columns)

    def _columns(self, values: pa.BinaryArray, begins: Ints, counts: Ints) -> list[pa.Array]:
        """Decodes the columns of all rows; in each value the cells of its rows precede their bodies."""
        width = self.rows.width
        ends_of_cells = begins[:-1] + self._head + counts * width
        if bool((ends_of_cells > begins[1:]).any()):
            raise ValueError("an encoded list is shorter than its rows")
        firsts = np.cumsum(counts) - counts
        number = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
        starts = np.repeat(begins[:-1] + self._head, counts) + number * width
        head = binary.head(binary.substrings(starts, starts + width, binary.data(values)), width)
        lengths = self.rows.body_lengths(head)
        before = np.cumsum(lengths) - lengths
        of_value = np.concatenate([before, [lengths.sum()]])[firsts]
        bodies = np.repeat(ends_of_cells - of_value, counts) + before
        totals = np.add.reduceat(np.append(lengths, 0), firsts) * (counts > 0) if len(counts) else counts
        if not bool((ends_of_cells + totals == begins[1:]).all()):
            raise ValueError("an encoded list is longer or shorter than its rows")
        columns, _ = self.rows.cut(head, values, bodies)
        return columns
