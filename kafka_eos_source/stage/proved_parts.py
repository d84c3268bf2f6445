"""The staged parts of one batch: proved whole, then opened one at a time as often as they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from kafka_eos_source.errors import StagedPartError
from kafka_eos_source.model import StagedPart
from kafka_eos_source.stage.files import LocalCopies, StagingFolder
from kafka_eos_source.stage.paths import RESTART


class ProvedParts:
    """Parts whose length, checksum and number of rows are those that their tasks reported.

    No file stays open between the proof and the reading: a batch may have thousands of parts, and many
    processes may open only a thousand files. A part that is opened again is therefore proved again.
    """

    def __init__(self, folder: StagingFolder, batch: str, parts: Iterable[StagedPart]) -> None:
        """Proves every part that has rows, before anything is sent to Kafka or a sink.

        Raises:
            StagedPartError: a part is missing or not what its task wrote.
        """
        self._folder = folder
        self._batch = batch
        self._parts = tuple(part for part in parts if part.rows)
        self._copies = LocalCopies()
        for part in self._parts:
            _check_rows(self._read(part), part, batch)

    def batches(self, *, with_changes: bool = False) -> Iterator[pa.RecordBatch]:
        """The Arrow batches of all parts, in order. May be called again.

        Args:
            with_changes: only of the parts that hold changes of operators' state.

        Raises:
            StagedPartError: a part was removed or changed since it was proved.
        """
        for part in self._parts:
            if part.shards or not with_changes:
                # the proof read these very bytes if they are in memory; a file may have been replaced
                found = self._read(part) if part.inline is None else pa.py_buffer(part.inline)
                yield from pa.ipc.open_stream(found)

    def _read(self, part: StagedPart) -> pa.Buffer:
        return self._folder.read(self._batch, part, self._copies)


def _check_rows(found: pa.Buffer, part: StagedPart, batch: str) -> None:
    name = part.name or "(inline)"
    try:
        rows = sum(each.num_rows for each in pa.ipc.open_stream(found))
    except pa.ArrowInvalid as error:
        raise StagedPartError(
            f"staged part {name} of batch {batch} is no Arrow stream: {error}.", fix=RESTART
        ) from error
    if rows != part.rows:
        raise StagedPartError(
            f"staged part {name} of batch {batch} has {rows:,} rows; its task counted {part.rows:,}.",
            fix=RESTART,
        )
