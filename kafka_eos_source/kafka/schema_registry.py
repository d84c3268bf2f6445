"""Calls a Confluent-compatible schema registry, and tells its answers from failures to reach it.

That difference decides what becomes of records. A registry that does not know an id says that the record is
bad. A registry that cannot be reached says nothing about the record, so the task has to fail and run again.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from uuid import UUID

from kafka_eos_source.errors import (
    AuthorizationError,
    InvalidOptionError,
    InvalidSchemaError,
    OperatorError,
    RegistryUnavailableError,
    SchemaNotFoundError,
)
from kafka_eos_source.option_values import boolean, refuse_plain_http
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS
from kafka_eos_source.secrets import (
    ALLOW_HTTP,
    FROM_ENVIRONMENT,
    NO_SECRETS,
    Secrets,
    shown_url,
    urls_in,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

#: What names a schema: a number that is unique in one registry, or a GUID.
SchemaId = int | UUID

#: How long a call is retried if the registry cannot be reached; in milliseconds.
RETRY_TIMEOUT = "retry.timeout.ms"
_RETRY_TIMEOUT_MS = 60_000
#: The most bytes of a schema with everything that it imports. Records of larger schemas are bad records.
MOST_BYTES = "schema.limit.bytes"
_MOST_BYTES = 4 << 20
#: After so many ids of one slice of records that the registry does not have, no more ids are asked for.
MOST_UNKNOWN_IDS = "schema.limit.unknown.ids"
_MOST_UNKNOWN_IDS = 200
#: The options of `Limits`.
LIMITS = (RETRY_TIMEOUT, MOST_BYTES, MOST_UNKNOWN_IDS)
#: Where a query writes the names of schemas, and whether it looks for them in headers.
ID_LOCATION = "schema.id.location"
HEADER, PAYLOAD = "header", "payload"
#: Length of the ids in front of payloads that are read.
ID_BYTES = "schema.id.bytes"
_ID_BYTES = ("4", "8")
_ANSWER_SECONDS = 10
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_LOGIN = "basic.auth.user.info"
_ISSUER = "bearer.auth.issuer.endpoint.url"
_LOGICAL_CLUSTER = "bearer.auth.logical.cluster"

#: Codes of the registry's errors: subject, version and schema not found.
_NOT_FOUND = (40401, 40402, 40403)
_TEMPORARY = (408, 425, 429)
_UNPROCESSABLE = 422


@dataclass(frozen=True)
class StoredReference:
    """A reference of a stored schema: the name under which it imports a version of a subject."""

    name: str
    subject: str
    version: int


@dataclass(frozen=True)
class StoredSchema:
    """A schema as the registry stores it.

    Attributes:
        schema_id: its id; -1 if it is not registered yet.
        format: ``AVRO``, ``PROTOBUF`` or ``JSON``.
        text: the schema itself.
        references: the schemas that it imports.
        guid: its GUID; None if the registry has not told it.
    """

    schema_id: SchemaId
    format: str
    text: str
    references: tuple[StoredReference, ...] = ()
    guid: UUID | None = None


@dataclass(frozen=True)
class Limits:
    """How long a registry is asked, and what a process reads from it; options of each kind of registry.

    Attributes:
        retry_seconds: how long a call is repeated if the registry does not answer (`RETRY_TIMEOUT`).
        most_bytes: the most bytes of a schema with everything that it imports (`MOST_BYTES`).
        most_unknown_ids: after so many unknown ids, it is not asked for more (`MOST_UNKNOWN_IDS`).
    """

    retry_seconds: float
    most_bytes: int
    most_unknown_ids: int

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Limits:
        """Removes the options from the settings.

        Raises:
            InvalidOptionError: if one is malformed.
        """
        return cls(
            _number(settings, RETRY_TIMEOUT, _RETRY_TIMEOUT_MS, "milliseconds") / 1000,
            int(_number(settings, MOST_BYTES, _MOST_BYTES, "bytes", 1)),
            int(_number(settings, MOST_UNKNOWN_IDS, _MOST_UNKNOWN_IDS, "ids", 1)),
        )


@dataclass(frozen=True)
class Request:
    """One request to a registry, which is repeated until it is answered.

    Attributes:
        registry: the registry, as errors name it.
        what: what is asked for, as errors name it.
        limits: says how long.
        secrets: what errors of the client may quote and messages must not show.
    """

    registry: str
    what: str
    limits: Limits
    secrets: Secrets = NO_SECRETS

    def until_answered(
        self,
        call: Callable[[], T],
        on: tuple[type[Exception], ...],
        permanent: Callable[[Exception], Exception | None],
    ) -> T:
        """Calls the registry until it answers.

        Args:
            call: the call.
            on: the classes of errors by which the client says that there is no answer, or a refusal.
            permanent: returns the error for a refusal that a repetition does not change; None = repeat.

        Raises:
            RegistryUnavailableError: if the registry does not answer in time.
        """

        def timed_out(failure: Exception) -> Exception:
            return RegistryUnavailableError(
                f"{self.registry} did not answer a request for {self.what} within "
                f"{self.limits.retry_seconds:g} s: {reason(failure, self.secrets)}.",
                fix="check the registry and the network, then start the query again. No record was declared "
                f"bad because of this. The option {RETRY_TIMEOUT!r} makes tasks wait longer.",
            )

        def report(failure: Exception, seconds: float) -> None:
            _log.warning(
                "%s does not answer a request for %s; next try in %.1f s: %s",
                self.registry,
                self.what,
                seconds,
                reason(failure, self.secrets),
            )

        pauses = Pauses(Deadline.after_seconds(self.limits.retry_seconds), 0.1, 5.0, jitter=0.3)
        return retry(call, on, pauses, permanent=permanent, timed_out=timed_out, report=report)


class _UnknownPathError(OperatorError):
    """The URL, or this registry, does not have the path of a request."""


class SchemaRegistry:
    """A client of one registry. Each call is repeated until the registry answers, or a deadline passes.

    Args:
        options: the properties of Confluent's client (``url``, ``basic.auth.user.info``, ``ssl.ca.location``,
            …), `RETRY_TIMEOUT`, `ALLOW_HTTP`, `MOST_BYTES`, `MOST_UNKNOWN_IDS`, `ID_LOCATION` and `ID_BYTES`.
            A name with the suffix ``.env`` gives the name of an environment variable with the value.

    Raises:
        InvalidOptionError: if an option is unknown or malformed, or the client is not installed.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        settings = from_environment(options)
        id_location(settings)
        id_bytes(settings)
        for name in (ID_LOCATION, ID_BYTES):
            settings.pop(name, None)
        self._secrets = _secrets(settings)
        self.limits = Limits.of(settings)
        self.url = shown_urls(str(settings.get("url", "")))
        self.name = f"the schema registry {self.url}"
        _check_urls(str(settings.get("url", "")))
        _refuse_plain_http(settings)
        self._client, self._unreachable = _client(settings)
        self._knows_guids = True

    def by_id(self, schema_id: SchemaId) -> StoredSchema:
        """Returns the schema with an id or a GUID.

        Raises:
            SchemaNotFoundError: if the registry says that it has no such schema.
            RegistryUnavailableError: if the registry does not answer.
            InvalidSchemaError: if the schema imports something without a name, subject or version, or the
                registry knows no GUIDs.
            AuthorizationError, OperatorError: if it refuses the request, or its answer is not a schema.
        """
        what = f"schema id {schema_id}"
        if not isinstance(schema_id, UUID):
            return self._call(lambda: _stored(schema_id, self._client.get_schema(schema_id)), what)
        try:
            if self._knows_guids:
                ask = self._client.get_schema_by_guid
                return self._call(lambda: _stored(schema_id, ask(str(schema_id))), what)
        except _UnknownPathError:
            self.answers()  # fails if this is no registry at all
            self._knows_guids = False
        raise InvalidSchemaError(
            f"the schema registry {self.url} knows no GUIDs of schemas.",
            fix="use a registry that does, such as that of Confluent Platform 8 or Confluent Cloud.",
        )

    def guid_of(self, schema_id: int) -> UUID | None:
        """Returns the GUID of a schema; None if the registry tells none. Raises the errors of `by_id`."""
        what = f"the subjects of schema id {schema_id}"
        for each in self._call(lambda: self._client.get_schema_versions(schema_id, limit=1), what):
            return self.by_version(each.subject, each.version).guid
        return None

    def by_version(self, subject: str, version: int | None = None) -> StoredSchema:
        """Returns a version of a subject, by default the latest. Raises the errors of `by_id`."""
        which: Any = "latest" if version is None else version
        what = f"version {which} of subject {subject!r}"
        return self._call(lambda: _stored_version(self._client.get_version(subject, which)), what)

    def referenced(self, reference: StoredReference) -> StoredSchema:
        """Returns the schema that another one imports, even if it was deleted since, as by `by_id`."""
        what = f"version {reference.version} of subject {reference.subject!r}, imported as {reference.name!r}"
        place = (reference.subject, reference.version)
        return self._call(lambda: _stored_version(self._client.get_version(*place, deleted=True)), what)

    def find(self, subject: str, schema: StoredSchema) -> StoredSchema:
        """Returns a schema that is registered under a subject, with its id. Raises the errors of `by_id`."""
        return self._call(
            lambda: _registered(schema, self._client.lookup_schema(subject, _of_client(schema))),
            f"the given schema under subject {subject!r}",
        )

    def register(self, subject: str, schema: StoredSchema) -> StoredSchema:
        """Registers a schema under a subject, unless it is known there, and returns it with its id.

        Raises:
            RegistryUnavailableError: if the registry does not answer.
            AuthorizationError, OperatorError: if it refuses the schema, such as for incompatibility.
        """
        return self._call(
            lambda: _registered(
                schema, self._client.register_schema_full_response(subject, _of_client(schema))
            ),
            f"the new schema of subject {subject!r}",
        )

    def forget(self) -> None:
        """Drops the schemas that Confluent's client keeps without limit; `registry.catalog` keeps its own."""
        self._client.clear_caches()

    def answers(self) -> None:
        """Checks that the registry can be reached and accepts the credentials. Raises as `by_id`."""
        self._call(self._client.get_subjects, "the list of subjects")

    def _call(self, call: Callable[[], T], what: str) -> T:
        """Calls the registry until it answers.

        Args:
            call: the call.
            what: what it asks for, for errors.
        """
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        def permanent(failure: Exception) -> Exception | None:
            if not isinstance(failure, SchemaRegistryError):
                return None
            status = failure.http_status_code
            if status >= 500 or status in _TEMPORARY:
                return None
            return self._refused(failure, what)

        request = Request(self.name, what, self.limits, self._secrets)
        try:
            return request.until_answered(call, (SchemaRegistryError, *self._unreachable), permanent)
        except (
            *SHAPE_ERRORS,
            RecursionError,
        ) as error:  # the body of an answer is not JSON, or not that of a registry
            self.forget()  # the client may have cached it
            raise OperatorError(
                f"{self.url} answered a request for {what} with something else than JSON of a schema "
                f"registry: {reason(error, self._secrets)}.",
                fix="check that the URL is that of a schema registry, and not of a proxy or a web page.",
            ) from error

    def _refused(self, failure: Any, what: str) -> Exception:
        """Returns the error for an answer that a repetition does not change."""
        status, code = failure.http_status_code, failure.error_code
        if code in _NOT_FOUND:
            return SchemaNotFoundError(
                f"{self.name} does not have {what} (error {code}).",
                fix="check the URL, the subject and the id; register the schema if it is new.",
            )
        if status == _UNPROCESSABLE and what.startswith("version"):
            return InvalidSchemaError(
                f"{self.name} does not accept the request for {what} (HTTP {status}): "
                f"{reason(failure, self._secrets)}.",
                fix="check the subject and the version.",
            )
        if status in (401, 403):
            return AuthorizationError(
                f"{self.name} refuses access to {what} (HTTP {status}): {reason(failure, self._secrets)}.",
                fix="check 'basic.auth.user.info', 'bearer.auth.token' or the client's certificate, and that "
                "the principal may read the subject.",
            )
        if status == 404:
            return _UnknownPathError(
                f"{self.url} answered a request for {what} with HTTP 404, but not as a schema registry does: "
                f"{reason(failure, self._secrets)}.",
                fix="check the path of the URL; Apicurio's ends in /apis/ccompat/v7.",
            )
        return OperatorError(
            f"{self.name} refuses a request for {what} (HTTP {status}, error {code}): "
            f"{reason(failure, self._secrets)}.",
            fix="correct what the registry complains about.",
        )


def id_location(options: Mapping[str, Any]) -> str | None:
    """Returns the value of the option `ID_LOCATION`; None if it is not set.

    Raises:
        InvalidOptionError: if it has another value.
    """
    found = options.get(ID_LOCATION)
    if found in (None, HEADER, PAYLOAD):
        return found
    raise InvalidOptionError(
        f"option {ID_LOCATION!r} of the schema registry has the value {found!r}; expected {HEADER!r}, to "
        f"write GUIDs into headers, or {PAYLOAD!r}, to look for ids only in front of payloads.",
        fix="leave it out to read both, and to write ids in front of payloads.",
    )


def id_bytes(options: Mapping[str, Any]) -> int:
    """Returns the value of the option `ID_BYTES`.

    Raises:
        InvalidOptionError: if it is not 4 or 8.
    """
    found = str(options.get(ID_BYTES, "4"))
    if found in _ID_BYTES:
        return int(found)
    raise InvalidOptionError(
        f"option {ID_BYTES!r} of the schema registry has the value {found!r}; expected 4, or 8 for records "
        "of Apicurio's Legacy8ByteIdHandler.",
        fix="leave it out for 4.",
    )


def shown_urls(urls: str) -> str:
    """Returns URLs without user names, passwords and values of queries, for errors and logs."""
    return ", ".join(map(shown_url, urls_in(urls)))


def _check_urls(urls: str) -> None:
    if urls and all(each.strip().startswith(("http://", "https://")) for each in urls.split(",")):
        return
    raise InvalidOptionError(
        f"option 'url' of the schema registry has the value {shown_urls(urls)!r}; expected one URL, or "
        "several separated by commas, that begin with http:// or https://.",
        fix="for example 'https://registry.example.com:8081'.",
    )


def _refuse_plain_http(settings: dict[str, Any]) -> None:
    """Takes `ALLOW_HTTP` out of the settings, and refuses to send a login over plain http without it."""
    allowed = boolean(ALLOW_HTTP, str(settings.pop(ALLOW_HTTP, "false")))
    urls, issuer = str(settings.get("url", "")), str(settings.get(_ISSUER, ""))
    is_login = any(name.startswith(("basic.auth.", "bearer.auth.")) for name in settings)
    for url in urls_in(urls):
        if is_login or "@" in url:
            refuse_plain_http("url", url, "the login at the registry", ALLOW_HTTP, allowed=allowed)
    if issuer:
        refuse_plain_http(_ISSUER, issuer, "the client's secret", ALLOW_HTTP, allowed=allowed)


def from_environment(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options with each ``name.env`` replaced by ``name`` and the variable's value."""
    settings: dict[str, Any] = {}
    for name, value in options.items():
        if not name.endswith(FROM_ENVIRONMENT):
            settings[name] = value
            continue
        if _VARIABLE.fullmatch(str(value)) is None:
            raise InvalidOptionError(
                f"option {name!r} of the schema registry has a value that is not the name of an environment "
                "variable; it is not shown, because it may be a secret.",
                fix="give the name of a variable that contains the value, for example 'REGISTRY_LOGIN'.",
            )
        found = os.environ.get(str(value))
        if found is None:
            raise InvalidOptionError(
                f"option {name!r} of the schema registry names the environment variable {value!r}, which is "
                "not set in this process.",
                fix="set the variable on the driver and on every executor before Spark starts.",
            )
        settings[name.removesuffix(FROM_ENVIRONMENT)] = found
    return settings


def _secrets(settings: Mapping[str, Any]) -> Secrets:
    user = str(settings.get(_LOGIN, ""))
    return Secrets.of(settings) | Secrets(frozenset({user, user.partition(":")[2]}))


def _number(settings: dict[str, Any], name: str, default: float, unit: str, least: int = 0) -> float:
    """Removes an option from the settings, and returns its value, which is at least ``least``."""
    value = settings.pop(name, default)
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = -1.0
    if not least <= found < float("inf"):
        raise InvalidOptionError(
            f"option {name!r} of the schema registry has the value {value!r}; expected a number of {unit}, "
            f"at least {least}.",
            fix=f"for example {default}.",
        )
    return found


def _client(settings: dict[str, Any]) -> tuple[Any, tuple[type[Exception], ...]]:
    """Returns Confluent's client, and the classes of errors by which it says that nobody answered."""
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as error:
        raise InvalidOptionError(
            f"the client of schema registries is not installed: {error}.",
            fix="pip install 'kafka-eos-source[avro]' (or [protobuf], [jsonschema]) on the driver and on "
            "every executor.",
        ) from error
    settings.setdefault("timeout", _ANSWER_SECONDS)
    settings["timeout"] = float(settings["timeout"])
    settings["max.retries"] = 0  # this package's retries log, and have a deadline
    if "bearer.auth.token" in settings:
        settings.setdefault("bearer.auth.credentials.source", "STATIC_TOKEN")
        settings.setdefault(_LOGICAL_CLUSTER, "")  # only Confluent Cloud has logical clusters
    try:
        client = SchemaRegistryClient(settings)
    except (ValueError, TypeError, OSError) as error:
        raise InvalidOptionError(
            f"an option of the schema registry is malformed: {reason(error, _secrets(settings))}.",
            fix="use the properties of Confluent's client: url, basic.auth.user.info, bearer.auth.token, "
            "ssl.ca.location, ssl.certificate.location, ssl.key.location, …",
        ) from error
    return client, _transport_errors()


def _transport_errors() -> tuple[type[Exception], ...]:
    """Returns the classes by which Confluent's client and its HTTP library report that nobody answered."""
    found: list[type[Exception]] = []
    for name in ("httpx2", "httpx"):  # the client uses one of them, depending on its version
        try:
            library = __import__(name)
        except ImportError:
            continue
        found.append(library.TransportError)
    from confluent_kafka.schema_registry.error import OAuthTokenError

    return (*found, OAuthTokenError)


def reason(failure: object, secrets: Secrets) -> str:
    """Returns the class and the text of an error without secrets, for messages."""
    text = secrets.hide(" ".join(str(failure).split()))[:500] or "no reason given"
    return f"{type(failure).__name__}: {text}".rstrip(".")


def _stored(schema_id: SchemaId, found: Any) -> StoredSchema:
    kind = found.schema_type or "AVRO"
    if not isinstance(found.schema_str, str) or not isinstance(kind, str):
        raise TypeError("it has no schema")
    references = []
    for each in found.references or ():
        texts, version = (each.name, each.subject), each.version
        if not all(isinstance(text, str) for text in texts) or type(version) is not int:
            raise InvalidSchemaError(
                f"schema id {schema_id} imports the name {each.name!r}, subject {each.subject!r}, version "
                f"{version!r}; expected two texts and a number.",
                fix="register the schema again with complete references.",
            )
        references.append(StoredReference(each.name, each.subject, version))
    return StoredSchema(schema_id, kind.upper(), found.schema_str, tuple(references))


def _stored_version(found: Any) -> StoredSchema:
    if type(found.schema_id) is not int:
        raise TypeError("it has no id")
    return replace(_stored(found.schema_id, found.schema), guid=_guid(found))


def _registered(schema: StoredSchema, found: Any) -> StoredSchema:
    return replace(schema, schema_id=int(found.schema_id), guid=_guid(found))


def _guid(found: Any) -> UUID | None:
    """Returns the GUID in an answer; registries before Confluent Platform 8 tell none."""
    return None if found.guid is None else UUID(found.guid)


def _of_client(schema: StoredSchema) -> Any:
    from confluent_kafka.schema_registry import Schema, SchemaReference

    references = [SchemaReference(each.name, each.subject, each.version) for each in schema.references]
    return Schema(schema.text, schema.format, references)
