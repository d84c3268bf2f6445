"""Shortens errors of this package before Spark shows them.

Spark shows the full traceback of a Python error: its frames, then the errors that caused it, each with its
own frames. The message of a `KafkaEosError` already names what happened, the value and the fix, and the rest
buries it. So the methods that Spark calls raise such an error without its cause and without inner frames. The
debug log gets the complete traceback.

A sink may be a class of the user, who needs the traceback of what it raised. Errors that the code of a user
raised, and errors of the driver about a sink, therefore stay as they are.
"""

from __future__ import annotations

import logging
import traceback
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

#: Errors of the driver about a sink. Their cause is what the sink raised.
_KEEP_CAUSE = (
    SinkFailedError,
    SinkRetryableError,
    SinkUnavailableError,
    SinkUndecidedError,
    SinkUnfinishedError,
)

_PACKAGE = __name__.partition(".")[0]

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
            if not _is_from_package(error):
                raise
            raise _shortened(error) from None

    return call


def with_short_errors(items: Iterator[T]) -> Iterator[T]:
    """Yields the items; raises errors of this package in their short form."""
    try:
        yield from items
    except _KEEP_CAUSE:
        raise
    except KafkaEosError as error:
        if not _is_from_package(error):
            raise
        raise _shortened(error) from None


def _shortened(error: KafkaEosError) -> KafkaEosError:
    _log.debug("complete traceback of an error that Spark shows in short form", exc_info=error)
    return error.with_traceback(None)


def _is_from_package(error: KafkaEosError) -> bool:
    """Whether code of this package raised the error, rather than code of the user, such as a sink."""
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == _PACKAGE
