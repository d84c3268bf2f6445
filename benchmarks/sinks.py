"""Compares each sink with its library on the same batches: ``python -m benchmarks.sinks [ROWS] [URL…]``.

A sink's time covers all of its steps: stage, prepare, commit, the list of `recover`, and cleaning up. The
library writes the same rows directly, to disk or in one transaction. Both run in turn, three times, and the
medians are compared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks import constructors
from kafka_eos_source.sinks.contract import OK, SinkContext, SinkTxn, StageContext, TwoPhaseSink
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.stage.fanout import SinkPart, StagedForSink
from kafka_eos_source.stage.files import PartStage, StagingFolder

_RUNS = 3
_BATCH_ROWS = 10_000
#: Rows of a batch so small that its time shows the fixed cost of the two phases of a commit.
_FEW, _RUNS_OF_FEW = 100, 15


def table(rows: int) -> pa.Table:
    numbers = pa.array(range(rows), pa.int64())
    return pa.table(
        {
            "id": numbers,
            "origin": pa.array([f"airport-{n % 300}" for n in range(rows)]),
            "delay": pa.array([n % 180 - 20.5 for n in range(rows)]),
            "carried": pa.array([f"a line of text of some length, number {n}" for n in range(rows)]),
            "at": pa.array([1_700_000_000_000_000 + n for n in range(rows)], pa.timestamp("us", "UTC")),
        }
    )


def by_sink(sink: TwoPhaseSink, rows: pa.Table, folder: Path) -> float:
    """Writes one batch through the sink; returns the seconds from the task's first row to the end."""
    staging = StagingFolder.at(str(folder / "staging"))
    sink.open(SinkContext("bench", "bench", "cluster", NotesFolder(str(folder / "store"))))
    deadline = Deadline.after_seconds(600)
    sink.make_ready(rows.schema, deadline)
    txn = sink.context.txn(1, SinkTxn.new_attempt())
    begun = time.perf_counter()
    stage = sink.stage(
        StageContext(1, uuid.uuid4().hex, rows.schema, lambda: PartStage(rows.schema, staging, "1", 262_144))
    )
    for batch in rows.to_batches(_BATCH_ROWS):
        stage.write(batch)
    staged = StagedForSink(staging, "1", rows.schema, [SinkPart("bench", rows.num_rows, stage.finish())])
    for outcome in (sink.prepare(txn, staged, deadline), sink.commit(txn, deadline)):
        assert outcome == OK, outcome
    sink.tidy(1, deadline)
    seconds = time.perf_counter() - begun
    sink.close()
    return seconds


def by_library(write: Callable[[], object]) -> float:
    begun = time.perf_counter()
    write()
    return time.perf_counter() - begun


def parquet(rows: pa.Table, folder: Path) -> None:
    with pq.ParquetWriter(folder / f"{uuid.uuid4().hex}.parquet", rows.schema) as out:
        for batch in rows.to_batches(_BATCH_ROWS):
            out.write_batch(batch)


def csv(rows: pa.Table, folder: Path) -> None:
    with pacsv.CSVWriter(folder / f"{uuid.uuid4().hex}.csv", rows.schema) as out:
        for batch in rows.to_batches(_BATCH_ROWS):
            out.write_batch(batch)


def json(rows: pa.Table, folder: Path) -> None:
    """Writes JSON with pandas, because pyarrow cannot."""
    with open(folder / f"{uuid.uuid4().hex}.jsonl", "w") as out:
        for batch in rows.to_batches(_BATCH_ROWS):
            batch.to_pandas().to_json(out, orient="records", lines=True, date_format="iso", date_unit="us")


def sqlalchemy(rows: pa.Table, url: str, name: str) -> None:
    import sqlalchemy as sa

    engine = sa.create_engine(url)
    target = sa.Table(name, sa.MetaData(), autoload_with=engine)
    with engine.begin() as connection:
        for batch in rows.to_batches(_BATCH_ROWS):
            connection.execute(target.insert(), batch.to_pylist())
    engine.dispose()


def cases(rows: pa.Table, urls: list[str]) -> Iterator[tuple[str, Callable[[Path], TwoPhaseSink], Any]]:
    kinds: list[tuple[_Kind, Callable[..., Any]]] = [("parquet", parquet), ("csv", csv), ("json", json)]
    for kind, library in kinds:
        yield (
            f"filesystem {kind}",
            partial(_files, kind),
            partial(library, rows),
        )
    for url in urls:
        name = f"bench_{uuid.uuid4().hex[:8]}"
        yield (
            f"sql {url.partition(':')[0]}",
            partial(_database, url, name),
            partial(_alone, rows, url, name),
        )


_Kind = Literal["parquet", "csv", "json"]


def _files(kind: _Kind, folder: Path) -> TwoPhaseSink:
    return constructors.files(str(folder / "sink"), format=kind).build()


def _database(url: str, name: str, _folder: Path) -> TwoPhaseSink:
    return constructors.sql(url, name).build()


def _alone(rows: pa.Table, url: str, name: str, _folder: Path) -> None:
    sqlalchemy(rows, url, name)


def main() -> None:
    rows = table(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
    few = rows.slice(0, _FEW)
    print(f"| sink | rows/s | library alone, rows/s | of it | {_FEW} rows, ms |\n|---|---|---|---|---|")
    for name, sink, library in cases(rows, sys.argv[2:]):
        ours, theirs = [], []
        for _ in range(_RUNS):
            with tempfile.TemporaryDirectory() as folder:
                ours.append(by_sink(sink(Path(folder)), rows, Path(folder)))
                theirs.append(by_library(partial(library, Path(folder))))
        mine, alone = (rows.num_rows / statistics.median(each) for each in (ours, theirs))
        with tempfile.TemporaryDirectory() as folder:
            least = statistics.median(
                by_sink(sink(Path(folder)), few, Path(folder)) for _ in range(_RUNS_OF_FEW)
            )
        print(
            f"| {name} | {mine:,.0f} | {alone:,.0f} | {mine / alone:.0%} | {1000 * least:.0f} |", flush=True
        )


if __name__ == "__main__":
    main()
