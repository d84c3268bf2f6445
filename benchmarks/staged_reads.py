"""``python -m benchmarks.staged_reads``: CPU time in Python from mapped to staged rows, without Spark.

With packed batches, one process packs the rows and another one unpacks and stages them; the JVM between them
is left out. With ``write=`` of `map_in_read`, the process that reads stages them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable

import click
import pyarrow as pa
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_eos_source.in_read.step import MapInRead, ReadColumn, ReadColumns, packed_batches_of, unpack
from kafka_eos_source.spark.schema import check_frame
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.rows import from_batches, staged_schema
from kafka_eos_source.stage.writer import stage

_BATCH = 10_000
_NAMES = ("key", "value")
_ROWS = StructType([StructField(name, BinaryType()) for name in _NAMES])


@click.command()
@click.option("--rows", default=1_000_000, show_default=True, type=click.IntRange(_BATCH))
@click.option("--value-bytes", default=92, show_default=True, type=click.IntRange(1))
@click.option("--repeat", default=7, show_default=True, type=click.IntRange(1))
def main(rows: int, value_bytes: int, repeat: int) -> None:
    """Prints the medians of both ways, which take turns."""
    keys = pa.array([b"%010d" % number for number in range(_BATCH)], pa.binary())
    values = pa.array([b"x" * value_bytes] * _BATCH, pa.binary())
    batches = [pa.RecordBatch.from_arrays([keys, values], names=list(_NAMES))] * (rows // _BATCH)
    step = MapInRead(ReadColumns(tuple(ReadColumn(name, name) for name in _NAMES)), _ROWS, None)
    columns = check_frame(_ROWS, topic_option="out", include_timestamp=False)
    with tempfile.TemporaryDirectory() as location:
        folder = StagingFolder.at(location)

        def staged(of: Iterable[pa.RecordBatch]) -> None:
            schema = staged_schema(columns)
            stage(from_batches(of, columns), schema, folder=folder, batch="0", inline_bytes=0, topic="out")
            folder.remove_batch("0")

        def packed() -> None:
            pipe = pa.BufferOutputStream()
            first, *others = step(batches)
            with pa.ipc.new_stream(pipe, first.schema) as stream:
                for each in (first, *others):
                    stream.write_batch(each)
            staged(unpack(packed_batches_of(pa.ipc.open_stream(pipe.getvalue())), _ROWS))

        ways: dict[str, Callable[[], None]] = {
            "packed batches": packed,
            "write=": lambda: staged(step.mapped(batches)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeat):
            for name, way in ways.items():
                before = time.process_time()
                way()
                seconds[name].append(time.process_time() - before)
    for name, own in seconds.items():
        median, low, high = (each / rows * 1e6 for each in (statistics.median(own), min(own), max(own)))
        click.echo(f"{name}: {median:.2f} CPU s per million rows, from {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
