"""Which thing a sink writes, spelled in one way; and the refusal of two sinks that write the same."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.runtime.file_systems import arrow_scheme
from kafka_eos_source.sinks.contract import TwoPhaseSink

_PORTS = {
    "http": 80,
    "https": 443,
    "postgresql": 5432,
    "mysql": 3306,
    "mariadb": 3306,
    "mssql": 1433,
    "oracle": 1521,
}


def refuse_shared(sinks: Mapping[str, TwoPhaseSink]) -> None:
    """Refuses two sinks of a query that write the same thing.

    Their ids, files and rows of bookkeeping are apart, but readers would find each row as often as there are
    sinks, and nearly always one of the two options is a mistake.

    Raises:
        InvalidOptionError: naming both.
    """
    seen: dict[str, str] = {}
    for name, sink in sinks.items():
        target = sink.target()
        if target is None:
            continue
        if target in seen:
            raise InvalidOptionError(
                f"the sinks {seen[target]!r} and {name!r} write to the same target: {target}.",
                fix="give each sink a target of its own, or leave one of them out.",
            )
        seen[target] = name


def location(uri: str) -> str:
    """A folder: symbolic links followed if it is local, user and password left out if it is not."""
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        path = os.path.realpath(unquote(parts.path) if parts.scheme else uri)
        return f"file:{path}"
    scheme = arrow_scheme(parts.scheme)
    path = posixpath.normpath(f"/{parts.path.lstrip('/')}")
    return f"{scheme}://{parts.netloc.rpartition('@')[2] if scheme != 'abfs' else parts.netloc}{path}"


def address(scheme: str, host: str | None, port: int | None) -> str:
    """Host and port of a server, with the port that its protocol uses by itself."""
    found = port or _PORTS.get(scheme)
    return f"{(host or 'localhost').lower()}{f':{found}' if found else ''}"
