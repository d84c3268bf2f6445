"""What a check of ``kafka-eos doctor`` finds, and what ``--fix`` can do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.operate.shared import (
    ExitCode,
)
from kafka_eos_source.secrets import without_url_secrets


class Severity(Enum):
    """How bad a finding is, from good to bad."""

    OK = "ok"
    NOTE = "note"  #: works; something could be better
    WARNING = "warning"  #: works today
    BAD = "bad"  #: a query cannot run, or will fail

    @property
    def rank(self) -> int:
        """Position in the order from good to bad."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Repair:
    """A change that cannot harm a query.

    Attributes:
        what: what it does, as an infinitive phrase; it is shown before it is done.
        run: does it; what it returns is ignored. It raises `OSError` or `KafkaEosError` if that fails.
    """

    what: str
    run: Callable[[], object]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        severity: how bad it is.
        what: what was found.
        why: why it matters; empty if the severity is OK.
        fix: what to do; empty = nothing.
        repair: what ``--fix`` does; None = nothing.
    """

    check: str
    severity: Severity
    what: str
    why: str = ""
    fix: str = ""
    repair: Repair | None = None

    def __post_init__(self) -> None:
        for name in ("what", "why", "fix"):  # they name locations, which are URLs
            object.__setattr__(self, name, without_url_secrets(getattr(self, name)))


def ok(check: str, what: str) -> Finding:
    """Returns the finding that all is well."""
    return Finding(check, Severity.OK, what)


def failure(check: str, error: KafkaEosError, why: str, severity: Severity = Severity.BAD) -> Finding:
    """Returns the finding that a check ended with an error."""
    return Finding(check, severity, error.message, why, error.fix or "see docs/security.md.")


def worst(findings: Iterable[Finding]) -> Severity:
    """Returns the highest severity; OK if there are no findings."""
    return max((each.severity for each in findings), key=lambda each: each.rank, default=Severity.OK)


def exit_code(severity: Severity) -> ExitCode:
    """Returns the exit code of doctor for the highest severity."""
    return {Severity.WARNING: ExitCode.WARNING, Severity.BAD: ExitCode.NEEDS_A_PERSON}.get(
        severity, ExitCode.DONE
    )
