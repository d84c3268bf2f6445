"""Checks a query's dead-letter topic: it exists, takes every letter, and keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from kafka_eos_source.errors import AuthorizationError
from kafka_eos_source.operate.doctor.finding import Finding, Severity, failure, ok
from kafka_eos_source.runtime.deadline import Deadline

_CHECK = "dead-letters"
#: Kafka's default of retention.ms.
_WEEK_MS = 7 * 24 * 3_600_000
#: A dead letter has up to 8 KiB of headers; the sink refuses topics that take no more than twice of that.
_LEAST_BYTES = 16_384
_MAX_BYTES = "max.message.bytes"


class Topics(Protocol):
    """Looks up topics; implemented by `kafka.topic_admin.TopicAdmin`."""

    def shape(self, name: str, deadline: Deadline) -> object | None: ...
    def config(self, name: str, deadline: Deadline) -> Mapping[str, str]: ...


def check_dead_letter_topic(
    name: str, output: str | None, topics: Topics, deadline: Deadline
) -> Iterator[Finding]:
    """Yields what is wrong with a dead-letter topic, or that nothing is.

    Args:
        name: the option ``deadLetter.topic``.
        output: the option ``topic``; None = not known.
        topics: looks topics up with the sink's credentials.
        deadline: limits the wait for the brokers.

    Raises:
        KafkaEosError: if no broker answers, or the login is refused.
    """
    if topics.shape(name, deadline) is None:
        yield Finding(
            _CHECK,
            Severity.BAD,
            f"the dead-letter topic {name!r} does not exist",
            "a query with onInvalidRecord=dead-letter does not start without it",
            f"kafka-eos topics create {name}",
        )
        return
    try:
        config = topics.config(name, deadline)
        limit = None if output is None else int(topics.config(output, deadline)[_MAX_BYTES])
    except AuthorizationError as error:
        why = "the sink asks for max.message.bytes, to know which records are too large"
        yield failure(_CHECK, error, why, Severity.WARNING)
        return
    found = [*_cleanup(name, config), *_size(name, int(config[_MAX_BYTES]), output, limit)]
    yield from found or [
        ok(_CHECK, f"topic {name!r} takes and keeps dead letters ({_MAX_BYTES}={config[_MAX_BYTES]})")
    ]


def _cleanup(name: str, config: Mapping[str, str]) -> Iterator[Finding]:
    policy = config["cleanup.policy"]
    if "compact" in policy:
        yield Finding(
            _CHECK,
            Severity.BAD,
            f"topic {name!r} has cleanup.policy={policy}",
            "a compacted topic refuses letters without a key, so that the batch fails, and keeps only the "
            "newest letter of each key",
            f"kafka-configs.sh --bootstrap-server … --alter --entity-type topics --entity-name {name} "
            "--add-config cleanup.policy=delete",
        )
    retention_ms = int(config["retention.ms"])
    if 0 <= retention_ms < _WEEK_MS:
        yield Finding(
            _CHECK,
            Severity.NOTE,
            f"topic {name!r} keeps letters for {retention_ms / 3_600_000:,.0f} hours (retention.ms)",
            "letters that are deleted before somebody looks at them are lost",
            "raise retention.ms; a week is Kafka's default.",
        )


def _size(name: str, own: int, output: str | None, limit: int | None) -> Iterator[Finding]:
    if own < _LEAST_BYTES:
        yield Finding(
            _CHECK,
            Severity.BAD,
            f"topic {name!r} has {_MAX_BYTES}={own}",
            f"a letter needs {_LEAST_BYTES:,} bytes, so that its headers fit; the query does not start",
            f"raise {_MAX_BYTES} of topic {name!r}.",
        )
    elif limit is not None and own < limit:
        yield Finding(
            _CHECK,
            Severity.WARNING,
            f"topic {name!r} has {_MAX_BYTES}={own}, less than topic {output!r} ({limit})",
            "records between the two sizes become dead letters with the beginning of their value, although "
            "the output takes them",
            f"raise {_MAX_BYTES} of topic {name!r} to {limit} or more.",
        )
