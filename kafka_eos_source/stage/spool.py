"""Holds the bytes of one staged part: in memory if they are few, else in a file of the staging folder."""

from __future__ import annotations

import zlib
from typing import Any

import pyarrow as pa

from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.paths import unwritable


class Spool:
    """A file-like object that moves its bytes to a file if there are many; computes size and CRC-32."""

    def __init__(self, folder: StagingFolder | None, batch: str, inline_bytes: int) -> None:
        self._folder = folder
        self._batch = batch
        self._inline_bytes = inline_bytes
        self._memory: bytearray | None = bytearray()
        self._file: pa.NativeFile | None = None
        self.closed = False
        self.name = ""
        self.size = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.size += view.nbytes
        self.crc32 = zlib.crc32(view, self.crc32)
        if self._memory is not None:
            if self._folder is None or self.size <= self._inline_bytes:
                self._memory += view
                return view.nbytes
            self._spill(self._folder)
        self._to_file(view)
        return view.nbytes

    def inline(self) -> bytes | None:
        return None if self._memory is None else bytes(self._memory)

    def finish(self) -> None:
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
        self.name, self._file = folder.create(self._batch)
        head, self._memory = self._memory, None
        self._to_file(head)

    def _to_file(self, data: Any) -> None:
        assert self._file is not None
        assert self._folder is not None
        try:
            self._file.write(data)
        except OSError as error:
            raise unwritable(self._folder.location, error) from error

    # methods that pyarrow requires of a Python file
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False
