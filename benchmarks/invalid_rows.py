"""Measures what the check for invalid rows costs: ``python -m benchmarks.invalid_rows``.

Each mode stages a million records of 100 bytes, as a task does with what Spark passes. Modes take turns, and
the CPU time of the process is measured. No broker is involved.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import pyarrow as pa

from kafka_eos_source.spark.schema import SinkColumns
from kafka_eos_source.stage.files import PartStage, StagingFolder
from kafka_eos_source.stage.rows import from_batches, staged_schema
from kafka_eos_source.stage.staging import stage

ROWS, IN_BATCH = 1_000_000, 10_000
_FIRST = {"key": 0, "value": 1, "topic": None, "partition": None, "headers": None, "timestamp": None}


def batches(bad_of_1000: int | None) -> list[pa.RecordBatch]:
    """Returns the rows as Spark passes them.

    Args:
        bad_of_1000: how many of 1000 rows are marked; None = the frame has no column for marks.
    """
    values = [b"%0100d" % number for number in range(IN_BATCH)]
    columns: dict[str, Any] = {"key": [each[-10:] for each in values], "value": values}
    if bad_of_1000 is not None:
        mark = {"error": "NotJson", "message": "the value is not JSON", "topic": "in", "partition": 1}
        fields = [("error", pa.string()), ("message", pa.string()), ("topic", pa.string())]
        kind = pa.struct([*fields, ("partition", pa.int32()), ("offset", pa.int64())])
        marks = [
            {**mark, "offset": number} if number % 1000 < bad_of_1000 else None for number in range(IN_BATCH)
        ]
        columns["kafka_eos_invalid"] = pa.array(marks, kind)
    return [pa.record_batch(columns)] * (ROWS // IN_BATCH)


def stage_all(rows: list[pa.RecordBatch], place: StagingFolder, dead_letters: bool) -> None:
    """Stages the rows, and their dead letters."""
    columns: SinkColumns = SinkColumns(**_FIRST)
    more: list[Any] = []
    if len(rows[0].schema.names) > 2:
        columns = SinkColumns(**_FIRST, invalid=2)
    if dead_letters:
        from kafka_eos_source.stage.row_rules import RecordLimits
        from kafka_eos_source.stage.rows import InvalidRows

        made = partial(PartStage, folder=place, batch="0", inline_bytes=0)
        more = [InvalidRows("dead", RecordLimits(1_000_000, 4), {"app": "app"}, "out", made)]
    stage(
        from_batches(rows, columns, *more),
        staged_schema(columns),
        folder=place,
        batch="0",
        inline_bytes=0,
        topic="out",
    )
    if more:
        more[0].finish()


#: For each mode, how many of 1000 rows are marked (None = there is no column for marks), and whether the task
#: looks for invalid rows.
MODES: dict[str, tuple[int | None, bool]] = {
    "fail": (None, False),
    "dead-letter": (None, True),
    "dead-letter, a column of marks, none bad": (0, True),
    "dead-letter, 1 % bad": (10, True),
}


@click.command()
@click.option("--rounds", default=10, show_default=True, help="How often each mode runs.")
@click.option("--mode", "chosen", multiple=True, type=click.Choice(list(MODES)), help="Only this mode.")
def main(rounds: int, chosen: tuple[str, ...]) -> None:
    """Print the CPU seconds per million records of each mode: the median of all rounds, and the lowest."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    rows = {name: batches(MODES[name][0]) for name in chosen or MODES}
    found: dict[str, list[float]] = {name: [] for name in chosen or MODES}
    try:
        for number in range(rounds + 1):
            for name, times in found.items():
                place = StagingFolder.at(str(folder / f"{number}-{len(times)}"))
                begun = time.process_time()
                stage_all(rows[name], place, MODES[name][1])
                if number:  # the first round warms up
                    times.append(time.process_time() - begun)
                shutil.rmtree(folder / f"{number}-{len(times)}", ignore_errors=True)
                for each in folder.iterdir():
                    shutil.rmtree(each)
    finally:
        shutil.rmtree(folder)
    for name, times in found.items():
        click.echo(f"{name}: {statistics.median(times):.3f} (lowest {min(times):.3f})")


if __name__ == "__main__":
    main()
