"""Verifies the staged parts of one batch, and opens them one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from kafka_eos_source.errors import StagedPartError
from kafka_eos_source.model import StagedPart
from kafka_eos_source.stage.files import LocalCopies, StagingFolder
from kafka_eos_source.stage.paths import RESTART
from kafka_eos_source.stage.sealed_column import records_in


class VerifiedParts:
    """Parts whose length, checksum and number of rows match the reports of their tasks.

    No file stays open between verification and reading, because a batch may have thousands of parts, and a
    process can often open only a thousand files. Therefore a part is verified again whenever it is opened.
    """

    def __init__(self, folder: StagingFolder, batch: str, parts: Iterable[StagedPart]) -> None:
        """Verifies every part that has rows, before the driver sends anything to Kafka or another sink.

        Raises:
            StagedPartError: if a part is missing or is not what its task wrote.
        """
        self._folder = folder
        self._batch = batch
        self._parts = tuple(part for part in parts if part.rows)
        self._copies = LocalCopies()
        for part in self._parts:
            _check_rows(self._read(part), part, batch)

    def batches(self, *, with_changes: bool = False) -> Iterator[pa.RecordBatch]:
        """Yields the Arrow batches of all parts, in order; can be called again.

        Args:
            with_changes: whether to read only the parts with state changes of operators.

        Raises:
            StagedPartError: if a part was removed or changed since it was verified.
        """
        for part in self._parts:
            if part.shards or not with_changes:
                # a file may have been replaced since it was verified; bytes in memory cannot change
                found = self._read(part) if part.inline is None else pa.py_buffer(part.inline)
                yield from pa.ipc.open_stream(found)

    def _read(self, part: StagedPart) -> pa.Buffer:
        return self._folder.read(self._batch, part, self._copies)


def _check_rows(found: pa.Buffer, part: StagedPart, batch: str) -> None:
    name = part.name or "(inline)"
    try:
        rows = sum(records_in(each) for each in pa.ipc.open_stream(found))
    except pa.ArrowInvalid as error:
        raise StagedPartError(
            f"staged part {name} of batch {batch} is not an Arrow IPC stream: {error}.", fix=RESTART
        ) from error
    if rows != part.rows:
        raise StagedPartError(
            f"staged part {name} of batch {batch} has {rows:,} rows; expected {part.rows:,}, as its task "
            "reported.",
            fix=RESTART,
        )
