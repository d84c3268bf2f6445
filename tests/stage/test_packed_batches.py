"""Packed batches: rows stay the same, damaged bytes are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

from kafka_eos_source.errors import InvalidRecordError, StateCorruptedError, StateError
from kafka_eos_source.model import ShardReport, TopicPartition
from kafka_eos_source.protocol import packing
from kafka_eos_source.protocol.packing import column, pack, pack_stream, slices, unpack, unpack_stream
from kafka_eos_source.state.store.durable import decode_rows
from kafka_eos_source.state.store.uncommitted import CHANGES

SCHEMA = pa.schema([pa.field("k", pa.int64()), pa.field("v", pa.string())])
SOME = pa.RecordBatch.from_arrays([pa.array([1, None]), pa.array(["a", "bc"])], schema=SCHEMA)
MADE_CHANGES = pa.RecordBatch.from_arrays(
    [pa.array([b"\x01k", b"\x01d"]), pa.array([b"v", None])], schema=CHANGES
)
REPORT = ShardReport(
    tp=TopicPartition("app-counts-changelog", 0),
    task_attempt_id="attempt-0",
    shards=2,
    query_id="query",
    batch_id=7,
    next_offset=40,
    time_ms=1000,
)


def rows(values: list[tuple[int | None, str | None]]) -> pa.RecordBatch:
    columns = [pa.array([row[at] for row in values], field.type) for at, field in enumerate(SCHEMA)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


MADE = st.lists(st.tuples(st.none() | st.integers(-9, 9), st.none() | st.text(max_size=9)), max_size=20)


@given(made=MADE, size_bytes=st.sampled_from([1, 50, 1 << 20]))
def test_rows_stay_the_same_in_both_forms(made: list[tuple[int | None, str | None]], size_bytes: int) -> None:
    cut = list(slices(rows(made), size_bytes))
    assert all(each.num_rows for each in cut)
    assert size_bytes > 1 or len(cut) == len(made)
    messages = column([pack(each) for each in cut])
    streams = column([pack_stream(each) for each in cut])
    found = [unpack(each, SCHEMA, "it") for each in packing.values(messages)]
    assert pa.Table.from_batches(found, SCHEMA).to_pylist() == rows(made).to_pylist()
    found = [batch for each in packing.values(streams) for batch in unpack_stream(each, "it")]
    assert pa.Table.from_batches(found, SCHEMA).to_pylist() == rows(made).to_pylist()


def test_slices_have_about_the_requested_size() -> None:
    cut = list(slices(rows([(1, "v" * 100)] * 1000), 10_000))
    assert 10 <= len(cut) <= 14
    assert max(each.nbytes for each in cut) <= 10_000


def test_a_column_skips_nulls_and_copies_no_single_value() -> None:
    packed = pack(SOME)
    one = column([packed])
    assert one.buffers()[2].address == packed.address
    (found,) = packing.values(pa.concat_arrays([pa.nulls(2, pa.binary()), one]))
    assert found == packed
    assert len(column([])) == 0
    assert unpack(packed, SCHEMA, "it").column(1).buffers()[2].address >= packed.address, "rows were copied"


@pytest.mark.parametrize("type_", [pa.binary(), pa.large_binary()])
def test_a_column_may_have_offsets_of_64_bits(type_: pa.DataType) -> None:
    """Spark passes such columns with ``spark.sql.execution.arrow.useLargeVarTypes``."""
    packed = [pack(SOME), pack_stream(SOME), pack(SOME)]
    whole = pa.concat_arrays([pa.nulls(1, pa.binary()), column(packed), pa.nulls(1, pa.binary())]).cast(type_)
    assert list(packing.values(whole)) == packed
    assert list(packing.values(whole.slice(2))) == packed[1:]
    assert list(packing.values(pa.nulls(2, type_))) == []


def test_more_than_a_column_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(SOME)
    monkeypatch.setattr(packing, "_COLUMN_BYTES", 2 * packed.size)
    assert len(column([packed] * 2)) == 2
    with pytest.raises(InvalidRecordError, match=rf"3 packed .* have {3 * packed.size} bytes; .* at most"):
        column([packed] * 3)


def _read_message(data: bytes) -> None:
    unpack(pa.py_buffer(data), SCHEMA, "column 'c'")


def _read_stream(data: bytes) -> None:
    list(unpack_stream(data, "column 'c'"))


READERS = pytest.mark.parametrize(
    ("read", "whole"),
    [(_read_message, pack(SOME).to_pybytes()), (_read_stream, pack_stream(SOME).to_pybytes())],
)


@READERS
@pytest.mark.parametrize("junk", [b"", b"junk", b"\xff" * 8, bytes(64), pack_stream(SOME)[:160]])
def test_junk_is_refused(read: Callable[[bytes], None], whole: bytes, junk: Any) -> None:
    read(whole)
    with pytest.raises(InvalidRecordError, match=rf"column 'c' contains {len(junk)} bytes that are not"):
        read(junk)


@READERS
def test_truncated_batches_are_refused(read: Callable[[bytes], None], whole: bytes) -> None:
    needed = len(whole) - 8 * (read is _read_stream)  # a stream may lack its end mark
    for size in range(needed):
        with pytest.raises(InvalidRecordError, match=f"contains {size} bytes that are not a packed batch"):
            read(whole[:size])


def test_a_batch_of_other_columns_is_not_read_beyond_its_buffers() -> None:
    """A message names no types, so another version's schema could make Arrow read beyond a buffer's end."""
    narrow = pa.record_batch({"k": pa.array([1, 2, 3], pa.int8()), "v": ["a", "b", "c"]})
    with pytest.raises(InvalidRecordError, match=r"column 'c'.*not a packed batch"):
        _read_message(pack(narrow).to_pybytes())


def test_a_report_says_whether_the_tasks_that_read_run_the_operator() -> None:
    report = replace(REPORT, in_read=True)
    (written,) = packing.pack_packets(report, ())
    assert packing.unpack_packet(written).report == replace(report, packets=1)


def test_damaged_stored_batches_get_the_error_of_their_place() -> None:
    """Pending changes are restored after a restart; a damaged packet needs a person."""
    with pytest.raises(StateCorruptedError, match="pending batch cannot be decoded"):
        decode_rows(pack_stream(MADE_CHANGES).to_pybytes()[:-100])
    first, _last = packing.pack_packets(REPORT, [MADE_CHANGES])
    with pytest.raises(StateError, match=r"'__kafka_eos_changelog' contains .* not a packed batch"):
        list(packing.unpack_packet(first.to_pybytes()[:-100]).batches())
