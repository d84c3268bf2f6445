"""Schemas of a registry with everything they import, kept in this process for as long as it lives.

The schema of an id never changes, so a schema that was read once is never asked for again: Spark's reused
Python workers, and every query in them, go on while the registry is down.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

from kafka_eos_source.errors import InvalidSchemaError, OperatorError, SchemaNotFoundError
from kafka_eos_source.kafka.schema_registry import (
    MOST_BYTES,
    MOST_UNKNOWN_IDS,
    SchemaId,
    SchemaRegistry,
    StoredSchema,
    shown_urls,
)
from kafka_eos_source.registry.codec import Reference, Schema, schema_format
from kafka_eos_source.registry.glue import GlueRegistry, is_glue
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.runtime.json_input import JsonError, parse_json

#: Another node of the registry may know a new id some moments later than the node that registered it. New ids
#: of a batch that are unknown are asked for again for this long before their records are bad.
_KNOWN_AFTER_SECONDS = 3.0
#: Only so many unknown ids of a batch are awaited: with more, it is likely full of records of another format.
_MOST_AWAITED = 100
#: How long an id that was awaited in vain is not asked for again.
_ASK_AGAIN_SECONDS = 5.0
_MOST_UNKNOWN = 10_000
#: So many ids are asked for at the same time, and so many before the answers are counted.
_TOGETHER, _COUNTED = 8, 32
#: Limits of what one schema imports, each of which is a request to the registry.
_DEEPEST, _MOST_REFERENCES = 50, 1000
#: The schemas that were used last, of which a process keeps so many bytes.
_MOST_KEPT_BYTES = 128 << 20


class UnknownId(str):
    """The reason why an id has no schema: the registry does not have it."""

    __slots__ = ()


#: A client of a registry.
Client = SchemaRegistry | GlueRegistry


def registry_client(options: Mapping[str, Any]) -> Client:
    """Returns a client of the registry that the option ``url`` names.

    Raises:
        InvalidOptionError: if an option is unknown or malformed, or the client is not installed.
    """
    return GlueRegistry(options) if is_glue(options) else SchemaRegistry(options)


class Catalog:
    """The schemas of one registry, by id or GUID.

    Args:
        options: options of `kafka.schema_registry.SchemaRegistry`, or of `registry.glue.GlueRegistry`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._client: Client | None = None
        #: By id, those last that were used last.
        self._schemas: dict[SchemaId, Schema] = {}
        self._kept_bytes = 0
        #: When each unknown id was asked for, and the registry's answer. Later answers about a schema that
        #: cannot be used would be the same, so the time of these is infinite.
        self._unknown: dict[SchemaId, tuple[float, str]] = {}

    @property
    def registry(self) -> Client:
        """The client, which is made on first use, because cached ids need none."""
        if self._client is None:
            self._client = registry_client(self._options)
        return self._client

    def add(self, schema_id: SchemaId, schema: Schema) -> None:
        """Adds a schema that another process has read from the registry.

        Raises:
            OperatorError: if this process knows the id with another text.
        """
        known = self._schemas.get(schema_id)
        if known is None:
            self._keep(schema_id, schema)
        elif known is not schema and not _is_same(known, schema):
            raise OperatorError(
                f"schema id {schema_id} of the registry {shown_urls(str(self._options.get('url', '')))} is "
                f"{known.format} {known.text[:300]!r} in this process, which has read it before, and "
                f"{schema.format} {schema.text[:300]!r} in the query: somebody has replaced the registry's "
                "contents.",
                fix="stop the query, start it again on new Python workers (new executors or a new "
                "application), and check that no records of the old registry are left.",
            )

    def of_ids(self, ids: Iterable[SchemaId]) -> dict[SchemaId, Schema | str]:
        """Returns the schema of each id; text with the reason for an id whose schema cannot be used.

        After `MOST_UNKNOWN_IDS` ids that the registry does not have, it is not asked for the others.

        Args:
            ids: the ids, those first that are the least likely to be wrong.

        Raises:
            RegistryUnavailableError: if the registry does not answer for an id that is not cached.
            AuthorizationError, OperatorError: if it refuses the request.
        """
        found: dict[SchemaId, Schema | str] = {}
        asked_for = []
        for each in ids:
            cached = self._schemas.get(each)
            asked, why = self._unknown.get(each, (-math.inf, ""))
            if cached is not None:
                found[each] = self._schemas[each] = self._schemas.pop(each)
            elif time.monotonic() - asked < _ASK_AGAIN_SECONDS:
                found[each] = why
            else:
                asked_for.append(each)
        if not asked_for:
            return found
        most_unknown = self.registry.limits.most_unknown_ids
        answers = self._ask(asked_for, most_unknown)
        awaited = [
            each
            for each, answer in answers.items()
            if isinstance(answer, SchemaNotFoundError) and each not in self._unknown
        ][:_MOST_AWAITED]
        deadline = Deadline.after_seconds(_KNOWN_AFTER_SECONDS)
        pauses = Pauses(deadline, 0.1, 1.0)
        is_last = False
        while awaited and not is_last:
            pauses.wait()
            # after the deadline, once more for each id, however long the registry took for the others
            is_last = deadline.expired
            answers |= self._ask(awaited)
            awaited = [each for each in awaited if isinstance(answers[each], SchemaNotFoundError)]
        for each, answer in answers.items():
            found[each] = self._taken(each, answer)
        for each in asked_for[len(answers) :]:
            found[each] = UnknownId(
                f"the registry was not asked for schema id {each}, because it does not have {most_unknown} "
                "other ids of the same slice of records. Its option "
                f"{MOST_UNKNOWN_IDS!r} raises that limit"
            )
        self.registry.forget()
        return found

    def _ask(
        self, ids: Sequence[SchemaId], most_unknown: float = math.inf
    ) -> dict[SchemaId, Schema | InvalidSchemaError | SchemaNotFoundError]:
        """Asks for the schemas of some ids, until the registry does not have `most_unknown` of them."""
        registry = self.registry  # made here, and not by several threads

        def ask(schema_id: SchemaId) -> Schema | InvalidSchemaError | SchemaNotFoundError:
            try:
                return self.schema(registry.by_id(schema_id))
            except (InvalidSchemaError, SchemaNotFoundError) as answer:  # about the id, or what it imports
                return answer.with_traceback(None)

        if len(ids) == 1:
            return {ids[0]: ask(ids[0])}
        answers: dict[SchemaId, Schema | InvalidSchemaError | SchemaNotFoundError] = {}
        unknown = 0
        with ThreadPoolExecutor(_TOGETHER, "kafka-eos-registry") as pool:
            for first in range(0, len(ids), _COUNTED):
                if unknown >= most_unknown:
                    break
                some = ids[first : first + _COUNTED]
                for each, answer in zip(some, pool.map(ask, some), strict=True):  # a failure cancels the rest
                    answers[each] = answer
                    unknown += not isinstance(answer, Schema)
        return answers

    def _taken(
        self, schema_id: SchemaId, answer: Schema | InvalidSchemaError | SchemaNotFoundError
    ) -> Schema | str:
        """Keeps an answer, and returns it as `of_ids` does."""
        if isinstance(answer, Schema):
            self._unknown.pop(schema_id, None)
            self._keep(schema_id, answer)
            return answer
        asked = time.monotonic()
        why: str = UnknownId(answer.message)
        if isinstance(answer, InvalidSchemaError):
            asked, why = math.inf, f"schema id {schema_id} cannot be used: {answer.message}"
        if schema_id not in self._unknown and len(self._unknown) >= _MOST_UNKNOWN:
            self._unknown.pop(next(iter(self._unknown)))
        self._unknown[schema_id] = (asked, why)
        return why

    def _keep(self, schema_id: SchemaId, schema: Schema) -> None:
        """Keeps a schema, and drops those that were not used for the longest time if they are too many."""
        self._schemas[schema_id] = schema
        self._kept_bytes += _bytes(schema)
        while self._kept_bytes > _MOST_KEPT_BYTES and len(self._schemas) > 1:
            self._kept_bytes -= _bytes(self._schemas.pop(next(iter(self._schemas))))

    def of_id(self, schema_id: SchemaId) -> Schema:
        """Returns the schema of an id, and keeps it. Raises the errors of `SchemaRegistry.by_id`."""
        found = self._schemas.get(schema_id)
        if found is None:
            found = self.schema(self.registry.by_id(schema_id))
            self._keep(schema_id, found)
        return found

    def of_version(self, subject: str, version: int | None) -> tuple[StoredSchema, Schema]:
        """Returns a version of a subject, as it is stored and with what it imports; None = the latest."""
        stored = self.registry.by_version(subject, version)
        return stored, self.schema(stored)

    def guid_of(self, schema_id: int) -> UUID | None:
        """Returns the GUID of an id; None if the registry does not tell it."""
        return self.registry.guid_of(schema_id) if isinstance(self.registry, SchemaRegistry) else None

    def registered(self, subject: str, schema: Schema, *, register: bool) -> StoredSchema:
        """Returns a schema without references as it is stored under a subject.

        Args:
            subject: the subject.
            schema: the schema.
            register: registers the schema if it is not there yet.
        """
        stored = StoredSchema(-1, schema.format, schema.text)
        return (self.registry.register if register else self.registry.find)(subject, stored)

    def schema(self, stored: StoredSchema) -> Schema:
        """Returns a stored schema with the schemas that it imports, and those that they import.

        Raises:
            SchemaNotFoundError: if an imported schema is gone.
            InvalidSchemaError: if schemas import each other in a circle, are too many or too large, or are
                not text.
        """
        return _Imports(self.registry).schema(stored, 0)


class _Imports:
    """Reads what one schema imports. Each imported schema is read once, and then shared."""

    def __init__(self, registry: Client) -> None:
        self._registry = registry
        #: By subject and version; None while its own imports are read.
        self._known: dict[tuple[str, int], Schema | None] = {}
        self._bytes = 0
        self._references = 0

    def schema(self, stored: StoredSchema, depth: int) -> Schema:
        """Returns a stored schema with its imports (see `Catalog.schema`)."""
        self._check(stored, depth)
        references = []
        for each in stored.references:
            key = (each.subject, each.version)
            if key not in self._known:
                self._known[key] = None
                self._known[key] = self.schema(self._registry.referenced(each), depth + 1)
            schema = self._known[key]
            if schema is None:
                raise InvalidSchemaError(
                    f"schema id {stored.schema_id} is in a circle of schemas that import each other: it "
                    f"imports {each.name[:300]!r}, which imports it.",
                    fix="remove the circle among the references in the registry.",
                )
            origin = f"subject {each.subject[:300]!r}, version {each.version}"
            references.append(Reference(each.name, schema, origin))
        return Schema(schema_format(stored.format), stored.text, tuple(references))

    def _check(self, stored: StoredSchema, depth: int) -> None:
        """Checks the text and the number of references of a schema, before they are read."""
        try:
            self._bytes += len(stored.text.encode())
            for each in stored.references:
                (each.name + each.subject).encode()
        except UnicodeEncodeError as error:
            raise InvalidSchemaError(
                f"schema id {stored.schema_id} is not text: {error.reason} in it, or in its references.",
                fix="register it again without this character.",
            ) from None
        self._references += len(stored.references)
        if self._bytes > self._registry.limits.most_bytes:
            raise InvalidSchemaError(
                f"schema id {stored.schema_id}, or a schema that imports it, has more than "
                f"{self._registry.limits.most_bytes} bytes, including what it imports.",
                fix=f"raise the option {MOST_BYTES!r} of the registry.",
            )
        if depth > _DEEPEST or self._references > _MOST_REFERENCES:
            raise InvalidSchemaError(
                f"schema id {stored.schema_id}, or a schema that imports it, imports more than "
                f"{_MOST_REFERENCES} schemas, or others more than {_DEEPEST} levels deep.",
                fix="register schemas that import less.",
            )


def _bytes(schema: Schema) -> int:
    return sum(len(each.text) for each in (schema, *(inner.schema for inner in schema.imports())))


def _is_same(one: Schema, other: Schema) -> bool:
    """Returns whether two schemas have the same text; a registry may format it differently."""
    if one.format != other.format:
        return False
    if one.text == other.text:
        return True
    try:
        return bool(parse_json(one.text) == parse_json(other.text))
    except JsonError:  # Protobuf, or the name of an Avro type
        return False


#: The catalogs of this process, by options. Python workers of Spark are forked from a process without any.
_catalogs: dict[tuple[tuple[str, str], ...], Catalog] = {}


def catalog(options: Mapping[str, Any]) -> Catalog:
    """Returns the catalog of this process for a registry."""
    key = tuple(sorted((name, str(value)) for name, value in options.items()))
    found = _catalogs.get(key)
    if found is None:
        found = _catalogs[key] = Catalog(options)
    return found
