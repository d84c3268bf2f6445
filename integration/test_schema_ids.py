"""Headers name the schemas of records from Confluent's serializers, and for Confluent's deserializers.

The registry is a double, because none that can be had here knows GUIDs; the rest is real.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import (
    SchemaRegistryClient,
    header_schema_id_serializer,
    prefix_schema_id_serializer,
    topic_subject_name_strategy,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from integration.support.kafka import Record, read_back
from integration.support.registered import DELAY, FLIGHT, WITH_ORIGIN
from kafka_eos_source import App, from_registry, map_in_read, registry_schema, to_registry, undecodable_record
from kafka_eos_source.protocol import records
from kafka_eos_source.registry.frames import VALUE_HEADER
from tests.support import registry_server
from tests.support.registry_server import Server

needs_arrow_udfs = pytest.mark.skipif(
    not hasattr(f, "arrow_udf"), reason="from_registry needs the Arrow UDFs of PySpark 4.1"
)
BY_TOPIC = {"subject.name.strategy": topic_subject_name_strategy}
SECONDS = 120
#: A schema whose records may begin like a frame of Confluent's: the bytes 0x00 and a schema id.
NUMBERS = json.dumps(
    {
        "type": "record",
        "name": "Flight",
        "namespace": "test",
        "fields": [
            *({"name": f"n{at}", "type": "int", "default": 0} for at in range(5)),
            {"name": "carrier", "type": "string"},
            {"name": "delay", "type": ["null", "int"]},
        ],
    }
)


@dataclass
class World:
    """Topics, and the double of a registry with the schemas of both."""

    broker: str
    spark: SparkSession
    server: Server
    source: str
    sink: str
    dead: str
    checkpoint: str
    sent: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.client = SchemaRegistryClient({"url": self.server.url})
        self.server.add(f"{self.sink}-value", DELAY)

    def send(self, text: str, record: Any, place: Callable[..., Any] = header_schema_id_serializer) -> bytes:
        """Sends a record that Confluent's serializer has made; returns its value."""
        headers: list[tuple[str, bytes]] = []
        write = AvroSerializer(self.client, text, conf={**BY_TOPIC, "schema.id.serializer": place})
        value = write(record, SerializationContext(self.source, MessageField.VALUE, headers))
        return self.send_bytes(value, headers)

    def send_bytes(self, value: bytes, headers: list[tuple[str, bytes]]) -> bytes:
        producer = Producer({"bootstrap.servers": self.broker})
        producer.produce(self.source, value, b"k%d" % self.sent, headers=headers)
        assert producer.flush(SECONDS) == 0
        self.sent += 1
        return value

    def options(self, **more: str) -> dict[str, str]:
        return {"url": self.server.url, "retry.timeout.ms": "2000", **more}

    def app(self) -> App:
        return App(f"ids-{uuid.uuid4().hex[:8]}", self.broker, checkpoint=self.checkpoint, spark=self.spark)

    def write(self, app: App, frame: DataFrame, **arguments: Any) -> None:
        letters = {"onInvalidRecord": "dead-letter", "deadLetter.topic": self.dead}
        writer = app.write(frame, self.sink, **arguments, options=letters)
        assert writer.trigger(availableNow=True).start().awaitTermination(SECONDS)

    def delays(self) -> list[Any]:
        """Returns the records in the sink as Confluent's deserializer reads them; headers name the schema."""
        read = AvroDeserializer(self.client, conf=BY_TOPIC)
        found = []
        for each in read_back(self.broker, self.sink):
            assert [name for name, _ in each.headers or []].count(VALUE_HEADER) == (each.value is not None)
            found.append(read(each.value, SerializationContext(self.sink, MessageField.VALUE, each.headers)))
        return found

    def letter(self) -> Record:
        (found,) = read_back(self.broker, self.dead)
        return found


@pytest.fixture
def world(broker: str, spark: SparkSession, topic: Callable[..., str], checkpoint: str) -> Iterator[World]:
    with registry_server.running() as server:
        yield World(broker, spark, server, topic(1), topic(1), topic(1), checkpoint)


def send_all(world: World) -> tuple[list[Any], bytes]:
    """Sends records of three schemas, and a bad one; returns the delays, and the bad value."""
    world.send(FLIGHT, {"carrier": "Atlantic", "delay": 5}, prefix_schema_id_serializer)
    world.send(WITH_ORIGIN, {"origin": "JFK", "carrier": "Baltic", "delay": 6})
    # 0x00, and the id 1 of the schema above: what is behind it was decoded to a wrong value
    numbers = {**{f"n{at}": int(at == 4) * -1 for at in range(5)}, "carrier": "Coral", "delay": 7}
    value = world.send(NUMBERS, numbers)
    assert value.startswith(b"\0\0\0\0\1")
    bad = world.send_bytes(b"\x02", [(VALUE_HEADER, b"\1" + world.server.guid(2).bytes)])
    return [{"carrier": c, "minutes": m} for c, m in (("Atlantic", 5), ("Baltic", 6), ("Coral", 7))], bad


@pytest.mark.fault("T492", "a payload begins like a frame, but a header names its schema", "decoding")
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("in the read", marks=pytest.mark.core),
        "through Spark",  # to_registry needs PySpark 4.1
        pytest.param("map_in_read", marks=pytest.mark.core),
    ],
)
def test_t492_headers_name_schemas_from_confluents_serializer_to_its_deserializer(
    world: World, way: str
) -> None:
    delays, bad = send_all(world)
    app, written = world.app(), world.options(**{"schema.id.location": "header"})
    if way == "map_in_read":

        def late(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                carrier, delay = (pc.struct_field(batch["value"], name) for name in ("carrier", "delay"))
                value = pa.StructArray.from_arrays([carrier, delay.cast(pa.int64())], ["carrier", "minutes"])
                yield pa.record_batch({"key": batch["key"], "value": value})

        result = map_in_read(
            app.read(world.source),
            late,
            "key BINARY, value BINARY",
            decode={"value": registry_schema(world.options(), topic=world.source, version=1)},
            encode={"value": registry_schema(written, topic=world.sink)},
        )
        world.write(app, result)
    else:
        reader = registry_schema(world.options(), topic=world.source, version=1)
        flights = app.read(world.source, registry=reader, keep="key", on_bad="dead-letter")
        result = flights.withColumnRenamed("delay", "minutes")
        if way == "through Spark":
            result = result.withColumn("minutes", f.col("minutes").cast("long"))
        world.write(app, result, key="key", registry=written)
    assert world.delays() == delays
    letter = world.letter()
    headers = dict(letter.headers or [])
    assert (letter.value, headers[records.ORIGIN_OFFSET]) == (bad, b"3")
    assert headers[VALUE_HEADER] == b"\1" + world.server.guid(2).bytes, "a replay needs it"


@needs_arrow_udfs
@pytest.mark.fault("T493", "the registry does not answer for the GUID in a header", "decoding")
def test_t493_plain_columns_take_headers_and_an_outage_makes_no_record_bad(world: World) -> None:
    delays, bad = send_all(world)
    options = {"kafka.bootstrap.servers": world.broker, "subscribe": world.source, "includeHeaders": "true"}
    source = world.spark.readStream.format("kafka-eos").options(**options, startingOffsets="earliest").load()
    reader = registry_schema(world.options(), topic=world.source, version=1)
    flight = from_registry("value", reader, headers="headers", mode="permissive")
    delay = f.struct("flight.value.carrier", f.col("flight.value.delay").cast("long").alias("minutes"))
    written = world.options(**{"schema.id.location": "header"})
    encoded = to_registry(delay, written, topic=world.sink)
    frame = source.withColumn("flight", flight).withColumn(
        "made", f.when(f.col("flight.error").isNull(), encoded)
    )
    own = f.when(f.col("made").isNull(), f.col("value")).otherwise(f.col("made.value")).alias("value")
    headers = f.coalesce("made.headers", "headers").alias("headers")
    frame = frame.select("key", own, headers, undecodable_record("flight"))
    writer = frame.writeStream.format("kafka-eos").option("checkpointLocation", world.checkpoint)
    writer = writer.options(**{"kafka.bootstrap.servers": world.broker, "topic": world.sink})
    writer = writer.options(**{"onInvalidRecord": "dead-letter", "deadLetter.topic": world.dead})
    world.server.fault = (503, "{}")
    query = writer.trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match=rf"(?s)REGISTRY_UNAVAILABLE.*{world.server.guid(3)}"):
        query.awaitTermination(SECONDS)
    world.server.fault = None
    assert read_back(world.broker, world.dead) == []
    assert writer.trigger(availableNow=True).start().awaitTermination(SECONDS)
    assert world.delays() == delays
    letter = world.letter()
    assert letter.value == bad
    assert dict(letter.headers or [])[VALUE_HEADER] == b"\1" + world.server.guid(2).bytes
