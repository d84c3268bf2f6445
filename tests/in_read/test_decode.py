"""Values of records become columns in the read: JSON with a declared schema, and messages of a registry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructType

from kafka_eos_source.documents.decode import JsonDecoding
from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError
from kafka_eos_source.in_read import decode
from kafka_eos_source.in_read.decode import check_kept, decoded_values
from kafka_eos_source.in_read.rows import RowsInRead
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.columns import RegistrySchema
from kafka_eos_source.registry.frames import VALUE_HEADER, frame_prefix
from kafka_eos_source.spark.arrow import HEADERS_ARROW

FIELDS = StructType().add("id", LongType()).add("inner", StructType().add("x", "string"))


def source(*values: bytes | None, headers: Sequence[list[dict[str, Any]] | None] = ()) -> pa.RecordBatch:
    rows = len(values)
    return pa.record_batch(
        {
            "key": pa.array([b"k%d" % row for row in range(rows)]),
            "value": pa.array(values, pa.binary()),
            "topic": pa.array(["t"] * rows),
            "partition": pa.array([0] * rows, pa.int32()),
            "offset": pa.array(range(rows), pa.int64()),
            "headers": pa.array(headers or [None] * rows, HEADERS_ARROW),
        }
    )


def rows_of(step: RowsInRead, *values: bytes | None) -> list[dict[str, Any]]:
    return [row for each in step(iter([source(*values)])) for row in each.to_pylist()]


def test_fields_of_json_objects_stand_behind_the_columns_that_are_kept() -> None:
    step = decoded_values(JsonDecoding(FIELDS), FIELDS, ["key", "offset"], "decodes JSON")
    assert step.rows.names == ["key", "offset", "id", "inner"]
    good = json.dumps({"inner": {"x": "a"}, "id": 7}).encode()
    assert rows_of(step, good, None) == [
        {"key": b"k0", "offset": 0, "id": 7, "inner": {"x": "a"}},
        {"key": b"k1", "offset": 1, "id": None, "inner": None},  # a tombstone
    ]
    assert step.column_of_source("key") == "key"
    assert step.column_of_source("id") is None


def test_a_field_with_the_name_of_a_column_of_the_source_is_no_column_of_the_source() -> None:
    fields = StructType().add("topic", "string")
    step = decoded_values(JsonDecoding(fields), fields, [], "decodes JSON")
    assert step.column_of_source("topic") is None


def test_many_nulls_and_nothing_else_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_warned", set())
    step = decoded_values(JsonDecoding(FIELDS, partial=True), FIELDS, [], "decodes JSON", on_bad="null")
    rows_of(step, *[b'{"id": "x"}'] * 999)
    rows_of(step, *[b'{"id": "x"}'] * 1000, b"{}")
    assert not caplog.records
    for _ in range(2):
        rows_of(step, *[b'{"id": "x"}'] * 1000)
    assert len(caplog.records) == 1
    assert "fits the schema of the read, struct<id:bigint" in caplog.text
    assert "field id: 'x'" in caplog.text or 'field id: "x"' in caplog.text


def test_the_record_of_a_bad_value_is_named_and_may_become_nulls() -> None:
    with pytest.raises(InvalidRecordError, match=r"offset 1 cannot be decoded: field id: .seven."):
        rows_of(decoded_values(JsonDecoding(FIELDS), FIELDS, [], "decodes JSON"), b"{}", b'{"id": "seven"}')
    partial = JsonDecoding(FIELDS, partial=True)
    step = decoded_values(partial, FIELDS, [], "decodes JSON", on_bad="null")
    assert rows_of(step, b'{"id": "seven", "inner": {"x": "a"}}', b"no") == [
        {"id": None, "inner": {"x": "a"}},
        {"id": None, "inner": None},
    ]


def test_messages_of_a_registry_are_decoded() -> None:
    pytest.importorskip("fastavro")
    text = '{"type": "record", "name": "r", "fields": [{"name": "name", "type": ["null", "string"]}]}'
    chosen = RegistrySchema({"url": "http://unused"}, Schema("AVRO", text), 7)
    step = decoded_values(chosen.decoding(), chosen.spark_type, ["key"], "decodes with a registry")
    found = rows_of(step, b"\0\0\0\0\x07\x02\x02a", None, b"\0\0\0\0\x07\0")
    assert [row["name"] for row in found] == ["a", None, None]
    with pytest.raises(InvalidRecordError, match=r"offset 1 cannot be decoded"):
        rows_of(step, b"\0\0\0\0\x07\0", b"x")


def test_a_header_names_the_schema_of_its_record_whatever_the_value_begins_with() -> None:
    """The payload is a frame of the same registry, by chance: it was decoded to a wrong value."""
    pytest.importorskip("fastavro")
    text = '{"type": "record", "name": "r", "fields": [{"name": "name", "type": "bytes"}]}'
    guid = UUID(int=7 << 100)
    chosen = RegistrySchema({"url": "http://headers"}, Schema("AVRO", text), 7, guid=guid)
    payload = b"\0"  # no bytes
    alike = b"\x0e\0\0\0\0\7\2a"  # seven bytes
    header = [{"key": VALUE_HEADER, "value": frame_prefix(guid)}]
    step = decoded_values(chosen.decoding(), chosen.spark_type, ["key"], "decodes with a registry")
    given = source(payload, alike, frame_prefix(7) + b"\2x", None, headers=[header, header, None, header])
    found = [row["name"] for each in step(iter([given])) for row in each.to_pylist()]
    assert found == [b"", alike[1:], b"x", None]
    assert step.of_source == ("key", "value", "headers", "topic", "partition", "offset")
    ignoring = RegistrySchema(
        {"url": "http://headers", "schema.id.location": "payload"}, Schema("AVRO", text), 7, guid=guid
    )
    step = decoded_values(ignoring.decoding(), chosen.spark_type, [], "decodes with a registry")
    assert "headers" not in step.of_source
    found = [row["name"] for each in step(iter([given.slice(2)])) for row in each.to_pylist()]
    assert found == [b"x", None]


def test_values_that_are_no_structs_stay_in_their_column() -> None:
    pytest.importorskip("fastavro")
    chosen = RegistrySchema({"url": "http://unused"}, Schema("AVRO", '"long"'), 8)
    step = decoded_values(chosen.decoding(), chosen.spark_type, ["key"], "decodes with a registry")
    assert rows_of(step, b"\0\0\0\0\x08\x02") == [{"key": b"k0", "value": 1}]


@pytest.mark.parametrize(
    ("keep", "fields", "said"),
    [
        (["sender"], ["id"], "keep= names 'sender'; expected columns of the source"),
        (["key"], ["key"], "'key' would be two columns"),
        (["key", "key"], ["id"], "'key' would be two columns"),
        (["key"], ["Key"], "'key' would be two columns"),
        ([], ["__kafka_eos_changelog"], "are reserved"),
    ],
)
def test_columns_that_cannot_be_kept_are_named(keep: list[str], fields: list[str], said: str) -> None:
    with pytest.raises(InvalidSchemaError, match=said):
        check_kept(keep, fields)
