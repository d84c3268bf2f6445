"""Calls AWS Glue's schema registry, and tells its answers from failures to reach it.

`GlueRegistry` has the methods of `kafka.schema_registry.SchemaRegistry`, so `catalog` treats both alike. Glue
has schemas where Confluent has subjects, and each version of a schema has a UUID. A schema imports no other.

botocore finds credentials by itself (environment, files, instance role, web identity). This package never
sees them.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar
from uuid import UUID

import pyarrow as pa

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
    LIMITS,
    Limits,
    Request,
    SchemaId,
    StoredReference,
    StoredSchema,
    from_environment,
    reason,
)
from kafka_eos_source.option_values import boolean, refuse_plain_http
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS
from kafka_eos_source.secrets import ALLOW_HTTP, FROM_ENVIRONMENT, NO_SECRETS, shown_url

T = TypeVar("T")

#: How the option ``url`` begins for Glue.
SCHEME = "glue://"
COMPRESSION = "compression"
_REGION, _ENDPOINT, _PROFILE, _TIMEOUT = "region", "endpoint", "profile", "timeout"
_COMPATIBILITY = "compatibility"
_OPTIONS = (_REGION, _ENDPOINT, _PROFILE, _TIMEOUT, COMPRESSION, _COMPATIBILITY, ALLOW_HTTP)
#: Of a registry, and of a schema.
_NAME = re.compile(r"[a-zA-Z0-9_$#.-]{1,255}")
_COMPATIBILITIES = (
    *("BACKWARD", "BACKWARD_ALL", "FORWARD", "FORWARD_ALL"),
    *("FULL", "FULL_ALL", "NONE", "DISABLED"),
)
_ANSWER_SECONDS = 10.0
_MOST_CONNECTIONS = 16

#: Codes of errors after which a repeated call may succeed, although the HTTP status is 4xx.
_TEMPORARY = frozenset(
    [
        "ConcurrentModificationException",
        "InternalFailure",
        "InternalServiceException",
        "LimitExceededException",
        "OperationTimeoutException",
        "PriorRequestNotComplete",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "ServiceUnavailableException",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    ]
)
#: Codes of answers about credentials. Their messages may quote the request with its session token.
_LOGIN = frozenset(
    [
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "IncompleteSignatureException",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "NotAuthorized",
        "OptInRequired",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    ]
)
_NOT_FOUND = "EntityNotFoundException"
_EXISTS = "AlreadyExistsException"
_DENIED = "AccessDeniedException"
_AVAILABLE, _PENDING = "AVAILABLE", "PENDING"


class GlueRegistry:
    """A client of Glue's schema registry. Each call is repeated until Glue answers, or a deadline passes.

    Args:
        options: ``url`` (``glue://`` and the name of the registry), ``region``, ``endpoint``, ``profile`` of
            AWS' configuration files, ``timeout``, ``compression`` and ``compatibility`` of what is written,
            and those of `kafka.schema_registry.Limits`. A name with the suffix ``.env`` gives the name of an
            environment variable that contains the value.

    Raises:
        InvalidOptionError: if an option is unknown or malformed, or botocore is not installed, or lacks a
            region.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        settings = from_environment(options)
        self.limits = Limits.of(settings)
        self._registry = _registry_name(str(settings.pop("url", "")))
        self._compatibility = _choice(settings, _COMPATIBILITY, _COMPATIBILITIES, str.upper)
        _choice(settings, COMPRESSION, tuple(_BYTES), str.lower)
        unknown = sorted(set(settings) - set(_OPTIONS))
        if unknown:
            raise InvalidOptionError(
                f"AWS Glue's schema registry has no option {unknown[0]!r}; expected one of "
                f"{', '.join(('url', *_OPTIONS, *LIMITS))}.",
                fix="remove it. AWS' library finds credentials by itself: in the environment, in the profile "
                f"that {_PROFILE!r} names, or from the role of the machine.",
            )
        self._client = _client(settings)
        self.name = f"AWS Glue (registry {self._registry!r} in {self._client.meta.region_name})"

    def by_id(self, version_id: SchemaId) -> StoredSchema:
        """Returns the schema of a version, whatever its status: other clients read its records, too.

        Raises:
            SchemaNotFoundError: if Glue says that it has no such version.
            RegistryUnavailableError: if Glue does not answer.
            AuthorizationError, OperatorError: if it refuses the request, or its answer is not a schema.
        """
        what = f"schema version {version_id}"
        found = self._call("GetSchemaVersion", what, {"SchemaVersionId": str(version_id)})
        stored = self._stored(found, what)
        if stored.schema_id != version_id:
            raise self._no_registry(what, ValueError(f"it is about version {stored.schema_id}"))
        return stored

    def by_version(self, name: str, version: int | None = None) -> StoredSchema:
        """Returns a version of a schema, by default the latest. Raises the errors of `by_id`.

        Raises:
            InvalidSchemaError: if Glue has refused that version as incompatible, or deletes it.
        """
        which = {"LatestVersion": True} if version is None else {"VersionNumber": version}
        what = f"version {version or 'latest'} of schema {name!r}"
        asked = {"SchemaId": self._schema(name), "SchemaVersionNumber": which}
        found = self._decided(self._call("GetSchemaVersion", what, asked), what)
        if found.get("Status") != _AVAILABLE:
            raise InvalidSchemaError(
                f"{self.name}: {what} has the status {found.get('Status')}; expected {_AVAILABLE}.",
                fix="name an earlier version, or register a schema that is compatible with the others.",
            )
        return self._stored(found, what)

    def referenced(self, reference: StoredReference) -> StoredSchema:
        """Raises an error, because schemas of Glue import no others."""
        raise InvalidSchemaError(f"{self.name} has no schemas that import {reference.name!r}.")

    def find(self, name: str, schema: StoredSchema) -> StoredSchema:
        """Returns a version of a schema with the given text, with its id. Raises the errors of `by_id`."""
        what = f"the given version of schema {name!r}"
        asked = {"SchemaId": self._schema(name), "SchemaDefinition": schema.text}
        return self._usable(schema, self._call("GetSchemaByDefinition", what, asked), what)

    def register(self, name: str, schema: StoredSchema) -> StoredSchema:
        """Registers a version of a schema, which is created with its first one, and returns it with its id.

        A text that is registered already keeps its id.

        Raises:
            RegistryUnavailableError: if Glue does not answer, or does not decide whether it is compatible.
            AuthorizationError, OperatorError: if it refuses the schema, such as for incompatibility.
        """
        with suppress(SchemaNotFoundError):
            return self.find(name, schema)
        what = f"the new version of schema {name!r}"
        version = {"SchemaId": self._schema(name), "SchemaDefinition": schema.text}
        with suppress(SchemaNotFoundError):
            return self._usable(schema, self._call("RegisterSchemaVersion", what, version), what)
        asked = {
            "RegistryId": {"RegistryName": self._registry},
            "SchemaName": name,
            "DataFormat": schema.format,
            "Compatibility": self._compatibility,
            "SchemaDefinition": schema.text,
        }
        made = self._call("CreateSchema", f"schema {name!r} in a registry {self._registry!r}", asked, _EXISTS)
        if not made:  # another writer has created it in the meantime
            made = self._call("RegisterSchemaVersion", what, version)
        return self._usable(schema, {"Status": made.get("SchemaVersionStatus"), **made}, what)

    def forget(self) -> None:
        """Does nothing, because botocore keeps no schemas; `registry.catalog` does."""

    def answers(self) -> None:
        """Checks that Glue can be reached and accepts the credentials. Raises as `by_id`."""
        self._call("GetSchemaVersion", "a version", {"SchemaVersionId": str(UUID(int=0))}, _NOT_FOUND)

    def _schema(self, name: str) -> dict[str, str]:
        if _NAME.fullmatch(name) is None:
            raise InvalidOptionError(
                f"the name of the schema is {name!r}; expected 1 to 255 letters, digits and _ - . $ #.",
                fix="give the name of a schema of AWS Glue with subject=.",
            )
        return {"RegistryName": self._registry, "SchemaName": name}

    def _usable(self, schema: StoredSchema, found: Mapping[str, Any], what: str) -> StoredSchema:
        """Returns a schema with the id in an answer, once Glue has accepted that version."""
        found = self._decided(found, what)
        if found.get("Status") != _AVAILABLE:
            raise OperatorError(
                f"{self.name}: {what} has the status {found.get('Status')}; expected {_AVAILABLE}.",
                fix="write with a schema that is compatible with the earlier versions; or delete this "
                "version in Glue, change the compatibility of the schema, and register it again.",
            )
        return replace(schema, schema_id=self._version_id(found, what))

    def _decided(self, found: Mapping[str, Any], what: str) -> Mapping[str, Any]:
        """Waits until Glue has compared a version with the earlier ones, and returns the new answer."""
        deadline = Deadline.after_seconds(self.limits.retry_seconds)
        pauses = Pauses(deadline, 0.1, 2.0)
        while found.get("Status") == _PENDING:
            pauses.wait(
                lambda: RegistryUnavailableError(
                    f"{self.name} has not decided within {self.limits.retry_seconds:g} s whether {what} is "
                    "compatible with the earlier ones.",
                    fix="start the query again.",
                )
            )
            found = self._call("GetSchemaVersion", what, {"SchemaVersionId": found.get("SchemaVersionId")})
        return found

    def _stored(self, found: Mapping[str, Any], what: str) -> StoredSchema:
        names = ("DataFormat", "SchemaDefinition")
        version_id = self._version_id(found, what)
        if "SchemaDefinition" not in found:
            raise SchemaNotFoundError(
                f"{self.name} has no text for {what} (status {found.get('Status')}).",
                fix="check whether the schema was deleted.",
            )
        kind, text = (found.get(each) for each in names)
        if not isinstance(kind, str) or not isinstance(text, str):
            raise self._no_registry(what, TypeError(f"{' or '.join(names)} is no text"))
        return StoredSchema(version_id, kind.upper(), text)

    def _version_id(self, found: Mapping[str, Any], what: str) -> UUID:
        try:
            return UUID(found["SchemaVersionId"])
        except SHAPE_ERRORS as error:
            raise self._no_registry(what, error) from error

    def _no_registry(self, what: str, error: Exception) -> OperatorError:
        return OperatorError(
            f"{self._client.meta.endpoint_url} answered a request for {what} with something else than AWS "
            f"Glue does: {reason(error, NO_SECRETS)}.",
            fix=f"check the option {_ENDPOINT!r}, and that no proxy answers.",
        )

    def _call(
        self, action: str, what: str, asked: Mapping[str, Any], accepted: str = ""
    ) -> Mapping[str, Any]:
        """Calls Glue until it answers.

        Args:
            action: name of the call, which is also that of the right.
            what: what it asks for, for errors.
            asked: the parameters.
            accepted: code of a refusal that is a normal answer, which is then empty.
        """
        from botocore import exceptions
        from botocore.parsers import ResponseParserError

        method = getattr(self._client, re.sub(r"(?<!^)(?=[A-Z])", "_", action).lower())

        def call() -> Mapping[str, Any]:
            try:
                found: Mapping[str, Any] = method(**asked)
            except exceptions.ClientError as error:
                if accepted and _code(error) == accepted:
                    return {}
                raise
            return found

        def permanent(failure: Exception) -> Exception | None:
            if isinstance(failure, exceptions.ClientError):
                status = failure.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
                if status >= 500 or status in (408, 425, 429) or _code(failure) in _TEMPORARY:
                    return None
                return self._refused(failure, action, what)
            if isinstance(failure, _unreachable(exceptions)):
                return None
            return self._misconfigured(failure, what)

        request = Request(self.name, what, self.limits)
        try:
            return request.until_answered(call, (exceptions.ClientError, exceptions.BotoCoreError), permanent)
        except (*SHAPE_ERRORS, ResponseParserError) as error:  # the body of an answer is not JSON
            raise self._no_registry(what, error) from error

    def _refused(self, failure: Any, action: str, what: str) -> KafkaEosError:
        """Returns the error for an answer that a repeated call would get, too."""
        code = _code(failure)
        if code == _NOT_FOUND:
            return SchemaNotFoundError(
                f"{self.name} does not have {what}.",
                fix="check the region, the account, and the names of registry and schema; register the "
                "schema if it is new.",
            )
        if code in _LOGIN:
            return AuthorizationError(
                f"{self.name} refuses the credentials: {code}.",
                fix="check the credentials that AWS' library finds on this machine (environment, profile, "
                "role), and its clock.",
            )
        status = failure.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code == _DENIED or status in (401, 403):
            return AuthorizationError(
                f"{self.name} refuses access to {what}: {reason(failure, NO_SECRETS)}.",
                fix=f"allow the principal the action glue:{action}; docs/schema-registry.md lists all.",
            )
        return OperatorError(
            f"{self.name} refuses a request for {what} (HTTP {status}): {reason(failure, NO_SECRETS)}.",
            fix="correct what AWS Glue complains about.",
        )

    def _misconfigured(self, failure: Exception, what: str) -> KafkaEosError:
        """Returns the error if botocore did not send a request."""
        from botocore import exceptions

        if isinstance(failure, exceptions.ParamValidationError):
            return InvalidOptionError(
                f"{self.name} cannot be asked for {what}: {reason(failure, NO_SECRETS)}.", fix="correct it."
            )
        return AuthorizationError(
            f"{self.name} was not asked for {what}: {reason(failure, NO_SECRETS)}.",
            fix="check the credentials that AWS' library finds on the driver and on every executor: "
            "environment, profile, or role.",
        )


# -- the form of records (see `registry.frames`) -------------------------------------------------

MAGIC = 3
PLAIN, ZLIB = 0, 5
HEADER_BYTES = 18
_BYTES = {"none": PLAIN, "zlib": ZLIB}


def header(version_id: SchemaId, compression: str) -> bytes:
    """Returns the first bytes of a message.

    Args:
        version_id: UUID of the schema's version.
        compression: ``none`` or ``zlib``.
    """
    assert isinstance(version_id, UUID)
    return bytes([MAGIC, _BYTES[compression]]) + version_id.bytes


def decompressed(message: memoryview, most_bytes: int) -> bytes | str | None:
    """Returns a compressed message without compression.

    Returns:
        The message; a text if it is damaged; None if its payload has more than `most_bytes`.
    """
    unpacker = zlib.decompressobj()
    try:
        payload = unpacker.decompress(message[HEADER_BYTES:], max(most_bytes, 0) + 1)
    except zlib.error as error:
        return f"the message cannot be decompressed: {error}"
    if len(payload) > most_bytes:
        return None
    if not unpacker.eof:
        return "the message cannot be decompressed: it ends in the middle of its payload"
    return bytes([MAGIC, PLAIN]) + message[2:HEADER_BYTES] + payload


def compressed(payloads: pa.Array, header: bytes) -> pa.Array:
    """Returns payloads as compressed messages; null stays null."""
    made = [None if each is None else header + zlib.compress(each) for each in payloads.to_pylist()]
    return pa.array(made, payloads.type)


# -- options -------------------------------------------------------------------------------------


def is_glue(options: Mapping[str, Any]) -> bool:
    """Returns whether options of a registry name AWS Glue's."""
    url = options.get("url")
    if url is None:
        url = os.environ.get(str(options.get(f"url{FROM_ENVIRONMENT}")), "")
    return str(url).strip().lower().startswith(SCHEME)


def schema_name(*, topic: str | None, record: str | None, is_key: bool) -> str | None:
    """Returns the name of the schema of a topic, as Glue's serializers choose it; None if nothing is given.

    Raises:
        InvalidOptionError: for the key of a topic, which would share one schema with the value.
    """
    if topic is not None and is_key:
        raise InvalidOptionError(
            f"the keys and the values of topic {topic!r} would have one schema of AWS Glue, {topic!r}.",
            fix="name the schema of the keys with subject=.",
        )
    return "-".join(each for each in (topic, record) if each is not None) or None


def compression(options: Mapping[str, Any]) -> str:
    """Returns how written payloads are compressed. Raises InvalidOptionError if the option is malformed."""
    return _choice(from_environment(options), COMPRESSION, tuple(_BYTES), str.lower)


def _code(failure: Any) -> str:
    return str(failure.response.get("Error", {}).get("Code", ""))


def _unreachable(exceptions: Any) -> tuple[type[Exception], ...]:
    """Returns the classes by which botocore says that nobody answered."""
    return (
        exceptions.HTTPClientError,
        exceptions.ConnectionError,
        exceptions.CredentialRetrievalError,
        exceptions.MetadataRetrievalError,
        exceptions.IncompleteReadError,
    )


def _registry_name(url: str) -> str:
    name = url.strip()[len(SCHEME) :].rstrip("/")
    if _NAME.fullmatch(name) is None:
        raise InvalidOptionError(
            f"option 'url' of the schema registry has the value {shown_url(url)!r}; expected {SCHEME} and "
            "the name of a registry of AWS Glue: 1 to 255 letters, digits and _ - . $ #.",
            fix=f"for example '{SCHEME}default-registry'; the region is the option {_REGION!r}.",
        )
    return name


def _choice(
    settings: dict[str, Any], name: str, choices: tuple[str, ...], written: Callable[[str], str]
) -> str:
    """Removes an option from the settings, and returns its value; by default the first of the choices."""
    value = str(settings.pop(name, choices[0]))
    if written(value) not in choices:
        raise InvalidOptionError(
            f"option {name!r} of the schema registry has the value {value!r}; expected one of "
            f"{', '.join(choices)}.",
            fix=f"leave it out for {choices[0]}.",
        )
    return written(value)


def _client(settings: dict[str, Any]) -> Any:
    """Returns botocore's client of Glue."""
    try:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ImportError as error:
        raise InvalidOptionError(
            f"the client of AWS Glue is not installed: {error}.",
            fix="pip install 'kafka-eos-source[aws]' on the driver and on every executor.",
        ) from error
    endpoint = settings.get(_ENDPOINT)
    if endpoint is not None:
        allowed = boolean(ALLOW_HTTP, str(settings.get(ALLOW_HTTP, "false")))
        refuse_plain_http(_ENDPOINT, str(endpoint), "the login at AWS", ALLOW_HTTP, allowed=allowed)
    try:
        seconds = float(settings.get(_TIMEOUT, _ANSWER_SECONDS))
        config = Config(
            connect_timeout=seconds,
            read_timeout=seconds,
            retries={"mode": "standard", "total_max_attempts": 1},  # this package's log, and have a deadline
            max_pool_connections=_MOST_CONNECTIONS,
        )
        session = Session(profile=settings.get(_PROFILE))
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
        return session.create_client(
            "glue", region_name=settings.get(_REGION), endpoint_url=endpoint, config=config
        )
    except (BotoCoreError, ValueError, TypeError) as error:
        raise InvalidOptionError(
            f"AWS Glue's client cannot be made: {reason(error, NO_SECRETS)}.",
            fix=f"set the option {_REGION!r} or the variable AWS_REGION; check {_ENDPOINT!r}, {_PROFILE!r} "
            f"and {_TIMEOUT!r}.",
        ) from error


@lru_cache(maxsize=1)
def _loader(folders: str | None) -> Any:
    """Returns what reads the description of Glue, and keeps it, because reading takes 80 ms."""
    from botocore.loaders import create_loader

    return create_loader(folders)
