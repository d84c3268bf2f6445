"""Records that the read makes of rows: keys, values, tombstones, and columns that stay beside them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from kafka_eos_source.app.records import Records
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.in_read.lineage import Obstacle
from kafka_eos_source.in_read.records import MadeRecords
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.columns import RegistrySchema
from kafka_eos_source.registry.frames import KEY_HEADER, VALUE_HEADER
from kafka_eos_source.spark.arrow import arrow_schema
from kafka_eos_source.spark.pickled import from_option, to_option
from kafka_eos_source.spark.session import SessionRules

UTC = SessionRules("UTC", is_ansi=True)
FRAME = {"id": "long", "name": "string", "raw": "binary", "gone": "boolean", "at": "timestamp"}
ROWS = [
    {"id": 1, "name": "a", "raw": b"\x01", "gone": False, "at": 1_000_000},
    {"id": 2, "name": None, "raw": None, "gone": None, "at": None},
    {"id": 3, "name": "c", "raw": b"\x03", "gone": True, "at": 2_000_001},
]


def made(
    columns: list[str], *, for_sinks: bool = False, session: SessionRules = UTC, **records: Any
) -> list[dict[str, Any]]:
    schema = StructType.fromJson(
        {
            "type": "struct",
            "fields": [{"name": n, "type": FRAME[n], "nullable": True, "metadata": {}} for n in columns],
        }
    )
    arguments = Records(**{"topic": "t", **records})
    shape = arguments.shape(schema, for_sinks=for_sinks, has_timestamp=False)
    assert shape is not None
    transform = arguments.in_read(schema, shape, session)
    assert isinstance(transform, MadeRecords), transform
    travelled = from_option(to_option(transform, "it", fix=""))
    assert travelled == transform
    batch = pa.RecordBatch.from_pylist([{n: row[n] for n in columns} for row in ROWS], arrow_schema(schema))
    rows = []
    for part, errors in travelled.slices(batch):
        assert not errors
        assert part.schema.names == transform.rows.names
        rows += part.cast(arrow_schema(transform.rows)).to_pylist()
    return rows


def test_columns_that_are_not_the_key_become_a_json_object() -> None:
    assert made(["name", "id", "at"], key="name") == [
        {"key": "a", "value": b'{"id":1,"at":"1970-01-01T00:00:01.000Z"}'},
        {"key": None, "value": b'{"id":2}'},
        {"key": "c", "value": b'{"id":3,"at":"1970-01-01T00:00:02.000Z"}'},
    ]


@pytest.mark.parametrize(
    ("arguments", "columns", "key", "value"),
    [
        ({"key": "id"}, ["id", "name"], b"1", b'{"name":"a"}'),
        ({"key": ["id", "at"], "value": "name"}, ["id", "name", "at"],
         b'{"id":1,"at":"1970-01-01T00:00:01.000000Z"}', "a"),
        ({"key": "at", "value": "raw"}, ["at", "raw"], b"1970-01-01T00:00:01.000000Z", b"\x01"),
        ({"key": "raw", "value": "raw"}, ["raw"], b"\x01", b"\x01"),
    ],
)  # fmt: skip
def test_keys_and_values(arguments: dict[str, Any], columns: list[str], key: Any, value: Any) -> None:
    assert made(columns, **arguments)[0] == {"key": key, "value": value}


def test_settings_of_the_session_that_change_the_text() -> None:
    session = SessionRules("UTC", is_ansi=True, has_nulls=True)
    assert made(["id", "name"], session=session)[1] == {"value": b'{"id":2,"name":null}'}
    assert made(["id", "name"], session=session, key=["name"])[1]["key"] == b'{"name":null}'


@pytest.mark.parametrize("arguments", [{}, {"key": "at", "value": "raw"}])
def test_spark_writes_times_in_its_old_way(arguments: dict[str, str]) -> None:
    schema = StructType().add("at", "timestamp").add("raw", "binary")
    records = Records(topic="t", **arguments)
    shape = records.shape(schema, for_sinks=False, has_timestamp=False)
    assert shape is not None
    found = records.in_read(schema, shape, SessionRules("UTC", is_ansi=True, has_legacy_times=True))
    assert isinstance(found, Obstacle)
    assert "timeParserPolicy is LEGACY" in str(found)


def test_removed_rows_become_tombstones() -> None:
    found = made(["id", "name", "gone"], key="id", removed="gone")
    assert [row["value"] for row in found] == [b'{"name":"a"}', b"{}", None]


def test_sinks_outside_kafka_get_all_columns() -> None:
    found = made(["id", "name"], key="id", for_sinks=True)
    assert found[2] == {"key": b"3", "value": b'{"name":"c"}', "id": 3, "name": "c"}


def test_values_are_encoded_with_a_registry() -> None:
    pytest.importorskip("fastavro")
    text = '{"type": "record", "name": "r", "fields": [{"name": "name", "type": ["null", "string"]}]}'
    registry = RegistrySchema({"url": "http://unused"}, Schema("AVRO", text), 7)
    found = made(["id", "name"], key="id", registry=registry)
    assert [row["value"] for row in found] == [
        b"\0\0\0\0\x07\x02\x02a",
        b"\0\0\0\0\x07\0",
        b"\0\0\0\0\x07\x02\x02c",
    ]


def test_a_header_names_the_schema_of_each_value_but_not_of_tombstones() -> None:
    pytest.importorskip("fastavro")
    text = '{"type": "record", "name": "r", "fields": [{"name": "name", "type": ["null", "string"]}]}'
    options, guid = {"url": "http://unused", "schema.id.location": "header"}, UUID(int=5)
    registry = RegistrySchema(options, Schema("AVRO", text), 7, guid=guid)
    found = made(["id", "name", "gone"], key="id", removed="gone", registry=registry)
    headers = [{"key": VALUE_HEADER, "value": b"\1" + guid.bytes}]
    assert [(row["value"], row["headers"]) for row in found] == [
        (b"\x02\x02a", headers),
        (b"\0", headers),
        (None, None),
    ]
    with pytest.raises(InvalidOptionError, match="registry does not tell the GUID of schema id 7"):
        RegistrySchema(options, Schema("AVRO", text), 7).encoding()
    assert (
        RegistrySchema(options, Schema("AVRO", text), 7, guid=guid).encoding(is_key=True).header == KEY_HEADER
    )


def test_what_only_spark_writes_is_named() -> None:
    schema = StructType().add("x", "double").add("id", "long")
    records = Records("t", key="x")
    shape = records.shape(schema, for_sinks=False, has_timestamp=False)
    assert shape is not None
    found = records.in_read(schema, shape, UTC)
    assert isinstance(found, Obstacle)
    assert "double" in found.what
    assert "cast" in found.fix
