"""The record batches of the native client, read back by kafka-python, which shares no code with them."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import cimpl
from hypothesis import example, given
from hypothesis import strategies as st
from kafka.record.memory_records import MemoryRecords

from kafka_eos_source.kafka import kernel
from kafka_eos_source.kafka.batches import EncodedBatch, Encoder, next_sequence
from kafka_eos_source.kafka.connection import _JOINED_BYTES, _SHORT_BYTES, _joined
from kafka_eos_source.kafka.kernel import PARTITIONERS, Rows
from kafka_eos_source.kafka.messages import produce_body
from kafka_eos_source.spark.arrow import HEADERS_ARROW

KERNEL = kernel.kernel()

_BYTES = st.none() | st.binary(max_size=40)
_HEADERS = st.none() | st.lists(
    st.fixed_dictionaries({"key": st.text("abcé", max_size=5), "value": _BYTES}), max_size=3
)
_ROW = st.tuples(_BYTES, _BYTES, st.none() | st.integers(0, 2**45), _HEADERS)


def columns(rows: Sequence[tuple[object, ...]], skip: int = 0) -> dict[str, pa.Array]:
    """Returns the rows as columns whose buffers begin with ``skip`` other rows."""
    kinds = {"key": pa.binary(), "value": pa.binary(), "timestamp": pa.int64(), "headers": HEADERS_ARROW}
    more = [(b"skipped", b"skipped", 1, [{"key": "skipped", "value": b""}])] * skip + list(rows)
    return {
        name: pa.array([row[number] for row in more], kind).slice(skip)
        for number, (name, kind) in enumerate(kinds.items())
    }


@pytest.mark.parametrize("level", [None, 0, 1, 9, 10, 12])
@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_every_codec_takes_every_level_that_the_option_allows(compression: str, level: int | None) -> None:
    """`kafka.compression.level` goes up to 12, which is gzip's 9, as in librdkafka."""
    described = Rows([columns([(b"key", b"value" * 100, 1, None)] * 20)])
    described.partitions[:] = 0
    groups = described.by_partition(KERNEL)
    ((_, sealed),) = Encoder(KERNEL, compression, level).seal(described, groups, 1 << 20)
    batch = EncodedBatch(sealed)
    batch.stamp(KERNEL, 1, 0, 0)
    read = MemoryRecords(batch.header + bytes(batch.body)).next_batch()
    assert [each.value for each in read] == [b"value" * 100] * 20


def test_a_higher_level_makes_lz4_smaller() -> None:
    described = Rows(
        [columns([(b"%d" % number, b"%d" % (number * 7919), 1, None) for number in range(3000)])]
    )
    described.partitions[:] = 0
    groups = described.by_partition(KERNEL)
    fast, small = (
        Encoder(KERNEL, "lz4", level).seal(described, groups, 1 << 20).data.nbytes for level in (None, 12)
    )
    assert small < fast


@given(
    st.lists(_ROW, min_size=1, max_size=40),
    st.sampled_from(["none", "gzip", "snappy", "lz4", "zstd"]),
    st.integers(100, 2000),
    st.integers(0, 9),
    st.sampled_from([0, 5, 2**31 - 3]),
)
@example([(None, b"at the epoch", 0, None)], "none", 500, 0, 0)
def test_another_client_reads_the_same_records(
    rows: list[tuple[object, ...]], compression: str, limit_bytes: int, skip: int, sequence: int
) -> None:
    found = []
    at = len(rows) // 3
    described = Rows([columns(rows[:at], skip), columns(rows[at:], 1)])
    described.partitions[:] = 4
    for partition, sealed in Encoder(KERNEL, compression).seal(
        described, described.by_partition(KERNEL), limit_bytes
    ):
        assert partition == 4
        before = bytes(sealed)
        batch = EncodedBatch(sealed)
        batch.stamp(KERNEL, 77, 5, sequence)
        assert bytes(sealed) == before, "the same sealed batch gets another stamp in the next try"
        read = MemoryRecords(batch.header + bytes(batch.body)).next_batch()
        assert read.validate_crc()
        assert (read.producer_id, read.producer_epoch, read.base_sequence) == (77, 5, sequence)
        sequence = next_sequence(sequence, batch.records)
        assert read.is_transactional
        records = list(read)
        assert len(records) == batch.records
        if compression == "none":
            assert batch.size_bytes <= limit_bytes or batch.records == 1
        found += records
    assert [(each.key, each.value) for each in found] == [(key, value) for key, value, _, _ in rows]
    for record, (_, _, timestamp, headers) in zip(found, rows, strict=True):
        assert timestamp is None or record.timestamp == timestamp
        assert record.headers == [(each["key"], each["value"]) for each in headers or ()]  # type: ignore[attr-defined]


@given(
    st.lists(st.sampled_from([1, 100, _SHORT_BYTES - 1, _SHORT_BYTES, _JOINED_BYTES, 200_000]), max_size=30)
)
def test_short_buffers_are_sent_together(sizes: list[int]) -> None:
    buffers = [bytes([number]) * size for number, size in enumerate(sizes)]
    joined = list(_joined(buffers))
    assert b"".join(joined) == b"".join(buffers)
    assert all(len(each) for each in joined)
    assert sum(len(each) < _SHORT_BYTES for each in joined) <= 1 + sum(size >= _SHORT_BYTES for size in sizes)


def test_the_checksum_is_crc32c() -> None:
    """The check value of RFC 3720, and every length of the code that handles eight bytes at a time."""
    data = np.frombuffer(b"123456789" * 9, np.uint8)
    assert KERNEL.crc32c(0, data.ctypes.data, 9) == 0xE3069283
    slow = [_crc32c(data[:length].tobytes()) for length in range(len(data))]
    assert [KERNEL.crc32c(0, data.ctypes.data, length) for length in range(len(data))] == slow
    first = KERNEL.crc32c(0, data.ctypes.data, 20)
    assert KERNEL.crc32c(first, data.ctypes.data + 20, 30) == slow[50]


@pytest.mark.parametrize("length", [6143, 6144, 6145, 12_288, 20_000])
def test_the_checksum_of_long_data_is_that_of_its_parts(length: int) -> None:
    """The kernel computes the checksums of three blocks at a time, and joins them."""
    data = np.frombuffer(random.Random(length).randbytes(length), np.uint8)
    joined = 0
    for begin in range(0, length, 1000):  # too short for blocks
        joined = KERNEL.crc32c(joined, data.ctypes.data + begin, min(1000, length - begin))
    assert KERNEL.crc32c(0, data.ctypes.data, length) == joined


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_sequence_numbers_wrap_as_in_javas_client() -> None:
    assert next_sequence(2**31 - 2, 1) == 2**31 - 1
    assert next_sequence(2**31 - 1, 1) == 0
    assert next_sequence(2**31 - 1, 5) == 4


@given(st.lists(st.tuples(st.none() | st.binary(max_size=9), st.none() | st.integers(0, 6)), max_size=200))
def test_rows_go_to_the_partitions_of_javas_producers(rows: list[tuple[bytes | None, int | None]]) -> None:
    from kafka.partitioner.default import murmur2

    at = len(rows) // 2
    placed = Rows(
        [
            {
                "key": pa.array([key for key, _ in part], pa.binary()),
                "value": pa.array([b"v"] * len(part), pa.binary()),
                "partition": pa.array([partition for _, partition in part], pa.int32()),
            }
            for part in (rows[:at], rows[at:])
        ]
    )
    placed.place(KERNEL, 7, first_without_key=3, stripe=2)
    for (key, partition), found in zip(rows, placed.partitions.tolist(), strict=True):
        if partition is not None:
            assert found == partition
        elif key is not None:
            assert found == (murmur2(key) & 0x7FFFFFFF) % 7
        else:
            assert 0 <= found < 7
    groups = placed.by_partition(KERNEL)
    assert groups.partitions.tolist() == sorted(set(placed.partitions.tolist()))
    expected = [
        row for partition in groups.partitions for row in np.flatnonzero(placed.partitions == partition)
    ]
    assert placed.numbers(groups.order).tolist() == expected
    sizes = np.array([1 + len(key or b"") for key, _ in rows])
    assert groups.bytes.tolist() == [
        sizes[placed.partitions == partition].sum() for partition in groups.partitions
    ]
    assert groups.largest_bytes == max(sizes, default=0)
    assert (groups.encoded_bytes > groups.bytes).all()
    some = groups.select(groups.partitions % 2 == 1)
    assert some.partitions.tolist() == [each for each in groups.partitions if each % 2 == 1]
    assert placed.numbers(some.order).tolist() == [row for row in expected if placed.partitions[row] % 2 == 1]
    assert some.ends.tolist() == np.cumsum(some.lengths).tolist()


def test_rows_that_name_partitions_which_may_not_exist_are_grouped_too() -> None:
    values = pa.array([b"a", b"b", b"c", b"d"])
    partitions = pa.array([2**31 - 1, 0, 2**31 - 1, 70_000], pa.int32())
    rows = Rows([{"value": values, "partition": partitions}])
    groups = rows.by_partition(KERNEL)
    assert groups.partitions.tolist() == [0, 70_000, 2**31 - 1]
    assert rows.numbers(groups.order).tolist() == [1, 3, 0, 2]
    assert groups.ends.tolist() == [1, 2, 4]


@given(
    keys=st.lists(st.none() | st.binary(max_size=40), min_size=1, max_size=30),
    partitions=st.integers(1, 2**31 - 1),
)
@example(keys=[b"\xca\x0e\x6d\xc9", b"", None], partitions=7)
@pytest.mark.parametrize("name", sorted(PARTITIONERS))
def test_keys_go_where_librdkafka_sends_them(name: str, keys: list[bytes | None], partitions: int) -> None:
    """Rows that librdkafka sends to random partitions are left to `Rows.place`."""
    column = pa.array(keys, pa.binary())
    rows = Rows([{"key": column, "value": column}])
    number = PARTITIONERS[name]
    KERNEL.place_rows(rows.address, rows.count, rows.partitions.ctypes.data, partitions, number)
    for key, found in zip(keys, rows.partitions.tolist(), strict=True):
        is_random = name == "random" or (
            name.endswith("_random") and (not key if name == "consistent_random" else key is None)
        )
        assert found == (-1 if is_random else of_librdkafka(name, key, partitions))


def of_librdkafka(name: str, key: bytes | None, partitions: int) -> int:
    """Returns what librdkafka's own function returns; it reads no argument but these."""
    library = ctypes.CDLL(cimpl.__file__)
    choose = library[f"rd_kafka_msg_partitioner_{name}"]
    choose.restype = ctypes.c_int32
    choose.argtypes = [
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t),
        *(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p),
    ]
    return int(choose(None, key, len(key or b""), partitions, None, None))


@pytest.mark.parametrize("name", sorted(PARTITIONERS))
def test_rows_whose_key_does_not_decide_go_to_all_partitions_in_turn(name: str) -> None:
    keys = pa.array([None] * 30, pa.binary())
    rows = Rows([{"key": keys, "value": keys}])
    rows.place(KERNEL, 3, first_without_key=1, stripe=5, partitioner=name)
    if name == "random" or name.endswith("_random"):
        assert rows.partitions.tolist() == [1] * 10 + [2] * 10 + [0] * 10
    else:
        assert len(set(rows.partitions.tolist())) == 1


@pytest.mark.parametrize(("transactional_id", "acks"), [("t" * 130, -1), (None, 1)])
def test_the_body_of_produce_is_what_kafka_python_encodes(transactional_id: str | None, acks: int) -> None:
    from kafka.protocol.producer import ProduceRequest

    kind = ProduceRequest.TopicProduceData
    batches = {"a": [(0, b"x" * 200), (7, b"y" * 62)], "é": [(1, b"z" * 61)]}
    for version in (9, 11, 12):
        request = ProduceRequest(
            transactional_id=transactional_id,
            acks=acks,
            timeout_ms=9500,
            topic_data=[
                kind(
                    name=topic,
                    partition_data=[
                        kind.PartitionProduceData(index=number, records=data, version=version)
                        for number, data in parts
                    ],
                    version=version,
                )
                for topic, parts in batches.items()
            ],
            version=version,
        )
        parts = {
            topic: [(number, sent_as_it_is(data)) for number, data in each] for topic, each in batches.items()
        }
        assert b"".join(produce_body(transactional_id, acks, 9500, parts)) == bytes(request.encode())


def sent_as_it_is(data: bytes) -> EncodedBatch:
    batch = EncodedBatch(memoryview(data))
    batch.header = data[:61]
    return batch
