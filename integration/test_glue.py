"""Records of AWS Glue: Spark, a broker, killed processes, and Glue's own serializer in Java."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from integration.support.kafka import produce, read_back
from integration.support.registered import DELAY, FLIGHT, WITH_ORIGIN
from integration.support.s3_server import S3PROXY
from integration.support.sink_stream import spec
from kafka_eos_source import App, registry_schema
from kafka_eos_source.embedded import java
from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.protocol import records
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.protobuf_schema import compile_schema
from tests.support import glue_server
from tests.support.glue_records import AVRO, JSON, PROTOBUF, RECORDS, Record
from tests.support.glue_server import REGION, RefusedError, Server

needs_arrow_udfs = pytest.mark.skipif(
    not hasattr(f, "arrow_udf"), reason="from_registry needs the Arrow UDFs of PySpark 4.1"
)
SECONDS = 120


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    glue_server.log_in(monkeypatch)
    with glue_server.running() as running:
        yield running


def framed(version: uuid.UUID, text: str, record: Any, *, packed: bool = False) -> bytes:
    """Returns a message of Glue, written without the product."""
    body = io.BytesIO()
    fastavro.schemaless_writer(body, fastavro.parse_schema(json.loads(text)), record)
    payload = zlib.compress(body.getvalue()) if packed else body.getvalue()
    return bytes([3, 5 if packed else 0]) + version.bytes + payload


def unframed(version: uuid.UUID, text: str, message: bytes | None) -> Any:
    """Returns the record of a compressed message of Glue, read without the product."""
    assert message is not None
    assert message[:18] == b"\3\5" + version.bytes
    body = io.BytesIO(zlib.decompress(message[18:]))
    return fastavro.schemaless_reader(body, fastavro.parse_schema(json.loads(text)), None)


def test_an_app_reads_and_writes_records_of_glue(
    spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str, server: Server
) -> None:
    """The tasks call Glue neither for the reader schema nor for the one that is written."""
    source, sink, dead = topic(1), topic(1), topic(1)
    flight, delay = server.add(source, FLIGHT), server.add(sink, DELAY)
    rows = [{"carrier": f"c{n}", "delay": n} for n in range(100)]
    good = [framed(flight, FLIGHT, each, packed=each["delay"] % 2 == 0) for each in rows]
    produce(broker, source, [*good[:50], b"\3\5" + flight.bytes + b"damaged", *good[50:]])
    app = App("glue", broker, checkpoint=checkpoint, spark=spark)
    flights = app.read(source, registry=server.options, on_bad="dead-letter")
    minutes = f.col("delay").cast("long").alias("minutes")
    write = {**server.options, "compression": "zlib"}
    dead_letters = {"onInvalidRecord": "dead-letter", "deadLetter.topic": dead}
    query = app.write(flights.select("carrier", minutes), sink, registry=write, options=dead_letters)
    assert query.trigger(availableNow=True).start().awaitTermination(SECONDS)
    found = [unframed(delay, DELAY, each.value) for each in read_back(broker, sink)]
    assert found == [{"carrier": each["carrier"], "minutes": each["delay"]} for each in rows]
    (letter,) = read_back(broker, dead)
    assert letter.value == b"\3\5" + flight.bytes + b"damaged"
    assert b"cannot be decompressed" in (dict(letter.headers or [])[records.MESSAGE] or b"")


@needs_arrow_udfs
@pytest.mark.fault(
    "T494", "AWS Glue throttles each new version, and the committing process is killed", "read, produce"
)
@pytest.mark.timeout(600)
def test_t494_records_of_glue_are_written_once_although_it_throttles_and_processes_are_killed(
    broker: str,
    topic: Callable[..., str],
    driver: Any,
    checkpoint: str,
    tmp_path: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, sink, dead = topic(2), topic(2), topic(1)
    old = server.add(source, WITH_ORIGIN)
    flight, delay = server.add(source, FLIGHT), server.add(sink, DELAY)
    answer, throttled = server.answer, set[str]()

    def throttling(call: str, asked: dict[str, Any]) -> dict[str, Any]:
        what = json.dumps(asked)
        if what not in throttled:
            throttled.add(what)
            raise RefusedError("ThrottlingException", "Rate exceeded")
        return answer(call, asked)

    monkeypatch.setattr(server, "answer", throttling)
    values = [{"carrier": f"c{n}", "delay": n} for n in range(200)]
    good = [framed(flight, FLIGHT, each, packed=n % 3 == 0) for n, each in enumerate(values[:100])]
    good += [framed(old, WITH_ORIGIN, {"origin": "JFK", **each}, packed=True) for each in values[100:]]
    bad = [framed(uuid.UUID(int=7), FLIGHT, values[0]), b"\0\0\0\0\1x"]
    produce(broker, source, [*good[:60], *bad, *good[60:]])
    query = spec(broker, source, sink, checkpoint, 110)
    query["registry"] = {
        "registry": {**server.options, "retry.timeout.ms": "60000", "compression": "zlib"},
        "read": {"topic": source},
        "write": {"topic": sink},
    }
    query["sink"]["options"].update({"onInvalidRecord": "dead-letter", "deadLetter.topic": dead})
    armed = f"commit.within_produce=kill-worker@{tmp_path}/once"
    running = driver({**query, "restarts": 1}, armed)
    assert running.wait(400) == 0, running.tail()
    assert (tmp_path / "once").exists()
    found = [unframed(delay, DELAY, each.value) for each in read_back(broker, sink)]
    wanted = [{"carrier": each["carrier"], "minutes": each["delay"]} for each in values]
    assert sorted(found, key=lambda each: each["minutes"]) == wanted
    assert sorted(each.value or b"" for each in read_back(broker, dead)) == sorted(bad)
    assert len(throttled) >= 4, "the reader's, the writer's, the older and the unknown version"


# -- Glue's own serializer -------------------------------------------------------------------------

_VERSION = "1.1.25"
SERIALIZER = java.JarSet(
    "glue",
    (("software.amazon.glue", "schema-registry-serde", _VERSION), ("org.slf4j", "slf4j-nop", "1.7.36")),
    120,
    _VERSION,
    sums=S3PROXY.sums,
)
_PROGRAM = Path(__file__).with_name("support") / "java" / "GlueSerde.java"


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _descriptors(text: str) -> str:
    """Returns a file, after the files that it imports, as Google's descriptors."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    file = compile_schema(Schema("PROTOBUF", text))
    found = FileDescriptorSet()
    for each in (*file.dependencies, file):
        each.CopyToProto(found.file.add())
    return _b64(found.SerializeToString())


def in_java(asked: list[dict[str, Any]]) -> list[str]:
    """Lets Glue's serializer write or read, and returns its answers."""
    try:
        command = [
            java.find(),
            "-XX:TieredStopAtLevel=1",
            "-cp",
            f"{java.jars(SERIALIZER)}/*",
            str(_PROGRAM),
        ]
    except KafkaEosError as error:
        pytest.skip(f"needs Glue's serializer: {error}")
    text = "\n".join(map(json.dumps, asked))
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [each["error"] for each in answers if "error" in each]
    return [next(iter(each.values())) for each in answers]


@pytest.mark.long
def test_glues_own_serializer_reads_and_writes_the_same_records(server: Server) -> None:
    options = {"region": REGION, "endpoint": server.url, "registry.name": "default-registry"}
    options |= {"schemaAutoRegistrationEnabled": "true", "avroRecordType": "GENERIC_RECORD"}

    def asked(record: Record, **more: Any) -> dict[str, Any]:
        own = {"dataFormat": record.format, "compression": record.compression.upper()}
        return {"options": {**options, **own}, "topic": f"t-{record.format}", **more}

    def to_write(record: Record) -> dict[str, Any]:
        if record.format != "PROTOBUF":
            schema = AVRO if record.format == "AVRO" else JSON
            return asked(record, data=record.payload, schema=schema)
        assert isinstance(record.payload, bytes)
        return asked(record, data=_b64(record.payload), files=_descriptors(PROTOBUF), message=record.message)

    written = [base64.b64decode(each) for each in in_java([to_write(each) for each in RECORDS])]
    values = []
    for record, message in zip(RECORDS, written, strict=True):
        assert message[:2] + message[18:] == record.framed[:2] + record.framed[18:], record
        name = f"acme.{record.message}" if record.message else None
        write = {**server.options, "compression": record.compression}
        schema = registry_schema(write, topic=f"t-{record.format}", message=name)
        decoded = schema.decoding().decode(pa.array([message]))
        assert decoded.errors == {}
        values.append(schema.encoding().encode(decoded.values).values[0].as_py())
    assert values == written
    read = in_java([asked(each, bytes=_b64(value)) for each, value in zip(RECORDS, values, strict=True)])
    for record, text in zip(RECORDS, read, strict=True):
        if isinstance(record.payload, bytes):
            assert text == f"acme.{record.message} {_b64(record.payload)}"
        else:
            assert json.loads(text) == record.value
