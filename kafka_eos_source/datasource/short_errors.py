"""Shortens errors of this package before Spark shows them.

Spark shows the full traceback of a Python error: its frames, then the errors that caused it, each with its
own frames. The message of a `KafkaEosError` already names what happened, the value and the fix, and the rest
buries it. So the methods that Spark calls raise such an error without its cause and without inner frames. The
debug log gets the complete traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

from kafka_eos_source.errors import (
    KafkaEosError,
    SinkFailedError,
    SinkRetryableError,
    SinkUnavailableError,
    SinkUndecidedError,
    SinkUnfinishedError,
)

P = ParamSpec("P")
T = TypeVar("T")

#: A sink may be a class of the user, who needs the traceback of what it raised.
_KEEP_CAUSE = (
    SinkFailedError,
    SinkRetryableError,
    SinkUnavailableError,
    SinkUndecidedError,
    SinkUnfinishedError,
)

_log = logging.getLogger(__name__)


def short_errors(method: Callable[P, T]) -> Callable[P, T]:
    """Decorates a method that Spark calls: it raises errors of this package in their short form."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except _KEEP_CAUSE:
            raise
        except KafkaEosError as error:
            raise _shortened(error) from None

    return call


def with_short_errors(items: Iterator[T]) -> Iterator[T]:
    """Yields the items; raises errors of this package in their short form."""
    try:
        yield from items
    except _KEEP_CAUSE:
        raise
    except KafkaEosError as error:
        raise _shortened(error) from None


def _shortened(error: KafkaEosError) -> KafkaEosError:
    _log.debug("complete traceback of an error that Spark shows in short form", exc_info=error)
    return error.with_traceback(None)
