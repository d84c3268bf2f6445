"""Frames of Confluent's wire format are taken off columns of every shape, and row by row as expected."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.registry.records import Frame, Messages, frame_prefix, frames, paths


def zigzag(value: int) -> bytes:
    """The reference: one varint, as Protobuf's documentation describes it."""
    left = (value << 1) ^ (value >> 63)
    out = b""
    while True:
        if left < 0x80:
            return out + bytes([left])
        out += bytes([left & 0x7F | 0x80])
        left >>= 7


def split(column: pa.Array, protobuf: bool = False) -> tuple[list[Frame], dict[int, str]]:
    messages = Messages.of(column)
    found, errors = frames(messages)
    if not protobuf:
        return found, errors
    deeper = []
    for each in found:
        groups, more = paths(messages, each)
        deeper += groups
        errors.update(more)
    return deeper, errors


IDS = st.sampled_from([0, 1, 7, 255, 256, 65536, 2**31 - 1])
PATHS = st.lists(st.integers(0, 300), max_size=4).map(tuple)
BODIES = st.binary(max_size=4)
GOOD = st.builds(lambda schema, path, body: (schema, path, body), IDS, PATHS, BODIES)
ROWS = st.lists(st.one_of(st.none(), GOOD, st.binary(max_size=8)), max_size=40)


@given(ROWS, st.booleans(), st.integers(0, 3), st.integers(0, 3))
def test_every_row_is_in_its_frame_or_has_an_error(rows: list, large: bool, before: int, behind: int) -> None:
    def message(row: object) -> bytes | None:
        if not isinstance(row, tuple):
            return row  # type: ignore[return-value]
        schema, path, body = row
        return b"\0" + schema.to_bytes(4, "big") + b"".join(map(zigzag, (len(path), *path))) + body

    padding = [b"padding"] * before, [b"behind"] * behind
    whole = padding[0] + [message(row) for row in rows] + padding[1]
    column = pa.array(whole, pa.large_binary() if large else pa.binary()).slice(before, len(rows))
    found, errors = split(column, protobuf=True)
    seen: dict[int, Frame] = {}
    for frame in found:
        assert list(frame.rows) == sorted(frame.rows)
        for row in frame.rows.tolist():
            assert row not in seen
            seen[row] = frame
    for number, row in enumerate(rows):
        if row is None:
            assert number not in seen
            assert number not in errors
        elif isinstance(row, tuple):
            schema, path, body = row
            assert seen[number].schema_id == schema
            assert seen[number].path == (path or (0,))
            assert message(row)[seen[number].start :] == body
        else:
            assert (number in seen) != (number in errors)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"", "is empty"),
        (b"\0\0\0\1", "has 4 bytes; expected at least 5"),
        (b"{1234}", "begin with the magic byte 0x00 of a schema registry, but with 0x7b"),
    ],
)
def test_messages_without_a_frame_say_what_is_wrong(message: bytes, said: str) -> None:
    found, errors = split(pa.array([b"\0\0\0\0\1ab", message, None]))
    assert said in errors.pop(1)
    assert not errors
    assert [(each.schema_id, each.rows.tolist()) for each in found] == [(1, [0])]


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        (b"", "ends inside the Protobuf message indices"),
        (zigzag(-1), "has -1 message indices"),
        (zigzag(65), "has 65 message indices"),
        (zigzag(2) + zigzag(3), "ends inside"),
        (zigzag(1) + zigzag(-2), "has the message index -2"),
        (b"\xff" * 6, "of more than 5 bytes"),
        (b"\xff", "ends inside"),
    ],
)
def test_malformed_message_indices_are_errors_of_their_row_only(indices: bytes, said: str) -> None:
    good = frame_prefix(9, (3, 1))
    found, errors = split(pa.array([good + b"x", frame_prefix(9) + indices, good]), protobuf=True)
    assert said in errors.pop(1)
    assert not errors
    assert [(each.path, each.start, each.rows.tolist()) for each in found] == [((3, 1), 8, [0, 2])]


def test_all_rows_of_one_frame_are_one_group_in_their_order() -> None:
    found, errors = split(pa.array([frame_prefix(5, (0,)) + b"a"] * 3), protobuf=True)
    assert [(each.schema_id, each.path, each.start) for each in found] == [(5, (0,), 6)]
    assert found[0].rows.tolist() == [0, 1, 2]
    assert not errors


def test_columns_without_bytes_have_no_frames() -> None:
    for column in (
        pa.array([], pa.binary()),
        pa.nulls(3, pa.binary()),
        pa.nulls(3, pa.large_binary()),
        pa.chunked_array([], pa.binary()),
        pa.array([b"x"], pa.binary()).slice(1),
    ):
        assert split(column) == ([], {})
    assert list(split(pa.array([b"", b""]))[1]) == [0, 1]
    chunked = pa.chunked_array([[frame_prefix(1)], [frame_prefix(2)]], pa.binary())
    assert [each.schema_id for each in split(chunked)[0]] == [1, 2]
    views = pa.array([frame_prefix(3) + b"a longer message"], pa.binary_view())
    assert [each.schema_id for each in split(views)[0]] == [3]


@given(st.integers(0, 2**31 - 1), st.lists(st.integers(0, 2**31 - 1), max_size=5))
def test_a_prefix_is_read_back(schema: int, path: list[int]) -> None:
    prefix = frame_prefix(schema, path)
    if path:
        (frame,), errors = split(pa.array([prefix]), protobuf=True)
        assert frame.path == tuple(path)
    else:
        (frame,), errors = split(pa.array([prefix]))
    assert (frame.schema_id, frame.start, errors) == (schema, len(prefix), {})
