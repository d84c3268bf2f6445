"""The level of the lines that librdkafka prints, for every Kafka client of a process and its children."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

#: Environment variable with the level, as in syslog: 3 = errors, 4 = warnings too, 6 = librdkafka's default.
VARIABLE = "KAFKA_EOS_CLIENT_LOG_LEVEL"

ERRORS = "3"


def with_log_level(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the properties of a client, with the level of `VARIABLE` unless they contain ``log_level``."""
    level = os.environ.get(VARIABLE)
    return {"log_level": level, **config} if level else dict(config)
