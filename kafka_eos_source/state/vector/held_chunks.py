"""Holds the rows of a shard's micro-batch for a second pass, and the positions of those that pass."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import numpy as np
import pyarrow as pa

from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.shard_rows import RowsFile, temporary_files


class HeldChunks:
    """Chunks of rows: one in memory, further ones in a temporary file. A context manager.

    Most micro-batches have one chunk per shard, and need no file. The file has no name, so no other process
    can open it, and it disappears with this process.

    Args:
        schema: columns of the rows.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._first: pa.RecordBatch | None = None
        self._further: RowsFile | None = None

    def __enter__(self) -> HeldChunks:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._further is not None:
            self._further.close()

    def add(self, rows: pa.RecordBatch) -> None:
        """Holds a chunk.

        Raises:
            UnavailableError: if the temporary folder is full or not writable.
        """
        if self._first is None:
            self._first = rows
            return
        with temporary_files():
            if self._further is None:
                self._further = RowsFile(self._schema)
            self._further.add(rows)

    def with_first_positions(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yields the chunks in order, each with the position of its first row among all rows. Call it once.

        Raises:
            UnavailableError: if the temporary file cannot be written or read.
        """
        if self._first is None:
            return
        yield self._first, 0
        if self._further is None:
            return
        first, self._first = self._first.num_rows, None  # frees the memory
        for rows in self._further.read():
            yield rows, first
            first += rows.num_rows


class Positions:
    """A set of positions of rows, which takes one bit per row.

    Args:
        rows: number of rows.
    """

    def __init__(self, rows: int) -> None:
        self._bits = np.zeros(-(-rows // 8), np.uint8)

    def add(self, positions: Ints) -> None:
        """Adds positions in any order, each at most once."""
        if not len(positions):
            return
        positions = np.sort(positions)
        byte, bit = positions >> 3, np.left_shift(1, positions & 7).astype(np.uint8)
        firsts = np.flatnonzero(np.diff(byte, prepend=-1))
        self._bits[byte[firsts]] |= np.bitwise_or.reduceat(bit, firsts)

    def between(self, start: int, end: int) -> Ints:
        """Returns the positions from ``start`` to ``end`` (excluded), in order and relative to ``start``."""
        first = start >> 3
        bits = np.unpackbits(self._bits[first : -(-end // 8)], bitorder="little")
        return np.flatnonzero(bits[start - 8 * first : end - 8 * first])
