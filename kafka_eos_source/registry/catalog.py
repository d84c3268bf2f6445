"""Schemas of a registry with everything they import, kept in this process for as long as it lives.

The schema of an id never changes, so a schema that was read once is never asked for again: Spark's reused
Python workers, and every query in them, go on while the registry is down.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from kafka_eos_source.errors import InvalidSchemaError, OperatorError, SchemaNotFoundError
from kafka_eos_source.kafka.schema_registry import SchemaRegistry, StoredReference, StoredSchema, shown_urls
from kafka_eos_source.registry.codec import Reference, Schema
from kafka_eos_source.registry.formats import schema_format
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.json_input import JsonError, parse_json
from kafka_eos_source.runtime.retry import Pauses

#: Another node of the registry may know a new id some moments later than the node that registered it. New ids
#: of a batch that are unknown are asked for again for this long before their records are bad.
_KNOWN_AFTER_SECONDS = 3.0
#: Only so many unknown ids of a batch are awaited: with more, it is likely full of records of another format.
_MOST_AWAITED = 100
#: How long an id that was awaited in vain is not asked for again.
_ASK_AGAIN_SECONDS = 5.0
_MOST_UNKNOWN = 10_000
_DEEPEST = 50


class Catalog:
    """The schemas of one registry, by id.

    Args:
        options: options of `kafka.schema_registry.SchemaRegistry`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._client: SchemaRegistry | None = None
        self._schemas: dict[int, Schema] = {}
        #: When each unknown id was asked for, and the registry's answer.
        self._unknown: dict[int, tuple[float, str]] = {}

    @property
    def registry(self) -> SchemaRegistry:
        """The client, which is made on first use, because cached ids need none."""
        if self._client is None:
            self._client = SchemaRegistry(self._options)
        return self._client

    def add(self, schema_id: int, schema: Schema) -> None:
        """Adds a schema that another process has read from the registry.

        Raises:
            OperatorError: if this process knows the id with another text.
        """
        known = self._schemas.setdefault(schema_id, schema)
        if known is not schema and not _is_same(known, schema):
            raise OperatorError(
                f"schema id {schema_id} of the registry {shown_urls(str(self._options.get('url', '')))} is "
                f"{known.format} {known.text[:300]!r} in this process, which has read it before, and "
                f"{schema.format} {schema.text[:300]!r} in the query: somebody has replaced the registry's "
                "contents.",
                fix="stop the query, start it again on new Python workers (new executors or a new "
                "application), and check that no records of the old registry are left.",
            )

    def of_ids(self, ids: Iterable[int]) -> dict[int, Schema | str]:
        """Returns the schema of each id; text with the reason for an id that the registry does not have.

        Raises:
            RegistryUnavailableError: if the registry does not answer for an id that is not cached.
            AuthorizationError, OperatorError: if it refuses the request.
        """
        found: dict[int, Schema] = {}
        unknown: dict[int, str] = {}
        for each in ids:
            cached = self._schemas.get(each)
            asked, why = self._unknown.get(each, (-_ASK_AGAIN_SECONDS, ""))
            if cached is not None:
                found[each] = cached
            elif time.monotonic() - asked < _ASK_AGAIN_SECONDS:
                unknown[each] = why
            else:
                self._ask(each, found, unknown)
        new = [each for each in unknown if each not in self._unknown]
        awaited = new[:_MOST_AWAITED]
        deadline = Deadline.after_seconds(_KNOWN_AFTER_SECONDS)
        pauses = Pauses(deadline, 0.1, 1.0)
        is_last = False
        while not is_last and any(each in unknown for each in awaited):
            pauses.wait()
            # after the deadline, once more for each id, however long the registry took for the others
            is_last = deadline.expired
            for each in awaited:
                if each in unknown and each not in self._unknown:
                    self._ask(each, found, unknown)
        for each in new:
            if each in unknown:
                self._remember(each, unknown[each])
        return {**found, **unknown}

    def _ask(self, schema_id: int, found: dict[int, Schema], unknown: dict[int, str]) -> None:
        """Asks for an id and what its schema imports, and puts the answer into one of the two."""
        try:
            schema = self.schema(self.registry.by_id(schema_id))
        except InvalidSchemaError as error:  # of an unknown format, or a circle: later answers are the same
            unknown[schema_id] = f"schema id {schema_id} cannot be used: {error.message}"
            self._remember(schema_id, unknown[schema_id])
            return
        except SchemaNotFoundError as error:  # the id, or a schema that it imports
            unknown[schema_id] = error.message
            if schema_id in self._unknown:
                self._remember(schema_id, error.message)
            return
        found[schema_id] = self._schemas[schema_id] = schema
        unknown.pop(schema_id, None)
        self._unknown.pop(schema_id, None)

    def _remember(self, schema_id: int, why: str) -> None:
        if len(self._unknown) >= _MOST_UNKNOWN:
            self._unknown.clear()
        self._unknown[schema_id] = (time.monotonic(), why)

    def of_id(self, schema_id: int) -> Schema:
        """Returns the schema of an id, and keeps it. Raises the errors of `SchemaRegistry.by_id`."""
        found = self._schemas.get(schema_id)
        if found is None:
            found = self._schemas[schema_id] = self.schema(self.registry.by_id(schema_id))
        return found

    def of_version(self, subject: str, version: int | None) -> tuple[int, Schema]:
        """Returns id and schema of a version of a subject; None = the latest."""
        stored = self.registry.by_version(subject, version)
        return stored.schema_id, self.schema(stored)

    def id_of(self, subject: str, schema: Schema, *, register: bool) -> int:
        """Returns the id of a schema without references under a subject.

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
            InvalidSchemaError: if schemas import each other in a circle.
        """
        return self._schema(stored, {}, 0)

    def _schema(self, stored: StoredSchema, known: dict[StoredReference, Schema], depth: int) -> Schema:
        if depth > _DEEPEST:
            raise InvalidSchemaError(
                f"schema id {stored.schema_id} imports other schemas more than {_DEEPEST} levels deep.",
                fix="remove the circle among the references in the registry.",
            )
        references = []
        for each in stored.references:
            key = StoredReference("", each.subject, each.version)
            if key not in known:
                known[key] = self._schema(self.registry.referenced(each), known, depth + 1)
            references.append(Reference(each.name, known[key]))
        return Schema(schema_format(stored.format), stored.text, tuple(references))


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
