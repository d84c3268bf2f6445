"""Checks that a query's credentials have the rights that the query needs, and names each missing one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from kafka_eos_source.operate.doctor.finding import Finding, Severity, ok

#: Who may log in with the credentials: the whole query, or one part of it.
PRINCIPALS = ("query", "source", "sink", "operator")

_FLAGS = {"topic": "--topic", "group": "--group", "transactional id": "--transactional-id"}


@dataclass(frozen=True)
class Names:
    """The resources that a query uses.

    Attributes:
        application_id: the transactional id.
        group_id: the consumer group.
        read: topics that it reads on the sink's cluster.
        written: output topics.
        anchor_topic: topic whose partition 0 carries the token; None = not known.
        token_topic: the option ``token.topic``; None = not set.
        changelogs: changelog topics of its stateful operators.
        dead_letter_topic: the option ``deadLetter.topic``; None = not set.
    """

    application_id: str
    group_id: str
    read: Collection[str] = ()
    written: Collection[str] = ()
    anchor_topic: str | None = None
    token_topic: str | None = None
    changelogs: Collection[str] = ()
    dead_letter_topic: str | None = None

    @property
    def topics(self) -> set[str]:
        """All topics."""
        some = (self.anchor_topic, self.token_topic, self.dead_letter_topic)
        return {*self.read, *self.written, *self.changelogs, *(each for each in some if each is not None)}


@dataclass(frozen=True, order=True)
class Need:
    """A right that a query needs.

    Attributes:
        kind: ``topic``, ``group`` or ``transactional id``.
        name: name of the resource.
        operation: Kafka's name of the operation, such as ``READ``.
        purpose: what the query needs it for.
    """

    kind: str
    name: str
    operation: str
    purpose: str


class Asks(Protocol):
    """Looks up rights; implemented by `kafka.rights.Rights`."""

    def of_topics(self, topics: Collection[str]) -> Mapping[str, frozenset[str] | None]: ...
    def of_group(self, group_id: str) -> frozenset[str] | None: ...
    def may_write_transactional_id(self, transactional_id: str) -> bool | None: ...


def needs(names: Names, principal: str) -> list[Need]:
    """Returns the rights that a principal needs, as docs/security.md lists them.

    Args:
        names: the query's resources.
        principal: one of `PRINCIPALS`.
    """
    found: set[Need] = set()
    everything = principal == "query"

    def add(kind: str, name: str, purpose: str, *operations: str) -> None:
        found.update(Need(kind, name, each, purpose) for each in operations)

    if everything or principal == "source":
        for topic in names.read:
            add("topic", topic, "reading the source", "READ")
    if everything or principal == "sink":
        add("transactional id", names.application_id, "the transactions", "WRITE")
        add("group", names.group_id, "the token and the source offsets", "READ")
        for topic in names.read:
            add("topic", topic, "committing the source offsets", "READ")
        for topic in names.written:
            add("topic", topic, "writing the output", "WRITE")
        if names.anchor_topic is not None:
            add("topic", names.anchor_topic, "committing the token", "READ")
        if names.token_topic is not None:
            add("topic", names.token_topic, "the record of the token", "WRITE", "READ", "DESCRIBE_CONFIGS")
        if names.dead_letter_topic is not None:
            add("topic", names.dead_letter_topic, "dead letters", "WRITE", "DESCRIBE_CONFIGS")
            for topic in names.written:
                add("topic", topic, "the size of records that are dead letters", "DESCRIBE_CONFIGS")
        for topic in names.changelogs:
            add("topic", topic, "the changes of the state", "WRITE", "READ")
    if names.changelogs and (everything or principal == "operator"):
        for topic in names.changelogs:
            add("topic", topic, "restoring the state", "READ", "DESCRIBE_CONFIGS")
        add("group", names.group_id, "which batch the changelog holds", "DESCRIBE")
        add("transactional id", names.application_id, "ending transactions of a dead driver", "WRITE")
    by_right = {(each.kind, each.name, each.operation): each for each in sorted(found)}
    return sorted(by_right.values())


def check(names: Names, principal: str, asks: Asks) -> Iterator[Finding]:
    """Yields a finding for each missing right, or one that all rights are there.

    Raises:
        KafkaEosError: if no broker answers, or the login is refused.
    """
    wanted = needs(names, principal)
    topics = asks.of_topics({each.name for each in wanted if each.kind == "topic"})
    group = asks.of_group(names.group_id) if any(each.kind == "group" for each in wanted) else frozenset()
    missing = 0
    for each in wanted:
        if each.kind == "topic":
            held = topics[each.name]
            if held is None:
                missing += 1
                yield _no_topic(each.name)
                continue
            is_there: bool | None = each.operation in held
        elif each.kind == "group":
            is_there = None if group is None else each.operation in group
        else:
            is_there = asks.may_write_transactional_id(each.name)
        if is_there is None:
            yield _unknown(each)
        elif not is_there:
            missing += 1
            yield _missing(each)
    if not missing:
        yield ok("rights", f"these credentials have the {len(wanted)} rights that the {principal} needs")


def _missing(need: Need) -> Finding:
    operation = need.operation.replace("_", " ").title().replace(" ", "")
    return Finding(
        "rights",
        Severity.BAD,
        f"the right {operation} on {need.kind} {need.name!r} is missing",
        f"the query needs it for {need.purpose}, and ends with NOT_AUTHORIZED without it",
        f"kafka-acls.sh --bootstrap-server … --add --allow-principal User:… --operation {operation} "
        f"{_FLAGS[need.kind]} {need.name}",
    )


def _no_topic(name: str) -> Finding:
    return Finding(
        "rights",
        Severity.WARNING,
        f"topic {name!r} does not exist, so its rights are not known",
        "a query does not create its topics, except changelogs",
        f"kafka-eos topics create {name}, or correct the name.",
    )


def _unknown(need: Need) -> Finding:
    return Finding(
        "rights",
        Severity.NOTE,
        f"cannot ask for the right {need.operation.title()} on {need.kind} {need.name!r} without using it",
        f"the query needs it for {need.purpose}",
        "look at the ACLs: kafka-acls.sh --bootstrap-server … --list",
    )
