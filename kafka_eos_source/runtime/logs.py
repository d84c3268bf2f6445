"""How this package logs: JSON lines if wanted, each warning once, and little of what librdkafka repeats.

Environment variables switch it, because the lines come from several processes: the planning process of each
source, the process that commits, and the workers. All inherit the driver's environment.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

#: The environment variable; ``json`` switches the structured logs on.
FORMAT_VARIABLE = "KAFKA_EOS_LOG_FORMAT"

_PACKAGE = "kafka_eos_source"


class JsonFormatter(logging.Formatter):
    """Formats a log record as one JSON object: time, level, logger, message, process, and its figures."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        batch = getattr(record, "batch", None)
        if batch is not None:
            found["batch"] = batch
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


def wants_json_logs() -> bool:
    """Whether the environment asks for structured logs."""
    return os.environ.get(FORMAT_VARIABLE, "").strip().lower() == "json"


def configure_if_wanted() -> None:
    """Makes this package's logger write JSON to standard error, if the environment asks for it."""
    if not wants_json_logs():
        return
    logger = logging.getLogger(_PACKAGE)
    if any(isinstance(each.formatter, JsonFormatter) for each in logger.handlers):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


# -- what librdkafka logs --------------------------------------------------------------------------

#: Environment variable with the level, as in syslog: 3 = errors, 4 = warnings too, 6 = librdkafka's default.
LEVEL_VARIABLE = "KAFKA_EOS_CLIENT_LOG_LEVEL"

ERRORS = "3"

#: A line that repeats is logged again, with a count, after this time at the earliest.
_REPEAT_SECONDS = 30.0
#: Different lines that are remembered; the one that was logged longest ago is forgotten first.
_MOST_LINES = 100
#: What differs between the lines of one cause: the client, its thread, durations and counts.
_VARIES = re.compile(r"\[rdkafka#[^]]*\]|\[thrd:[^]]*\]:?|, \d+ identical error\(s\) suppressed|\d+ ?ms\b")

_log = logging.getLogger(__name__)


def with_log_level(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a client's properties, with the level of `LEVEL_VARIABLE` unless they have ``log_level``."""
    level = os.environ.get(LEVEL_VARIABLE)
    return {"log_level": level, **config} if level else dict(config)


@dataclass(slots=True)
class _Line:
    logged_at: float
    repeats: int = 0


class Repeats:
    """Counts lines that repeat, of all clients of a process.

    Args:
        clock: returns seconds, such as ``time.monotonic``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._lock = threading.Lock()

    def reduced(self, text: str) -> str | None:
        """Returns the line to log, which may state how often it repeated; None = log nothing."""
        key, now = _VARIES.sub("", text), self._clock()
        with self._lock:
            known = self._lines.get(key)
            if known is not None:
                known.repeats += 1
                seconds = now - known.logged_at
                if seconds < _REPEAT_SECONDS:
                    return None
                if known.repeats > 1:
                    text = f"{text} ({known.repeats} times in the last {seconds:.0f} s)"
            self._lines[key] = _Line(now)
            self._lines.move_to_end(key)
            if len(self._lines) > _MOST_LINES:
                self._lines.popitem(last=False)
            return text


_repeats = Repeats()


class ClientLog:
    """The logger of one client, in the place of a `logging.Logger`.

    Args:
        hide: removes the secrets of the client from a text.
    """

    def __init__(self, hide: Callable[[str], str]) -> None:
        self._hide = hide

    def log(self, level: int, text: str, *arguments: object) -> None:
        """Logs a line of librdkafka, unless it repeats another one."""
        if _log.isEnabledFor(level):
            line = _repeats.reduced(self._hide(text % arguments))
            if line is not None:
                _log.log(level, "%s", line)


def warn_once(log: logging.Logger, text: str) -> None:
    """Logs a warning unless this process has logged the same text before."""
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)


_warned: set[str] = set()
