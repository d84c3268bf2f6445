"""A checkpoint as Spark leaves it, without Spark."""

from __future__ import annotations

import json
from pathlib import Path

from kafka_eos_source.protocol.source_position import SourcePosition


class MadeUp:
    """The files of Spark's that the sink and its tools look at.

    Args:
        folder: to be made.
        query_id: Spark's id of the query.
    """

    def __init__(self, folder: Path, query_id: str) -> None:
        self.location = str(folder)
        self.query_id = query_id
        folder.mkdir(parents=True)
        (folder / "metadata").write_text(json.dumps({"id": query_id}))

    def log_offsets(self, batch_id: int, *sources: SourcePosition) -> None:
        """``offsets/<batch>``, written before the batch runs."""
        lines = [source.to_json() for source in sources]
        self._write(f"offsets/{batch_id}", "\n".join(["v1", '{"batchWatermarkMs":0}', *lines]))

    def log_commit(self, batch_id: int) -> None:
        """``commits/<batch>``, written after it."""
        self._write(f"commits/{batch_id}", "v1\n{}")

    def forget(self, *names: str) -> None:
        """Removes such files, as ``commits/3``."""
        for name in names:
            Path(self.location, name).unlink()

    def _write(self, name: str, text: str) -> None:
        path = Path(self.location, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        (path.parent / f".{path.name}.crc").write_bytes(b"crc")  # as Hadoop leaves beside it
