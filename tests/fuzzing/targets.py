"""The border for foreign bytes as one table: what reads them, and which errors it may raise.

`tests/fuzzing/test_fuzzing.py` replays the corpus of each target; ``./dev fuzz`` searches for new inputs. An
error that the table does not allow is a finding.
"""

from __future__ import annotations

import io
import json
import struct
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from typing import Any

import kafka.protocol.admin
import kafka.protocol.consumer
import kafka.protocol.metadata
import kafka.protocol.producer
import kafka.protocol.sasl
import pyarrow as pa
from kafka.errors import KafkaError as KafkaPythonError
from kafka.protocol.api_message import ApiMessage
from pyspark.sql.types import MapType, StringType, StructField, StructType

import tests.support.fetched_log as log
from kafka_eos_source.documents.decode import JsonDecoding
from kafka_eos_source.documents.encode import JsonEncoding
from kafka_eos_source.errors import InvalidRecordError, KafkaEosError
from kafka_eos_source.kafka.access import Session, new_exchange
from kafka_eos_source.kafka.compression import decompressed
from kafka_eos_source.kafka.failure import LoginRefusedError
from kafka_eos_source.kafka.fetched_batches import DamagedBatchError, FetchedBatches, decode
from kafka_eos_source.kafka.kernel import WANTS, kernel
from kafka_eos_source.kafka.messages import check_size, decoded, fetch_answer
from kafka_eos_source.kafka.tokens import OAuthService
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate.rescale_copy import CopyJournal
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.offset_log import SourcePosition, is_kafka_offset_json
from kafka_eos_source.protocol.records import DeadLetter
from kafka_eos_source.protocol.token import Mark, Token, TokenRecord
from kafka_eos_source.read.columns import Run, record_batches
from kafka_eos_source.registry import codec as codecs
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import SinkTxn
from kafka_eos_source.sinks.http_client import Answer, meaning_of, pending_ids, retry_after_seconds, state_of
from kafka_eos_source.state.snapshots.storage import Manifest, ManifestName, UnusableSnapshotError
from tests.documents import json_model as model
from tests.documents.json_examples import DOCUMENTS, MIXED, SCALARS, VALUES

TP = TopicPartition("t", 0)
#: What a connection takes for a damaged answer (`Connection._answered`).
_DAMAGED = (ValueError, IndexError, struct.error, KeyError)


@dataclass(frozen=True)
class Target:
    """A function that reads foreign bytes.

    Attributes:
        run: the function.
        allowed: the errors that it may raise.
        seeds: bytes that it accepts.
    """

    run: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...] = field(default=(), repr=False)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


# -- the wire ------------------------------------------------------------------------------------


@cache
def requests() -> tuple[type[Any], ...]:
    """Returns the kinds of requests of kafka-python whose answers `decoded` reads."""
    found = {}
    for module in (
        kafka.protocol.admin,
        kafka.protocol.consumer,
        kafka.protocol.metadata,
        kafka.protocol.sasl,
    ):
        for name, each in sorted(vars(module).items()):
            if isinstance(each, type) and issubclass(each, ApiMessage) and name.endswith("Request"):
                found[name] = each
    return tuple(found.values())


def answer(data: bytes) -> None:
    """Decodes an answer; the first bytes choose the request and its version."""
    if len(data) < 6:
        return
    kind = requests()[data[0] % len(requests())]
    span = kind.max_version - kind.min_version + 1
    request = kind(version=kind.min_version + data[1] % span)
    number = int.from_bytes(data[2:6], "big", signed=True)
    decoded(request, data[2:], number)


def api_versions(data: bytes) -> None:
    """Takes over the answer with which each connection begins."""
    request = kafka.protocol.metadata.ApiVersionsRequest(version=data[0] % 5 if data else 0)
    found = decoded(request, b"\0\0\0\1" + data[1:], 1)
    session = Session()
    session.learn(found, "host:9092")
    for low, high in session.versions.values():
        min(low, high)
    dict(session.features)


def batches(data: bytes) -> None:
    """Reads record batches; the first byte says whether checksums are checked, and made right before."""
    if not data:
        return
    how, data = data[0], data[1:]
    if how & 1 and len(data) > 61:
        data = log.with_checksum(data)
    found = FetchedBatches.of(kernel(), TP, 0, memoryview(data), ((1, 0),), checks=bool(how & 2))
    group = [(found, 1 << 62)]
    for part in decode(
        kernel(), sum(set(WANTS.values())), group, committed=bool(how & 4), most_bytes=1 << 24
    ):
        if len(part.messages):
            record_batches([Run(TP, part.messages, part.messages.offsets)], True, None)
    if found.damage is not None:
        raise found.damage


def compression(data: bytes) -> None:
    if data:
        decompressed(data[0] % 6, memoryview(data)[1:], 1 << 20)


def scram(data: bytes) -> None:
    """Takes two messages of a server, separated by a zero byte."""
    conf = {"sasl.username": "u", "sasl.password": "p"}
    exchange = new_exchange("SCRAM-SHA-256", conf, None, "host", Deadline.after_seconds(5))
    nonce = exchange.auth_bytes().split(b"r=")[-1]
    for each in data.split(b"\0")[:3]:
        exchange.receive(each.replace(b"NONCE", nonce))
        exchange.auth_bytes()


# -- tokens, positions, manifests ----------------------------------------------------------------


def token(data: bytes) -> None:
    text = _text(data)
    for found in (Token.decode(text), Token.decode('{"kafka-eos":1,' + text)):
        if found is not None:
            assert Token.decode(found.encode()) == found
    Mark.decode(text)
    CopyJournal.decode(text)


def token_record(data: bytes) -> None:
    key, _, value = data.partition(b"\0")
    TokenRecord.decode(key, value)


def position(data: bytes) -> None:
    is_kafka_offset_json(_text(data))
    SourcePosition.from_json(_text(data))


def spark_offsets(data: bytes) -> None:
    offset_log.parse(_text(data), "offsets/3", 3)


def names(data: bytes) -> None:
    SinkTxn.parse(_text(data))
    ManifestName.parse(_text(data))


def dead_letter(data: bytes) -> None:
    pieces = data.split(b"\0")
    DeadLetter.parse([(_text(name), value) for name, value in zip(pieces[::2], pieces[1::2], strict=False)])


def manifest(data: bytes) -> None:
    Manifest.decode(data)


# -- answers of services -------------------------------------------------------------------------


class _Answered(urllib.request.OpenerDirector):
    """Answers each request with the same bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def open(self, *_: Any, **__: Any) -> Any:
        return io.BytesIO(self.data)


def oauth(data: bytes) -> None:
    service = OAuthService("http://127.0.0.1/token", {}, lambda: {"grant_type": "client_credentials"}, {})
    service._opener = _Answered(data)
    issued = service(Deadline.after_seconds(5))
    assert isinstance(issued.expires, float)


def jwt(data: bytes) -> None:
    import kafka_eos_source.kafka.tokens as tokens

    tokens._expiry(_text(data))


def http_sink(data: bytes) -> None:
    """The first byte chooses the status; a line is the header ``Retry-After``."""
    status = [200, 404, 409, 429, 500][data[0] % 5] if data else 200
    header, _, body = data[1:].partition(b"\n")
    found = Answer(status, body, retry_after_seconds(_text(header), datetime.now(timezone.utc)))
    meaning_of(found)
    state_of(found)
    pending_ids(found)
    str(found)


# -- records and schemas -------------------------------------------------------------------------

AVRO = Schema(
    "AVRO",
    json.dumps(
        {
            "type": "record",
            "name": "R",
            "fields": [
                {"name": "a", "type": ["null", "int"]},
                {"name": "b", "type": {"type": "array", "items": "string"}},
                {"name": "c", "type": {"type": "map", "values": "double"}},
                {
                    "name": "d",
                    "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
                },
                {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["x", "y"]}},
                {"name": "f", "type": {"type": "long", "logicalType": "timestamp-micros"}},
                {"name": "g", "type": ["null", {"type": "fixed", "name": "F", "size": 3}, "boolean"]},
            ],
        }
    ),
)
PROTOBUF = Schema(
    "PROTOBUF",
    'syntax = "proto3"; import "google/protobuf/timestamp.proto"; message R { int32 a = 1; '
    "map<string, double> m = 3; oneof o { string s = 4; bytes b = 5; } google.protobuf.Timestamp t = 6; "
    "repeated sint64 p = 7; enum E { X = 0; Y = 1; } E e = 8; }",
)
DECLARED = StructType([*MIXED.fields, *(StructField(f"c{at}", each) for at, each in enumerate(SCALARS))])
JSON = Schema(
    "JSON",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "array", "items": {"type": "string"}},
                "c": {"type": "object", "properties": {"d": {"type": "number"}}},
                "t": {"type": "boolean"},
            },
        }
    ),
)


@cache
def _decoder(schema: Schema) -> Any:
    return codecs.decoder(schema, (0,), None, None)


def records(schema: Schema) -> Callable[[bytes], None]:
    """Returns what decodes a record, twice in one column, between others."""

    def run(data: bytes) -> None:
        column = pa.array([b"", data, None, data[1:]], pa.binary())
        found = _decoder(schema).decode(column, 0)
        found.values.validate(full=True)
        assert len(found.values) == len(column)

    return run


def json_text(data: bytes) -> None:
    """Writes a string with any bytes as the key and the value of a map; the document must be JSON."""
    raw = pa.array([data], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 1, raw.buffers())
    entries = pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), text, text)
    made = JsonEncoding(MapType(StringType(), StringType()), "UTC").encode(entries)
    ((key, value),) = json.loads(made[0].as_py()).items()
    if key != value or ("\ufffd" not in value and value.encode() != data):
        raise AssertionError(f"{data!r} became {value!r}")


def documents(data: bytes) -> None:
    """Decodes documents, which two zero bytes separate; their rows must be those of the model."""
    column = data.split(b"\0\0")[:8]
    for partial in (False, True):
        found = JsonDecoding(DECLARED, "America/New_York", partial).decode(pa.array(column, pa.binary()))
        found.values.validate(full=True)
        rows = model.plain(found.values)
        for number, document in enumerate(column):
            row, is_bad = model.decoded(document, DECLARED, "America/New_York", partial)
            assert (number in found.errors, model.comparable(rows[number])) == (is_bad, model.comparable(row))


def schema(kind: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        codecs.decoder(Schema(kind, _text(data)), (0,), None, None)  # type: ignore[arg-type]

    return run


# -- seeds ---------------------------------------------------------------------------------------


def _batch_seeds() -> tuple[bytes, ...]:
    found = log.Log()
    for codec in (log.NONE, log.GZIP, log.SNAPPY, log.XERIAL, log.LZ4, log.ZSTD):
        found.append([log.Record(0, b"k", b"value" * 20, [(b"h", b"1")], 7)] * 2, codec=codec)
    found.append([log.Record(0, b"k", b"v")], producer=1, transactional=True)
    found.finish(1, log.ABORT)
    one = [each.encoded() for each in found.batches]
    return (*(b"\6" + each for each in one), b"\7" + b"".join(one), b"\5" + one[0])


def _packed_seeds() -> tuple[bytes, ...]:
    plain = b"some bytes " * 40
    numbers = {log.GZIP: 1, log.SNAPPY: 2, log.XERIAL: 2, log.LZ4: 3, log.ZSTD: 4}
    return tuple(bytes([number]) + log.compressed(plain, codec) for codec, number in numbers.items())


def _document_seeds() -> tuple[bytes, ...]:
    """Returns documents with values of all types, and others of all shapes, several in each input."""
    kinds = [(f"c{number}", texts) for number, texts in enumerate([VALUES] * len(SCALARS))]
    values = [f'{{"{name}":{text}}}'.encode() for name, texts in kinds for text in texts[::3]]
    shapes = [each for each in DOCUMENTS if len(each) < 400]
    found = [*shapes, *values]
    return tuple(b"\0\0".join(found[at : at + 8]) for at in range(0, len(found), 8))


_TOKEN = (
    b'{"kafka-eos":1,"app":"a","query":"q","run":"r","seq":3,"batch":2,"start":"s","end":"e","rows":7,'
    b'"target":"t","cluster":"c","txn":3,"parts":2}'
)
_RECORD = b'{"kafka-eos-record":1,"token":' + _TOKEN + b',"group":"g","ends":{"t":[[0,[5]]]}}'
_IDS = b'{"pending": ["a", "b"]}'

TARGETS: Mapping[str, Target] = {
    "answers": Target(answer, _DAMAGED),
    "api-versions": Target(
        api_versions,
        (*_DAMAGED, ConnectionError),
        (b"\3\0\0\3\0\1\0\0\0\5\0\0\0\0\0\0", b"\0\0\0\0\0\0\1\0\0\0\0\0\5"),
    ),
    "batches": Target(batches, (DamagedBatchError, InvalidRecordError), _batch_seeds()),
    "compression": Target(compression, (OSError, ValueError, zlib.error), _packed_seeds()),
    "fetch": Target(
        lambda data: fetch_answer(4 + data[0] % 9 if data else 4, memoryview(data)[1:]),
        _DAMAGED,
        (b"\x08\0\0\0\0\0\0\0\0\0\1\0", b"\0\0\0\0\0\0\0\0\0\0\0\0\0"),
    ),
    "size": Target(
        lambda data: check_size(int.from_bytes(data[:4].ljust(4, b"\0"), "big", signed=True), "h"),
        (ConnectionError,),
    ),
    "scram": Target(
        scram,
        (ValueError, LookupError, KafkaPythonError, LoginRefusedError),  # as `open_session` allows
        (b"r=NONCEx,s=c2FsdA==,i=4096\0v=AAAA", b"e=other-error"),
    ),
    "token": Target(token, (KafkaEosError,), (_TOKEN, b"kafka-eos:0123456789ab:5")),
    "token-record": Target(token_record, (KafkaEosError,), (b"a\0" + _RECORD,)),
    "position": Target(
        position, (KafkaEosError,), (b'{"t":{"0":5,"1":7}}', b'{"t":{"0":5},"kafka-eos":{"v":1}}')
    ),
    "offset-log": Target(
        spark_offsets,
        (KafkaEosError,),
        (b'v1\n{"batchTimestampMs":5}\n{"t":{"0":5}}', b'v2\n{}\nsource:{"t":{}}'),
    ),
    "names": Target(names, (), (b"app.0123456789abcdef.sink.00000000000000000003.0123456789abcdef",)),
    "dead-letter": Target(dead_letter, (), (b"kafka-eos-batch\0" + b"5",)),
    "manifest": Target(
        manifest,
        (KafkaEosError, UnusableSnapshotError),
        (b'{"format":1,"identity":{},"next_offset":3,"batch":{},"created_ms":5,"files":[]}',),
    ),
    "oauth": Target(
        oauth,
        (OSError, LoginRefusedError),
        (b'{"access_token":"a.eyJleHAiOjF9.c","expires_in":300}', b'{"access_token":"a.eyJleHAiOjF9.c"}'),
    ),
    "jwt": Target(jwt, (), (b"a.eyJleHAiOjF9.c",)),
    "http-sink": Target(
        http_sink,
        (),
        (b"\0" + b"5\n" + _IDS, b"\0\n" + b'{"state":"prepared"}', b"\3Wed, 21 Oct 2015 07:28:00 GMT\n"),
    ),
    "avro": Target(records(AVRO), (), (b"\2\4\2\2a\0\2\2k\0\0\0\0\0\0\0\0\0\2\1\0\2\0",)),
    "protobuf": Target(
        records(PROTOBUF), (), (b"\x08\x05\x1a\x05\x0a\x01k\x11\x00", b"\x22\1s\x32\2\x08\5\x3a\2\1\2")
    ),
    "json": Target(records(JSON), (), (b'{"a":1,"b":["x"],"c":{"d":1.5},"t":true}',)),
    "json-text": Target(
        json_text, (), (b'plain "\\\0\x1f', "\u00e9\u20ac\U0001f600".encode(), b"\xed\xa0\x80\xf0\x9f\x98")
    ),
    "json-documents": Target(documents, (), _document_seeds()),
    "avro-schema": Target(
        schema("AVRO"), (KafkaEosError,), (AVRO.text.encode(), b'"int"', b'["null","string"]')
    ),
    "json-schema": Target(schema("JSON"), (KafkaEosError,), (JSON.text.encode(), b"true", b'{"$ref":"#"}')),
}
