"""Writes one staged part: in memory if its bytes are few, else to a file of the staging folder."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pyarrow as pa

from kafka_eos_source.model import StagedPart
from kafka_eos_source.runtime.file_systems import WriteOnlyFile
from kafka_eos_source.stage.checksum import crc32c
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.paths import unwritable


class Spool(WriteOnlyFile):
    """A file-like object that moves its bytes to a file if there are many; computes size, CRC and digest.

    Args:
        folder: folder for the file; None = the bytes stay in memory.
        batch: name of the micro-batch in the folder.
        inline_bytes: maximum size in memory.
    """

    def __init__(self, folder: StagingFolder | None, batch: str, inline_bytes: int) -> None:
        self._folder = folder
        self._batch = batch
        self._inline_bytes = inline_bytes
        self._memory: bytearray | None = bytearray()
        self._file: Any = None
        self._digest: Any = None
        self.name = ""
        self.size = 0
        self.checksum = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.size += view.nbytes
        if self._memory is not None:
            if self._folder is None or self.size <= self._inline_bytes:
                self._memory += view
                return view.nbytes
            self._spill(self._folder)
        self._to_file(view)
        return view.nbytes

    def inline(self) -> bytes | None:
        return None if self._memory is None else bytes(self._memory)

    def digest(self) -> str:
        return "" if self._digest is None else str(self._digest.hexdigest())

    def finish(self) -> None:
        if self._memory is not None:
            self.checksum = crc32c(self._memory)
        if self._file is not None and self._folder is not None:
            try:
                self._file.close()
            except OSError as error:
                raise unwritable(self._folder.location, error) from error

    def discard(self) -> None:
        """Deletes the file of a failed task attempt."""
        if self._file is not None and self._folder is not None:
            try:
                self._file.close()
            finally:
                self._folder.remove_parts(self._batch, [self.name])

    def _spill(self, folder: StagingFolder) -> None:
        folder.check_shared()
        self.name, self._file, needs_digest = folder.create(self._batch)
        self._digest = sha256() if needs_digest else None
        head, self._memory = self._memory, None
        self._to_file(head)

    def _to_file(self, data: Any) -> None:
        assert self._file is not None
        assert self._folder is not None
        self.checksum = crc32c(data, self.checksum)
        if self._digest is not None:
            self._digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise unwritable(self._folder.location, error) from error


class PartStage:
    """Stages rows as one part, an Arrow IPC stream; implements `contract.Stage`.

    Args:
        schema: schema of the rows.
        folder: folder for a file; None = the part always stays in memory.
        batch: name of the micro-batch in the folder.
        inline_bytes: maximum size of a part that stays in memory, for the commit message.
    """

    def __init__(
        self,
        schema: pa.Schema,
        folder: StagingFolder | None,
        batch: str,
        inline_bytes: int,
    ) -> None:
        self._spool = Spool(folder, batch, inline_bytes)
        self._stream = pa.ipc.new_stream(pa.PythonFile(self._spool, mode="w"), schema)
        self._rows = 0

    def write(self, batch: pa.RecordBatch, records: int | None = None) -> None:
        """Adds an Arrow batch.

        Args:
            batch: the batch.
            records: number of records in it; None = its number of rows.
        """
        self._stream.write_batch(batch)
        self._rows += batch.num_rows if records is None else records

    def finish(self) -> StagedPart:
        self._stream.close()
        self._spool.finish()
        spool = self._spool
        return StagedPart(
            name=spool.name,
            rows=self._rows,
            size_bytes=spool.size,
            checksum=spool.checksum,
            digest=spool.digest(),
            inline=spool.inline(),
        )

    def discard(self) -> None:
        """Deletes the file of a failed task attempt."""
        self._spool.discard()
