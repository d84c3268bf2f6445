"""A function in the read: its rows reach the sink unchanged, and unsupported uses are refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from kafka_eos_source.commit import at_least_once, open_sinks
from kafka_eos_source.datasource import sink
from kafka_eos_source.datasource import writer as stream_writer
from kafka_eos_source.errors import InvalidOptionError, InvalidRecordError, InvalidSchemaError
from kafka_eos_source.in_read import step
from kafka_eos_source.in_read.step import (
    PACKED,
    MapInRead,
    ReadColumn,
    ReadColumns,
    pack,
    packed_batches_of,
    packed_frame_schema,
    schema_of_packed_rows,
    unpack,
)
from kafka_eos_source.options.parse import parse_read, parse_write
from kafka_eos_source.read.settings import schema_of, task_read
from kafka_eos_source.spark.arrow import arrow_schema, read_arrow_schema
from kafka_eos_source.spark.pickled import to_bytes, to_option
from kafka_eos_source.spark.worker import StreamingTask

pytestmark = pytest.mark.usefixtures("unknown_topic_limits")

READ = {"subscribe": "t", "kafka.bootstrap.servers": "h:1"}
ROWS = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", StringType()),
        StructField("partition", IntegerType()),
    ]
)
COLUMNS = ReadColumns((ReadColumn("word", "value", as_text=True), ReadColumn("k", "key")))


@st.composite
def batches(draw: st.DrawFn) -> list[pa.RecordBatch]:
    one = st.tuples(
        st.none() | st.binary(max_size=3), st.none() | st.text(max_size=3), st.none() | st.integers(0, 9)
    )
    return [rows_batch(rows) for rows in draw(st.lists(st.lists(one, max_size=20), max_size=4))]


def rows_batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    schema = arrow_schema(ROWS)
    columns = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@given(rows=batches(), size_bytes=st.sampled_from([1, 100, 2 << 20]), together=st.booleans())
def test_packing_and_unpacking_batches_keeps_all_rows(
    rows: list[pa.RecordBatch], size_bytes: int, together: bool
) -> None:
    """Rows stay the same however many packed batches Spark puts into one batch, and whatever their size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "PACKED_BATCH_BYTES", size_bytes)
        packed_batches = list(pack(rows, ROWS))
    if together and packed_batches:
        (whole,) = pa.Table.from_batches(packed_batches).combine_chunks().to_batches()
        packed_batches = [whole]
    found = list(unpack(packed_batches_of(packed_batches), ROWS))
    assert pa.Table.from_batches(found, arrow_schema(ROWS)) == pa.Table.from_batches(rows, arrow_schema(ROWS))
    assert all(each.num_rows for each in found)


def test_large_batches_become_several_packed_batches() -> None:
    rows = rows_batch([(b"k" * 100_000, "", 0)] * 60)
    assert 3 <= len(list(pack([rows], ROWS))) <= 6


def test_columns_that_a_function_returns_are_matched_by_name_and_cast() -> None:
    given = pa.record_batch(
        {
            "value": pa.array(["v"], pa.large_string()),
            "partition": pa.array([7], pa.int64()),
            "key": pa.array([b"k"]),
        }
    )
    (found,) = unpack(packed_batches_of(pack([given], ROWS)), ROWS)
    assert found.to_pylist() == [{"key": b"k", "value": "v", "partition": 7}]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"key": [b"k"], "value": ["v"]}, "expected the columns of its schema, key, value, partition"),
        ({"key": [b"k"], "value": ["v"], "partition": [1], "more": [1]}, "with the columns .*more"),
        ({"key": [b"k"], "value": ["v"], "partition": [2**40]}, "'partition' .* cannot be cast to int32"),
        ({"key": [b"k"], "value": ["v"], "partition": ["x"]}, "'partition' .* cannot be cast to int32"),
    ],
)
def test_rows_that_do_not_fit_the_schema_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRecordError, match=said):
        list(pack([pa.record_batch(given)], ROWS))


@pytest.mark.parametrize("given", [None, rows_batch([]).schema, [pa.table({"value": ["v"]})]])
def test_a_function_that_returns_anything_but_record_batches_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRecordError, match=r"expected an iterable of pyarrow\.RecordBatch"):
        list(pack(given, ROWS))


def test_the_frame_names_the_schema_of_its_packed_batches() -> None:
    schema = packed_frame_schema(ROWS)
    assert schema_of_packed_rows(StructType.fromJson(json.loads(schema.json()))) == ROWS
    assert schema_of_packed_rows(ROWS) is None


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (StructType([StructField(PACKED, BinaryType())]), "has no metadata with the schema"),
        (StructType([*packed_frame_schema(ROWS).fields, StructField("topic", StringType())]), "'topic'"),
        (
            StructType(
                [StructField("value", BinaryType(), metadata=packed_frame_schema(ROWS)[PACKED].metadata)]
            ),
            f"column 'value' is column '{PACKED}' of map_in_read under another name",
        ),
    ],
)
def test_a_frame_with_packed_batches_that_cannot_be_unpacked_is_refused(
    schema: StructType, said: str
) -> None:
    options = parse_write({"kafka.bootstrap.servers": "h:1", "topic": "out"}, streaming=True)
    with pytest.raises(InvalidSchemaError, match=said):
        stream_writer.stream_writer(options, schema)
    with pytest.raises(InvalidSchemaError, match=said):
        stream_writer.batch_writer(options, schema)


def test_the_schema_of_packed_batches_is_checked_like_that_of_rows() -> None:
    options = parse_write({"kafka.bootstrap.servers": "h:1", "topic": "out"}, streaming=True)
    schema = packed_frame_schema(StructType([StructField("key", BinaryType())]))
    with pytest.raises(InvalidSchemaError, match="the frame has no column 'value'"):
        stream_writer.stream_writer(options, schema)


def short_words(rows: Iterator[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    """Returns the rows of one letter, each twice."""
    for batch in rows:
        short = batch.filter(pa.compute.equal(pa.compute.utf8_length(batch["word"]), 1))
        given = pa.record_batch({"value": short["word"], "key": short["k"]})
        yield given
        yield given


def test_a_function_is_called_with_the_columns_of_the_frame() -> None:
    out = StructType([StructField("key", BinaryType()), StructField("value", StringType())])
    step = MapInRead(COLUMNS, out, to_bytes(short_words, "", fix=""))
    assert step.columns.of_source == ("value", "key")
    source = read_arrow_schema(False, step.columns.of_source)
    read = [
        pa.RecordBatch.from_arrays([pa.array([b"a", b"bb"]), pa.array([b"1", None])], schema=source),
        pa.RecordBatch.from_arrays([pa.array([b"ccc"]), pa.array([b"3"])], schema=source),
        pa.RecordBatch.from_arrays([pa.array([b"d"]), pa.array([None], pa.binary())], schema=source),
    ]
    found = pa.Table.from_batches(unpack(packed_batches_of(step(read)), out)).to_pylist()
    a, d = {"key": b"1", "value": "a"}, {"key": None, "value": "d"}
    assert found == [a, a, d, d]


def test_without_a_function_rows_are_unchanged() -> None:
    out = StructType([StructField("word", StringType()), StructField("k", BinaryType())])
    source = read_arrow_schema(False, COLUMNS.of_source)
    read = pa.RecordBatch.from_arrays([pa.array([b"\xff"]), pa.array([b"1"])], schema=source)
    (found,) = unpack(packed_batches_of(MapInRead(COLUMNS, out, None)([read])), out)
    assert found["word"].view(pa.binary()).to_pylist() == [b"\xff"], "bytes that are not UTF-8 stay unchanged"
    assert found["k"].to_pylist() == [b"1"]


def test_the_option_describes_the_whole_step_to_the_read() -> None:
    step = MapInRead(COLUMNS, ROWS, to_bytes(short_words, "", fix=""))
    assert step.schema
    options = parse_read({**READ, "step.in.read": step.to_option()}, streaming=True)
    assert schema_of(options) == packed_frame_schema(ROWS)
    read = task_read(options)
    assert read.settings.columns == ("value", "key")
    assert read.step == step
    assert "short_words" not in repr(read), "what is pickled may contain passwords"
    wanted = {"columns", "rows", "function", "frame", "by"}
    assert vars(read.step).keys() == wanted, "computed values do not travel"


@pytest.mark.parametrize(
    "written",
    [
        "x",
        "[]",
        "{}",
        "AAAA",
        to_option(7, "", fix=""),
        MapInRead(ReadColumns((ReadColumn("k", "nope"),)), ROWS, None).to_option(),
    ],
)
def test_a_handwritten_option_is_refused_on_the_driver(written: str) -> None:
    options = parse_read({**READ, "step.in.read": written}, streaming=True)
    with pytest.raises(InvalidOptionError, match=r"'step\.in\.read' has the value"):
        schema_of(options)


def test_the_driver_does_not_unpickle_the_function() -> None:
    step = MapInRead(COLUMNS, ROWS, b"no pickle")
    options = parse_read({**READ, "step.in.read": step.to_option()}, streaming=True)
    assert task_read(options).step == step


def test_options_of_an_operator_with_a_step_that_is_none_are_refused() -> None:
    step = {"step.in.read": MapInRead(COLUMNS, ROWS, None).to_option()}
    options = parse_read({**READ, **step, "step.in.read.operator.application.id": "a"}, streaming=True)
    with pytest.raises(InvalidOptionError, match="belong to another step"):
        schema_of(options)


def test_a_function_that_cannot_be_pickled_is_refused() -> None:
    lock = threading.Lock()

    def locked(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with lock:
            yield from rows

    with pytest.raises(InvalidOptionError, match=r"map_in_read cannot be pickled"):
        to_option(locked, "the function of map_in_read", fix="")


@pytest.mark.parametrize("as_rows", [True, False], ids=["PySpark 4.0", "Arrow"])
def test_the_sink_stages_the_rows_in_packed_batches(
    as_rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "running_task", lambda: StreamingTask("q", "0", "r"))
    monkeypatch.setattr(at_least_once, "check_target", lambda options: None)
    if as_rows:
        monkeypatch.setattr(stream_writer, "_StreamArrowWriter", None)
    options = parse_write(
        {"kafka.bootstrap.servers": "b:9092", "topic": "out", "checkpointLocation": str(tmp_path)},
        streaming=True,
    )
    writer = stream_writer.stream_writer(options, packed_frame_schema(ROWS))
    packed_batches = list(pack([rows_batch([(b"k", "v", 1), (None, "w", None)])], ROWS))
    given: Any = (
        [(each["__kafka_eos_rows"][0].as_py(),) for each in packed_batches] if as_rows else packed_batches
    )
    message: Any = writer.write(iter(given))
    assert message.staged.part.rows == 2
    staged = pa.ipc.open_stream(message.staged.part.inline).read_all().to_pylist()
    assert staged == [
        {"key": b"k", "value": b"v", "partition": 1},
        {"key": None, "value": b"w", "partition": None},
    ]


def test_sinks_outside_kafka_get_the_rows_in_packed_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "running_task", lambda: StreamingTask("q", "0", "r"))
    monkeypatch.setattr(at_least_once, "check_target", lambda options: None)
    monkeypatch.setattr(open_sinks, "cluster_id", lambda *_, **__: "cluster")
    options = parse_write(
        {
            "kafka.bootstrap.servers": "b:9092",
            "topic": "out",
            "checkpointLocation": str(tmp_path),
            "application.id": "app",
            "sinks": "files",
            "sink.files.type": "filesystem",
            "sink.files.path": str(tmp_path / "files"),
            "sink.files.columns": "partition,value",
        },
        streaming=True,
    )
    writer = stream_writer.stream_writer(options, packed_frame_schema(ROWS))
    given: Any = pack([rows_batch([(b"k", "v", 1), (None, "w", None)])], ROWS)
    message: Any = writer.write(given)
    assert message.staged.part.rows == 2
    assert [(part.sink, part.rows) for part in message.staged.sinks] == [("files", 2)]
