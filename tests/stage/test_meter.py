"""The figures of a writing task: records and bytes per topic, time, and the trace of a record."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.model import TaskFigures
from kafka_eos_source.spark.arrow import HEADERS_ARROW
from kafka_eos_source.stage.staging import TaskMeter, stage

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def batch(*rows: tuple[bytes | None, bytes | None, str], **more: object) -> pa.RecordBatch:
    keys, values, topics = zip(*rows, strict=True)
    columns = {
        "key": pa.array(keys, pa.binary()),
        "value": pa.array(values, pa.binary()),
        "topic": pa.array(topics, pa.string()),
    }
    return pa.record_batch({**columns, **more})


def with_headers(*headers: list[tuple[str, bytes | None]] | None) -> pa.RecordBatch:
    listed = [each and [{"key": key, "value": value} for key, value in each] for each in headers]
    return pa.record_batch(
        {"value": pa.array([b"v"] * len(headers)), "headers": pa.array(listed, HEADERS_ARROW)}
    )


_BYTES = st.none() | st.binary(max_size=5)


@given(
    st.lists(st.lists(st.tuples(_BYTES, _BYTES, st.sampled_from("abc")), min_size=1, max_size=8), max_size=4)
)
def test_records_and_bytes_are_those_of_each_topic(batches: list[list[tuple[bytes, bytes, str]]]) -> None:
    meter = TaskMeter(None)
    records, sizes = Counter[str](), Counter[str]()
    for rows in batches:
        meter.add(batch(*rows))
        for key, value, topic in rows:
            records[topic] += 1
            sizes[topic] += len(key or b"") + len(value or b"")
    assert meter.figures().topics == {topic: (number, sizes[topic]) for topic, number in records.items()}
    assert meter.highest == dict.fromkeys(records, -1)


def test_all_rows_of_an_option_topic_belong_to_it() -> None:
    meter = TaskMeter("out")
    meter.add(pa.record_batch({"value": pa.array([b"abc", None, b"d"])}))
    meter.add(pa.record_batch({"value": pa.array([b"e"]), "partition": pa.array([4], pa.int32())}))
    assert meter.figures().topics == {"out": (4, 5)}
    assert meter.highest == {"out": 4}


def test_staging_is_a_part_of_the_tasks_time() -> None:
    clock = Clock()
    meter = TaskMeter("out", clock)
    clock.now = 3.0  # the rows come late
    with meter.staging():
        clock.now = 3.5
    figures = meter.figures()
    assert (figures.seconds, figures.staging_seconds) == (3.5, 0.5)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("a", b"1"), ("traceparent", TRACE.encode())], TRACE),
        ([("traceparent", b"not a trace")], ""),
        ([("traceparent", b"\xff" * 55)], ""),
        ([("traceparent", None)], ""),
        ([("a", b"1")], ""),
        ([], ""),
        (None, ""),
    ],
)
def test_the_first_record_names_its_trace(
    headers: list[tuple[str, bytes | None]] | None, expected: str
) -> None:
    meter = TaskMeter("out")
    meter.add(with_headers(headers))
    meter.add(with_headers([("traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01")]))
    assert meter.figures().traceparent == expected, "no other record is looked at"


def test_a_staged_part_carries_the_figures_of_its_task() -> None:
    rows = batch((b"k", b"value", "a"), (None, b"v", "b"))
    part = stage([rows], rows.schema, folder=None, batch="3", inline_bytes=1 << 20)
    assert part.measured.topics == {"a": (1, 6), "b": (1, 1)}
    assert 0 < part.measured.staging_seconds <= part.measured.seconds
    empty = stage([], rows.schema, folder=None, batch="3", inline_bytes=1 << 20)
    assert empty.measured.topics == {}
    assert TaskFigures().topics == {}
