"""One task attempt's rows into one staged part: in its message while they are few, else in a file."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source import failpoints
from kafka_eos_source.model import ShardPart, ShardReport, StagedPart, TopicPartition
from kafka_eos_source.schema import CHANGES, PARTITION, TOPIC
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.paths import unwritable
from kafka_eos_source.state.packet import unpack


class _Spool:
    """A file-like that keeps bytes in memory until there are too many, and counts and sums them."""

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
        """Leaves nothing behind of an attempt that failed."""
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

    # what pyarrow asks of a Python file
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def stage(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    *,
    folder: StagingFolder | None,
    batch: str,
    inline_bytes: int,
    run_id: str = "",
    topic: str | None = None,
) -> StagedPart:
    """Writes every batch of one task attempt, and says what was written.

    Args:
        batches: of columns `schema`, as `stage.rows` makes them.
        schema: the staged columns.
        folder: where a file goes; None = all stays in the message.
        batch: the micro-batch's name in the folder.
        inline_bytes: largest part that travels inside the commit message.
        run_id: of the streaming run.
        topic: the ``topic`` option, when the rows do not say.

    Raises:
        InvalidRecordError: from ``batches``.
        StateError: what is in the column of an operator's changes is no packet.
        UnavailableError: the folder cannot be written (full, read-only).
        InvalidOptionError: the folder is not the driver's.
    """
    spool = _Spool(folder, batch, inline_bytes)
    rows = 0
    topics: dict[str, int] = {}
    shards: list[ShardPart] | None = [] if CHANGES in schema.names else None
    try:
        with pa.ipc.new_stream(pa.PythonFile(spool, mode="w"), schema) as stream:
            for each in batches:
                if each.num_rows:
                    stream.write_batch(each)
                    rows += each.num_rows
                    if shards is not None and each.column(CHANGES).null_count == 0:
                        shards += shard_parts(each)
                        continue
                    # so that the driver can check them before it begins
                    for name, partition in highest_partitions(each, topic).items():
                        topics[name] = max(partition, topics.get(name, partition))
        failpoints.reach("stage.before_close")
        spool.finish()
    except BaseException:
        spool.discard()
        raise
    failpoints.reach("stage.after_close")
    return StagedPart(
        name=spool.name,
        rows=rows,
        size_bytes=spool.size,
        crc32=spool.crc32,
        topics=tuple(sorted(topics.items())),
        inline=spool.inline(),
        run_id=run_id,
        shards=None if shards is None else tuple(shards),
    )


def shard_parts(packets: pa.RecordBatch) -> list[ShardPart]:
    """What a staged batch of packets brings, by shard and attempt."""
    numbers: dict[tuple[TopicPartition, str], list[int]] = {}
    reports: dict[tuple[TopicPartition, str], ShardReport] = {}
    for each in packets.column(CHANGES):
        packet = unpack(memoryview(each.as_buffer()))
        numbers.setdefault((packet.tp, packet.attempt), []).append(packet.number)
        if packet.report is not None:
            reports[packet.tp, packet.attempt] = packet.report
    return [
        ShardPart(tp, attempt, tuple(found), reports.get((tp, attempt)))
        for (tp, attempt), found in numbers.items()
    ]


def highest_partitions(batch: pa.RecordBatch, topic: str | None) -> dict[str, int]:
    """Each output topic of a staged batch, with the highest partition that a row names (-1 = none does)."""
    partition = (
        batch.column(PARTITION) if PARTITION in batch.schema.names else pa.nulls(batch.num_rows, pa.int32())
    )
    if topic is not None:
        highest = pc.max(partition).as_py()
        return {topic: -1 if highest is None else highest}
    table = pa.table({TOPIC: batch.column(TOPIC), PARTITION: pc.fill_null(partition, -1)})
    maxima = table.group_by(TOPIC).aggregate([(PARTITION, "max")])
    return dict(zip(maxima[TOPIC].to_pylist(), maxima[f"{PARTITION}_max"].to_pylist(), strict=True))
