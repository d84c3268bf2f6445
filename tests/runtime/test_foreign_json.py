"""Documents of other programs have any shape: each is read, passed over, or refused by a named error."""

from __future__ import annotations

import ast
import contextlib
import copy
import json
import struct
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kafka_eos_source
from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.observe.figures import BatchFigures, SourceFigures, WaitingCommit
from kafka_eos_source.observe.source import figures_in, with_figures
from kafka_eos_source.operate import records
from kafka_eos_source.operate.replay import _parsed
from kafka_eos_source.operate.rescale_copy import (
    CopyJournal,
    decode_notes,
    encode_notes,
    filled_until,
    with_filled,
)
from kafka_eos_source.protocol import packing
from kafka_eos_source.protocol.offset_log import SourcePosition, is_kafka_offset_json
from kafka_eos_source.protocol.token import Token, TokenRecord
from kafka_eos_source.registry.avro import arrow_type
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.sinks.http_client import Answer, pending_ids, retry_after_seconds, state_of
from kafka_eos_source.state.changelog.move import Move
from kafka_eos_source.state.encoding.describe import Description, TableDescription
from kafka_eos_source.state.model import BatchRecord, decode_batch, encode_batch
from kafka_eos_source.state.store.durable import decode_header
from tests.commit.shards_kit import report
from tests.observe.figures_kit import BATCH, SOURCE, WAITING
from tests.protocol.token_records import RECORD
from tests.support.foreign_records import JSON_VALUES

PACKAGE = Path(kafka_eos_source.__file__).parent
#: Values that JSON can hold, as Python values.
VALUES = []
for text in JSON_VALUES:
    if len(text) < 2_000:
        try:
            VALUES.append(json.loads(text))
        except ValueError:
            continue
_VALUES = st.sampled_from(VALUES).map(copy.deepcopy)
BATCH_RECORD = BatchRecord("query", 7, "attempt", "run", counts={"late": 1})
MOVE = Move("counts", 2, 3, "id", RECORD.token, "attempt", 5, None, {"late": 1})
DESCRIPTION = Description(
    "aggregate",
    pa.schema([("k", pa.string())]),
    {2: TableDescription("t", pa.schema([("n", pa.list_(pa.struct([("m", pa.decimal128(5, 2))])))]))},
)
JOURNAL = CopyJournal("cut", 3, "id", 1, 5, 2, 9, 7)
HEADER = {"record": {"query_id": "q"}, "base": None, "size_bytes": 1, "ranges": [["00", None]], "blobs": 1}
HEADER["record"] = {"query_id": "q", "batch_id": 1, "attempt": "a", "run_id": "r"}
POSITION = {
    "@": {"start": {"t": {"0": 1}}, "cluster": "c", "epochs": {"t": [1]}, "topics": {"t": "id"}, "tick": 1},
    "t": {"0": 5},
}
PACKET = bytes(next(iter(packing.pack_packets(report(7, 1), []))))
AVRO = {
    "type": "record",
    "name": "R",
    "fields": [{"name": "a", "type": ["null", "int"], "default": None}, {"name": "b", "type": "bytes"}],
}


def _packet(text: bytes) -> Any:
    return packing.unpack_packet(struct.pack(PACKET_LENGTH.format, len(text)) + text)


PACKET_LENGTH = packing._LENGTH
READERS: dict[str, tuple[Callable[[bytes], object], Any]] = {
    "token": (lambda text: Token.decode(text.decode()), RECORD.token.encode()),
    "token record": (lambda text: TokenRecord.decode(b"orders", text), RECORD.encode().decode()),
    "position": (lambda text: SourcePosition.from_json(text.decode()), json.dumps(POSITION)),
    "offset": (lambda text: is_kafka_offset_json(text.decode()), json.dumps(POSITION)),
    "packet": (_packet, PACKET[4 : 4 + struct.unpack_from(PACKET_LENGTH.format, PACKET)[0]].decode()),
    "batch record": (decode_batch, encode_batch(BATCH_RECORD).decode()),
    "description": (Description.from_json, DESCRIPTION.to_json().decode()),
    "pending header": (decode_header, json.dumps(HEADER)),
    "move": (lambda text: Move.decode(text.decode()), MOVE.encode()),
    "copy journal": (lambda text: CopyJournal.decode(text.decode()), JOURNAL.encode()),
    "filled": (lambda text: filled_until(text.decode(), "id"), with_filled(MOVE, "id", 5)),
    "notes": (decode_notes, encode_notes({b"a": b"b"}, {}).decode()),
    "figures": (lambda text: BatchFigures.from_json(text.decode()), BATCH.to_json()),
    "waiting": (lambda text: WaitingCommit.from_json(text.decode()), WAITING.to_json()),
    "source": (lambda text: SourceFigures.from_json(text.decode()), SOURCE.to_json()),
    "progress": (lambda text: figures_in(text.decode()), json.dumps(with_figures(POSITION, BATCH))),
    "produced line": (
        lambda text: list(records.from_json([text.decode()])),
        '{"key":"a","value":{"b":1},"timestamp_ms":5,"partition":1,"headers":[{"key":"h","value":"v"}]}',
    ),
    "replay": (lambda text: _parsed(text.decode()), '{"replay":1,"topic_id":"id"}'),
    "state of a sink": (lambda text: state_of(Answer(200, text)), '{"state":"prepared"}'),
    "ids of a sink": (lambda text: pending_ids(Answer(200, text)), '{"pending":["a"]}'),
    "avro schema": (lambda text: arrow_type(Schema("AVRO", text.decode())), json.dumps(AVRO)),
}
EACH = pytest.mark.parametrize("name", READERS)


def _read(name: str, text: str) -> None:
    with contextlib.suppress(KafkaEosError):
        READERS[name][0](text.encode())


@st.composite
def reshaped(draw: st.DrawFn, document: Any) -> Any:
    """A document of which up to two parts are replaced, removed or renamed."""
    found = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 2))):
        holder, key = None, None
        at = found
        while isinstance(at, (dict, list)) and at and (holder is None or draw(st.booleans())):
            key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            holder, at = at, at[key]
        if holder is None:
            return draw(_VALUES)
        if draw(st.integers(0, 5)):
            holder[key] = draw(_VALUES)
        else:
            del holder[key]
    return found


@EACH
def test_a_valid_document_is_read(name: str) -> None:
    assert READERS[name][0](READERS[name][1].encode()) is not None


@EACH
@settings(max_examples=60)
@given(data=st.data())
def test_a_document_of_another_shape_is_read_or_refused_by_name(name: str, data: st.DataObject) -> None:
    document = json.loads(READERS[name][1])
    head = document.get("kafka-eos") if isinstance(document, dict) else None
    found = data.draw(reshaped(document))
    if head is not None and isinstance(found, dict) and name == "token":
        found = {"kafka-eos": found.pop("kafka-eos", head), **found}  # its first key says that it is one
    _read(name, json.dumps(found, separators=(",", ":")))


@EACH
def test_a_text_that_parsers_disagree_about_is_read_or_refused_by_name(name: str) -> None:
    valid = READERS[name][1]
    for text in JSON_VALUES:
        _read(name, text)
        _read(name, f'{{"kafka-eos":{text}}}')
        for place in range(len(valid)):
            if valid[place] in ":[," and len(text) < 1_000:
                _read(name, f"{valid[: place + 1]}{text}{valid[place + 1 :]}"[:20_000])
                break


@pytest.mark.parametrize(
    "header",
    [
        *JSON_VALUES[:60],
        "9" * 400,
        "²",
        "-1",
        "Sun, 06 Nov 99999 08:49:37 GMT",
        "Sun, 06 Nov 1994 08:49:37 +99999999999",
        "Sun, 06 Nov 1994 99:99:99 GMT",
        "Fri, 31 Dec 9999 23:59:59 -2359",
        "Mon, 01 Jan 0001 00:00:00 +2359",
        "0 0 0 0:0:0 0",
        format_datetime(datetime(2024, 1, 1, tzinfo=timezone.utc)),
    ],
)
def test_any_retry_after_is_a_time_or_none(header: str) -> None:
    found = retry_after_seconds(header, datetime(2024, 1, 1, tzinfo=timezone.utc))
    assert found is None or 0 <= found < 1e12


def test_no_other_module_parses_json() -> None:
    """A parser of its own would have exceptions and limits of its own."""
    parsers = {
        "json.loads",
        "json.load",
        "json.JSONDecoder",
        "msgspec.json.Decoder",
        "msgspec.json.decode",
    }
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in parsers
    }
    assert found == {"runtime/json_input.py"}
