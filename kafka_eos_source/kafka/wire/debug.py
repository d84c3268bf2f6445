"""The log of the client's own connections, which the options ``debug`` and ``log_level`` control.

It has a logger for connections (``broker``), one for TLS and logins (``security``), and one for each kind of
request. Contexts of librdkafka are translated to these, so that ``debug`` means the same for both clients.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

_PACKAGE = "kafka_eos_source.kafka.wire"
_client = logging.getLogger(_PACKAGE)

broker_log = _client.getChild("broker")
security_log = _client.getChild("security")
_requests = _client.getChild("requests")

_TRANSACTION = (
    "FindCoordinator",
    "InitProducerId",
    "AddPartitionsToTxn",
    "AddOffsetsToTxn",
    "TxnOffsetCommit",
    "EndTxn",
)
_READ = ("Fetch", "ListOffsets", "OffsetForLeaderEpoch")
#: Contexts of librdkafka that have lines here, and their loggers below this package's.
_CONTEXTS: Mapping[str, tuple[str, ...]] = {
    "all": ("broker", "security", "requests"),
    "generic": ("broker", "security"),
    "broker": ("broker",),
    "security": ("security",),
    "protocol": ("requests",),
    "feature": ("requests.ApiVersions",),
    "metadata": ("requests.Metadata",),
    "topic": ("requests.Metadata",),
    "fetch": tuple(f"requests.{each}" for each in _READ),
    "consumer": tuple(f"requests.{each}" for each in _READ),
    "msg": ("requests.Produce",),
    "queue": ("requests.Produce",),
    "eos": tuple(f"requests.{each}" for each in _TRANSACTION),
}
#: Levels of syslog below which `log_level` hides lines; those with a higher number are for ``debug``.
_LEVELS = (*[logging.ERROR] * 4, logging.WARNING, *[logging.INFO] * 3)


#: The levels that the clients of this process have asked for.
_asked: set[int] = set()


def configure_log(kafka: Mapping[str, str]) -> None:
    """Applies the options ``debug`` and ``log_level`` to this process. They stay for later clients.

    The logger has the lowest level that any client asked for: one that wants errors only must not hide the
    warnings of another, such as those of damaged records.
    """
    _asked.add(_LEVELS[int(kafka["log_level"])] if kafka.get("log_level") else logging.NOTSET)
    others = logging.getLogger(_PACKAGE.rpartition(".")[0]).getEffectiveLevel()
    lowest = min(each or others for each in _asked)
    _client.setLevel(logging.NOTSET if lowest == others and logging.NOTSET in _asked else lowest)
    contexts = [each for each in kafka.get("debug", "").split(",") if each in _CONTEXTS]
    for each in contexts:
        for name in _CONTEXTS[each]:
            _client.getChild(name).setLevel(logging.DEBUG)
    if contexts and not _is_shown():
        # a worker of Spark configures no logging, so that Python would print warnings only
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        _client.addHandler(handler)


def log_request(address: str, sent: Any, correlation_id: int) -> None:
    """Logs a request that is sent."""
    log = _logger(type(sent).__name__)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s: request %d, version %d", address, correlation_id, sent.API_VERSION)


def log_answer(address: str, sent: Any, correlation_id: int, size: int) -> None:
    """Logs the answer to a request."""
    log = _logger(type(sent).__name__)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s: answer %d, %d bytes", address, correlation_id, size)


@cache
def _logger(kind: str) -> logging.Logger:
    return _requests.getChild(kind.removesuffix("Request"))


def _is_shown() -> bool:
    """Returns whether any handler shows the lines of this client."""
    log: logging.Logger | None = _client
    while log is not None:
        if any(not isinstance(each, logging.NullHandler) for each in log.handlers):
            return True
        log = log.parent if log.propagate else None
    return False
