"""Checks that a query's credentials have the rights that the query needs, and names each missing one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from kafka_eos_source.operate.doctor.finding import Finding, Severity, ok
from kafka_eos_source.operate.rights import QUERY, Names, Need, arguments, needs

#: Who may log in with the credentials: the whole query, or one part of it.
PRINCIPALS = ("query", *QUERY)


class Asks(Protocol):
    """Looks up rights; implemented by `kafka.rights.Rights`."""

    def of_topics(self, topics: Collection[str]) -> Mapping[str, frozenset[str] | None]: ...
    def of_group(self, group_id: str) -> frozenset[str] | None: ...
    def may_write_transactional_id(self, transactional_id: str) -> bool | None: ...


def check_rights(names: Names, principal: str, asks: Asks) -> Iterator[Finding]:
    """Yields a finding for each missing right, or one that all rights are there.

    Args:
        names: the query's resources.
        principal: one of `PRINCIPALS`.
        asks: looks up the rights of the credentials.

    Raises:
        KafkaEosError: if no broker answers, or the login is refused.
    """
    parts = QUERY if principal == "query" else (principal,)
    # the retention check asks for the right on the cluster; a changelog that exists needs no Create
    wanted = [each for each in needs(names, parts) if each.kind != "cluster" and each.operation != "CREATE"]
    topics = asks.of_topics({each.name for each in wanted if each.kind == "topic"})
    group = asks.of_group(names.group_id) if any(each.kind == "group" for each in wanted) else frozenset()
    missing, absent = 0, set()
    for each in wanted:
        if each.kind == "topic":
            held = topics[each.name]
            if held is None:
                missing += 1
                if each.name not in absent:
                    yield _no_topic(each.name)
                absent.add(each.name)
                continue
            is_there: bool | None = each.operation in held
        elif each.kind == "group":
            is_there = None if group is None else each.operation in group
        else:
            is_there = asks.may_write_transactional_id(each.name)
        if is_there is None:
            yield _unknown(each)
        elif not is_there:
            missing += not each.without
            yield _missing(each)
    if not missing:
        required = sum(not each.without for each in wanted)
        yield ok("rights", f"these credentials have the {required} rights that the {principal} needs")


def _missing(need: Need) -> Finding:
    return Finding(
        "rights",
        Severity.NOTE if need.without else Severity.BAD,
        f"the right {need.title} on {need.kind} {need.name!r} is missing",
        f"it is for {need.purpose}; without it: {need.without}"
        if need.without
        else f"the {need.part} needs it for {need.purpose}, and ends with NOT_AUTHORIZED without it",
        f"kafka-acls.sh --bootstrap-server … --add --allow-principal User:… {arguments(need)}",
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
        f"cannot ask for the right {need.title} on {need.kind} {need.name!r} without using it",
        f"the query needs it for {need.purpose}",
        "look at the ACLs: kafka-acls.sh --bootstrap-server … --list",
    )
