"""Keeps errors of the measurement away from the query that is measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kafka_eos_source.runtime.private_folders import warn_once

_log = logging.getLogger(__name__)

T = TypeVar("T")


def guarded(call: Callable[[], T]) -> T | None:
    """Makes a call that measures or observes; logs its error once, and returns None then."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever fails here, the query goes on
        warn_once(_log, f"a figure of the query is missing: {error!r}. The query is not affected.")
        return None
