"""What AWS Glue answers, and whether it answers, decides what becomes of records."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator

import pytest

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
from kafka_eos_source.registry.glue import GlueRegistry
from tests.support import glue_server
from tests.support.glue_server import REGISTRY, Server

UNKNOWN = uuid.UUID("00000000-0000-4000-8000-00000000000f")
OTHER = uuid.UUID(int=1)
INT, LONG = '"int"', '"long"'


@pytest.fixture(autouse=True)
def login(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login of the environment, and no file or machine that has another one."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMIK7MDENG")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(catalogs, "_KNOWN_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(catalogs, "_catalogs", {})
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


def test_a_name_that_no_schema_can_have_is_refused(server: Server) -> None:
    with pytest.raises(InvalidOptionError, match="the name of the schema is 'a b'"):
        registry(server).by_version("a b")
