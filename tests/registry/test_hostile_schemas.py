"""Whatever a schema contains that a record names, it makes bad records at most, and costs little."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from kafka_eos_source.documents.converted import MOST_BYTES, Converted
from kafka_eos_source.errors import (
    AuthorizationError,
    InvalidOptionError,
    KafkaEosError,
    OperatorError,
    RegistryUnavailableError,
    RetriableError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate import records as people
from kafka_eos_source.registry import catalog as catalogs
from kafka_eos_source.registry import codec, protobuf_schema, records
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.frames import frame_prefix
from kafka_eos_source.registry.records import Decoding
from tests.registry import avro_model
from tests.support import registry_server
from tests.support.hostile_schemas import (
    ATTACKS,
    PAYLOADS,
    READERS,
    avro,
    decoded,
    one_by_one,
    proto,
    record,
    schemas,
    unions,
)
from tests.support.registry_server import Server

GOOD = '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}'


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(catalogs, "_KNOWN_AFTER_SECONDS", 0.2)
    with registry_server.running() as running:
        catalogs._catalogs.clear()
        records._decoders.clear()
        yield running


def decode(server: Server, *messages: bytes, **options: Any) -> Converted:
    reader = READERS["AVRO"]
    given = {"url": server.url, "retry.timeout.ms": "300", **options}
    return Decoding(given, reader, None, codec.arrow_type(reader, None)).decode(
        pa.array(messages, pa.binary())
    )


def message(schema_id: int) -> bytes:
    return frame_prefix(schema_id) + b"\x06"


def number_of_steps(work: Any) -> int:
    """Returns how many calls of Python functions some work takes, which no other process disturbs."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


# -- schemas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ATTACKS)
def test_a_schema_that_was_made_to_do_harm_costs_its_records_at_most(name: str) -> None:
    make, expected = ATTACKS[name]
    schema = make()
    payload = b"\0" if schema.format == "PROTOBUF" else b""  # the path of the first message
    found = decoded(schema, payload + b"\x02\x00", payload, payload + b"\xff" * 20)
    assert len(found.values) == 3
    assert all(len(text) < 1100 for text in found.errors.values())
    if expected is not None:
        assert sorted(found.errors) == [0, 1, 2]
        assert expected in found.errors[0]


@pytest.mark.parametrize("levels", [10, 40])
def test_time_does_not_grow_with_what_a_schema_could_be_written_out_to(levels: int) -> None:
    """A record that has the next one twice doubles with each level, and its text only gets longer."""

    def schema(levels: int) -> Schema:
        found: Any = record("D0", ("v", "int"))
        for level in range(1, levels):
            found = record(f"D{level}", ("a", found), ("b", f"D{level - 1}"))
        return avro(("d", {"type": "array", "items": found}))

    decoded(schema(2), b"\x00")
    assert number_of_steps(lambda: decoded(schema(levels), b"\x00")) < 4000


def test_unions_of_types_that_all_match_are_compared_a_number_of_times_only() -> None:
    reader = Schema("AVRO", json.dumps(one_by_one(6)))
    found = decoded(Schema("AVRO", json.dumps(unions(6, 2))), b"\0" * 6 + b"\x06", reader=reader)
    assert str(found.values[0].as_py()).count("r") == 12
    found = decoded(Schema("AVRO", json.dumps(unions(6, 30))), b"\0" * 6 + b"\x06", reader=reader)
    assert "takes more than 200,000 steps" in found.errors[0]


#: How many schemas a test tries; protoc runs for each.
EXAMPLES = {"AVRO": avro_model.EXAMPLES, "JSON": avro_model.EXAMPLES, "PROTOBUF": avro_model.EXAMPLES // 10}


@pytest.mark.parametrize("kind", READERS)
def test_records_of_any_schema_become_values_or_errors(kind: Any) -> None:
    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=EXAMPLES[kind])
    @given(schemas(kind), PAYLOADS)
    def check(writer: Schema, payloads: list[bytes]) -> None:
        if kind == "PROTOBUF":
            payloads = [b"\0" + each for each in payloads]
        assert len(decoded(writer, *payloads).values) == len(payloads)

    check()


@pytest.mark.parametrize("kind", READERS)
def test_people_see_records_of_any_schema(kind: Any) -> None:
    """`kafka-eos tail` has no reader schema, so that of the record decides its columns."""

    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=EXAMPLES[kind])
    @given(schemas(kind), PAYLOADS)
    def check(writer: Schema, payloads: list[bytes]) -> None:
        frame = frame_prefix(7, (0,) if kind == "PROTOBUF" else ())
        texts = seen(writer, *(frame + each for each in payloads))
        assert len(texts) == len(payloads)
        assert None not in texts

    check()


def seen(writer: Schema, *messages: bytes) -> list[bytes | None]:
    catalogs._catalogs.clear()
    options = {"url": "http://127.0.0.1:1", "retry.timeout.ms": "0"}
    catalogs.catalog(options).add(7, writer)
    tp = TopicPartition("t", 0)
    records_of = [people.TopicRecord(tp, at, None, None, each) for at, each in enumerate(messages)]
    return [each.value for each in people.decoded(records_of, options)]


@pytest.mark.parametrize("name", [name for name in ATTACKS if name.startswith("json")])
def test_people_see_records_of_harmful_json_schemas(name: str) -> None:
    assert len(seen(ATTACKS[name][0](), frame_prefix(7) + b"{}", frame_prefix(7) + b"1")) == 2


def test_equal_schemas_are_equal_however_they_share_their_imports() -> None:
    """The hash of a schema that was written out as a tree would take exponential time."""
    make, _ = ATTACKS["protobuf: 20 files that refer to each other"]
    one, other = make(), make()
    assert number_of_steps(lambda: one == other and hash(one) == hash(other)) < 1000
    assert one == other
    assert hash(one) == hash(other)
    assert one != other.references[-1].schema
    assert len(list(one.imports())) == 20


# -- decoders that fail in ways that nobody thought of ------------------------------------------------


class Fragile:
    arrow_type = pa.int64()

    def decode(self, messages: pa.Array, start: int, most_bytes: int = MOST_BYTES) -> Converted:
        bodies = [each[start:] for each in messages.to_pylist()]
        if b"bad" in bodies:
            raise ZeroDivisionError("x" * 5000)
        if b"memory" in bodies:
            raise MemoryError("none left")
        fitting = bodies[: most_bytes // 8]
        return Converted(
            pa.array([int(each) if each.isdigit() else None for each in fitting], pa.int64()),
            {row: "no number" for row, each in enumerate(fitting) if not each.isdigit()},
        )


def fragile(*bodies: bytes, most_bytes: int = MOST_BYTES) -> Converted:
    return records.decode_foreign(Fragile(), pa.array([b"." + each for each in bodies]), 1, most_bytes)


def test_an_exception_of_a_decoder_is_the_error_of_the_record_that_causes_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = fragile(b"1", b"bad", b"x", b"4", b"bad")
    assert found.values.to_pylist() == [1, None, None, 4, None]
    assert sorted(found.errors) == [1, 2, 4]
    assert found.errors[1].startswith("the record cannot be decoded: ZeroDivisionError: xxx")
    assert found.errors[2] == "no number"
    assert len(caplog.records) == 1
    assert fragile(b"1", b"bad", b"3", b"4", most_bytes=26).values.to_pylist() == [1, None, 3]
    assert not fragile(b"bad").values.is_valid()[0].as_py()


def test_memory_that_is_used_up_is_not_the_fault_of_a_record() -> None:
    with pytest.raises(MemoryError):
        fragile(b"1", b"memory", b"bad")


@pytest.mark.parametrize(
    ("failure", "is_of_record"),
    [
        (ZeroDivisionError("x"), True),
        (RecursionError("x"), True),
        (pa.ArrowInvalid("x"), True),
        (MemoryError("x"), False),
        (OSError("no space left"), False),
        (ImportError("x"), False),
        (InvalidOptionError("not installed"), False),
        (RetriableError("x"), False),
    ],
)
def test_what_compiling_a_schema_raises_decides_whose_error_it_is(
    failure: Exception, is_of_record: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> Any:
        raise failure

    reader = READERS["AVRO"]
    decoded(reader, b"\x00")
    monkeypatch.setattr(codec, "decoder", fail)
    if is_of_record:
        found = decoded(reader, b"\x00", b"\x00")
        assert sorted(found.errors) == [0, 1]
        assert f"schema id 7 cannot be compiled: {type(failure).__name__}: x" in found.errors[0]
    else:
        with pytest.raises(type(failure)):
            decoded(reader, b"\x00")


# -- protoc --------------------------------------------------------------------------------------------


@pytest.fixture
def no_cache() -> Iterator[None]:
    protobuf_schema._compiled.cache_clear()
    yield
    protobuf_schema._compiled.cache_clear()


@pytest.mark.parametrize(
    ("code", "stderr", "is_of_schema", "said"),
    [
        (1, b"/schema.proto:1:1: wrong", True, "schema.proto:1:1: wrong"),
        (-signal.SIGXCPU, b"", True, "CPU time"),
        (-signal.SIGSEGV, b"", True, "exit status -11"),
        (-signal.SIGABRT, b"std::bad_alloc", True, "std::bad_alloc"),
        (-signal.SIGKILL, b"", False, "signal 9"),
        (-signal.SIGTERM, b"", False, "signal 15"),
        (97, b"ModuleNotFoundError: grpc_tools", False, "cannot be started"),
    ],
)
def test_how_protoc_ends_decides_whether_the_schema_is_at_fault(
    code: int, stderr: bytes, is_of_schema: bool, said: str, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded(READERS["PROTOBUF"], b"\0")  # the reader schema is compiled before the fault
    runs: list[Any] = []

    def run(*command: Any, **more: Any) -> Any:
        runs.append(command)
        return subprocess.CompletedProcess(command, code, b"", stderr)

    monkeypatch.setattr(protobuf_schema.subprocess, "run", run)
    if is_of_schema:
        found = decoded(proto("int32 z = 9;"), b"\0", b"\0")
        assert sorted(found.errors) == [0, 1]
        assert said in found.errors[0]
        decoded(proto("int32 z = 9;"), b"\0")
        assert len(runs) == 1 + (code == 1), "once more as Java's client reads it; the refusal is remembered"
    else:
        for _ in range(2):
            with pytest.raises(RetriableError, match=said):
                decoded(proto("int32 z = 9;"), b"\0")
        assert len(runs) == 2, "asked again, because the next answer may be another"


@pytest.mark.parametrize("failure", [OSError("no fork"), subprocess.TimeoutExpired("protoc", 300)])
def test_a_machine_that_cannot_run_protoc_makes_no_record_bad(
    failure: Exception, no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded(READERS["PROTOBUF"], b"\0")

    def run(*command: Any, **more: Any) -> Any:
        raise failure

    monkeypatch.setattr(protobuf_schema.subprocess, "run", run)
    with pytest.raises(RetriableError, match="says nothing about the schema"):
        decoded(proto("int32 z = 9;"), b"\0")


def test_a_schema_for_which_protoc_needs_endless_time_is_refused(
    no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """protoc compares each reserved number with each other."""
    reserved = ",".join(str(3 * number + 5) for number in range(200_000))
    monkeypatch.setattr(protobuf_schema, "_PROTOC", protobuf_schema._PROTOC.replace('"CPU": 10', '"CPU": 1'))
    assert "CPU time" in decoded(proto(f"reserved {reserved};"), b"\0").errors[0]


def test_each_path_of_a_schema_that_protoc_refuses_costs_nothing(
    no_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []
    run = protobuf_schema._run_protoc

    def counted(texts: Any, descriptors: Any, main: str) -> bytes | str:
        runs.append(texts[main])
        return run(texts, descriptors, main)

    monkeypatch.setattr(protobuf_schema, "_run_protoc", counted)
    bad = proto("missing z = 9;")
    found = decoded(bad, *(frame_prefix(0, (number,))[5:] for number in range(1, 300)))
    assert len(found.errors) == 299
    assert runs.count(bad.text) == 1


def test_decoders_are_kept_for_a_number_of_messages_only() -> None:
    paths = [frame_prefix(0, (number,))[5:] for number in range(1, records._MOST_DECODERS + 200)]
    assert len(decoded(READERS["PROTOBUF"], *paths).errors) == len(paths)
    assert [len(each) for each in records._decoders.values()] == [records._MOST_DECODERS]


# -- the registry -----------------------------------------------------------------------------------


def test_a_slice_of_garbage_asks_the_registry_for_a_number_of_ids_only(server: Server) -> None:
    good = server.add("s", GOOD)
    garbage = [message(1000 + each) for each in range(2000)]
    found = decode(server, *garbage, message(good), message(good))
    assert found.values[2000].as_py()["a"] == found.values[2001].as_py()["a"] == 3, (
        "the id of most records is first"
    )
    assert len(found.errors) == 2000
    assert "does not have schema id 1000" in found.errors[0]
    assert "was not asked for schema id 2999" in found.errors[1999]
    assert "'schema.limit.unknown.ids'" in found.errors[1999]
    rounds = 3  # within the time in which new ids are awaited
    assert len(server.requests) <= 200 + catalogs._COUNTED + rounds * catalogs._MOST_AWAITED


def test_a_topic_with_a_thousand_schemas_needs_no_option(server: Server) -> None:
    ids = [server.add("s", GOOD.replace('"R"', f'"n{number}.R"')) for number in range(1000)]
    found = decode(server, *(message(each) for each in ids))
    assert not found.errors
    assert len(server.requests) == 1000
    decode(server, *(message(each) for each in ids))
    assert len(server.requests) == 1000


def test_the_number_of_unknown_ids_is_an_option(server: Server) -> None:
    found = decode(server, *(message(1000 + each) for each in range(64)), **{"schema.limit.unknown.ids": "5"})
    assert len([text for text in found.errors.values() if "was not asked" in text]) == 32
    with pytest.raises(InvalidOptionError, match=r"'schema\.limit\.unknown\.ids' .* 'x'"):
        decode(server, message(1), **{"schema.limit.unknown.ids": "x"})


def test_schemas_are_asked_for_together(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests wait for each other here, which they can only if several are under way."""
    import threading

    ids = [server.add("s", GOOD) for _ in range(catalogs._TOGETHER)]
    together = threading.Barrier(catalogs._TOGETHER, timeout=60)
    answer = server.answer

    def wait(method: str, path: str, body: dict[str, Any]) -> Any:
        together.wait()
        return answer(method, path, body)

    monkeypatch.setattr(server, "answer", wait)
    assert not decode(
        server, *(message(each) for each in ids), **{"retry.timeout.ms": "60000", "timeout": "60"}
    ).errors


@pytest.mark.parametrize(
    ("references", "said"),
    [
        ({1: [2], 2: [1]}, "circle"),
        ({1: [1]}, "circle"),
        ({each: [n for n in range(1, 21) if n != each] for each in range(1, 21)}, "circle"),
        ({each: [each + 1] for each in range(1, 1000)}, "levels deep"),
        ({1: list(range(2, 1200))}, "imports more than 1000"),
        ({each: list(range(each + 1, 49)) for each in range(1, 49)}, "imports more than 1000"),
        ({1: [5000]}, "does not have version 1 of subject '5000'"),
    ],
)
def test_imports_without_an_end_make_bad_records(
    references: dict[int, list[int]], said: str, server: Server
) -> None:
    imported = {each for some in references.values() for each in some if each != 5000}
    for number in range(1, 1 + max(imported | references.keys())):
        some = references.get(number, [])
        named = [{"name": f"f{each}", "subject": str(each), "version": 1} for each in some]
        server.add(str(number), GOOD, references=named)
    found = decode(server, message(1), message(1))
    assert said in found.errors[0]
    assert len(server.requests) <= 1100
    before = len(server.requests)
    if "does not have" not in said:
        assert decode(server, message(1)).errors[0] == found.errors[0]
        assert len(server.requests) == before, "the refusal is remembered"


def test_imports_that_are_shared_are_read_once(server: Server) -> None:
    for number in range(1, 21):
        named = [{"name": f"f{each}", "subject": str(each), "version": 1} for each in range(1, number)]
        server.add(str(number), GOOD.replace('"R"', f'"f{number}"'), references=named)
    server.add("main", GOOD, references=[{"name": "f20", "subject": "20", "version": 1}])
    assert decode(server, message(21)).values[0].as_py()["a"] == 3
    assert len(server.requests) == 21


def test_a_schema_of_many_bytes_makes_bad_records(server: Server) -> None:
    large = GOOD.replace('"R"', '"R", "doc": "' + "x" * (4 << 20) + '"')
    one, part = (
        server.add("s", large),
        server.add("p", GOOD.replace('"R"', '"P", "doc": "' + "x" * 3_000_000 + '"')),
    )
    server.add("q", GOOD.replace('"R"', '"Q", "doc": "' + "x" * 3_000_000 + '"'))
    named = [{"name": name.upper(), "subject": name, "version": 1} for name in "pq"]
    both = server.add("both", GOOD, references=named)
    found = decode(server, message(one), message(both), message(part))
    assert "more than 4194304 bytes" in found.errors[0]
    assert "more than 4194304 bytes, including what it imports" in found.errors[1]
    assert not decode(server, message(one), **{"schema.limit.bytes": "9000000"}).errors


@pytest.mark.parametrize(
    "answer",
    [
        {"schema": GOOD, "references": [{"name": None, "subject": "s", "version": 1}]},
        {"schema": GOOD, "references": [{"name": "n", "subject": 5, "version": 1}]},
        {"schema": GOOD, "references": [{"name": "n", "subject": "s", "version": "x"}]},
        {"schema": GOOD, "references": [{"name": "n", "subject": "s", "version": True}]},
        {"schema": GOOD, "references": [{}]},
        {"schema": GOOD, "references": [{"name": "n", "subject": "\ud800", "version": 1}]},
        {"schema": GOOD + "\ud800"},
        {"schema": GOOD, "schemaType": "XML"},
        {"schema": "5"},
        {"schema": ""},
    ],
)
def test_a_schema_that_a_registry_should_not_have_accepted_makes_bad_records(
    answer: dict[str, Any], server: Server
) -> None:
    good = server.add("s", GOOD)
    server.schemas[2] = answer
    found = decode(server, message(2), message(good))
    assert list(found.errors) == [0]
    assert "schema id 2" in found.errors[0]


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (0, "", RegistryUnavailableError),
        (500, "{}", RegistryUnavailableError),
        (503, '{"error_code": 40403}', RegistryUnavailableError),
        (429, "{}", RegistryUnavailableError),
        (408, "{}", RegistryUnavailableError),
        (401, "{}", AuthorizationError),
        (403, '{"error_code": 40301}', AuthorizationError),
        (404, "<html>no such page</html>", OperatorError),
        (404, "{}", OperatorError),
        (400, "{}", OperatorError),
        (200, "<html>log in</html>", OperatorError),
        (200, "[]", OperatorError),
        (200, "5", OperatorError),
        (200, "null", OperatorError),
        (200, "{}", OperatorError),
        (200, '{"schema": null}', OperatorError),
        (200, '{"schema": 5}', OperatorError),
        (200, '{"schema": {}, "schemaType": []}', OperatorError),
        (200, '{"schema": "x", "schemaType": 7}', OperatorError),
        (200, '{"schema": "x", "references": 5}', OperatorError),
        (200, '{"schema": "x", "references": [5]}', OperatorError),
        (200, '{"schema": "x", "metadata": 5}', OperatorError),
        (200, "[" * 100_000, OperatorError),
    ],
)
def test_an_outage_makes_no_record_bad(
    status: int, body: str, expected: type[KafkaEosError], server: Server
) -> None:
    good = server.add("s", GOOD)
    server.fault = (status, body)
    for _ in range(2):
        with pytest.raises(expected) as raised:
            decode(server, *(message(each) for each in range(1, 40)))
        assert str(good) in str(raised.value)
    server.fault = None
    assert not decode(server, message(good)).errors, "nothing of the outage is remembered"


def test_an_outage_ends_all_requests_of_a_slice_together(server: Server) -> None:
    server.fault = (503, "{}")
    began = time.monotonic()
    with pytest.raises(RegistryUnavailableError):
        decode(server, *(message(each) for each in range(5000)))
    assert time.monotonic() - began < 60
    assert len(server.requests) < 500


def test_a_process_keeps_schemas_up_to_a_number_of_bytes(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogs, "_MOST_KEPT_BYTES", 3 * len(GOOD))
    for _ in range(5):
        server.add("s", GOOD)
    for number in (1, 2, 3, 1, 4):  # 2 was used the longest time ago
        decode(server, message(number))
    assert len(server.requests) == 4
    decode(server, message(1), message(3), message(4))
    assert len(server.requests) == 4
    decode(server, message(2))
    assert len(server.requests) == 5
