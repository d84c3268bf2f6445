"""Records with a schema registry: a real one, a broker, Spark, and killed processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StreamingQuery

from integration.support.kafka import produce, read_back
from integration.support.processes import await_condition
from integration.support.query import Query
from integration.support.registered import (
    DELAY,
    DELAY_PROTO,
    FLIGHT,
    WITH_ORIGIN,
    WITHOUT_DELAY,
    avro,
    avro_record,
    delay_proto,
    delays,
    of_other_clients,
)
from integration.support.registry import PATH, Registry
from integration.support.sink_stream import spec
from integration.support.tls_registry import PASSWORD, USER, TlsRegistry, tls_registry
from kafka_eos_source import from_registry, map_in_read, registry_schema, to_registry, undecodable_record
from kafka_eos_source.errors import AuthorizationError, RegistryUnavailableError
from kafka_eos_source.protocol import records

needs_arrow_udfs = pytest.mark.skipif(
    not hasattr(f, "arrow_udf"), reason="from_registry needs the Arrow UDFs of PySpark 4.1"
)
SECONDS = 120


class World:
    """Two topics, a dead-letter topic, and the schemas of both in the registry."""

    def __init__(
        self, spark: SparkSession, query: Query, dead: str, registry: Registry, out: str, kind: str = "AVRO"
    ) -> None:
        self.spark, self.query, self.dead, self.registry = spark, query, dead, registry
        self.broker = query.broker
        self.flight = registry.register(f"{query.source}-value", FLIGHT)
        self.delay = registry.register(f"{query.sink}-value", out, kind)
        self.spec: dict[str, Any] = {
            "registry": {"url": registry.url, "retry.timeout.ms": "3000"},
            "read": {"topic": query.source},
            "write": {"topic": query.sink},
        }

    def send(self, *messages: bytes | None) -> None:
        produce(self.broker, self.query.source, messages)

    def start(self, frame: DataFrame, **trigger: Any) -> StreamingQuery:
        writer = frame.writeStream.format("kafka-eos")
        writer = writer.options(**{"kafka.bootstrap.servers": self.broker, "topic": self.query.sink})
        writer = writer.options(**{"onInvalidRecord": "dead-letter", "deadLetter.topic": self.dead})
        writer = writer.option("checkpointLocation", self.query.checkpoint)
        return writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start()

    def delays(self) -> list[tuple[int, Any]]:
        """Returns schema id and record of each message in the sink."""
        return [avro_record(DELAY, each.value or b"") for each in read_back(self.broker, self.query.sink)]

    def await_delays(self, query: StreamingQuery, wanted: list[Any]) -> None:
        def arrived() -> bool:
            assert query.isActive, query.exception()
            return len(self.delays()) >= len(wanted)

        await_condition(arrived, SECONDS, f"{len(wanted)} records are in the sink")
        assert self.delays() == [(self.delay, {"carrier": c, "minutes": m}) for c, m in wanted]


@pytest.fixture
def world(
    spark: SparkSession,
    broker: str,
    topic: Callable[..., str],
    checkpoint: str,
    schema_registry: Registry,
) -> World:
    query = Query(spark, broker, topic(1), topic(1), checkpoint)
    return World(spark, query, topic(1), schema_registry, DELAY)


@needs_arrow_udfs
def test_writers_schemas_may_change_while_the_query_runs(world: World) -> None:
    """New ids arrive in the running query, whose reader schema stays that of its start."""
    world.send(avro(world.flight, FLIGHT, {"carrier": "AA", "delay": 5}))
    query = world.start(delays(world.query.frame(), world.spec))
    try:
        wanted: list[Any] = [("AA", 5)]
        world.await_delays(query, wanted)
        newer = world.registry.register(f"{world.query.source}-value", WITH_ORIGIN)
        assert newer != world.flight
        world.send(
            avro(newer, WITH_ORIGIN, {"origin": "JFK", "carrier": "BB", "delay": None}),
            avro(world.flight, FLIGHT, {"carrier": "CC", "delay": -3}),
            b"not framed",
            b"\1" + bytes(16),  # the frame of a GUID, which this registry does not know
            avro(newer, WITH_ORIGIN, {"origin": "LGA", "carrier": "DD", "delay": 1}),
        )
        wanted += [("BB", 0), ("CC", -3), ("DD", 1)]
        world.await_delays(query, wanted)
        # no delay, and the reader schema has no default for it: this id is bad, and only this one
        unfit = world.registry.register("elsewhere-value", WITHOUT_DELAY)
        world.send(avro(unfit, WITHOUT_DELAY, {"carrier": "EE"}))
        await_condition(lambda: len(read_back(world.broker, world.dead)) == 3, SECONDS, "dead letters")
    finally:
        query.stop()
    first, guid, second = read_back(world.broker, world.dead)
    assert b"knows no GUIDs of schemas" in (dict(guid.headers or [])[records.MESSAGE] or b"")
    assert first.value == b"not framed"
    headers = dict(first.headers or [])
    assert headers[records.ERROR] == b"UndecodableRecord"
    assert b"magic byte" in (headers[records.MESSAGE] or b"")
    assert headers[records.ORIGIN_OFFSET] == b"3"
    message = dict(second.headers or [])[records.MESSAGE] or b""
    assert f"schema id {unfit} does not fit the reader schema".encode() in message


@needs_arrow_udfs
@pytest.mark.fault("T128", "the schema registry is killed, and comes back", "while batches run")
def test_an_outage_of_the_registry_stops_new_ids_and_makes_no_record_bad(world: World) -> None:
    """Cached ids go on; a new id fails the query by name, and is read when the registry is back."""
    # the registry gives one id to equal schemas, and Spark's workers may have cached that of another test
    unseen = WITH_ORIGIN.replace("unknown", world.query.source)
    other = world.registry.register(f"{world.query.source}-value", unseen)
    world.spec["read"]["version"] = 1
    frame = delays(world.query.frame(), world.spec)
    world.send(avro(world.flight, FLIGHT, {"carrier": "AA", "delay": 5}))
    query = world.start(frame)
    wanted: list[Any] = [("AA", 5)]
    world.await_delays(query, wanted)
    world.registry.kill()
    try:
        world.send(avro(world.flight, FLIGHT, {"carrier": "BB", "delay": 6}))
        wanted.append(("BB", 6))
        world.await_delays(query, wanted)
        world.send(
            avro(world.flight, FLIGHT, {"carrier": "CC", "delay": 7}),
            avro(other, unseen, {"origin": "JFK", "carrier": "DD", "delay": 8}),
        )
        with pytest.raises(StreamingQueryException) as raised:
            assert query.awaitTermination(SECONDS), "the query goes on"
        text = str(raised.value)
        assert "KAFKA_EOS.REGISTRY_UNAVAILABLE" in text
        assert f"schema id {other} within 3 s" in text
        assert world.registry.url in text
        assert len(world.delays()) == len(wanted), "a part of the failed batch is visible"
    finally:
        query.stop()
        world.registry.start()
    query = world.start(frame)
    try:
        world.await_delays(query, [*wanted, ("CC", 7), ("DD", 8)])
    finally:
        query.stop()
    assert read_back(world.broker, world.dead) == []


@pytest.mark.core
def test_map_in_read_decodes_and_encodes_inside_the_read(world: World) -> None:
    def late(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            batch = batch.filter(pc.greater(pc.struct_field(batch["value"], "delay"), 0))
            carrier, delay = (pc.struct_field(batch["value"], name) for name in ("carrier", "delay"))
            value = pa.StructArray.from_arrays([carrier, delay.cast(pa.int64())], ["carrier", "minutes"])
            yield pa.record_batch({"key": batch["key"], "value": value})

    sent = [avro(world.flight, FLIGHT, {"carrier": f"c{n}", "delay": n - 50}) for n in range(100)]
    world.send(*sent, b"bad")
    registry = world.spec["registry"]
    frame = map_in_read(
        world.query.frame().select("key", "value", "topic", "partition", "offset"),
        late,
        "key BINARY, value BINARY",
        decode={"value": registry_schema(registry, topic=world.query.source)},
        encode={"value": registry_schema(registry, topic=world.query.sink)},
    )
    assert world.start(frame, availableNow=True).awaitTermination(SECONDS)
    assert [each["carrier"] for _, each in world.delays()] == [f"c{n}" for n in range(51, 100)]
    (letter,) = read_back(world.broker, world.dead)
    assert letter.value == b"bad"
    assert dict(letter.headers or [])[records.ORIGIN_OFFSET] == b"100"


#: What `DELAY_PROTO` describes, as JSON.
DELAY_JSON = json.dumps(
    {
        "type": "object",
        "properties": {"carrier": {"type": "string"}, "minutes": {"type": "integer"}},
        "required": ["carrier", "minutes"],
    }
)


@pytest.fixture(scope="module")
def behind_tls(schema_registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRegistry]:
    folder = tmp_path_factory.mktemp("tls")
    with tls_registry(folder, schema_registry.port, PATH) as found:
        yield found


@needs_arrow_udfs
def test_json_and_protobuf_in_one_select_with_a_registry_behind_tls(
    world: World, behind_tls: TlsRegistry
) -> None:
    """JSON keys become Protobuf and Protobuf values become JSON; the tasks log in to look up an older id."""
    registry = world.registry
    older = registry.register(f"{world.query.source}-key", DELAY_JSON.replace("minutes", "duration"), "JSON")
    registry.call("PUT", f"/config/{world.query.source}-key", {"compatibility": "NONE"})
    as_json = registry.register(f"{world.query.source}-key", DELAY_JSON, "JSON")
    as_proto = registry.register(f"{world.query.source}-other", DELAY_PROTO, "PROTOBUF")
    options = {
        "url": behind_tls.url,
        "basic.auth.user.info": f"{USER}:{PASSWORD}",
        "ssl.ca.location": str(behind_tls.ca),
        "retry.timeout.ms": "3000",
    }
    proto = registry_schema(options, subject=f"{world.query.source}-other", message="test.Delay")
    documents = registry_schema(options, topic=world.query.source, is_key=True)
    rows = [(f"c{n}", n % 100) for n in range(300)]

    def document(number: int, carrier: str, minutes: int) -> bytes:
        name = "duration" if number == older else "minutes"
        body = json.dumps({"carrier": carrier, name: minutes}, separators=(",", ":"))
        return b"\0" + number.to_bytes(4, "big") + body.encode()

    produce(
        world.broker,
        world.query.source,
        [delay_proto(as_proto, *row) for row in rows],
        keys=[document(older if n % 3 else as_json, *row) for n, row in enumerate(rows)],
    )
    before = len(behind_tls.accepted)
    key, value = from_registry("key", documents), from_registry("value", proto)
    frame = world.query.frame().select(
        to_registry(f.struct(key["carrier"].alias("carrier"), key["minutes"].alias("minutes")), proto).alias(
            "key"
        ),
        to_registry(value, documents).alias("value"),
    )
    world.query.run(frame)
    found = read_back(world.broker, world.query.sink)
    assert [each.value for each in found] == [document(as_json, *row) for row in rows]
    # the property `duration` of the older schema is not in the reader schema, which makes `minutes` null
    assert [each.key for each in found] == [
        delay_proto(as_proto, row[0], 0 if n % 3 else row[1]) for n, row in enumerate(rows)
    ]
    assert any(f"/schemas/ids/{older}" in path for path in behind_tls.accepted[before:])
    assert behind_tls.refused == []


def test_a_login_and_a_certificate_that_are_refused_are_named(
    schema_registry: Registry, behind_tls: TlsRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema_id = schema_registry.register("tls-value", FLIGHT)
    options = {
        "url": behind_tls.url,
        "basic.auth.user.info": f"{USER}:wrong-password",
        "ssl.ca.location": str(behind_tls.ca),
        "retry.timeout.ms": "500",
    }
    with pytest.raises(AuthorizationError, match=r"refuses access to schema id .* \(HTTP 401\)") as refused:
        registry_schema(options, schema_id=schema_id)
    assert "wrong-password" not in str(refused.value)
    behind_tls.refused.clear()
    del options["basic.auth.user.info"]
    options["basic.auth.user.info.env"] = "TEST_REGISTRY_LOGIN"
    monkeypatch.setenv("TEST_REGISTRY_LOGIN", f"{USER}:{PASSWORD}")
    assert registry_schema(options, schema_id=schema_id).schema_id == schema_id
    with pytest.raises(RegistryUnavailableError, match=r"(?i)certificate"):
        registry_schema({**options, "ssl.ca.location": str(behind_tls.other_ca)}, schema_id=schema_id)
    assert behind_tls.refused == []


@pytest.mark.fault("T489", "schemas refer to each other in ways that only other clients accepted", "read")
def test_t489_records_of_other_clients_are_read_whatever_their_references_are_called(
    schema_registry: Registry,
) -> None:
    """This registry stores the descriptors that Confluent's client for Python registers as they are."""
    for record, expected in of_other_clients(schema_registry.url, "t489"):
        schema_id = int.from_bytes(record[1:5], "big")
        message = "M" if "by" in expected else None
        schema = registry_schema(schema_registry.url, schema_id=schema_id, message=message)
        made = schema.decoding().decode(pa.array([record], pa.binary()))
        assert (made.values.to_pylist(), made.errors) == ([expected], {}), schema.schema.text


@needs_arrow_udfs
def test_by_default_a_bad_record_fails_the_query_and_is_named(world: World) -> None:
    world.send(avro(world.flight, FLIGHT, {"carrier": "AA", "delay": 5}), b"\0\0\0")
    value = from_registry("value", world.spec["registry"], topic=world.query.source)
    frame = world.query.frame().select(value.alias("flight")).selectExpr("flight.carrier AS value")
    query = world.start(frame, availableNow=True)
    place = f"of topic {world.query.source}, partition 0, offset 1"
    with pytest.raises(PySparkException, match=rf"INVALID_RECORD\] the record {place} cannot be decoded"):
        query.awaitTermination(SECONDS)
    assert read_back(world.broker, world.query.sink) == []


@needs_arrow_udfs
@pytest.mark.fault(
    "T127", "the committing process is killed while records become dead letters", "produce, after the commit"
)
@pytest.mark.timeout(600)
def test_avro_becomes_protobuf_once_although_the_committing_process_is_killed(
    broker: str,
    topic: Callable[..., str],
    driver: Any,
    checkpoint: str,
    tmp_path: Path,
    schema_registry: Registry,
) -> None:
    source, sink, dead = topic(2), topic(2), topic(1)
    flight = schema_registry.register(f"{source}-value", FLIGHT)
    delay = schema_registry.register(f"{sink}-value", DELAY_PROTO, "PROTOBUF")
    good = [avro(flight, FLIGHT, {"carrier": f"c{n}", "delay": n % 100}) for n in range(270)]
    bad = [b"bad %d" % n for n in range(15)] + [
        avro(flight + 1_000_000, FLIGHT, {"carrier": "x", "delay": 1})
    ]
    produce(broker, source, [*good[:100], *bad, *good[100:]])
    query = spec(broker, source, sink, checkpoint, 100)
    query["registry"] = {
        "registry": schema_registry.url,
        "read": {"topic": source},
        "write": {"topic": sink, "message": "test.Delay"},
    }
    query["sink"]["options"].update({"onInvalidRecord": "dead-letter", "deadLetter.topic": dead})
    steps = ("commit.within_produce", "commit.after_commit")
    armed = ",".join(f"{step}=kill-worker@{tmp_path}/once-{step}" for step in steps)
    running = driver({**query, "restarts": len(steps)}, armed)
    assert running.wait(400) == 0, running.tail()  # it starts the query three times
    assert all((tmp_path / f"once-{step}").exists() for step in steps)
    wanted = [delay_proto(delay, f"c{n}", n % 100) for n in range(270)]
    assert sorted(each.value or b"" for each in read_back(broker, sink)) == sorted(wanted)
    assert sorted(each.value or b"" for each in read_back(broker, dead)) == sorted(bad)


#: A client of Spark Connect that runs the query of `integration.support.registered`.
CONNECT = """
import json, sys
from pyspark.sql import SparkSession
from integration.support.registered import delays

plan = json.loads(sys.argv[1])
spark = SparkSession.builder.remote("local[2]").getOrCreate()
frame = spark.readStream.format("kafka-eos").options(**plan["sources"][0]["options"]).load()
query = delays(frame, plan["registry"]).writeStream.format("kafka-eos").options(**plan["sink"]["options"])
assert query.trigger(availableNow=True).start().awaitTermination(120)
spark.stop()
"""


@needs_arrow_udfs
@pytest.mark.long
def test_the_columns_work_over_spark_connect(
    broker: str, topic: Callable[..., str], checkpoint: str, schema_registry: Registry
) -> None:
    pytest.importorskip("grpc")
    source, sink, dead = topic(1), topic(1), topic(1)
    flight = schema_registry.register(f"{source}-value", FLIGHT)
    delay = schema_registry.register(f"{sink}-value", DELAY)
    produce(broker, source, [avro(flight, FLIGHT, {"carrier": "AA", "delay": 5}), b"bad"])
    plan = spec(broker, source, sink, checkpoint, 100)
    plan["registry"] = {"registry": schema_registry.url, "read": {"topic": source}, "write": {"topic": sink}}
    plan["sink"]["options"].update({"onInvalidRecord": "dead-letter", "deadLetter.topic": dead})
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_SUBMIT_ARGS"}
    finished = subprocess.run(
        [sys.executable, "-c", CONNECT, json.dumps(plan)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert finished.returncode == 0, finished.stderr
    (record,) = read_back(broker, sink)
    assert avro_record(DELAY, record.value or b"") == (delay, {"carrier": "AA", "minutes": 5})
    assert [each.value for each in read_back(broker, dead)] == [b"bad"]


@needs_arrow_udfs
@pytest.mark.fault("T373", "a JSON document is nested too deeply to be written again", "decoding")
def test_t373_a_document_that_cannot_be_written_again_is_a_dead_letter(world: World) -> None:
    """300 levels in 607 bytes, where the schema has two fields; between records that are read."""
    number = world.registry.register(f"{world.query.source}-json", DELAY_JSON, "JSON")
    read = registry_schema(world.spec["registry"], subject=f"{world.query.source}-json")
    head = b"\0" + number.to_bytes(4, "big")
    good = head + b'{"carrier":"AA","minutes":5}'
    bad = [
        head + b'{"carrier":' + b"[" * 300 + b"]" * 300 + b',"minutes":1}',
        head + b"[" * 300 + b"]" * 300,
        head + b'{"carrier":"BB","minutes":1e400}',
    ]
    world.send(good, *bad, good)
    flight = from_registry("value", read, mode="permissive")
    decoded = world.query.frame().withColumn("flight", flight)
    encoded = to_registry("flight.value", world.spec["registry"], topic=world.query.sink)
    value = f.when(f.col("flight.error").isNull(), encoded).otherwise(f.col("value"))
    frame = decoded.select("key", value.alias("value"), undecodable_record("flight"))
    assert world.start(frame, availableNow=True).awaitTermination(SECONDS)
    assert world.delays() == [(world.delay, {"carrier": "AA", "minutes": 5})] * 2
    letters = read_back(world.broker, world.dead)
    assert [each.value for each in letters] == bad
    headers = [dict(each.headers or []) for each in letters]
    assert [each[records.ORIGIN_OFFSET] for each in headers] == [b"1", b"2", b"3"]
    assert b"nested more than 254 levels" in (headers[0][records.MESSAGE] or b"")

    failing = world.query.frame().select(from_registry("value", read)["carrier"].alias("value"))
    query = failing.writeStream.format("noop").trigger(availableNow=True).start()
    with pytest.raises(PySparkException, match=r"INVALID_RECORD\].*, offset 1 cannot be decoded"):
        query.awaitTermination(SECONDS)
