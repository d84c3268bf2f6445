"""Messages become Arrow columns with the same values as in Spark's own connector."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.read.columns import MAX_TIMESTAMP_MS, record_batch
from kafka_eos_source.read.runs import MessageList, Run
from kafka_eos_source.spark.schema import read_arrow_schema

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
Headers = list[tuple[str, bytes | None]] | None


@dataclass(frozen=True)
class FakeMessage:
    """A message with the accessors of ``confluent_kafka.Message`` that the columns use."""

    key_: bytes | None = None
    value_: bytes | None = None
    timestamp_: tuple[int, int] = (1, 0)
    headers_: Headers = None

    def key(self) -> bytes | None:
        return self.key_

    def value(self) -> bytes | None:
        return self.value_

    def timestamp(self) -> tuple[int, int]:
        return self.timestamp_

    def headers(self) -> Headers:
        return self.headers_


def run(*messages: object, topic: str = "t", partition: int = 0, first: int = 0) -> Run:
    return Run(
        TopicPartition(topic, partition), MessageList(messages), np.arange(first, first + len(messages))
    )


def test_null_and_empty_values_stay_different() -> None:
    batch = record_batch(
        [run(FakeMessage(), FakeMessage(b"", b""), FakeMessage(b"k", None), FakeMessage(None, b"v"))], False
    )
    assert batch.schema.equals(read_arrow_schema(False))
    assert batch.column("key").to_pylist() == [None, b"", b"k", None]
    assert batch.column("value").to_pylist() == [None, b"", None, b"v"]


def test_each_row_has_the_topic_partition_and_offset_of_its_message() -> None:
    batch = record_batch(
        [
            run(FakeMessage(), FakeMessage(), topic="a", partition=3, first=2**40),
            run(FakeMessage(), topic="b", partition=1, first=7),
            run(FakeMessage(), topic="a", partition=0, first=0),
        ],
        False,
    )
    assert batch.column("topic").to_pylist() == ["a", "a", "b", "a"]
    assert batch.column("partition").to_pylist() == [3, 3, 1, 0]
    assert batch.column("offset").to_pylist() == [2**40, 2**40 + 1, 7, 0]


def test_timestamps_and_their_types_equal_those_of_spark() -> None:
    """Timestamp types are those of Java and Spark: librdkafka's 0, 1, 2 become -1, 0, 1."""
    batch = record_batch(
        [
            run(
                FakeMessage(timestamp_=(1, 1_700_000_000_123)),
                FakeMessage(timestamp_=(2, 5)),
                FakeMessage(timestamp_=(0, 0)),
                FakeMessage(timestamp_=(1, -1000)),
            )
        ],
        False,
    )
    assert batch.column("timestampType").to_pylist() == [0, 1, -1, 0]
    expected_ms = [1_700_000_000_123, 5, -1, -1000]
    assert batch.column("timestamp").to_pylist() == [EPOCH + timedelta(milliseconds=ms) for ms in expected_ms]


def test_the_largest_timestamp_that_spark_can_hold_is_accepted() -> None:
    batch = record_batch([run(FakeMessage(timestamp_=(1, MAX_TIMESTAMP_MS)))], False)
    assert batch.column("timestamp").cast("int64").to_pylist() == [MAX_TIMESTAMP_MS * 1000]


def test_a_timestamp_beyond_sparks_range_names_the_record() -> None:
    absurd = FakeMessage(timestamp_=(1, 1712345678123456789))
    with pytest.raises(
        InvalidRecordError, match=r"offset 41 of t-2 has the timestamp 1712345678123456789 ms"
    ):
        record_batch([run(FakeMessage()), run(FakeMessage(), absurd, partition=2, first=40)], False)


def test_only_requested_columns_are_created() -> None:
    """Columns come in the requested order, and other columns are not even read from the message."""

    class Broken(FakeMessage):
        def timestamp(self) -> tuple[int, int]:
            raise AssertionError

    messages = run(Broken(b"k", b"v", headers_=[("a", b"1")]), first=7)
    batch = record_batch([messages], True, ("offset", "headers", "key"))
    assert batch.schema.equals(read_arrow_schema(True, ("offset", "headers", "key")))
    assert batch.to_pylist() == [{"offset": 7, "headers": [{"key": "a", "value": b"1"}], "key": b"k"}]


def test_headers_keep_order_duplicates_and_nulls_and_no_headers_are_null() -> None:
    batch = record_batch(
        [
            run(
                FakeMessage(headers_=[("a", b"1"), ("a", None), ("", b"")]),
                FakeMessage(headers_=None),
                FakeMessage(headers_=[]),
                FakeMessage(headers_=[("ü", b"\xff")]),
            )
        ],
        True,
    )
    assert batch.schema.equals(read_arrow_schema(True))
    assert batch.column("headers").to_pylist() == [
        [{"key": "a", "value": b"1"}, {"key": "a", "value": None}, {"key": "", "value": b""}],
        None,
        None,
        [{"key": "ü", "value": b"\xff"}],
    ]


def test_a_header_name_that_is_not_utf8_names_the_record() -> None:
    class Broken(FakeMessage):
        def headers(self) -> Headers:
            b"\xff".decode()
            return None

    with pytest.raises(InvalidRecordError, match="offset 1 of t-0 has a header name that is not UTF-8"):
        record_batch([run(FakeMessage(), Broken())], True)


bytes_or_none = st.none() | st.binary(max_size=8)
header_lists = st.none() | st.lists(st.tuples(st.text(max_size=3), bytes_or_none), max_size=3)
messages = st.builds(
    FakeMessage,
    bytes_or_none,
    bytes_or_none,
    st.tuples(st.sampled_from([0, 1, 2]), st.integers(0, 4_102_444_800_000)),
    header_lists,
)
runs = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.integers(0, 3),
        st.integers(0, 10),
        st.lists(messages, min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=4,
)


@given(runs)
def test_every_row_equals_its_message(drawn: list[tuple[str, int, int, list[FakeMessage]]]) -> None:
    batch = record_batch([run(*ms, topic=t, partition=p, first=f) for t, p, f, ms in drawn], True)
    expected = [
        {
            "key": m.key_,
            "value": m.value_,
            "topic": topic,
            "partition": partition,
            "offset": first + index,
            "timestamp": EPOCH + timedelta(milliseconds=m.timestamp_[1] if m.timestamp_[0] else -1),
            "timestampType": m.timestamp_[0] - 1,
            "headers": [{"key": k, "value": v} for k, v in m.headers_] if m.headers_ else None,
        }
        for topic, partition, first, ms in drawn
        for index, m in enumerate(ms)
    ]
    assert batch.to_pylist() == expected
    batch.validate(full=True)
