"""Normalised names of what sinks write to, and the refusal of two sinks with the same target."""

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
    """Raises if two sinks of a query write to the same target.

    The sinks would not damage each other's work, but readers would find each row twice. Nearly always, one
    of the two options is a mistake.

    Raises:
        InvalidOptionError: if two sinks have the same target; the message names both sinks.
    """
    seen: dict[str, str] = {}
    for name, sink in sinks.items():
        target = sink.target()
        if target is None:
            continue
        if target in seen:
            raise InvalidOptionError(
                f"the sinks {seen[target]!r} and {name!r} write to the same target: {target}.",
                fix="give each sink its own target, or remove one of them.",
            )
        seen[target] = name


def location(uri: str) -> str:
    """Returns the normalised URI of a folder.

    Resolves the symbolic links of a local folder, and removes user and password from a remote URI.
    """
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        path = os.path.realpath(unquote(parts.path) if parts.scheme else uri)
        return f"file:{path}"
    scheme = arrow_scheme(parts.scheme)
    path = posixpath.normpath(f"/{parts.path.lstrip('/')}")
    return f"{scheme}://{parts.netloc.rpartition('@')[2] if scheme != 'abfs' else parts.netloc}{path}"


def address(scheme: str, host: str | None, port: int | None) -> str:
    """Returns host and port of a server; without a port, the default port of the protocol."""
    found = port or _PORTS.get(scheme)
    return f"{(host or 'localhost').lower()}{f':{found}' if found else ''}"
