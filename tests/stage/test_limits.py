"""Thousands of parts are read with few open files, and a part that changes after its check is detected."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from kafka_eos_source.commit.request import ProducerSession
from kafka_eos_source.errors import StagedPartError
from kafka_eos_source.model import StagedPart
from kafka_eos_source.stage import files
from kafka_eos_source.stage.fanout import SinkPart, StagedForSink
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.stage.staging import stage
from tests import ROOT
from tests.commit.wire_commit import OUTPUT, RecordingClients, cluster, commit, values

SCHEMA = pa.schema([("value", pa.binary()), ("partition", pa.int32())])

Read = Callable[[], Iterator[pa.RecordBatch]]


@pytest.fixture
def folder(tmp_path: Path) -> StagingFolder:
    return StagingFolder.at(str(tmp_path / "staging"))


@pytest.fixture
def remote(folder: StagingFolder, monkeypatch: pytest.MonkeyPatch) -> StagingFolder:
    """Returns the same folder on a file system that does not support memory mapping."""

    def not_local(location: str) -> tuple[pafs.FileSystem, str]:
        return pafs.SubTreeFileSystem("/", pafs.LocalFileSystem()), location.lstrip("/")

    monkeypatch.setattr(files, "file_system", not_local)
    return folder


def stage_part(folder: StagingFolder, number: int = 0) -> StagedPart:
    texts = values(number)
    rows = [
        pa.array([text.encode() for text in texts]),
        pa.array([row % 2 for row in range(len(texts))], pa.int32()),
    ]
    batch = pa.record_batch(rows, schema=SCHEMA)
    return stage([batch], SCHEMA, folder=folder, batch="0", inline_bytes=0, topic=OUTPUT)


def read_all(read: Read) -> list[str]:
    return [value.decode() for batch in read() for value in batch.column("value").to_pylist()]


def for_kafka(folder: StagingFolder, *parts: StagedPart) -> Read:
    return StagedRows(folder, "0", parts).batches


def for_a_sink(folder: StagingFolder, *parts: StagedPart) -> Read:
    found = [SinkPart("files", part.rows, part) for part in parts]
    return StagedForSink(folder, "0", SCHEMA, found).batches


each_reader = pytest.mark.parametrize("open_parts", [for_kafka, for_a_sink])

_FEW_FILES = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from kafka_eos_source.stage import files
from tests.stage.test_limits import *

folder = StagingFolder.at(sys.argv[2])
if sys.argv[3] == "remote":
    files.file_system = lambda location: (
        pafs.SubTreeFileSystem("/", pafs.LocalFileSystem()), location.lstrip("/")
    )
parts = [stage_part(folder, number) for number in range(300)]
expected = [text for number in range(300) for text in values(number)]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for open_parts in (for_kafka, for_a_sink):
    read = open_parts(folder, *parts)
    for _ in range(2):
        assert read_all(read) == expected
    batches = list(read())  # as a sink does that makes one table of all batches
    assert pa.Table.from_batches(batches)["value"].to_pylist() == [text.encode() for text in expected]
print("read", len(batches))
"""


@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_batch_may_have_more_parts_than_the_process_may_open_files(tmp_path: Path, where: str) -> None:
    arguments = [
        sys.executable,
        "-c",
        _FEW_FILES,
        str(ROOT),
        str(tmp_path / "staging"),
        where,
    ]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "read 300\n", ended.stderr


def damage(path: Path, how: str, other: Path) -> None:
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "replaced":
        other.replace(path)
    else:
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content)


@each_reader
@pytest.mark.parametrize("how", ["deleted", "truncated", "replaced", "changed"])
def test_a_part_that_changes_after_it_was_verified_is_refused(
    folder: StagingFolder, open_parts: Callable[..., Read], how: str
) -> None:
    """A staged file that is replaced by another valid file of equal size is detected."""
    part, other = stage_part(folder, 0), stage_part(folder, 1)
    assert (part.rows, part.size_bytes) == (other.rows, other.size_bytes)
    batch = Path(folder.location, "0")
    read = open_parts(folder, part)
    assert read_all(read) == values(0)
    damage(batch / part.name, how, batch / other.name)
    with pytest.raises(StagedPartError, match=r"cannot be read|is damaged") as caught:
        read_all(read)
    assert "restart the query" in caught.value.fix


@each_reader
def test_a_remote_part_is_downloaded_once(remote: StagingFolder, open_parts: Callable[..., Read]) -> None:
    parts = [stage_part(remote, number) for number in range(3)]
    read = open_parts(remote, *parts)
    for part in parts:
        Path(remote.location, "0", part.name).unlink()
    for _ in range(2):
        assert read_all(read) == values(0) + values(1) + values(2)


def test_a_part_that_is_replaced_during_the_commit_aborts_the_transaction(folder: StagingFolder) -> None:
    first, second, other = stage_part(folder, 0), stage_part(folder, 1), stage_part(folder, 2)
    batch = Path(folder.location, "0")
    with cluster() as simulated:
        kafka, session = RecordingClients(simulated), ProducerSession()
        staged = StagedRows(folder, "0", [first, second])
        damage(batch / second.name, "replaced", batch / other.name)
        with pytest.raises(StagedPartError, match="is damaged"):
            commit(kafka, session, rows=staged)
        assert kafka.calls[-1] == "abort"
        assert kafka.visible() == []
        assert session.producer is None


def test_topics_and_rows_are_known_without_reading(folder: StagingFolder) -> None:
    staged = StagedRows(folder, "0", [stage_part(folder), stage_part(folder, 1)])
    assert staged.rows == len(values(0) + values(1))
    assert staged.topics == MappingProxyType({OUTPUT: 1})
