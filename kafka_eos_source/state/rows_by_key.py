"""Divides the rows of a shard's micro-batch by key, so that each part fits into memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import IO

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.state.encoding.spark_hash import shards_of

#: Rows and bytes that stay in memory. More go to temporary files.
MOST_ROWS, MOST_BYTES = 1 << 18, 32 << 20
#: Number of parts. A shard's rows have equal remainders of their hash; a prime divides them nevertheless.
_PARTS = 61


class RowsByKey:
    """Rows in parts, so that all rows of a key are in one part, in order of arrival. A context manager.

    Most micro-batches fit into memory and are one part. Larger ones are divided by the hash of the key into
    temporary files. These have no name, so no other process can open them, and they disappear with this
    process.

    Args:
        keys: names of the key columns.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = list(keys)
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        self._files: list[IO[bytes]] = []
        self._writers: list[pa.RecordBatchWriter] = []

    def __enter__(self) -> RowsByKey:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for file in self._files:
            with suppress(OSError):  # a full disk cannot take the rest of the buffer, which nobody needs
                file.close()

    def add(self, rows: pa.RecordBatch) -> None:
        """Adds rows; all batches have the same schema.

        Raises:
            UnavailableError: if the temporary folder is full or not writable.
        """
        if not rows.num_rows:
            return
        self._waiting.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        too_many = self._rows >= MOST_ROWS or self._bytes >= MOST_BYTES
        if too_many and (self._files or len(self._waiting) > 1):  # a single batch is in memory anyway
            self._divide()

    def parts(self) -> Iterator[list[pa.RecordBatch]]:
        """Yields the rows of each part as batches; no part without rows. Call it once.

        Raises:
            UnavailableError: if a temporary file cannot be written or read.
        """
        if not self._files:
            waiting, self._waiting = self._waiting, []
            if waiting:
                yield waiting
            return
        self._divide()
        with temporary_files():
            for writer in self._writers:
                writer.close()
        for file in self._files:
            with temporary_files():
                file.seek(0)
                found = list(pa.ipc.open_stream(file))
                file.close()
            if found:
                yield found

    def _divide(self) -> None:
        """Moves the rows in memory to the files of their parts."""
        with temporary_files():
            if not self._files:
                for _ in range(_PARTS):
                    self._files.append(tempfile.TemporaryFile())  # noqa: SIM115  closed by __exit__
                    self._writers.append(pa.ipc.new_stream(self._files[-1], self._waiting[0].schema))
            waiting, self._waiting, self._rows, self._bytes = self._waiting, [], 0, 0
            while waiting:
                rows = waiting.pop(0)
                part = shards_of([rows.column(name) for name in self._keys], _PARTS)
                order = np.argsort(part, kind="stable")
                ends = np.cumsum(np.bincount(part, minlength=_PARTS)).tolist()
                rows, start = rows.take(pa.array(order)), 0
                for writer, end in zip(self._writers, ends, strict=True):
                    if end > start:
                        writer.write_batch(rows.slice(start, end - start))
                    start = end


@contextmanager
def temporary_files() -> Iterator[None]:
    """Lets errors of temporary files name their folder."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"the temporary folder {tempfile.gettempdir()!r} cannot hold the rows of a micro-batch: {error}.",
            fix="free space there, set the environment variable TMPDIR of the executors to a larger folder, "
            "or set maxOffsetsPerTrigger on the source; then restart the query.",
        ) from error
