"""The rows of a shard's micro-batch: how they travel to it, their event times, and how they fit into memory.

Partial rows travel to their shard as one Spark row per shard, not one row per key. Spark does not need to see
the rows that a read, or a step after it, has combined. As ordinary rows, each of them would be converted from
Arrow to Spark's row format, shuffled, and converted back. So the combining task sorts its rows by shard, with
Spark's own hash, and sends each shard one Spark row with a packed batch:

============================  ======  ===============================================================
column                        type    content
============================  ======  ===============================================================
``__kafka_eos_route``         int     a number that ``repartition(shards, route)`` sends to the shard
``__kafka_eos_shard``         int     the shard
``__kafka_eos_packed_batch``  binary  the rows as a message of `protocol.packing`
============================  ======  ===============================================================
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import TracebackType
from typing import IO

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.protocol import packing
from kafka_eos_source.spark.arrow import fit
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.layout import hash_columns, shards_of
from kafka_eos_source.state.model import BatchContext

#: Names of the columns in the table above.
ROUTE = "__kafka_eos_route"
SHARD = "__kafka_eos_shard"
PACKED_BATCH = "__kafka_eos_packed_batch"
#: Name of the column with Spark's time of the micro-batch, for operators that use event times.
BATCH_TIME = "__kafka_eos_batch_time"

#: Schema of a frame that holds packed batches.
PACKED_SCHEMA = pa.schema(
    [pa.field(ROUTE, pa.int32()), pa.field(SHARD, pa.int32()), pa.field(PACKED_BATCH, pa.binary())]
)

#: Approximate size of the rows in a packed batch, in bytes. Spark holds a few packed batches in memory.
PACKED_BATCH_BYTES = 4 << 20


def pack(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, keys: Sequence[str], shards: int
) -> Iterator[pa.RecordBatch]:
    """Packs rows by shard. The rows of a shard keep their order.

    Args:
        batches: the rows, with the columns of ``schema``.
        schema: schema of the packed rows; `unpack` needs the same one.
        keys: names of the key columns, in grouping order.
        shards: number of shards.

    Yields:
        Batches of `PACKED_SCHEMA`.
    """
    for batch in batches:
        if not batch.num_rows:
            continue
        batch = fit(batch, schema, "the aggregation returned")
        shard_of_row = shards_of([batch.column(name) for name in keys], shards)
        order = np.argsort(shard_of_row, kind="stable")
        counts = np.bincount(shard_of_row, minlength=shards)
        batch = batch.take(pa.array(order))
        packed: list[pa.Buffer] = []
        destinations: list[int] = []
        start = 0
        for shard in np.flatnonzero(counts).tolist():
            count = int(counts[shard])
            of_shard = packing.slices(batch.slice(start, count), PACKED_BATCH_BYTES)
            packed += map(packing.pack, of_shard)
            destinations += [shard] * (len(packed) - len(destinations))
            start += count
        yield routed(packing.column(packed), destinations, shards)


def pack_past_packets(
    function: Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]],
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    keys: Sequence[str],
    shards: int,
) -> Iterator[pa.RecordBatch]:
    """Applies a function to the rows of batches and packs the result; packets pass it, and go to shard 0.

    Args:
        function: takes rows without the column of packets; reads all of them.
        batches: rows and packets of one task.
        schema, keys, shards: as `pack` takes them.

    Yields:
        Batches of `PACKED_SCHEMA` and the column of packets.
    """
    before = packing.WaitingPackets()

    def rows() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            data, packets = packing.split_packets(batch)
            before.append(packets)
            yield data

    for each in pack(function(rows()), schema, keys, shards):
        yield packing.with_packets(each)
    for packets in before.taken():
        nothing = routed(pa.nulls(len(packets), pa.binary()), [0] * len(packets), shards)
        yield nothing.append_column(packing.CHANGELOG, packets)


def routed(packed: pa.BinaryArray, destinations: Sequence[int], shards: int) -> pa.RecordBatch:
    """Returns rows of `PACKED_SCHEMA` that carry each packed batch to the shard of the same position."""
    route_of_shard = routes(shards)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([route_of_shard[shard] for shard in destinations], pa.int32()),
            pa.array(destinations, pa.int32()),
            packed,
        ],
        schema=PACKED_SCHEMA,
    )


def unpack(packed: pa.BinaryArray, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yields the rows that `pack` packed, with the same ``schema``. Nulls are skipped.

    Raises:
        InvalidRecordError: if a value is not a packed batch.
    """
    where = f"column {PACKED_BATCH!r}"
    return (packing.unpack(each, schema, where) for each in packing.values(packed))


@lru_cache(maxsize=8)
def routes(shards: int) -> tuple[int, ...]:
    """Returns, for each shard, the smallest number that Spark's hash sends there.

    Spark's hash spreads consecutive numbers like a random function, so about ``shards × ln(shards)`` numbers
    reach every shard.
    """
    smallest: dict[int, int] = {}
    start, step = 0, 4 * shards + 64
    while len(smallest) < shards:
        numbers = np.arange(start, start + step, dtype=np.int32)
        for number, shard in zip(
            numbers.tolist(), shards_of([pa.array(numbers)], shards).tolist(), strict=True
        ):
            smallest.setdefault(shard, number)
        start += step
    return tuple(smallest[shard] for shard in range(shards))


# ---------------------------------------- event times


def record_event_times(
    context: BatchContext, first_ms: Ints, last_ms: Ints | None = None, rows: Ints | None = None
) -> None:
    """Records the largest event time of this shard's rows in the context of the batch.

    A single record with a wrong time in the far future must not close all windows. So event times after
    ``context.event_time_limit_ms`` do not count, and their rows are counted as ``future_rows``.

    Args:
        context: the micro-batch.
        first_ms: event time of each row; or, for a partial row, the first time that it covers.
        last_ms: the last event time of each partial row.
        rows: number of rows in each partial row.
    """
    if not len(first_ms):
        return
    last_ms = first_ms if last_ms is None else last_ms
    limit_ms = context.event_time_limit_ms
    if limit_ms is not None:
        ahead = first_ms > limit_ms
        if bool(ahead.any()):
            context.count("future_rows", int(ahead.sum() if rows is None else rows[ahead].sum()))
            last_ms = last_ms[~ahead]
            if not len(last_ms):
                return
        last_ms = np.minimum(last_ms, limit_ms)
    largest, known = int(last_ms.max()), context.seen_event_time_ms
    context.seen_event_time_ms = largest if known is None else max(known, largest)


def closed_until(context: BatchContext, grace_ms: int) -> int | None:
    """Returns the time up to which windows are closed at the end of the batch; None = no window closes.

    The event times that this shard saw in the running batch count. The watermark of the next batch is at
    least as late, so no later row can fall into these windows, and their results can be emitted now.

    Args:
        context: the micro-batch.
        grace_ms: how long a window accepts rows after its end.

    Returns:
        Milliseconds since the epoch. A window that ends at this time or earlier is closed.
    """
    times = [time for time in (context.event_time_ms, context.seen_event_time_ms) if time is not None]
    return max(times) - grace_ms if times else None


# ---------------------------------------- parts of the rows, divided by key

#: Rows and bytes that stay in memory. More go to temporary files.
MOST_ROWS, MOST_BYTES = 1 << 18, 32 << 20
#: A part that is this many times larger is divided again.
_LARGE = 2
#: Entries of the state that a part may change, as a multiple of `MOST_ROWS`.
_MOST_ENTRIES = 2
#: Number of files.
_FILES = 61
#: Seed of the hash that divides rows for the first time; each further division adds one. It must differ from
#: Spark's seed: all rows of a shard have the same remainder of Spark's hash.
_SEED = 0x5EED


class RowsByKey:
    """Rows in parts, so that all rows of a key are in one part, in order of arrival. A context manager.

    Most micro-batches fit into memory and are one part. Larger ones are divided by a hash of the key into
    temporary files. These have no name, so no other process can open them, and they disappear with this
    process. A part that is still too large is divided again, unless one key has most of its rows.

    Args:
        keys: names of the key columns.
        entries_per_row: how many entries of the state one row changes. The parts become smaller if there are
            many, because the entries have to fit into memory too.
    """

    def __init__(self, keys: Sequence[str], *, entries_per_row: int = 1, _division: int = 0) -> None:
        self._keys = list(keys)
        self._entries_per_row = entries_per_row
        self._division = _division
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        self._files: list[RowsFile] = []

    def __enter__(self) -> RowsByKey:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    @property
    def divided(self) -> bool:
        """Whether `parts` may yield several parts. It is known once all rows are added."""
        return bool(self._files) or self._pieces_of(self._rows) > 1

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
                yield from self._pieces(waiting)
            return
        self._divide()
        total = sum(file.rows for file in self._files)
        together: list[RowsFile] = []
        for file in (file for file in self._files if file.rows):
            if file.is_large and file.rows <= total // 2:
                yield from self._divided_again(file)
                continue
            if together and _exceed_memory([*together, file]):
                yield from self._pieces(_read_all(together))
                together = []
            together.append(file)
        if together:
            yield from self._pieces(_read_all(together))

    def _divided_again(self, file: RowsFile) -> Iterator[list[pa.RecordBatch]]:
        division = self._division + 1
        with RowsByKey(self._keys, entries_per_row=self._entries_per_row, _division=division) as finer:
            for rows in file.read():
                finer.add(rows)
            yield from finer.parts()

    def _pieces(self, part: list[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
        """Divides a part in memory if its rows change too many entries of the state."""
        count = self._pieces_of(sum(rows.num_rows for rows in part))
        if count <= 1:
            yield part
            return
        pieces: list[list[pa.RecordBatch]] = [[] for _ in range(count)]
        while part:
            for piece, rows in zip(pieces, self._by_hash(part.pop(0), count, 1), strict=True):
                if rows.num_rows:
                    piece.append(rows)
        yield from filter(None, pieces)

    def _pieces_of(self, rows: int) -> int:
        if self._entries_per_row == 1:
            return 1
        return -(-rows * self._entries_per_row // (_MOST_ENTRIES * MOST_ROWS))

    def _divide(self) -> None:
        """Moves the rows in memory to the files of their parts."""
        with temporary_files():
            if not self._files:
                for _ in range(_FILES):
                    self._files.append(RowsFile(self._waiting[0].schema))
            waiting, self._waiting, self._rows, self._bytes = self._waiting, [], 0, 0
            while waiting:
                for file, rows in zip(self._files, self._by_hash(waiting.pop(0), _FILES), strict=True):
                    file.add(rows)

    def _by_hash(self, rows: pa.RecordBatch, parts: int, further: int = 0) -> Iterator[pa.RecordBatch]:
        """Yields the rows of each part, in their order."""
        hashes = hash_columns([rows.column(name) for name in self._keys], _SEED + self._division + further)
        part = np.mod(hashes.astype(np.int64), parts)
        # NumPy sorts numbers of 16 bits by radix, which is much faster
        order = np.argsort(part.astype(np.uint16 if parts <= 1 << 16 else np.uint32), kind="stable")
        ends = np.cumsum(np.bincount(part, minlength=parts)).tolist()
        rows, start = rows.take(pa.array(order)), 0
        for end in ends:
            yield rows.slice(start, end - start)
            start = end


class RowsFile:
    """A temporary file with the rows of a part.

    Args:
        schema: columns of the rows.

    Attributes:
        rows: number of rows.
        bytes: their size in memory.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.rows = self.bytes = 0
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
        self._writer = pa.ipc.new_stream(self._file, schema)

    @property
    def is_large(self) -> bool:
        return self.rows > _LARGE * MOST_ROWS or self.bytes > _LARGE * MOST_BYTES

    def add(self, rows: pa.RecordBatch) -> None:
        if rows.num_rows:
            self._writer.write_batch(rows)
            self.rows += rows.num_rows
            self.bytes += rows.nbytes

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows, and then closes the file. Call it once."""
        with temporary_files():
            self._writer.close()
            self._file.seek(0)
            reader = pa.ipc.open_stream(self._file)
        while True:
            with temporary_files():
                rows = next(reader, None)
            if rows is None:
                break
            yield rows
        self.close()

    def close(self) -> None:
        with suppress(OSError):  # a full disk cannot take the rest of the buffer, which nobody needs
            self._file.close()


def _exceed_memory(files: list[RowsFile]) -> bool:
    return sum(file.rows for file in files) > MOST_ROWS or sum(file.bytes for file in files) > MOST_BYTES


def _read_all(files: list[RowsFile]) -> list[pa.RecordBatch]:
    return [rows for file in files for rows in file.read()]


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
