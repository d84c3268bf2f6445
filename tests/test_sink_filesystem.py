"""Two drivers that finish the same batch: each finds it finished, whoever was quicker at which step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kafka_eos_source.sinks import OK
from kafka_eos_source.sinks.filesystem import FilesystemSink, committed_files
from kafka_eos_source.testing.sinks import System, deadline, new_txn, opened, stage

DRIVERS, TIMES = 3, 60
ROWS = pa.table({"n": [1, 2, 3]})


@pytest.fixture
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switching_often")
def test_who_comes_second_finds_it_done(tmp_path: Path) -> None:
    for number in range(TIMES):
        folder = tmp_path / str(number)
        system = System(sink=lambda at=folder: FilesystemSink(str(at)), visible=list)
        txn, outcomes = new_txn(), []
        with opened(system) as sink:
            assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        start = threading.Barrier(DRIVERS)

        def commit(system: System = system, start: threading.Barrier = start) -> None:
            with opened(system) as own:
                start.wait()
                outcomes.append(own.commit(txn, deadline()))  # noqa: B023 - joined before the next one

        threads = [threading.Thread(target=commit) for _ in range(DRIVERS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert outcomes == [OK] * DRIVERS
        assert sum(pq.read_table(file).num_rows for file in committed_files(str(folder))) == len(ROWS)
        assert not list(folder.glob("_kafka_eos/*/ending/*")), "nothing gathered is left"
