"""Writes a checkpoint's files as Spark does, without Spark."""

from __future__ import annotations

import json
from pathlib import Path

from kafka_eos_source.protocol.offset_log import SourcePosition


class SparkCheckpoint:
    """A checkpoint with the files that the sink and the command line tools read.

    Args:
        folder: the checkpoint's folder, which is created.
        query_id: Spark's id of the query.
    """

    def __init__(self, folder: Path, query_id: str) -> None:
        self.location = str(folder)
        self.query_id = query_id
        folder.mkdir(parents=True)
        (folder / "metadata").write_text(json.dumps({"id": query_id}))

    def log_offsets(self, batch_id: int, *sources: SourcePosition) -> None:
        """Writes ``offsets/<batch>``, as Spark does before the batch runs."""
        lines = [source.to_json() for source in sources]
        self._write(f"offsets/{batch_id}", "\n".join(["v1", '{"batchWatermarkMs":0}', *lines]))

    def log_commit(self, batch_id: int) -> None:
        """Writes ``commits/<batch>``, as Spark does after the batch."""
        self._write(f"commits/{batch_id}", "v1\n{}")

    def forget(self, *names: str) -> None:
        """Removes files by their path in the checkpoint, such as ``commits/3``."""
        for name in names:
            Path(self.location, name).unlink()

    def _write(self, name: str, text: str) -> None:
        path = Path(self.location, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        (path.parent / f".{path.name}.crc").write_bytes(
            b"crc"
        )  # Hadoop writes a checksum file beside each file
