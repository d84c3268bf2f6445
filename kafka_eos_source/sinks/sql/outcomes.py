"""Outcomes of the sink's calls for errors of the database: whether a retry can help, and their text."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kafka_eos_source.sinks.contract import Fatal, Outcome, Retryable, TwoPhaseSink
from kafka_eos_source.sinks.sql.database import FIX
from kafka_eos_source.sinks.sql.types import sqlalchemy

F = TypeVar("F", bound=Callable[..., Outcome])


def errors_as_outcomes(call: F) -> F:
    """Turns errors of the database into `Retryable` if a retry can help, else into `Fatal`."""

    @functools.wraps(call)
    def wrapped(self: TwoPhaseSink, *args: Any) -> Outcome:
        errors = sqlalchemy().exc
        try:
            return call(self, *args)
        except (
            errors.OperationalError,
            errors.InterfaceError,
            errors.InternalError,
            errors.TimeoutError,
        ) as e:
            return Retryable(driver_text(e))
        except errors.DBAPIError as e:
            return Retryable(driver_text(e)) if e.connection_invalidated else Fatal(driver_text(e), FIX)

    return cast(F, wrapped)


def driver_text(error: Exception) -> str:
    """Returns the error text of the database's driver.

    SQLAlchemy's own text is not used, because it includes the statement and its rows.
    """
    original = getattr(error, "orig", None) or error
    message = re.sub(r"\s+", " ", str(original)).strip()
    return f"{type(original).__name__}: {message}"
