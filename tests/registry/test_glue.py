"""What AWS Glue answers, and whether it answers, decides what becomes of records."""

from __future__ import annotations

import logging
import re
import tracemalloc
import uuid
import zlib
from collections.abc import Iterator
from functools import partialmethod

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from kafka_eos_source.errors import (
    AuthorizationError,
    InvalidOptionError,
    InvalidSchemaError,
    KafkaEosError,
    OperatorError,
    RegistryUnavailableError,
    SchemaNotFoundError,
)
from kafka_eos_source.kafka.schema_registry import StoredSchema
from kafka_eos_source.registry import catalog as catalogs
from kafka_eos_source.registry import glue, records
from kafka_eos_source.registry.codec import Schema, zigzag
from kafka_eos_source.registry.columns import registry_schema
from kafka_eos_source.registry.frames import OF_GLUE, Framed
from kafka_eos_source.registry.glue import GlueRegistry
from kafka_eos_source.registry.records import Decoding
from tests.support import glue_server
from tests.support.glue_records import IDS, RECORDS, TEXTS, Record
from tests.support.glue_server import REGISTRY, Server

UNKNOWN = uuid.UUID("00000000-0000-4000-8000-00000000000f")
OTHER = uuid.UUID(int=1)
INT, LONG = '"int"', '"long"'


@pytest.fixture(autouse=True)
def login(monkeypatch: pytest.MonkeyPatch) -> None:
    glue_server.log_in(monkeypatch)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(catalogs, "_KNOWN_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(catalogs, "_catalogs", {})
    monkeypatch.setattr(records, "_decoders", {})
    with glue_server.running() as running:
        yield running


def registry(server: Server, **options: str) -> GlueRegistry:
    return GlueRegistry({**server.options, **options})


def given(text: str, kind: str = "AVRO") -> StoredSchema:
    return StoredSchema(-1, kind, text)


# -- the client ------------------------------------------------------------------------------------


def test_a_version_is_found_by_id_number_and_text(server: Server) -> None:
    first, second = server.add("flights", INT), server.add("flights", LONG)
    client = registry(server)
    assert client.by_id(first) == StoredSchema(first, "AVRO", INT)
    assert client.by_version("flights").schema_id == second
    assert client.by_version("flights", 1).schema_id == first
    assert client.find("flights", given(INT)) == StoredSchema(first, "AVRO", INT)
    client.answers()
    assert server.authorization.startswith("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/")


def test_a_schema_is_created_with_its_first_version_and_registered_once(server: Server) -> None:
    client = registry(server, compatibility="full")
    first = client.register("flights", given(INT)).schema_id
    assert client.register("flights", given(INT)).schema_id == first
    second = client.register("flights", given(LONG)).schema_id
    assert [client.by_id(each).text for each in (first, second)] == [INT, LONG]
    (created,) = [asked for call, asked in server.requests if call == "CreateSchema"]
    assert created["Compatibility"] == "FULL"
    assert created["DataFormat"] == "AVRO"


def test_two_writers_may_create_a_schema_at_the_same_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = server.answer

    def other_writer_first(call: str, asked: dict[str, object]) -> dict[str, object]:
        if call == "CreateSchema":
            server.add("flights", INT)
        return answer(call, asked)

    monkeypatch.setattr(server, "answer", other_writer_first)
    assert str(registry(server).register("flights", given(LONG)).schema_id) in server.versions
    assert len(server.versions) == 2


def test_a_version_that_is_compared_with_earlier_ones_is_awaited(server: Server) -> None:
    server.add("flights", INT)
    server.decisions = ["PENDING", "PENDING", "AVAILABLE"]
    made = registry(server, **{"retry.timeout.ms": "60000"}).register("flights", given(LONG))
    assert server.versions[str(made.schema_id)]["Status"] == "AVAILABLE"


def test_a_version_that_stays_undecided_is_no_answer(server: Server) -> None:
    server.add("flights", INT)
    server.decisions = ["PENDING"]
    with pytest.raises(RegistryUnavailableError, match=r"has not decided within 0\.3 s whether the new"):
        registry(server).register("flights", given(LONG))


def test_an_incompatible_version_is_refused_for_writing_and_as_the_reader_schema(server: Server) -> None:
    server.add("flights", INT)
    server.decisions = ["PENDING", "FAILURE"]
    client = registry(server)
    with pytest.raises(OperatorError, match="the new version of schema 'flights' has the status FAILURE"):
        client.register("flights", given(LONG))
    with pytest.raises(InvalidSchemaError, match="version latest of schema 'flights' has the status FAILURE"):
        client.by_version("flights")


def test_records_of_a_version_are_read_whatever_became_of_it(server: Server) -> None:
    server.decisions = ["FAILURE"]
    failed = server.add("flights", INT)
    assert registry(server).by_id(failed).text == INT
    del server.versions[str(failed)]["SchemaDefinition"]
    with pytest.raises(SchemaNotFoundError, match="has no text for schema version"):
        registry(server).by_id(failed)


def test_what_glue_does_not_have_is_an_answer(server: Server) -> None:
    client = registry(server)
    with pytest.raises(SchemaNotFoundError) as raised:
        client.by_id(UNKNOWN)
    assert f"AWS Glue (registry '{REGISTRY}' in eu-central-1) does not have schema version {UNKNOWN}" in str(
        raised.value
    )
    with pytest.raises(SchemaNotFoundError, match="does not have version latest of schema 'nothing'"):
        client.by_version("nothing")
    with pytest.raises(SchemaNotFoundError, match="does not have the given version of schema 'nothing'"):
        client.find("nothing", given(INT))
    other = registry(server, url="glue://other")
    with pytest.raises(SchemaNotFoundError, match="schema 'new' in a registry 'other'"):
        other.register("new", given(INT))


@pytest.mark.parametrize(
    "fault",
    [
        (0, None, ""),
        (500, "InternalServiceException", ""),
        (503, None, "oops"),
        (400, "ThrottlingException", "Rate exceeded"),
        (400, "OperationTimeoutException", ""),
        (429, None, ""),
    ],
)
def test_no_answer_is_an_error_that_names_version_registry_and_time(
    server: Server, fault: tuple[int, str | None, str]
) -> None:
    server.fault = fault
    with pytest.raises(RegistryUnavailableError) as raised:
        registry(server).by_id(UNKNOWN)
    text = str(raised.value)
    for part in (
        REGISTRY,
        "eu-central-1",
        f"schema version {UNKNOWN}",
        "within 0.3 s",
        "No record was declared",
    ):
        assert part in text
    assert len(server.requests) > 1


def test_a_throttled_call_is_repeated_until_glue_answers(server: Server) -> None:
    server.fault = (400, "ThrottlingException", "Rate exceeded")
    number = server.add("s", INT)

    class Recovering(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            server.fault = None

    handler = Recovering()
    log = logging.getLogger("kafka_eos_source.kafka.schema_registry")
    log.addHandler(handler)
    try:
        assert registry(server, **{"retry.timeout.ms": "60000"}).by_id(number).text == INT
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize(
    ("fault", "expected", "said"),
    [
        ((400, "AccessDeniedException", "not you"), AuthorizationError, "the action glue:GetSchemaVersion"),
        ((403, None, "{}"), AuthorizationError, "the action glue:GetSchemaVersion"),
        ((400, "UnrecognizedClientException", "x"), AuthorizationError, "refuses the credentials: Unrecog"),
        ((400, "ExpiredTokenException", "x"), AuthorizationError, "refuses the credentials: ExpiredToken"),
        ((400, "InvalidInputException", "x is bad"), OperatorError, "x is bad"),
        ((400, "GlueEncryptionException", "KMS"), OperatorError, "KMS"),
        ((404, None, "<html>"), OperatorError, "HTTP 404"),
        ((200, None, "<html>log in</html>"), OperatorError, "something else than AWS Glue does"),
        ((200, None, "{}"), OperatorError, "something else than AWS Glue does"),
        ((200, None, "[]"), OperatorError, "something else than AWS Glue does"),
        ((200, None, "[" * 100_000), OperatorError, "something else than AWS Glue does"),
        (
            (200, None, f'{{"SchemaVersionId":"{UNKNOWN}","DataFormat":"AVRO","SchemaDefinition":[1]}}'),
            OperatorError,
            "something else than AWS Glue does",
        ),
        (
            (
                200,
                None,
                f'{{"SchemaVersionId":"{uuid.UUID(int=1)}","DataFormat":"AVRO","SchemaDefinition":""}}',
            ),
            OperatorError,
            "something else than AWS Glue does",
        ),
    ],
)
def test_a_refusal_is_neither_an_unknown_version_nor_retried(
    server: Server, fault: tuple[int, str | None, str], expected: type[KafkaEosError], said: str
) -> None:
    server.fault = fault
    with pytest.raises(expected, match=said) as raised:
        registry(server).by_id(UNKNOWN)
    assert not isinstance(raised.value, SchemaNotFoundError)
    assert len(server.requests) == 1


def test_each_call_that_is_denied_names_its_right(server: Server) -> None:
    server.add("flights", INT)
    client = registry(server)
    for call, use in (
        ("GetSchemaVersion", client.answers),
        ("GetSchemaByDefinition", lambda: client.find("flights", given(INT))),
        ("RegisterSchemaVersion", lambda: client.register("flights", given(LONG))),
        ("CreateSchema", lambda: client.register("new", given(LONG))),
    ):
        server.denied = {call}
        with pytest.raises(AuthorizationError, match=f"allow the principal the action glue:{call}"):
            use()


def test_a_session_token_that_an_answer_quotes_is_not_shown(server: Server) -> None:
    server.fault = (403, "InvalidSignatureException", "the canonical string is x-amz-security-token:FwoGZXIv")
    with pytest.raises(AuthorizationError) as raised:
        registry(server).by_id(UNKNOWN)
    assert "FwoGZXIv" not in str(raised.value)
    assert "InvalidSignatureException" in str(raised.value)


def test_without_credentials_the_error_says_where_they_are_looked_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(AuthorizationError, match=r"NoCredentialsError.*on the driver and on every executor"):
        registry(server).by_id(UNKNOWN)
    assert not server.requests


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "glue://"}, "for example 'glue://default-registry'"),
        ({"url": "glue://a b"}, "the name of a registry of AWS Glue"),
        ({"url": "glue://flights?region=eu-central-1"}, "the region is the option 'region'"),
        ({"region": None}, "set the option 'region' or the variable AWS_REGION"),
        ({"region": "no region"}, "client cannot be made"),
        ({"profile": "absent"}, "The config profile .absent. could not be found"),
        ({"endpoint": "nowhere"}, "client cannot be made"),
        ({"endpoint": "http://glue.example.com"}, "without encryption"),
        ({"compression": "gzip"}, "expected one of none, zlib"),
        ({"compatibility": "SIDEWAYS"}, "expected one of BACKWARD"),
        ({"retry.timeout.ms": "soon"}, "expected a number of milliseconds"),
        ({"aws_secret_access_key": "wJalrXUtnFEMIK7MDENG"}, "has no option 'aws_secret_access_key'"),
        ({"region.env": "ABSENT_VARIABLE"}, "which is not set in this process"),
    ],
)
def test_malformed_options_are_named(server: Server, options: dict[str, str | None], said: str) -> None:
    merged = {**server.options, **options}
    if "region.env" in options:
        del merged["region"]
    with pytest.raises(InvalidOptionError, match=said) as raised:
        GlueRegistry({name: value for name, value in merged.items() if value is not None})
    assert "wJalrXUtnFEMIK7MDENG" not in str(raised.value)


def test_the_url_may_be_in_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_URL", server.options["url"])
    options = {**server.options, "url.env": "REGISTRY_URL"}
    del options["url"]
    made = server.add("flights", TEXTS["AVRO"])
    assert registry_schema(options, topic="flights").encoding().name == b"\x03\0" + made.bytes


def test_a_name_that_no_schema_can_have_is_refused(server: Server) -> None:
    with pytest.raises(InvalidOptionError, match="the name of the schema is 'a b'"):
        registry(server).by_version("a b")


@pytest.mark.parametrize("name", ["flights", "nothing"])
def test_moto_answers_as_the_server_of_these_tests(name: str, server: Server) -> None:
    """The double is ours, so the same calls go to an implementation of somebody else, too."""
    moto = pytest.importorskip("moto")

    def answers(client: GlueRegistry) -> list[object]:
        made = client.register("flights", given(INT))
        client.register("flights", given(LONG))
        client.answers()
        found: list[object] = [client.register("flights", given(INT)) == made]
        for ask in (
            lambda: client.by_id(made.schema_id).text,
            lambda: client.by_id(UNKNOWN).text,
            lambda: client.by_version(name).text,
            lambda: client.by_version(name, 1).text,
            lambda: client.by_version(name, 9).text,
            lambda: client.find(name, given(LONG)).text,
            lambda: client.find(name, given('"string"')).text,
        ):
            try:
                found.append(ask())
            except KafkaEosError as error:
                found.append(error.message)
        return found

    expected = answers(registry(server))
    with moto.mock_aws():
        assert answers(GlueRegistry({"url": f"glue://{REGISTRY}", "region": "eu-central-1"})) == expected


# -- frames ----------------------------------------------------------------------------------------

HEADER = 18


def decoding(server: Server, kind: str, message: str | None = None) -> Decoding:
    """Returns what decodes with the schema of Glue's own serializer."""
    for each, text in TEXTS.items():
        if IDS[each] not in server.versions:
            server.add(f"t-{each}", text, each, IDS[each])
    return registry_schema(server.options, topic=f"t-{kind}", message=message).decoding()


def framed(payload: bytes, *, compression: int = 0, version: str = IDS["AVRO"]) -> bytes:
    return bytes([3, compression]) + uuid.UUID(version).bytes + payload


GOOD = RECORDS[0].framed[HEADER:]


@pytest.mark.parametrize(
    "record", RECORDS, ids=lambda each: f"{each.format}-{each.compression}-{each.message}"
)
def test_records_of_glues_own_serializer_are_read(server: Server, record: Record) -> None:
    message = f"acme.{record.message}" if record.message else None
    found = decoding(server, record.format, message).decode(pa.array([None, record.framed, record.framed]))
    assert found.errors == {}
    nothing, *values = found.values.to_pylist()
    assert nothing is None
    assert [{name: each[name] for name in record.value} for each in values] == [record.value] * 2


@pytest.mark.parametrize(
    "record", RECORDS, ids=lambda each: f"{each.format}-{each.compression}-{each.message}"
)
def test_records_are_written_byte_by_byte_as_by_glues_own_serializer(server: Server, record: Record) -> None:
    message = f"acme.{record.message}" if record.message else None
    decoded = decoding(server, record.format, message).decode(pa.array([record.framed])).values
    options = {**server.options, "compression": record.compression}
    encoding = registry_schema(options, topic=f"t-{record.format}", message=message).encoding()
    assert encoding.encode(decoded).values.to_pylist() == [record.framed]
    nulls = encoding.encode(pa.nulls(2, decoded.type))
    assert nulls.values.to_pylist() == [None, None]


@pytest.mark.parametrize("large", [False, True])
def test_rows_of_all_kinds_keep_their_order(server: Server, large: bool) -> None:
    def packed(carrier: bytes) -> bytes:
        return framed(zlib.compress(bytes([2 * len(carrier)]) + carrier + b"\0"), compression=5)

    other = str(server.add("t-other", TEXTS["AVRO"].replace("minutes", "hours")))
    messages = [
        packed(b"A"),
        framed(b"\2B\0"),
        None,
        b"\x03\x05short",
        framed(b"\2C\0", version=other),
        packed(b"D"),
        framed(zlib.compress(b"\2E\0")[:-5], compression=5),
        framed(b"no zlib", compression=5),
        packed(b""),
        framed(b"\2F\0"),
    ]
    column = pa.array([b"before", *messages], pa.large_binary() if large else pa.binary()).slice(1)
    reader = decoding(server, "AVRO")
    found = reader.decode(column)
    carriers = [None if each is None else each["carrier"] for each in found.values.to_pylist()]
    assert carriers == ["A", "B", None, None, None, "D", None, None, "", "F"]
    assert sorted(found.errors) == [3, 4, 6, 7]
    assert found.errors[3] == "the message has 7 bytes; expected at least 18, as AWS Glue's have"
    assert "minutes" in found.errors[4]
    assert "ends in the middle of its payload" in found.errors[6]
    assert "cannot be decompressed: Error -3" in found.errors[7]
    every = [each for part in reader.slices(column) for each in part.values.to_pylist()]
    assert every == found.values.to_pylist()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"", "the message is empty"),
        (b"\x03", "has 1 bytes; expected at least 18"),
        (framed(b"x", compression=7), "the compression byte 0x07; expected 0x00 .none. or 0x05 .zlib."),
        (
            b"\0\0\0\0\1payload",
            "begin with 0x03, .*, but with 0x00; it looks like a message of another schema",
        ),
        (b"{}", "but with 0x7b; it looks like a JSON document"),
        (framed(GOOD, version=str(UNKNOWN)), f"does not have schema version {UNKNOWN}"),
        (framed(GOOD, version=IDS["JSON"]), "has the format JSON; expected AVRO"),
        (framed(b"\x04"), r"schema id \S+: .*carrier"),
    ],
)
def test_a_record_that_cannot_be_read_says_why(server: Server, message: bytes, said: str) -> None:
    column = pa.array([framed(GOOD), message, framed(GOOD)])
    found = decoding(server, "AVRO").decode(column)
    assert [each is None for each in found.values.to_pylist()] == [False, True, False]
    assert list(found.errors) == [1]
    assert re.search(said, found.errors[1])


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (b"", "ends inside the Protobuf message indices"),
        (b"\x80", "ends inside the Protobuf message indices"),
        (b"\x80\x80\x80\x80\x80\x01", "index of more than 5 bytes"),
        (b"\x07", "message number 7 leads to no message of the schema, which has 7"),
        (b"\xff\xff\xff\xff\x0f", "message number 4294967295 leads to no message"),
        (b"\x01", "message number 1 leads to no message"),  # an entry of a map
        (b"\x00", "messages of type acme.Alpha, but acme.Flight is expected"),
    ],
)
def test_a_message_number_that_leads_nowhere_is_an_error_of_its_record(
    server: Server, number: bytes, said: str
) -> None:
    payload = b"\x0a\x02LH"
    good = framed(b"\x03" + payload, version=IDS["PROTOBUF"])
    longer = framed(b"\x83\x00" + payload, version=IDS["PROTOBUF"])
    bad = framed(number, version=IDS["PROTOBUF"])
    found = decoding(server, "PROTOBUF", "acme.Flight").decode(pa.array([good, bad, longer]))
    assert [each and each["carrier"] for each in found.values.to_pylist()] == ["LH", None, "LH"]
    assert said in found.errors[1]


def test_the_decimal_of_glues_converter_needs_no_reference(server: Server) -> None:
    """AWS ships this file in its library, so schemas import it although Glue has no references."""
    text = """syntax = "proto3";
    import "additionalTypes/decimal.proto";
    message Price { .additionalTypes.Decimal amount = 1; }"""
    price = server.add("prices", text, "PROTOBUF")
    message = framed(b"\0\x0a\x06\x08\x07\x18\x03\x20\x02", version=str(price))
    found = registry_schema(server.options, topic="prices").decoding().decode(pa.array([message]))
    assert found.values.to_pylist() == [{"amount": {"units": 7, "fraction": 0, "precision": 3, "scale": 2}}]


def test_a_payload_that_is_large_without_compression_is_an_error_of_its_record(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoding, "decode", partialmethod(Decoding.decode, most_bytes=4000))

    def packed(size: int) -> bytes:
        return framed(zlib.compress(zigzag(size) + b"A" * size + b"\0"), compression=5)

    sizes = [100, 1000, 1200, 1 << 24, 1300, 1300, 1300, 10]
    parts = list(decoding(server, "AVRO").slices(pa.array([packed(each) for each in sizes])))
    values = [each for part in parts for each in part.values.to_pylist()]
    assert [None if each is None else len(each["carrier"]) for each in values] == [
        None if each == 1 << 24 else each for each in sizes
    ]
    (error,) = (text for part in parts for text in part.errors.values())
    assert "takes more than 256 MiB when it is decoded" in error
    assert all(part.values.nbytes <= 4000 for part in parts)


def test_the_largest_payload_is_never_held_as_a_whole(server: Server) -> None:
    """A record of 1 MiB that would take 1 GiB costs its limit, and not more."""
    bomb = framed(zlib.compress(bytes(64 << 20)), compression=5)
    tracemalloc.start()
    try:
        assert glue.decompressed(memoryview(bomb), 1 << 20) is None
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 << 20


def test_uncompressed_frames_are_read_without_a_copy(server: Server) -> None:
    column = pa.array([framed(GOOD)] * 1000)
    assert Framed.of(column, naming=OF_GLUE).messages.column is column


def test_each_version_is_asked_for_once_per_process_and_the_readers_never(server: Server) -> None:
    reader = decoding(server, "AVRO")
    other = str(server.add("t-other", TEXTS["AVRO"].replace("carrier", "carrier ").replace(" ", "")))
    server.requests.clear()
    for _ in range(2):
        reader.decode(pa.array([framed(GOOD), framed(GOOD, version=other)]))
    assert [asked for _, asked in server.requests] == [{"SchemaVersionId": other}]


def test_an_outage_makes_no_record_bad(server: Server) -> None:
    reader = decoding(server, "AVRO")
    other = str(server.add("t-other", TEXTS["AVRO"] + " "))
    server.fault = (400, "ThrottlingException", "Rate exceeded")
    assert reader.decode(pa.array([framed(GOOD)])).errors == {}
    with pytest.raises(RegistryUnavailableError, match=f"schema version {other}"):
        reader.decode(pa.array([framed(GOOD), framed(GOOD, version=other)]))
    server.fault = (400, "AccessDeniedException", "no")
    with pytest.raises(AuthorizationError, match="glue:GetSchemaVersion"):
        reader.decode(pa.array([framed(GOOD, version=other)]))
    server.fault = None
    assert reader.decode(pa.array([framed(GOOD, version=other)])).errors == {}


# -- which schema ----------------------------------------------------------------------------------


def test_a_schema_has_the_name_of_its_topic(server: Server) -> None:
    first = server.add("flights", TEXTS["AVRO"])
    second = server.add("flights", TEXTS["AVRO"] + " ")
    keys = server.add("flights-keys", LONG)
    for chosen, expected in (
        ({"topic": "flights"}, second),
        ({"subject": "flights", "version": 1}, first),
        ({"record": "flights"}, second),
        ({"schema_id": str(first)}, first),
        ({"schema_id": first}, first),
        ({"topic": "flights", "schema": TEXTS["AVRO"]}, first),
        ({"subject": "flights-keys", "is_key": True}, keys),
    ):
        assert registry_schema(server.options, **chosen).schema_id == expected
    with pytest.raises(
        InvalidOptionError, match="keys and the values of topic 'flights' would have one schema"
    ):
        registry_schema(server.options, topic="flights", is_key=True)
    with pytest.raises(InvalidOptionError, match="expected the UUID of a schema's version"):
        registry_schema(server.options, schema_id=1)


@pytest.mark.parametrize("kind", ["AVRO", "PROTOBUF", "JSON"])
def test_a_schema_is_derived_registered_and_used_for_a_round_trip(server: Server, kind: str) -> None:
    rows = StructType([StructField("carrier", StringType()), StructField("minutes", LongType())])
    options = {**server.options, "compression": "zlib"}
    schema = registry_schema(options, topic="delays", schema=rows, schema_type=kind, register=True)
    values = pa.array([{"carrier": "LH", "minutes": 5}, {"carrier": "é" * 1000, "minutes": None}])
    messages = schema.encoding().encode(values).values
    assert [each[:2] for each in messages.to_pylist()] == [b"\x03\x05"] * 2
    assert max(map(len, messages.to_pylist())) < 200
    read = registry_schema(server.options, topic="delays").decoding().decode(messages)
    assert read.errors == {}
    assert [each["carrier"] for each in read.values.to_pylist()] == ["LH", "é" * 1000]


def test_a_record_of_glue_in_another_registry_says_so() -> None:
    reader = Decoding({"url": "http://127.0.0.1:1"}, Schema("AVRO", INT), None, pa.int32())
    (error,) = reader.decode(pa.array([framed(b"\2")])).errors.values()
    assert "AWS Glue" in error
    assert "glue://" in error
