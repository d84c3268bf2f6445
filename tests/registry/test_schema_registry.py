"""What the schema registry answers, and whether it answers, decides what becomes of records."""

from __future__ import annotations

import inspect
import logging
import socket
import time
from collections.abc import Iterator
from functools import partial, partialmethod
from typing import Any, get_type_hints
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType
from pyspark.util import PythonEvalType

from kafka_eos_source.documents import converted
from kafka_eos_source.documents.converted import MOST_BYTES, Converted
from kafka_eos_source.errors import (
    AuthorizationError,
    InvalidOptionError,
    InvalidSchemaError,
    KafkaEosError,
    OperatorError,
    RegistryUnavailableError,
    SchemaNotFoundError,
)
from kafka_eos_source.kafka.schema_registry import (
    SchemaId,
    SchemaRegistry,
    StoredReference,
    StoredSchema,
    shown_urls,
)
from kafka_eos_source.registry import catalog as catalogs
from kafka_eos_source.registry import codec, records
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.columns import from_registry, registry_schema, subject_name, to_registry
from kafka_eos_source.registry.frames import frame_prefix
from kafka_eos_source.registry.records import Decoding, Encoding
from kafka_eos_source.spark.arrow import HEADERS_ARROW
from tests.support import registry_server
from tests.support.registry_server import Server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(catalogs, "_KNOWN_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(catalogs, "_catalogs", {})
    monkeypatch.setattr(records, "_decoders", {})
    with registry_server.running() as running:
        yield running


class Text:
    """A codec whose payload is text, and whose schema is the name of a field."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.arrow_type = pa.struct([pa.field("text", pa.string()), pa.field("of", pa.string())])

    def decode(self, messages: pa.Array, start: int, most_bytes: int = MOST_BYTES) -> Converted:
        values: list[dict[str, str] | None] = []
        errors = {}
        for row, each in enumerate(messages.to_pylist()):
            body = None if each is None else each[start:]
            if body == b"bad":
                errors[row] = "the payload is bad"
            values.append(None if body in (None, b"bad") else {"text": body.decode(), "of": self.name})
        decoded = Converted(pa.array(values, self.arrow_type), errors)
        while decoded.values.nbytes > most_bytes:
            decoded = decoded.first(len(decoded.values) - 1)
        return decoded

    def encode(self, values: pa.Array, prefix: bytes, most_bytes: int = MOST_BYTES) -> Converted:
        return Converted(
            pa.array([None if each is None else prefix + each.encode() for each in values.to_pylist()])
        )


class TextCodec:
    """The functions of the codec's package."""

    def decoder(self, writer: Schema, *path: Any, reader: Schema, message: str | None = None) -> Text:
        if writer.text == "unreadable":
            raise InvalidSchemaError("field x has no default.")
        return Text(f"{writer.text}{path[0] if path else ''}")

    def encoder(self, schema: Schema, values_type: pa.DataType, **more: Any) -> Text:
        return Text()

    def arrow_type(self, schema: Schema, *message: Any) -> pa.DataType:
        return Text().arrow_type

    def message_path(self, schema: Schema, message: str | None) -> tuple[int, ...]:
        return (2, 1)


@pytest.fixture
def text_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_codec", lambda kind: TextCodec())


def registry(server: Server, **options: Any) -> SchemaRegistry:
    return SchemaRegistry({"url": server.url, "retry.timeout.ms": 300, **options})


def decoder(server: Server, **options: Any) -> Decoding:
    reader = Schema("AVRO", "reader")
    return Decoding(
        {"url": server.url, "retry.timeout.ms": "300", **options}, reader, None, Text().arrow_type
    )


def message(schema_id: SchemaId, text: bytes) -> bytes:
    return frame_prefix(schema_id) + text


def texts(found: Converted) -> list[str | None]:
    return [None if each is None else f"{each['of']}:{each['text']}" for each in found.values.to_pylist()]


# -- the client ------------------------------------------------------------------------------------


def test_a_schema_is_found_by_id_and_by_version(server: Server) -> None:
    first = server.add("flights-value", '"int"')
    second = server.add("flights-value", '"long"', "AVRO", [{"name": "n", "subject": "other", "version": 3}])
    client = registry(server)
    assert client.by_id(first) == StoredSchema(first, "AVRO", '"int"')
    assert client.by_version("flights-value").references == (StoredReference("n", "other", 3),)
    assert client.by_version("flights-value").schema_id == second
    assert client.by_version("flights-value", 1).schema_id == first
    assert client.find("flights-value", StoredSchema(-1, "AVRO", '"int"')).schema_id == first
    assert client.register("flights-value", StoredSchema(-1, "AVRO", '"string"')).schema_id == 3
    client.answers()


def test_an_unknown_id_is_an_answer(server: Server) -> None:
    with pytest.raises(SchemaNotFoundError, match=rf"{server.url} does not have schema id 9 \(error 40403\)"):
        registry(server).by_id(9)
    with pytest.raises(SchemaNotFoundError, match="does not have version latest of subject 'nothing'"):
        registry(server).by_version("nothing")


#: Something that names a schema, which a registry is asked for.
IDS = pytest.mark.parametrize("schema_id", [9, UUID(int=9)], ids=["id", "guid"])


@IDS
@pytest.mark.parametrize("fault", [(0, ""), (503, "{}"), (500, "oops"), (429, "{}")])
def test_no_answer_is_an_error_that_names_id_url_and_time(
    server: Server, fault: tuple[int, str], schema_id: SchemaId
) -> None:
    server.fault = fault
    with pytest.raises(RegistryUnavailableError) as raised:
        registry(server).by_id(schema_id)
    text = str(raised.value)
    for part in (server.url, f"schema id {schema_id}", "within 0.3 s", "No record was declared bad"):
        assert part in text
    assert len(server.requests) > 1


def test_a_call_is_repeated_until_the_registry_answers(server: Server) -> None:
    server.fault = (503, "{}")
    number = server.add("s", '"int"')
    client = registry(server, **{"retry.timeout.ms": 60_000})

    class Recovering(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            server.fault = None

    handler = Recovering()
    log = logging.getLogger("kafka_eos_source.kafka.schema_registry")
    log.addHandler(handler)
    try:
        assert client.by_id(number).text == '"int"'
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize(
    ("fault", "expected", "said"),
    [
        ((401, '{"error_code":401,"message":"no"}'), AuthorizationError, "basic.auth.user.info"),
        ((403, '{"error_code":40301,"message":"no"}'), AuthorizationError, "refuses access to schema id"),
        ((404, "<html>not here</html>"), OperatorError, "HTTP 404, but not as a schema registry does"),
        ((422, '{"error_code":42201,"message":"x is invalid"}'), OperatorError, "x is invalid"),
        ((200, "<html>log in</html>"), OperatorError, "something else than JSON"),
        ((200, "[" * 100_000), OperatorError, "something else than JSON"),
        ((200, "[]"), OperatorError, "something else than JSON"),
        ((200, '{"schema":"x","references":[{"name":1}]}'), InvalidSchemaError, "two texts and a number"),
    ],
)
@IDS
def test_a_refusal_is_neither_an_unknown_id_nor_retried(
    server: Server, fault: tuple[int, str], expected: type[KafkaEosError], said: str, schema_id: SchemaId
) -> None:
    server.fault = fault
    with pytest.raises(expected, match=said) as raised:
        registry(server).by_id(schema_id)
    assert not isinstance(raised.value, SchemaNotFoundError)
    is_page = fault[0] == 404 and isinstance(schema_id, UUID)
    assert len(server.requests) == 1 + is_page, "whether it is a registry without GUIDs, is asked too"


def test_a_registry_without_guids_makes_bad_records_and_is_not_asked_again(
    server: Server, text_codec: None
) -> None:
    """As of Confluent Platform 7, Apicurio and others, where a record of garbage may begin with 0x01."""
    server.has_guids = False
    known = server.add("s", "one")
    rows = pa.array([message(known, b"a"), message(UUID(int=9), b"b")])
    decoding = decoder(server)
    found = decoding.decode(rows)
    assert texts(found) == ["one:a", None]
    assert "knows no GUIDs of schemas" in found.errors[1]
    asked = len(server.requests)
    found = decoding.decode(pa.array([message(UUID(int=number), b"b") for number in range(9, 20)]))
    assert len(found.errors) == 11
    assert len(server.requests) == asked


def test_a_second_url_answers_if_the_first_does_not(server: Server) -> None:
    number = server.add("s", '"int"')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert registry(server, url=f"{nobody}, {server.url}").by_id(number).text == '"int"'


def test_credentials_are_sent_and_never_shown(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    number = server.add("s", '"int"')
    registry(server, **{"basic.auth.user.info": "bob:hunter2"}).by_id(number)
    assert server.requests[-1][2]["Authorization"].startswith("Basic ")
    registry(server, **{"bearer.auth.token": "t0ken"}).by_id(number)
    assert server.requests[-1][2]["Authorization"] == "Bearer t0ken"
    assert "Confluent-Identity-Pool-Id" not in server.requests[-1][2]
    monkeypatch.setenv("REGISTRY_LOGIN", "eve:from-environment")
    registry(server, **{"basic.auth.user.info.env": "REGISTRY_LOGIN"}).by_id(number)
    assert server.requests[-1][2]["Authorization"].startswith("Basic ")
    url = server.url.replace("//", "//bob:hunter3@")
    for options in ({"basic.auth.user.info": "bob:hunter2"}, {"url": url}):
        server.fault = (500, "bob:hunter2 may not" if url not in options.values() else "hunter3 may not")
        with pytest.raises(RegistryUnavailableError) as raised:
            registry(server, **options).by_id(1)
        assert "hunter" not in str(raised.value)
    assert "hunter" not in repr(decoder(server, **{"basic.auth.user.info": "bob:hunter2"}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": ""}, "option 'url'"),
        ({"url": "mock://x"}, "begin with http"),
        ({"retry.timeout.ms": "soon"}, "'retry.timeout.ms' of the schema registry has the value 'soon'"),
        ({"schema.limit.unknown.ids": "0"}, "'schema.limit.unknown.ids' .* has the value '0'; .* at least 1"),
        ({"schema.limit.bytes": 0.5}, "'schema.limit.bytes' .* has the value 0.5; .* at least 1"),
        (
            {"schema.id.location": "headers"},
            "'schema.id.location' .* the value 'headers'; expected 'header'",
        ),
        ({"schema.id.bytes": 5}, "'schema.id.bytes' .* has the value '5'; expected 4, or 8"),
        ({"basic.auth.user.info": "bob"}, "malformed"),
        ({"bsic.auth.user.info": "bob:x"}, "bsic.auth.user.info"),
        ({"ssl.ca.location": "/no/such/file"}, "malformed"),
        ({"bearer.auth.token.env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE"),
    ],
)
def test_malformed_options_are_named(server: Server, options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        registry(server, **options)


@pytest.mark.parametrize("secret", ["pass", "p/ss", "p?ss", "p#ss", "p@ss", "p,ss"])
def test_urls_are_shown_without_passwords(secret: str) -> None:
    # a question mark may also begin the query, and the rest of the password a value in it
    shown = "https://" if set("?#") & set(secret) else "https://a:8081/x"
    assert shown_urls(f"https://bob:{secret}@a:8081/x, http://b") == f"{shown}, http://b"
    assert shown_urls(f"bob:{secret}@a") == ("" if set("?#") & set(secret) else "a")


def test_a_value_in_the_place_of_a_variable_is_not_shown(server: Server) -> None:
    with pytest.raises(InvalidOptionError, match="not the name of an environment variable") as raised:
        registry(server, **{"basic.auth.user.info.env": "bob:hunter2"})
    assert "hunter2" not in str(raised.value)


def test_contexts_are_in_the_url_and_not_in_the_subject(server: Server) -> None:
    with pytest.raises(InvalidOptionError, match=r"':\.eu:flights'.*/contexts/\.eu"):
        registry_schema(server.url, subject=":.eu:flights")


# -- schemas and their references ------------------------------------------------------------------


def test_references_are_resolved_through_all_levels(server: Server) -> None:
    server.add("a", "A")
    server.add("b", "B", "AVRO", [{"name": "n.a", "subject": "a", "version": 1}])
    both = [{"name": "n.b", "subject": "b", "version": 1}, {"name": "n.a", "subject": "a", "version": 1}]
    top = server.add("c", "C", "AVRO", both)
    found = catalogs.Catalog({"url": server.url}).of_id(top)
    assert [each.name for each in found.references] == ["n.b", "n.a"]
    assert found.references[0].schema.references[0].schema == Schema("AVRO", "A")
    assert found.references[0].origin.startswith("subject '")


def test_schemas_that_import_each_other_are_refused(server: Server) -> None:
    server.add("a", "A", "AVRO", [{"name": "b", "subject": "b", "version": 1}])
    server.add("b", "B", "AVRO", [{"name": "a", "subject": "a", "version": 1}])
    with pytest.raises(InvalidSchemaError, match="circle of schemas"):
        catalogs.Catalog({"url": server.url}).of_id(1)


# -- decoding --------------------------------------------------------------------------------------


def test_rows_of_several_schemas_keep_their_order(server: Server, text_codec: None) -> None:
    first, second = server.add("s", "one"), server.add("s", "two")
    rows = [message(first, b"a"), None, message(second, b"b"), message(second, b"bad"), message(first, b"c")]
    column = pa.array([b"before", *rows, b"", b"behind"], pa.large_binary()).slice(1, 6)
    found = decoder(server).decode(column)
    assert texts(found) == ["one:a", None, "two:b", None, "one:c", None]
    assert sorted(found.errors) == [3, 5]
    assert found.errors[3] == f"schema id {second}: the payload is bad"
    assert "the message is empty; expected the magic byte and a schema id" in found.errors[5]


@pytest.mark.parametrize("schemas", [1, 2, 7])
def test_slices_contain_each_row_once_and_fit_into_the_limit(
    server: Server, text_codec: None, monkeypatch: pytest.MonkeyPatch, schemas: int
) -> None:
    """Rows of one, two and many schemas, with tombstones, bad rows, and one that is too large by itself."""
    monkeypatch.setattr(converted, "MOST_BYTES", 400)
    names = [server.add("s", f"schema{number}") for number in range(schemas)]
    rows: list[bytes | None] = [message(names[n % schemas], b"%d" % n * (n % 9)) for n in range(300)]
    rows[7], rows[40], rows[90], rows[91] = None, b"no frame", message(names[0], b"x" * 500), None
    rows[0] = message(names[0], b"bad")
    column = pa.array([b"before", *rows, b"behind"]).slice(1, 300)
    whole = decoder(server).decode(column)
    each = decoder(server)
    monkeypatch.setattr(Decoding, "decode", partialmethod(Decoding.decode, most_bytes=400))
    found = list(each.slices(column))
    assert len(found) > 20
    assert max(part.values.nbytes for part in found) <= 400
    assert [text for part in found for text in texts(part)] == [
        None if row == 90 else text for row, text in enumerate(texts(whole))
    ]
    errors, at = {}, 0
    for part in found:
        errors |= {at + row: text for row, text in part.errors.items()}
        at += len(part.values)
    assert errors == whole.errors | {90: "the record takes more than 0 MiB when it is decoded"}
    assert [len(part.values) for part in each.slices(column[:0])] == [0]


def test_columns_of_one_schema_runs_and_nulls(server: Server, text_codec: None) -> None:
    first, second = server.add("s", "one"), server.add("s", "two")
    run = [message(first, b"a"), message(first, b"bad"), message(second, b"c")]
    found = decoder(server).decode(pa.array(run))
    assert texts(found) == ["one:a", None, "two:c"]
    assert list(found.errors) == [1]
    assert texts(decoder(server).decode(pa.array([None, message(first, b"a")]))) == [None, "one:a"]
    assert texts(decoder(server).decode(pa.nulls(2, pa.binary()))) == [None, None]
    assert len(decoder(server).decode(pa.array([], pa.binary())).values) == 0
    chunked = pa.chunked_array([[message(first, b"a")], [message(second, b"b")]])
    assert texts(decoder(server).decode(chunked)) == ["one:a", "two:b"]


def test_protobuf_rows_are_grouped_by_message_type(server: Server, text_codec: None) -> None:
    number = server.add("s", "p", "PROTOBUF")
    rows = [frame_prefix(number, path) + b"x" for path in ((0,), (1, 0), (0,))] + [frame_prefix(number)]
    proto = Decoding({"url": server.url}, Schema("PROTOBUF", "reader"), None, Text().arrow_type)
    found = proto.decode(pa.array(rows))
    assert texts(found) == ["p(0,):x", "p(1, 0):x", "p(0,):x", None]
    assert found.errors == {3: "the message ends inside the Protobuf message indices"}


def test_a_writer_schema_that_does_not_fit_the_reader_is_an_error_of_its_rows(
    server: Server, text_codec: None
) -> None:
    good, unreadable, other = (
        server.add("s", "one"),
        server.add("s", "unreadable"),
        server.add("s", "p", "JSON"),
    )
    found = decoder(server).decode(pa.array([message(each, b"a") for each in (good, unreadable, other)]))
    assert texts(found) == ["one:a", None, None]
    assert "does not fit the reader schema: field x has no default" in found.errors[1]
    assert "has the format JSON; expected AVRO" in found.errors[2]


def test_an_unknown_id_is_a_bad_record_and_an_outage_is_not(server: Server, text_codec: None) -> None:
    """Otherwise an outage of the registry would send good records to the dead-letter topic."""
    known = server.add("s", "one")
    rows = pa.array([message(known, b"a"), message(77, b"b")])
    found = decoder(server).decode(rows)
    assert texts(found) == ["one:a", None]
    assert "does not have schema id 77" in found.errors[1]
    assert "pass headers= to from_registry" in found.errors[1]
    with_headers = decoder(server).decode(rows, pa.nulls(2, HEADERS_ARROW))
    assert "headers" not in with_headers.errors[1], "they are known to say nothing"
    later = server.add("s", "two")
    for fault in ((503, "{}"), (0, ""), (404, "<html>gateway</html>"), (401, "{}")):
        server.fault = fault
        with pytest.raises(KafkaEosError) as raised:
            decoder(server).decode(pa.array([message(known, b"a"), message(later, b"b")]))
        assert not isinstance(raised.value, SchemaNotFoundError)
        assert texts(decoder(server).decode(rows)) == ["one:a", None], (
            "what is cached does not need the registry"
        )
    server.fault = None
    assert texts(decoder(server).decode(pa.array([message(later, b"b")]))) == ["two:b"]


def test_each_id_is_asked_for_once_per_process(server: Server, text_codec: None) -> None:
    ids = [server.add("s", "one"), server.add("s", "two")]
    for _ in range(3):
        decoder(server).decode(pa.array([message(each, b"a") for each in ids] * 5))
    assert sorted(path for _, path, _ in server.requests) == [f"/schemas/ids/{each}" for each in ids]


def test_the_id_of_the_reader_schema_needs_no_registry_in_the_tasks(
    server: Server, text_codec: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = server.add("t-value", "one")
    options = {"url": server.url, "retry.timeout.ms": "300"}
    chosen = registry_schema(options, topic="t")
    given = registry_schema(options, topic="t", schema="one")
    monkeypatch.setattr(catalogs, "_catalogs", {})  # as in another process
    server.fault = (503, "{}")
    rows = pa.array([message(number, b"a")])
    with pytest.raises(RegistryUnavailableError):  # its text may differ from the registry's
        given.decoding().decode(rows)
    assert texts(chosen.decoding().decode(rows)) == ["one:a"]


def test_an_id_that_another_node_registered_a_moment_ago_is_awaited(
    server: Server, text_codec: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogs, "_KNOWN_AFTER_SECONDS", 60.0)
    answer = server.answer

    def lagging(method: str, path: str, body: dict[str, Any]) -> Any:
        found = answer(method, path, body)
        if not server.schemas:
            server.add("s", "one")
        return found

    monkeypatch.setattr(server, "answer", lagging)
    assert texts(decoder(server).decode(pa.array([message(1, b"a")]))) == ["one:a"]


def test_a_registry_that_is_slow_for_one_id_does_not_make_records_of_another_bad(
    server: Server, text_codec: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request for the first id takes longer than new ids are awaited."""
    answer, asked = server.answer, 0

    def slow(method: str, path: str, body: dict[str, Any]) -> Any:
        nonlocal asked
        if path.startswith("/schemas/ids/1"):
            asked += 1
            if asked == 2:
                time.sleep(2 * catalogs._KNOWN_AFTER_SECONDS)  # the fault itself
        found = answer(method, path, body)
        if asked == 2 and not server.schemas:
            server.add("s", "one")
            server.add("s", "two")
        return found

    monkeypatch.setattr(server, "answer", slow)
    rows = pa.array([message(1, b"a"), message(2, b"b")])
    assert texts(decoder(server).decode(rows)) == ["one:a", "two:b"]


def test_an_id_that_was_awaited_in_vain_is_asked_for_again_without_waiting(
    server: Server, text_codec: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.array([message(1, b"a")])
    assert texts(decoder(server).decode(rows)) == [None]
    asked = len(server.requests)
    assert texts(decoder(server).decode(rows)) == [None]
    assert len(server.requests) == asked, "not asked for again at once"
    monkeypatch.setattr(catalogs, "_ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(catalogs, "_KNOWN_AFTER_SECONDS", 3600.0)
    assert texts(decoder(server).decode(rows)) == [None]
    assert len(server.requests) == asked + 1
    server.add("s", "one")
    assert texts(decoder(server).decode(rows)) == ["one:a"]


def test_a_batch_full_of_unknown_ids_awaits_some_of_them(
    server: Server, text_codec: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogs, "_KNOWN_AFTER_SECONDS", 1.0)
    monkeypatch.setattr(catalogs, "_MOST_AWAITED", 5)
    answer = server.answer

    def lagging(method: str, path: str, body: dict[str, Any]) -> Any:
        found = answer(method, path, body)
        if path.startswith("/schemas/ids/5") and not server.schemas:
            server.add("s", "one")
        return found

    monkeypatch.setattr(server, "answer", lagging)
    found = decoder(server).decode(pa.array([message(each, b"a") for each in range(6)]))
    assert texts(found) == [None, "one:a", None, None, None, None]
    assert [path for _, path, _ in server.requests].count("/schemas/ids/5") == 1, "beyond the bound"


def test_a_schema_that_cannot_be_used_makes_bad_records(server: Server, text_codec: None) -> None:
    """The query goes on with the records of other ids."""
    gone = server.add("s", "one", references=[{"name": "n", "subject": "gone", "version": 1}])
    foreign, good = server.add("s", "<x/>", "XML"), server.add("s", "two")
    found = decoder(server).decode(pa.array([message(each, b"a") for each in (gone, foreign, good)]))
    assert texts(found) == [None, None, "two:a"]
    assert "subject 'gone', imported as 'n'" in found.errors[0]
    assert "the schema format 'XML' is unknown" in found.errors[1]
    assert "headers" not in found.errors[1], "the record names a schema that the registry has"


def test_an_id_that_no_registry_gives_is_a_bad_record(server: Server, text_codec: None) -> None:
    """A registry answers with HTTP 404 without a code of its own, which fails the task."""
    known = server.add("s", "one")
    ids = (known, 2**31, 2**32 - 1)
    found = decoder(server).decode(pa.array([message(each, b"a") for each in ids]))
    assert texts(found) == ["one:a", None, None]
    assert "the schema id 2147483648; ids of a registry end at 2147483647" in found.errors[1]
    assert len(server.requests) == 1
    assert list(decoder(server).decode(pa.array([message(2**31, b"a")])).errors) == [0]


def test_a_registry_with_other_contents_is_noticed(server: Server) -> None:
    kept = catalogs.Catalog({"url": server.url.replace("//", "//bob:hunter2@")})
    kept.add(5, Schema("AVRO", '{"type": "int"}'))
    kept.add(5, Schema("AVRO", '{"type":"int"}'))
    with pytest.raises(OperatorError, match=r"schema id 5 .*int.*string.*new executors") as raised:
        kept.add(5, Schema("AVRO", '"string"'))
    assert server.url in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_values_are_encoded_with_the_frame_of_their_schema(text_codec: None) -> None:
    values = pa.array(["a", None])
    assert Encoding(7, Schema("AVRO", "s")).encode(values).values.to_pylist() == [b"\0\0\0\0\7a", None]
    framed = Encoding(7, Schema("PROTOBUF", "s")).encode(pa.chunked_array([values])).values
    assert framed[0].as_py() == frame_prefix(7, (2, 1)) + b"a"


# -- which schema ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"topic": "t"}, "t-value"),
        ({"topic": "t", "is_key": True}, "t-key"),
        ({"record": "n.R"}, "n.R"),
        ({"topic": "t", "record": "n.R"}, "t-n.R"),
        ({}, None),
    ],
)
def test_the_subject_follows_from_what_is_given(given: dict[str, Any], expected: str | None) -> None:
    arguments: dict[str, Any] = {"topic": None, "record": None, "is_key": False}
    assert subject_name(**{**arguments, **given}) == expected


def test_the_schema_is_the_latest_or_the_one_that_is_named(server: Server, text_codec: None) -> None:
    first, second = server.add("t-value", "one"), server.add("t-value", "two")
    assert registry_schema(server.url, topic="t").schema_id == second
    assert registry_schema(server.url, topic="t", version=1).schema_id == first
    assert registry_schema({"url": server.url}, schema_id=first).schema.text == "one"
    given = registry_schema(server.url, topic="t", schema="one")
    assert (given.schema_id, given.encoding().schema.text) == (first, "one")
    assert registry_schema(server.url, topic="t", schema="new", register=True).schema_id == 3
    with pytest.raises(InvalidOptionError, match="without a subject"):
        registry_schema(server.url, schema="one").encoding()
    with pytest.raises(SchemaNotFoundError, match="the given schema under subject 't-value'"):
        registry_schema(server.url, topic="t", schema="unregistered")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no schema is named"),
        ({"topic": "t", "subject": "s"}, "subject is 's', and topic or record is given too"),
        ({"topic": "t", "version": 1, "schema_id": 2}, "version and schema_id are given"),
        ({"topic": "t", "register": True}, "register is set"),
        ({"schema": "x", "register": True}, "register is set"),
        ({"topic": "t", "schema": "x", "schema_type": "THRIFT"}, "'THRIFT' is unknown; expected one of AVRO"),
    ],
)
def test_contradicting_arguments_are_refused(server: Server, given: dict[str, Any], said: str) -> None:
    with pytest.raises(KafkaEosError, match=said):
        registry_schema(server.url, **given)


def test_spark_takes_the_functions_for_those_of_iterators(
    server: Server, text_codec: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They return several arrays for one if it is large. Spark chooses the kind of UDF by type hints."""
    typehints = pytest.importorskip("pyspark.sql.pandas.typehints")
    wanted = getattr(PythonEvalType, "SQL_SCALAR_ARROW_ITER_UDF", None)
    if wanted is None:
        pytest.skip("needs the Arrow UDFs of PySpark 4.1")
    found = []

    def arrow_udf(function: Any, _returned: Any) -> Any:
        hints = get_type_hints(function)
        found.append(typehints.infer_arrow_eval_type(inspect.signature(function), hints))
        raise NotImplementedError

    monkeypatch.setattr("pyspark.sql.functions.arrow_udf", arrow_udf, raising=False)
    server.add("s", "one")
    for make in (from_registry, to_registry, partial(from_registry, headers="headers")):
        with pytest.raises(NotImplementedError):
            make("value", server.url, subject="s")
    assert found == [wanted] * 3


def test_columns_need_arrow_udfs(server: Server, text_codec: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("pyspark.sql.functions.arrow_udf", raising=False)
    server.add("t-value", "one")
    for function in (from_registry, to_registry):
        with pytest.raises(InvalidOptionError, match=r"need PySpark 4\.1.*decode with map_in_read"):
            function("value", server.url, topic="t")
    with pytest.raises(InvalidOptionError, match="mode is 'lenient'; expected 'fail' or 'permissive'"):
        from_registry("value", server.url, topic="t", mode="lenient")  # type: ignore[arg-type]
    chosen = registry_schema(server.url, topic="t")
    with pytest.raises(InvalidOptionError, match="version is given together with a schema"):
        from_registry("value", chosen, version=1)


@pytest.mark.parametrize("kind", ["AVRO", "PROTOBUF", "JSON"])
def test_a_schema_is_derived_registered_and_used_for_a_round_trip(server: Server, kind: str) -> None:
    """With the real codecs, through the registry."""
    type_ = StructType([StructField("carrier", StringType()), StructField("minutes", LongType())])
    chosen = registry_schema(
        server.url, topic="flights", record="acme.Delay", schema=type_, schema_type=kind, register=True
    )
    assert server.subjects == {"flights-acme.Delay": [1]}
    rows = [{"carrier": "AA", "minutes": 5}, None, {"carrier": "ü" * 50, "minutes": -(2**62)}]
    encoded = chosen.encoding().encode(pa.array(rows, chosen.arrow_type))
    assert not encoded.errors
    found = registry_schema(server.url, topic="flights", record="acme.Delay").decoding()
    decoded = found.decode(pa.concat_arrays([encoded.values, pa.array([b"\0\0\0\0\1", b"no"])]))
    assert decoded.values.to_pylist()[:3] == rows
    assert 4 in decoded.errors


@pytest.mark.parametrize("message", [None, "Flight"])
def test_protobuf_messages_of_another_type_are_bad_records(server: Server, message: str | None) -> None:
    """Their fields have the numbers of other fields, and must not become values of the reader's."""
    leg = "message Leg { string id=1; string to=2; }"
    text = f'syntax="proto3"; message Flight {{ string id=1; {leg} repeated Leg legs=3; }}'
    own, other = server.add("f", text, "PROTOBUF"), server.add("l", f'syntax="proto3"; {leg}', "PROTOBUF")
    same = server.add("f", f'syntax="proto3"; package old; {text.partition(";")[2]}', "PROTOBUF")
    body = b"\x0a\x02F1"
    rows = [frame_prefix(own, (0,)), frame_prefix(other, (0,)), frame_prefix(own, (0, 0))]
    found = registry_schema(server.url, schema_id=own, message=message).decoding()
    decoded = found.decode(pa.array([each + body for each in (*rows, frame_prefix(same, (0,)))]))
    flight = {"id": "F1", "legs": []}
    assert decoded.values.to_pylist() == [flight, None, None, flight]
    assert "messages of type Leg, but Flight is expected" in decoded.errors[1]
    assert "messages of type Flight.Leg, but Flight is expected" in decoded.errors[2]


def test_values_are_converted_between_units_of_time_and_not_by_the_names_of_fields(server: Server) -> None:
    def column(unit: str, name: str = "at") -> pa.Array:
        return pa.array([{name: 1}], pa.struct([(name, pa.timestamp(unit))]))

    made = Decoding({"url": server.url}, Schema("AVRO", "x"), None, column("us").type)
    assert made._fit(column("ms")).type == column("us").type
    with pytest.raises(InvalidSchemaError, match="expected struct<at: timestamp"):
        made._fit(column("us", "other"))
