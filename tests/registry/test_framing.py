"""Frames of Confluent's wire format are taken off columns of every shape, and row by row as expected."""

from __future__ import annotations

import re
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.registry.frames import KEY_HEADER, VALUE_HEADER, Frame, Framed, Naming, frame_prefix
from kafka_eos_source.spark.arrow import HEADERS_ARROW


def zigzag(value: int) -> bytes:
    """The reference: one varint, as Protobuf's documentation describes it."""
    left = (value << 1) ^ (value >> 63)
    out = b""
    while True:
        if left < 0x80:
            return out + bytes([left])
        out += bytes([left & 0x7F | 0x80])
        left >>= 7


def split(
    column: pa.Array, protobuf: bool = False, headers: pa.Array | None = None, header: str = VALUE_HEADER
) -> tuple[list[Frame], dict[int, str]]:
    framed = Framed.of(column, headers, Naming(header))
    found, errors = framed.frames()
    if not protobuf:
        return found, errors
    deeper = []
    for each in found:
        groups, more = framed.paths(each)
        deeper += groups
        errors.update(more)
    return deeper, errors


IDS = st.sampled_from([0, 1, 7, 255, 256, 65536, 2**31 - 1]) | st.sampled_from(
    [UUID(int=0), UUID(int=1), UUID(int=1 << 64), UUID(int=(1 << 64) + 1), UUID(int=(1 << 128) - 1)]
)
PATHS = st.lists(st.integers(0, 300), max_size=4).map(tuple)
BODIES = st.binary(max_size=4)
Named = tuple[int | UUID, tuple[int, ...], bytes]
GOOD = st.builds(lambda schema, path, body: (schema, path, body), IDS, PATHS, BODIES)
ROWS = st.lists(st.one_of(st.none(), GOOD, st.binary(max_size=8)), max_size=40)


def name(schema: int | UUID, path: tuple[int, ...]) -> bytes:
    """The reference: what a serializer writes as the name of a schema and a message."""
    named = b"\1" + schema.bytes if isinstance(schema, UUID) else b"\0" + schema.to_bytes(4, "big")
    return named + b"".join(map(zigzag, (len(path), *path)))


@given(ROWS, st.booleans(), st.integers(0, 3), st.integers(0, 3))
def test_every_row_is_in_its_frame_or_has_an_error(rows: list, large: bool, before: int, behind: int) -> None:
    def message(row: object) -> bytes | None:
        return name(*row[:2]) + row[2] if isinstance(row, tuple) else row  # type: ignore[return-value]

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


#: Headers of one record: a name, something else under that header, no value, and other headers.
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([VALUE_HEADER, KEY_HEADER, VALUE_HEADER[:-1] + "x", "trace", ""]),
        st.one_of(st.none(), st.builds(name, IDS, PATHS), st.binary(max_size=3)),
    ),
    max_size=4,
)
RECORDS = st.lists(st.tuples(st.none() | st.binary(max_size=9), st.none() | HEADERS), max_size=20)


def last_of(headers: list[tuple[str, bytes | None]] | None, wanted: str) -> bytes | None:
    """The reference: the value of the last header of a name, as Kafka's `Headers.lastHeader` finds it."""
    return next((value for each, value in reversed(headers or []) if each == wanted), None)


def column_of(headers: list[list[tuple[str, bytes | None]] | None]) -> pa.Array:
    as_dicts = [each and [{"key": key, "value": value} for key, value in each] for each in headers]
    return pa.array(as_dicts, HEADERS_ARROW)


@given(RECORDS, st.sampled_from([VALUE_HEADER, KEY_HEADER]), st.integers(0, 2))
def test_the_last_header_of_its_name_comes_before_the_message(
    records: list[tuple[bytes | None, list[tuple[str, bytes | None]] | None]], header: str, before: int
) -> None:
    extra = [(b"\0\0\0\0\1", [(header, name(3, ()))])] * before
    whole = [*extra, *records, *extra]
    values = pa.array([each for each, _ in whole], pa.binary()).slice(before, len(records))
    headers = column_of([each for _, each in whole]).slice(before, len(records))
    found, errors = split(values, True, headers, header)
    seen = {row: frame for frame in found for row in frame.rows.tolist()}
    assert sorted([*seen, *errors]) == [row for row, (value, _) in enumerate(records) if value is not None]
    for row, (value, own) in enumerate(records):
        named = last_of(own, header)
        if value is None:
            continue
        if named is None:  # as if there were no headers
            alone, alone_errors = split(pa.array([value]), True, column_of([None]), header)
            assert errors.get(row) == alone_errors.get(0)
            assert [(each.schema_id, each.path, each.start) for each in alone] == [
                (each.schema_id, each.path, each.start) for each in [seen.get(row)] if each is not None
            ]
            continue
        inside, inside_errors = split(pa.array([named]), True)
        assert (row in errors) == bool(inside_errors), (errors, inside_errors)
        for each in inside:
            assert (seen[row].schema_id, seen[row].path) == (each.schema_id, each.path)
            assert seen[row].start == 0, "the message is the payload alone"


def test_headers_are_found_in_the_types_that_spark_chooses() -> None:
    entry = pa.struct([pa.field("key", pa.large_string()), pa.field("value", pa.large_binary())])
    headers = pa.array([None, [{"key": VALUE_HEADER, "value": name(7, ())}]], pa.large_list(entry))
    found, errors = split(pa.array([frame_prefix(5), b"\0\0\0\0\5"]), headers=headers)
    assert [(each.schema_id, each.start, each.rows.tolist()) for each in found] == [(5, 5, [0]), (7, 0, [1])]
    assert not errors


def test_entries_of_a_row_without_headers_do_not_count() -> None:
    """Arrow lets a null list have entries, and a null struct have fields."""
    entries = column_of([[(VALUE_HEADER, name(7, ()))] * 3]).values
    headers = pa.ListArray.from_arrays(
        pa.array([0, 1, 2, 3], pa.int32()), entries, mask=pa.array([False, True, False]), type=HEADERS_ARROW
    )
    found, _ = split(pa.array([frame_prefix(5)] * 3), headers=headers)
    assert [(each.schema_id, each.rows.tolist()) for each in found] == [(7, [0, 2]), (5, [1])]


def test_headers_that_are_not_looked_at_name_nothing() -> None:
    headers = column_of([[(VALUE_HEADER, name(7, ()))]])
    framed = Framed.of(pa.array([frame_prefix(5), b""]), headers, Naming(None))
    assert [each.schema_id for each in framed.frames()[0]] == [5]
    assert "the registry has 'schema.id.location=payload'" in framed.frames()[1][1]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"", "is empty"),
        (b"\0\0\0\1", "has 4 bytes; expected at least 5"),
        (b"\1" * 16, "has 16 bytes; expected at least 17"),
        (b"{1234}", "begin with the magic byte 0x00 of a schema registry, but with 0x7b"),
        (b' \n[{"a":1}]', "like a JSON document without a frame; app.read(schema=…) reads such documents"),
        (b"\3\0" + bytes(16) + b"x", "like a message of AWS Glue Schema Registry"),
        (b"\3\5" + bytes(16), "like a message of AWS Glue Schema Registry"),
        (b"Obj\1\4\x14avro.codec", "like an Avro container file, which contains its schema"),
        (b"\xc3\1" + bytes(8), "like Avro's single-object encoding"),
        (
            b"\x2cavro/binary+0123456789abcdef",
            "like a message of Azure Schema Registry, written by Kafka Streams",
        ),
        (b"\x0a\4name", "like a Protobuf message without a frame"),
        (b"\x08\x96\1", "like a Protobuf message without a frame"),
        (
            b"plain",
            "an id in the header '__value_schema_id' is not seen here: pass headers= to from_registry",
        ),
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


@pytest.mark.parametrize(
    ("header", "value", "said"),
    [
        ("content-type", b"avro/binary+0123456789abcdef0123456789abcdef", "schema in Azure Schema Registry"),
        ("apicurio.value.globalId", bytes(7) + b"\5", r"in Apicurio's headers, .*Default4ByteIdHandler"),
        ("apicurio.value.contentId", bytes(7) + b"\5", "in Apicurio's headers"),
    ],
)
def test_a_header_of_another_registry_is_refused_by_name(header: str, value: bytes, said: str) -> None:
    """Also before a payload that could be a frame, which would be decoded to a wrong value."""
    own = (VALUE_HEADER, name(7, ()))
    headers = column_of([[(header, value)], [(header, value), own], [(header, None)], [], [(header, value)]])
    found, errors = split(pa.array([frame_prefix(5), b"x", *[frame_prefix(5)] * 2, None]), headers=headers)
    assert [(each.schema_id, each.rows.tolist()) for each in found] == [(7, [1]), (5, [2, 3])]
    assert list(errors) == [0]
    assert re.search(f"the header '{header}' names the {said}|{said}", errors[0])
    of_keys = split(pa.array([frame_prefix(5)]), headers=headers.slice(0, 1), header=KEY_HEADER)
    assert [each.schema_id for each in of_keys[0]] == [5], "it is about the value"


def test_other_content_types_say_nothing_about_the_schema() -> None:
    headers = column_of([[("content-type", b"application/json")], [("content-type", b"avro/binary")]])
    found, errors = split(pa.array([frame_prefix(5)] * 2), headers=headers)
    assert [each.rows.tolist() for each in found] == [[0, 1]]
    assert not errors


def test_ids_of_eight_bytes_are_read_if_the_option_says_so() -> None:
    column = pa.array([b"\0" + number.to_bytes(8, "big") + b"x" for number in (3, 2**31, 2**64 - 1)])
    framed = Framed.of(column, naming=Naming(VALUE_HEADER, 8))
    (frame,), errors = framed.frames()
    assert (frame.schema_id, frame.start, frame.rows.tolist()) == (3, 9, [0])
    assert list(errors) == [1, 2]
    framed = Framed.of(column)
    (frame,), errors = framed.frames()
    assert frame.schema_id == 0
    assert "had written the id 3 with 8 bytes" in framed.suspicion(frame)


def test_the_frame_of_an_old_serializer_of_azure_is_recognised() -> None:
    framed = Framed.of(pa.array([bytes(4) + b"0123456789abcdef" * 2 + b"payload"]))
    (frame,), _ = framed.frames()
    assert "frame of an old serializer of Azure" in framed.suspicion(frame)


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


@given(st.integers(0, 2**31 - 1) | st.uuids(), st.lists(st.integers(0, 2**31 - 1), max_size=5))
def test_a_prefix_is_read_back(schema: int | UUID, path: list[int]) -> None:
    prefix = frame_prefix(schema, path)
    if path:
        (frame,), errors = split(pa.array([prefix]), protobuf=True)
        assert frame.path == tuple(path)
    else:
        (frame,), errors = split(pa.array([prefix]))
    assert (frame.schema_id, frame.start, errors) == (schema, len(prefix), {})
