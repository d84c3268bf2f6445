"""A task's rows become a staged part, whole or not at all."""

from __future__ import annotations

import datetime
import os
import pickle
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

import kafka_eos_source
from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidRecordError,
    StagedPartError,
    UnavailableError,
)
from kafka_eos_source.model import StagedPart
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.spark.schema import SinkColumns, check_frame
from kafka_eos_source.stage.files import (
    PROBE,
    StagingFolder,
    crc32c,
    location_of_batch_writes,
    location_of_query,
)
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.stage.rows import from_arrow, from_rows, staged_schema
from kafka_eos_source.stage.staging import TaskMeter, stage

HEADERS = ArrayType(StructType([StructField("Key", StringType()), StructField("VALUE", BinaryType())]))
WIDE = StructType(
    [
        StructField("topic", StringType()),
        StructField("value", StringType()),
        StructField("other", IntegerType()),
        StructField("key", BinaryType()),
        StructField("partition", IntegerType()),
        StructField("headers", HEADERS),
        StructField("timestamp", TimestampType()),
    ]
)
COLUMNS = check_frame(WIDE, topic_option=None, include_timestamp=True)
NOON = datetime.datetime(2013, 1, 1, 12, tzinfo=datetime.timezone.utc)
ARROW = pa.schema(
    [
        ("topic", pa.string()),
        ("value", pa.string()),
        ("other", pa.int32()),
        ("key", pa.binary()),
        ("partition", pa.int32()),
        ("headers", pa.list_(pa.struct([("Key", pa.string()), ("VALUE", pa.binary())]))),
        ("timestamp", pa.timestamp("us", "UTC")),
    ]
)


def frame(*rows: dict[str, object]) -> pa.RecordBatch:
    full = {
        "topic": "t",
        "value": "v",
        "other": 1,
        "key": b"k",
        "partition": 0,
        "headers": None,
        "timestamp": NOON,
    }
    return pa.RecordBatch.from_pylist([{**full, **row} for row in rows], ARROW)


def value_only(rows: int) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array([b"x" * 100] * rows, pa.binary())})


VALUE = SinkColumns(value=0, key=None, topic=None, partition=None, headers=None, timestamp=None)


@pytest.fixture
def folder(tmp_path: Path) -> StagingFolder:
    return StagingFolder.at(str(tmp_path / "staging"))


def stage_batches(
    folder: StagingFolder | None, *batches: pa.RecordBatch, inline_bytes: int = 0
) -> StagedPart:
    return stage(
        batches, staged_schema(VALUE), folder=folder, batch="3", inline_bytes=inline_bytes, topic="out"
    )


def test_arrow_rows_are_staged_column_by_column() -> None:
    staged = from_arrow(
        frame(
            {"headers": [{"Key": "h", "VALUE": b"1"}, {"Key": "i", "VALUE": None}]},
            {"key": None, "value": None, "partition": None, "timestamp": None},
            {"key": b"", "value": "", "headers": []},
        ),
        COLUMNS,
    )
    ms = int(NOON.timestamp() * 1000)
    assert staged.schema == staged_schema(COLUMNS)
    assert staged.to_pylist() == [
        {
            "key": b"k",
            "value": b"v",
            "topic": "t",
            "partition": 0,
            "headers": [{"key": "h", "value": b"1"}, {"key": "i", "value": None}],
            "timestamp": ms,
        },
        {"key": None, "value": None, "topic": "t", "partition": None, "headers": None, "timestamp": None},
        {"key": b"", "value": b"", "topic": "t", "partition": 0, "headers": [], "timestamp": ms},
    ]


def test_spark_rows_are_staged_like_arrow_rows() -> None:
    local = NOON.astimezone().replace(tzinfo=None)  # PySpark passes naive local times to a row-based writer
    rows = [
        ("t", "v", 1, bytearray(b"k"), 0, [("h", bytearray(b"1")), ("i", None)], local),
        ("t", None, 1, None, None, None, None),
    ]
    by_row = pa.Table.from_batches(from_rows(rows, COLUMNS))
    by_arrow = from_arrow(
        frame(
            {"headers": [{"Key": "h", "VALUE": b"1"}, {"Key": "i", "VALUE": None}]},
            {"key": None, "value": None, "partition": None, "timestamp": None},
        ),
        COLUMNS,
    )
    assert by_row.to_pylist() == by_arrow.to_pylist()


def test_slices_of_a_batch_keep_their_own_headers() -> None:
    whole = frame(*({"headers": [{"Key": str(i), "VALUE": b"x"}] * i} for i in range(5)))
    staged = from_arrow(whole.slice(2, 2), COLUMNS)
    assert [len(headers) for headers in staged.column("headers").to_pylist()] == [2, 3]


def test_large_arrow_types_are_staged_like_the_others() -> None:
    """Spark passes them with ``spark.sql.execution.arrow.useLargeVarTypes``."""
    headers = [{"Key": "h", "VALUE": b"1"}, {"Key": "i", "VALUE": None}]
    usual = frame({"headers": headers}, {"key": None, "value": None}, {"headers": []})
    entry = pa.struct([("Key", pa.large_string()), ("VALUE", pa.large_binary())])
    large_types = {"topic": pa.large_string(), "value": pa.large_string(), "key": pa.large_binary()}
    large = pa.schema(
        [
            (each.name, pa.list_(entry) if each.name == "headers" else large_types.get(each.name, each.type))
            for each in ARROW
        ]
    )
    found = pa.RecordBatch.from_pylist(usual.to_pylist(), large)
    assert from_arrow(found, COLUMNS).equals(from_arrow(usual, COLUMNS))


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"topic": None}, "'topic' is null"),
        ({"topic": ""}, "'topic' is empty"),
        ({"partition": -1}, "'partition' is negative"),
        ({"headers": [{"Key": None, "VALUE": b"1"}]}, "null key"),
        ({"headers": [None]}, "null entry"),
        ({"timestamp": datetime.datetime(1969, 12, 31, tzinfo=datetime.timezone.utc)}, "before 1970"),
    ],
)
def test_a_row_that_cannot_become_a_record_is_refused_with_column_and_number(
    row: dict[str, object], column: str
) -> None:
    with pytest.raises(InvalidRecordError, match=column) as caught:
        from_arrow(frame({}, row), COLUMNS)
    assert re.search(r"in (row 1|entry 0) of the Arrow batch", str(caught.value))
    assert caught.value.fix


def test_a_small_part_is_sent_in_the_commit_message(folder: StagingFolder) -> None:
    part = stage_batches(folder, value_only(3), inline_bytes=10_000)
    assert part.name == ""
    assert part.inline is not None
    assert part.rows == 3
    assert folder.batches() == []
    assert StagedRows(folder, "3", [pickle.loads(pickle.dumps(part))]).rows == 3


def test_a_large_part_is_written_to_a_file(folder: StagingFolder) -> None:
    part = stage_batches(folder, value_only(100), value_only(1), inline_bytes=1000)
    assert part.inline is None
    assert os.path.getsize(f"{folder.location}/3/{part.name}") == part.size_bytes
    staged = StagedRows(folder, "3", [part])
    assert [batch.num_rows for batch in staged.batches()] == [100, 1]
    assert [batch.num_rows for batch in staged.batches()] == [100, 1]  # a retried commit reads the part again
    assert staged.topics == {"out": -1}
    folder.remove_batch("3")
    assert folder.batches() == []


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux reports resident memory")
def test_a_batch_that_was_read_does_not_stay_in_memory(folder: StagingFolder) -> None:
    """A staged file is read in pieces, and can be read again by a retried commit."""
    rows = pa.record_batch({"value": pa.array([b"x" * 1000] * 20_000)})
    part = stage([rows], rows.schema, folder=folder, batch="3", inline_bytes=0, topic="out")
    staged = StagedRows(folder, "3", [part])
    assert resident(part.name) < 1_000_000
    for _ in range(2):
        batches = staged.batches()
        assert sum(len(value.as_py()) for value in next(batches).column("value")) == 20_000_000
        assert resident(part.name) > 19_000_000
        assert next(batches, None) is None
        assert resident(part.name) < 1_000_000


def resident(name: str) -> int:
    """Returns how many bytes of a mapped file are resident in this process."""
    maps = Path("/proc/self/smaps").read_text().split(name)[1:]
    return sum(1024 * int(re.search(r"^Rss: +(\d+) kB$", each, re.MULTILINE)[1]) for each in maps)  # type: ignore[index]


def test_a_task_without_rows_stages_an_empty_part(folder: StagingFolder) -> None:
    part = stage_batches(folder)
    assert part.rows == 0
    assert list(StagedRows(folder, "3", [part]).batches()) == []


@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=1))
def test_any_changed_byte_of_a_staged_part_is_detected(position: int, byte: bytes) -> None:
    part = stage_batches(None, value_only(3))
    assert part.inline is not None
    changed = bytearray(part.inline)
    at = position % len(changed)
    if changed[at : at + 1] == byte:
        changed[at] ^= 1
    else:
        changed[at : at + 1] = byte
    damaged = StagedPart("", part.rows, part.size_bytes, part.checksum, inline=bytes(changed))
    with pytest.raises(StagedPartError, match="damaged"):
        StagingFolder("nowhere").read("3", damaged)


@pytest.mark.parametrize("damage", ["truncate", "empty", "delete"])
def test_a_damaged_file_is_refused_before_any_record_is_sent(folder: StagingFolder, damage: str) -> None:
    part = stage_batches(folder, value_only(100))
    path = Path(folder.location, "3", part.name)
    if damage == "delete":
        path.unlink()
    else:
        os.truncate(path, 0 if damage == "empty" else part.size_bytes - 1)
    with pytest.raises(StagedPartError, match="restart the query"):
        StagedRows(folder, "3", [part])


def test_a_part_with_a_wrong_row_count_is_refused(folder: StagingFolder) -> None:
    part = stage_batches(folder, value_only(3))
    wrong = StagedPart(part.name, 4, part.size_bytes, part.checksum)
    with pytest.raises(StagedPartError, match="3 rows; expected 4"):
        StagedRows(folder, "3", [wrong])


def test_a_failed_task_attempt_leaves_no_file(folder: StagingFolder) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield value_only(100)
        raise RuntimeError("the task failed")

    with pytest.raises(RuntimeError, match="the task failed"):
        stage(rows(), staged_schema(VALUE), folder=folder, batch="3", inline_bytes=0, topic="out")
    assert os.listdir(f"{folder.location}/3") == []


def test_a_folder_that_is_not_shared_is_refused(folder: StagingFolder) -> None:
    elsewhere = StagingFolder(folder.location, probe="written by a driver on another machine")
    with pytest.raises(InvalidOptionError, match="not shared"):
        stage_batches(elsewhere, value_only(100))
    assert (
        stage_batches(elsewhere, value_only(1), inline_bytes=10_000).inline is not None
    )  # inline rows need no folder


def test_every_writer_finds_the_same_probe_file(folder: StagingFolder) -> None:
    assert StagingFolder.at(folder.location) == folder
    assert Path(folder.location, PROBE).read_text() == folder.probe


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(UnavailableError, match=r"staging\.location"):
        StagingFolder.at(str(tmp_path / "staging"))


def test_a_file_at_the_path_of_the_staging_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="cannot be written"):
        StagingFolder.at(str(tmp_path / "file" / "staging"))


def test_a_full_disk_is_named_and_nothing_is_staged(
    monkeypatch: pytest.MonkeyPatch, folder: StagingFolder
) -> None:
    class Full:
        def write(self, data: object) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    monkeypatch.setattr(StagingFolder, "create", lambda self, batch: ("x.arrow", Full(), False))
    with pytest.raises(UnavailableError, match="No space left"):
        stage_batches(folder, value_only(100))


def test_the_uri_selects_the_file_system(tmp_path: Path) -> None:
    assert file_system(f"file://{tmp_path}/a b")[1] == f"{tmp_path}/a b"
    assert file_system(f"file:{tmp_path}/a%20b")[1] == f"{tmp_path}/a b"
    assert file_system(str(tmp_path))[1] == str(tmp_path)
    with pytest.raises(InvalidOptionError, match=r"staging\.location"):
        file_system("ftp://somewhere/x")


def test_a_part_records_the_highest_partition_of_each_topic() -> None:
    batch = pa.record_batch(
        {
            "value": pa.array([b"", b"", b"", b""]),
            "topic": pa.array(["a", "b", "a", "b"]),
            "partition": pa.array([3, None, 1, None], pa.int32()),
        }
    )
    assert TaskMeter(None).add(batch) == {"a": 3, "b": -1}
    assert TaskMeter("c").add(batch) == {"c": 3}
    assert TaskMeter("c").add(value_only(1)) == {"c": -1}


def test_staged_rows_of_many_parts_list_all_topics(folder: StagingFolder) -> None:
    parts = [
        StagedPart("", 0, 0, 0, topics=(("a", 1), ("b", -1))),
        StagedPart("", 0, 0, 0, topics=(("a", 4),)),
    ]
    assert StagedRows(folder, "3", parts).topics == {"a": 4, "b": -1}


def test_two_queries_with_one_staging_location_use_different_folders(tmp_path: Path) -> None:
    shared = str(tmp_path / "staging")
    ours, theirs = (location_of_query(f"/checkpoints/{name}", shared) for name in ("a", "b"))
    assert ours != theirs
    assert os.path.dirname(ours) == os.path.dirname(theirs) == shared
    assert location_of_query("file:///checkpoints/a/", shared + "/") == ours, "however it is spelt"
    assert location_of_query("/checkpoints/a/", None) == "/checkpoints/a/kafka-eos/staging"


# -- protection against other users


@pytest.fixture
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_only_the_owner_may_read_staged_parts(tmp_path: Path, generous_umask: None) -> None:
    folder = StagingFolder.at(str(tmp_path / "checkpoint" / "kafka-eos" / "staging"))
    part = stage_batches(folder, value_only(100))
    assert mode(folder.location) == mode(f"{folder.location}/3") == 0o700
    assert mode(f"{folder.location}/3/{part.name}") == mode(f"{folder.location}/{PROBE}") == 0o600


def test_a_folder_of_the_user_keeps_its_mode_and_parts_are_private(
    tmp_path: Path, generous_umask: None
) -> None:
    tmp_path.chmod(0o755)
    folder = StagingFolder.at(str(tmp_path))
    part = stage_batches(folder, value_only(100))
    assert mode(tmp_path) == 0o755
    assert mode(tmp_path / "3") == 0o700
    assert mode(tmp_path / "3" / part.name) == 0o600


def test_a_folder_of_another_user_is_named(folder: StagingFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(fs: object, path: str) -> str:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("kafka_eos_source.stage.files.read_text", denied)
    with pytest.raises(InvalidOptionError, match="belongs to another user"):
        stage_batches(StagingFolder(folder.location, probe="of a driver"), value_only(100))


_GOOD = "0123456789abcdef" * 2 + ".arrow"
_ESCAPING_NAMES = [
    "../4/" + _GOOD,
    "/etc/passwd",
    "..",
    ".",
    "",
    "x/" + _GOOD,
    _GOOD + "\n",
    _GOOD + "\0",
    "C:\\" + _GOOD,
    _GOOD.upper(),
    PROBE,
]


def renamed_part(part: StagedPart, name: str) -> StagedPart:
    """Returns the part under another file name, with the right length and checksum."""
    return StagedPart(name, part.rows, part.size_bytes, part.checksum)


@pytest.mark.parametrize("name", _ESCAPING_NAMES)
def test_a_part_name_that_no_task_uses_is_refused(folder: StagingFolder, name: str) -> None:
    part = stage_batches(folder, value_only(100))
    with pytest.raises(StagedPartError, match="is not the name of a staged batch or part"):
        StagedRows(folder, "3", [renamed_part(part, name)])


@given(st.text(max_size=60) | st.from_regex(r"[./0-9a-f]{30,40}\.arrow", fullmatch=True))
def test_a_part_name_cannot_escape_the_staging_folder(name: str) -> None:
    with pytest.raises(StagedPartError) as caught:
        StagingFolder("/nowhere/staging").read("3", StagedPart(name, 1, 1, 1))
    assert "is not the name of a staged" in str(caught.value) or re.fullmatch(r"[0-9a-f]{32}\.arrow", name)


def test_discarding_a_part_name_outside_the_folder_deletes_nothing(
    folder: StagingFolder, tmp_path: Path
) -> None:
    part = stage_batches(folder, value_only(100))
    outside = tmp_path / "precious"
    outside.mkdir()
    kept = [outside / _GOOD, Path(folder.location, PROBE), Path(folder.location, "3", part.name)]
    kept[0].write_bytes(b"kept")
    folder.remove_parts("3", [f"../{PROBE}", f"../../precious/{_GOOD}", str(kept[0]), ".."])
    folder.remove_parts("../../precious", [_GOOD])
    folder.remove_parts("..", [_GOOD])
    for batch in ("..", ".", "", "../../precious", str(outside)):
        folder.remove_batch(batch)
    assert all(each.exists() for each in kept)


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_link_out_of_the_folder_is_followed_neither_to_read_nor_to_delete(
    folder: StagingFolder, tmp_path: Path, linked: str
) -> None:
    part = stage_batches(folder, value_only(100))
    staged, outside = Path(folder.location, "3"), tmp_path / "outside"
    staged.rename(outside)
    if linked == "folder":
        staged.symlink_to(outside)
    else:
        staged.mkdir()
        (staged / part.name).symlink_to(outside / part.name)
    with pytest.raises(StagedPartError, match="is a link to"):
        StagedRows(folder, "3", [part])
    folder.remove_parts("3", [part.name])
    folder.remove_batch("3")
    assert (outside / part.name).exists()


def test_a_staging_folder_behind_a_link_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    folder = StagingFolder.at(str(tmp_path / "link" / "staging"))
    part = stage_batches(folder, value_only(100))
    assert StagedRows(folder, "3", [part]).rows == 100
    folder.remove_batch("3")
    assert folder.batches() == []


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_staged_files_are_never_unpickled(folder: StagingFolder, tmp_path: Path) -> None:
    """This includes the Arrow extension type of CVE-2023-47248."""
    trace = tmp_path / "exploded"
    pickled = pickle.dumps(Bomb(trace))
    field = pa.field(
        "value",
        pa.binary(),
        metadata={
            b"ARROW:extension:name": b"arrow.py_extension_type",
            b"ARROW:extension:metadata": pickled,
        },
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([field])) as out:
        out.write_batch(pa.record_batch([pa.array([b"v"])], schema=pa.schema([field])))
    for content, opens in ((pickled, False), (sink.getvalue().to_pybytes(), True)):
        Path(folder.location, "3").mkdir(exist_ok=True)
        Path(folder.location, "3", _GOOD).write_bytes(content)
        part = StagedPart(_GOOD, 1, len(content), crc32c(content))
        if opens:
            list(StagedRows(folder, "3", [part]).batches())
        else:
            with pytest.raises(StagedPartError, match="is not an Arrow IPC stream"):
                StagedRows(folder, "3", [part])
        assert not trace.exists()
    pickle.loads(pickled)
    assert trace.exists(), "the bomb works"


def test_the_package_unpickles_only_options_of_the_query() -> None:
    """This package unpickles only what a query's own options hold; Spark unpickles its own messages."""
    package = Path(kafka_eos_source.__file__).parent
    found = re.compile(
        r"\b(pickle|cloudpickle|marshal|shelve|allow_pickle|py_extension_type|eval|exec)\b\s*(\.\w|[(=])"
    )
    unpickling = {
        path.relative_to(package) for path in package.rglob("*.py") if found.search(path.read_text())
    }
    sends_a_probe_to_executors = Path("operate/doctor/executors.py")  # it pickles, and unpickles nothing
    assert unpickling - {sends_a_probe_to_executors} == {Path("spark/pickled.py")}


def test_the_folder_of_batch_writes_must_belong_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generous_umask: None
) -> None:
    """A staging folder in the shared temporary folder, whose name anyone can guess, must be private."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    location = location_of_batch_writes()
    assert location == location_of_batch_writes() == f"{tmp_path}/kafka-eos-staging-{os.getuid()}"
    assert mode(location) == 0o700
    own = os.getuid()
    monkeypatch.setattr("os.geteuid", lambda: own + 1)
    os.rename(location, f"{tmp_path}/kafka-eos-staging-{own + 1}")
    with pytest.raises(InvalidOptionError, match=r"not this user's own.*staging\.location"):
        location_of_batch_writes()


def test_a_link_in_place_of_the_folder_of_batch_writes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"kafka-eos-staging-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidOptionError, match="not this user's own"):
        location_of_batch_writes()
