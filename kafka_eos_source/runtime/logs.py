"""How this package logs: JSON lines if wanted, all lines of others if wanted, and each warning once.

Environment variables switch it, because the lines come from several processes: the planning process of each
source, the process that commits, and the workers. All inherit the driver's environment.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import datetime, timezone
from typing import Any

#: The environment variable; ``json`` switches the structured logs on.
FORMAT_VARIABLE = "KAFKA_EOS_LOG_FORMAT"

#: The environment variable that shows everything that Spark, PySpark and py4j print if it is ``false``.
QUIET_VARIABLE = "KAFKA_EOS_QUIET_LOGS"

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


def wants_all_logs() -> bool:
    """Whether the environment asks for all log lines, also those that need no action."""
    return os.environ.get(QUIET_VARIABLE, "").strip().lower() in ("false", "0", "no", "off")


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


def warn_once(log: logging.Logger, text: str) -> None:
    """Logs a warning unless this process has logged the same text before."""
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)


_warned: set[str] = set()
