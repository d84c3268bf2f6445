"""Messages become Arrow columns with the same values as in Spark's own connector."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.kafka.kernel import WANT_RAW_NAMES, WANTS
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.read import columns
from kafka_eos_source.read.columns import MAX_TIMESTAMP_MS, Run, record_batch
from kafka_eos_source.spark.arrow import read_arrow_schema, unescaped_names
from tests.support.fetched_log import Batch, Headers, Record, decoded

ALL = sum(set(WANTS.values()))
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def message(
    key: bytes | None = None, value: bytes | None = None, ms: int = 0, headers: Headers = ()
) -> Record:
    return Record(0, key, value, headers, ms)


def run(
    *records: Record, topic: str = "t", partition: int = 0, first: int = 0, append_ms: int | None = None
) -> Run:
    placed = [replace(each, offset=first + index) for index, each in enumerate(records)]
    tp = TopicPartition(topic, partition)
    messages = decoded({tp: Batch(first, first + len(records) - 1, placed, append_ms=append_ms)})
    return Run(tp, messages, messages.offsets)


def test_null_and_empty_values_stay_different() -> None:
    batch = record_batch([run(message(), message(b"", b""), message(b"k", None), message(None, b"v"))], False)
    assert batch.schema.equals(read_arrow_schema(False))
    assert batch.column("key").to_pylist() == [None, b"", b"k", None]
    assert batch.column("value").to_pylist() == [None, b"", None, b"v"]


def test_each_row_has_the_topic_partition_and_offset_of_its_message() -> None:
    batch = record_batch(
        [
            run(message(), message(), topic="a", partition=3, first=2**40),
            run(message(), topic="b", partition=1, first=7),
            run(message(), topic="a", partition=0, first=0),
        ],
        False,
    )
    assert batch.column("topic").to_pylist() == ["a", "a", "b", "a"]
    assert batch.column("partition").to_pylist() == [3, 3, 1, 0]
    assert batch.column("offset").to_pylist() == [2**40, 2**40 + 1, 7, 0]


def test_timestamps_and_their_types_equal_those_of_spark() -> None:
    batch = record_batch(
        [
            run(message(ms=1_700_000_000_123), message(ms=-1), message(ms=-1000)),
            run(message(ms=7), append_ms=5),
        ],
        False,
    )
    assert batch.column("timestampType").to_pylist() == [0, 0, 0, 1]
    expected_ms = [1_700_000_000_123, -1, -1000, 5]
    assert batch.column("timestamp").to_pylist() == [EPOCH + timedelta(milliseconds=ms) for ms in expected_ms]


def test_the_largest_timestamp_that_spark_can_hold_is_accepted() -> None:
    batch = record_batch([run(message(ms=MAX_TIMESTAMP_MS))], False)
    assert batch.column("timestamp").cast("int64").to_pylist() == [MAX_TIMESTAMP_MS * 1000]


@pytest.mark.parametrize(
    "ms", [MAX_TIMESTAMP_MS + 1, -MAX_TIMESTAMP_MS - 1, 1712345678123456789, -4611686018427387904, -(1 << 63)]
)
def test_a_timestamp_beyond_sparks_range_is_null_and_logged_once(
    ms: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_warned", set())
    runs = [run(message(ms=5)), run(message(ms=-1), message(ms=ms), partition=2, first=40)]
    for _ in range(2):
        batch = record_batch(runs, False)
        batch.validate(full=True)
        assert batch.column("timestamp").to_pylist() == [
            EPOCH + timedelta(milliseconds=5),
            EPOCH - timedelta(milliseconds=1),
            None,
        ]
        assert batch.column("timestampType").to_pylist() == [0, 0, 0]
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert f"The record at offset 41 of t-2 has the timestamp {ms} ms" in caplog.text


def test_columns_come_in_the_requested_order() -> None:
    batch = record_batch(
        [run(message(b"k", b"v", headers=[(b"a", b"1")]), first=7)], True, ("offset", "headers", "key")
    )
    assert batch.schema.equals(read_arrow_schema(True, ("offset", "headers", "key")))
    assert batch.to_pylist() == [{"offset": 7, "headers": [{"key": "a", "value": b"1"}], "key": b"k"}]


def test_headers_keep_order_duplicates_and_nulls_and_no_headers_are_null() -> None:
    batch = record_batch(
        [
            run(
                message(headers=[(b"a", b"1"), (b"a", None), (b"", b"")]),
                message(),
                message(headers=[("ü".encode(), b"\xff")]),
            )
        ],
        True,
    )
    assert batch.schema.equals(read_arrow_schema(True))
    assert batch.column("headers").to_pylist() == [
        [{"key": "a", "value": b"1"}, {"key": "a", "value": None}, {"key": "", "value": b""}],
        None,
        [{"key": "ü", "value": b"\xff"}],
    ]


@pytest.mark.parametrize(
    "name", [b"\xff", b"a\xc3", b"\xed\xa0\x80b", b"\xe2\x82\xe2\x82\xac", b"\xf0\x9f\x98"]
)
def test_a_header_name_that_is_not_utf8_has_replacement_characters(name: bytes) -> None:
    batch = record_batch([run(message(), message(headers=[(name, b"1"), (b"b", None)]))], True)
    batch.validate(full=True)
    assert batch.column("headers").to_pylist() == [
        None,
        [{"key": name.decode(errors="replace"), "value": b"1"}, {"key": "b", "value": None}],
    ]


def raw(*records: Record, first: int = 0) -> Run:
    """Records whose names of headers are the bytes that were written."""
    found = run(*records, first=first)
    placed = [replace(each, offset=first + index) for index, each in enumerate(records)]
    batch = Batch(first, first + len(records) - 1, placed)
    messages = decoded({found.tp: batch}, ALL | WANT_RAW_NAMES)
    return Run(found.tp, messages, messages.offsets)


def names_of(runs: list[Run], header_names: str) -> list[str]:
    found = record_batch(runs, True, header_names=header_names)
    found.validate(full=True)
    return [each["key"] for row in found.column("headers").to_pylist() for each in row or ()]


@given(st.lists(st.binary(max_size=5), max_size=4))
def test_an_escaped_name_is_text_that_stands_for_the_same_bytes(written: list[bytes]) -> None:
    shown = names_of([raw(message(), message(headers=[(each, None) for each in written]))], "escape")
    assert unescaped_names(pa.array(shown, pa.string())).cast(pa.binary()).to_pylist() == written
    for name, text in zip(written, shown, strict=True):
        if not {0, ord("\\")} & set(name) and name.decode(errors="replace").encode() == name:
            assert text.encode() == name, "a name that is text stays as it is"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"a\xffb", "a\\xFFb"),
        (b"\xed\xa0\x80", "\\xED\\xA0\\x80"),
        (b"a\\xFF", "a\\x5CxFF"),
        (b"a\0b", "a\\x00b"),
        ("ü".encode(), "ü"),
    ],
)
def test_escaped_names_show_the_bytes(written: bytes, shown: str) -> None:
    assert names_of([raw(message(headers=[(written, b"1")]))], "escape") == [shown]


def test_a_backslash_that_begins_no_escape_stays() -> None:
    names = pa.array(["a\\b", "\\x4", "\\xG0", "\\\\x41", None, "\\xff"])
    wanted = [b"a\\b", b"\\x4", b"\\xG0", b"\\A", None, b"\xff"]
    assert unescaped_names(names).cast(pa.binary()).to_pylist() == wanted
    assert unescaped_names(names.slice(4)).cast(pa.binary()).to_pylist() == wanted[4:]


def test_a_name_that_is_not_utf8_can_fail_the_task_with_the_place_and_ways_to_go_on() -> None:
    good = message(headers=[(b"a", b"1"), ("ü\0".encode(), b"")])
    assert names_of([raw(good, message())], "fail") == ["a", "ü\0"]
    with pytest.raises(InvalidRecordError, match=r"offset 9 of t-0 .* not UTF-8: b'c\\xff'") as failed:
        names_of(
            [raw(good, message(), first=3), raw(good, message(headers=[(b"c\xff", None)]), first=8)], "fail"
        )
    for each in ("headerNames", "'replace'", "'escape'", "checkpoint stays valid"):
        assert each in failed.value.fix


bytes_or_none = st.none() | st.binary(max_size=8)
names = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=3)
messages = st.builds(
    message,
    bytes_or_none,
    bytes_or_none,
    st.integers(0, 4_102_444_800_000),
    st.lists(st.tuples(names.map(str.encode), bytes_or_none), max_size=3),
)
runs = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.integers(0, 3),
        st.integers(0, 10),
        st.lists(messages, min_size=1, max_size=4),
        st.none() | st.integers(0, 2**41),
    ),
    min_size=1,
    max_size=4,
)


@given(runs)
def test_every_row_equals_its_message(drawn: list[tuple[str, int, int, list[Record], int | None]]) -> None:
    batch = record_batch(
        [run(*ms, topic=t, partition=p, first=f, append_ms=at) for t, p, f, ms, at in drawn], True
    )
    expected = [
        {
            "key": m.key,
            "value": m.value,
            "topic": topic,
            "partition": partition,
            "offset": first + index,
            "timestamp": EPOCH + timedelta(milliseconds=m.ms if at is None else at),
            "timestampType": 0 if at is None else 1,
            "headers": [{"key": k.decode(), "value": v} for k, v in m.headers] or None,
        }
        for topic, partition, first, ms, at in drawn
        for index, m in enumerate(ms)
    ]
    assert batch.to_pylist() == expected
    batch.validate(full=True)
