"""``kafka-eos produce`` turns lines into records; ``kafka-eos tail`` prints records as lines."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.cli import main
from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate import records as operating
from kafka_eos_source.operate.records import (
    TopicRecord,
    _in_time_order,
    decoded,
    from_json,
    from_lines,
    record_json,
    record_line,
)
from kafka_eos_source.operate.topics import source_partitions
from kafka_eos_source.protocol.token import Mark, ShardProgress, Token
from kafka_eos_source.registry.frames import frame_prefix
from tests.support import glue_server, registry_server

TP = TopicPartition("t", 1)

_bytes = st.none() | st.binary(max_size=8) | st.text(max_size=8).map(str.encode)
_records = st.builds(
    TopicRecord,
    tp=st.just(TP),
    offset=st.integers(0, 2**62),
    timestamp_ms=st.none() | st.integers(0, 2**41),
    key=_bytes,
    value=_bytes,
    headers=st.lists(st.tuples(st.text(max_size=4), _bytes), max_size=3).map(tuple),
)


def rows_from_json(lines: list[str], **options: bool) -> list[dict[str, object]]:
    return [row for batch in from_json(lines, **options) for row in batch.to_pylist()]


@given(st.lists(_records, max_size=5))
def test_what_tail_prints_can_be_produced_again(records: list[TopicRecord]) -> None:
    rows = rows_from_json([record_json(record) for record in records], keep_partitions=True)
    assert rows == [
        {
            "key": record.key,
            "value": record.value,
            "partition": 1,
            "headers": [{"key": name, "value": value} for name, value in record.headers] or None,
            "timestamp": record.timestamp_ms,
        }
        for record in records
    ]


def test_json_values_may_be_objects_and_the_key_chooses_the_partition() -> None:
    (row,) = rows_from_json(['{"key": "a", "value": {"delay": 1}, "headers": {"h": "x"}, "partition": 3}'])
    assert (row["key"], row["value"], row["partition"]) == (b"a", b'{"delay": 1}', None)
    assert row["headers"] == [{"key": "h", "value": b"x"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not a record: it is not JSON"),
        ("[1]", "it is list, expected an object"),
        ('{"key": "a"}', "it has no field 'value'"),
        ('{"value": 1, "valeu": 2}', "field 'valeu' is unknown"),
        ('{"value": 1, "timestamp_ms": "now"}', "timestamp_ms is 'now'"),
        ('{"value": 1, "partition": true}', "partition is True"),
        ('{"value_base64": "?"}', "Error"),
        ('{"value": 1, "headers": [{"value": "x"}]}', "KeyError"),
    ],
)
def test_produce_names_a_line_that_is_not_a_record(line: str, message: str) -> None:
    with pytest.raises(InvalidRecordError, match="line 2 is not a record") as refused:
        rows_from_json(['{"value": "fine"}', line])
    assert message in str(refused.value)


def test_a_line_is_a_value_or_a_key_and_a_value() -> None:
    (batch,) = from_lines(["a\n", "", "c\r\n"])
    assert batch.to_pylist() == [{"key": None, "value": value} for value in (b"a", b"", b"c")]
    (batch,) = from_lines(["k|v|w"], "|")
    assert batch.to_pylist() == [{"key": b"k", "value": b"v|w"}]
    with pytest.raises(InvalidRecordError, match="line 10001 has no"):
        list(from_lines(["k|v"] * 10_000 + ["kv"], "|"))


def test_tail_prints_a_record_as_one_readable_line() -> None:
    record = TopicRecord(TP, 7, 1_700_000_000_123, None, b"\xff", state="aborted")
    assert record_line(record) == "1:7 22:13:20.123 [aborted] null \ufffd"
    assert json.loads(record_json(record))["value_base64"] == "/w=="


@pytest.mark.parametrize(
    "text",
    [
        "\x1b]52;c;ZWNobyBvd25lZA==\x07",  # sets the clipboard
        "\x1b[2J",  # clears the screen
        "\x9b2J",  # the same in one character
        "first\n1:8 22:13:20.124 forged",
        "\u202edlrow",
    ],
)
def test_contents_of_records_do_not_act_on_a_terminal(text: str) -> None:
    record = TopicRecord(TP, 7, 1_700_000_000_123, text.encode(), text.encode())
    line, as_json = record_line(record), record_json(record)
    assert line.isprintable()
    assert as_json.isprintable()
    assert json.loads(as_json)["value"] == text, "programs get what was written"


def test_tail_merges_partitions_by_time_and_keeps_the_order_of_each() -> None:
    other = TopicPartition("t", 2)
    records = [
        TopicRecord(TP, 0, 50, None, None),
        TopicRecord(TP, 1, 10, None, None),  # its producer set an old timestamp
        TopicRecord(other, 0, 40, None, None),
        TopicRecord(other, 1, 60, None, None),
    ]
    found = [(record.tp.partition, record.offset) for record in _in_time_order(records)]
    assert found == [(2, 0), (1, 0), (1, 1), (2, 1)]


def test_the_lag_of_a_query_leaves_out_anchor_and_changelogs() -> None:
    token = Token("app", "query", "run", 3, 2, "s", "e", 10)
    text, mark = token.encode(), Mark.of(token).encode()
    shard = Token("app", "query", "run", 3, 2, "s", "e", 10, shard=ShardProgress("a", 0, None)).encode()
    source, second = TopicPartition("in", 0), TopicPartition("in", 1)
    anchor, changelog = TopicPartition("out", 0), TopicPartition("app-changelog", 0)
    offsets = [GroupOffset(anchor, 2, text), GroupOffset(changelog, 9, shard)]
    assert source_partitions([*offsets, GroupOffset(source, 60, text)]) == {source}
    # a source whose offset equals the batch number differs from the anchor by its other partitions
    assert source_partitions([*offsets, GroupOffset(source, 2, text), GroupOffset(second, 7, mark)]) == {
        source,
        second,
    }
    assert source_partitions([*offsets, GroupOffset(source, 2, text)], [source]) == {source}
    # a group of any other consumer has no tokens
    assert source_partitions([GroupOffset(anchor, 5, ""), GroupOffset(source, 0, "")]) == {anchor, source}


@pytest.mark.parametrize(
    ("arguments", "servers"),
    [
        ([], "127.0.0.1:9092"),
        (["--kafka", "client.id=me"], "127.0.0.1:9092"),
        (["--bootstrap-servers", "a:1"], "a:1"),
        (["--kafka", "bootstrap.servers=b:2"], "b:2"),
        (["--kafka", "kafka.bootstrap.servers = c:3"], "c:3"),
    ],
)
def test_commands_use_the_local_broker_by_default(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], servers: str
) -> None:
    asked: list[object] = []

    def topics(kafka: dict[str, str], *_rest: object, **_named: object) -> dict[str, int]:
        asked.append(kafka["bootstrap.servers"])
        return {"flights": 3}

    monkeypatch.setattr(operating, "partition_counts", topics)
    result = CliRunner().invoke(main, ["topics", "list", *arguments])
    assert (result.exit_code, asked) == (0, [servers]), result.output


FLIGHT = (
    '{"type":"record","name":"F","fields":[{"name":"carrier","type":"string"},{"name":"raw","type":"bytes"}]}'
)


def test_tail_decodes_records_of_a_registry_and_leaves_others_as_they_are() -> None:
    with registry_server.running() as server:
        number = server.add("t-value", FLIGHT)
        framed = frame_prefix(number) + b"\x04AA\x02\xff"
        values = [framed, b"plain", None, frame_prefix(number) + b"\x63", frame_prefix(99) + b"x"]
        records = [
            TopicRecord(TopicPartition("t", 0), at, None, framed, each) for at, each in enumerate(values)
        ]
        found = decoded(records, {"url": server.url})
        name = b"\1" + server.guid(number).bytes
        named = (("\udcff", b""), ("__value_schema_id", name))
        bare = TopicRecord(TopicPartition("t", 0), 9, None, None, framed[5:], named)
        in_header = decoded([bare, replace(bare, headers=())], {"url": server.url})
    text = b'{"carrier": "AA", "raw": "/w=="}'
    assert [each.value for each in found] == [text, *values[1:]]
    assert {each.key for each in found} == {text}
    assert [each.value for each in in_header] == [text, framed[5:]]


def test_tail_decodes_records_of_aws_glue(monkeypatch: pytest.MonkeyPatch) -> None:
    glue_server.log_in(monkeypatch)
    with glue_server.running() as server:
        version = server.add("t", FLIGHT)
        payload = b"\x04AA\x02\xff"
        values = [
            b"\3\0" + version.bytes + payload,
            b"\3\5" + version.bytes + zlib.compress(payload),
            b"plain",
            b"\3\5" + version.bytes + b"damaged",
        ]
        records = [TopicRecord(TP, at, None, None, each) for at, each in enumerate(values)]
        found = decoded(records, server.options)
    assert [each.value for each in found] == [b'{"carrier": "AA", "raw": "/w=="}'] * 2 + values[2:]


@pytest.mark.parametrize("type_", ["timestamp-millis", "timestamp-micros", "local-timestamp-micros"])
def test_tail_shows_records_beside_one_with_a_time_beyond_pythons_calendar(type_: str) -> None:
    at = {"type": "long", "logicalType": type_}
    with registry_server.running() as server:
        schema = {"type": "record", "name": "R", "fields": [{"name": "at", "type": at}]}
        prefix = frame_prefix(server.add("t-value", json.dumps(schema)))
        values = [prefix + b"\x00", prefix + b"\xfe" + b"\xff" * 7 + b"\x3f", prefix + b"\x00"]
        records = [TopicRecord(TP, at, None, None, each) for at, each in enumerate(values)]
        found = [each.value or b"" for each in decoded(records, {"url": server.url})]
    assert found[0].startswith(b'{"at": "1970-01-01 00:00:00')
    assert found == [found[0], values[1], found[0]]
