"""What sinks write to: normalised names, the refusal of two sinks with one target, and the check of a folder.

A target is what decides where rows go, as text: the same text however the options spell it, and without
credentials. It contains what the options state. What only the environment states, such as
``AWS_ENDPOINT_URL`` or ``.pyiceberg.yaml``, is not part of it.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow.fs as pafs

from kafka_eos_source import secrets
from kafka_eos_source.errors import InvalidOptionError, UnavailableError
from kafka_eos_source.runtime.file_systems import arrow_scheme
from kafka_eos_source.secrets import shown_url
from kafka_eos_source.sinks.contract import TwoPhaseSink
from kafka_eos_source.sinks.specs import SECRET_NAME

#: File systems of PyArrow whose paths begin with the name of a bucket or container.
_WITH_BUCKETS = ("s3", "gcs", "abfs")
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


def check_folder(fs: pafs.FileSystem, path: str, shown: str) -> None:
    """Checks that files can be written to a folder, without writing any.

    Of a local folder, or the nearest one above it that exists, it checks the permissions. Of a bucket or
    another remote file system, it checks that it exists and answers to this login.

    Args:
        fs: file system.
        path: path of the folder in it; need not exist.
        shown: the folder as the user named it, for errors.

    Raises:
        InvalidOptionError: if a file is in the place of a folder, or the bucket does not exist.
        UnavailableError: if the folder is not writable.
        OSError: if the file system cannot be reached.
    """
    if not isinstance(fs, pafs.LocalFileSystem):
        if fs.get_file_info(path).type != pafs.FileType.NotFound or fs.type_name not in _WITH_BUCKETS:
            return
        bucket = path.lstrip("/").partition("/")[0]
        try:
            found = fs.get_file_info(bucket).type
        except OSError:
            return  # this login may see only a part of the bucket
        if found == pafs.FileType.NotFound:
            raise InvalidOptionError(
                f"option 'path' has the value {shown_url(shown)!r}; there is no bucket or container "
                f"{bucket!r}.",
                fix="create it, or correct the option 'path' and the credentials.",
            )
        return
    above = path
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise InvalidOptionError(
            f"option 'path' has the value {shown!r}, but {above!r} is not a folder.",
            fix="correct the option 'path', or remove that file.",
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise not_writable(shown, f"{above!r} gives this user no right to write")


def not_writable(folder: str, why: object) -> UnavailableError:
    """Returns the error for a folder that the driver cannot write to."""
    return UnavailableError(
        f"the driver cannot write to the folder {folder!r}: {why}.",
        fix="give driver and executors write access to the folder.",
    )


def location(uri: str, endpoint: str | None = None) -> str:
    """Returns the normalised URI of a folder.

    Resolves the symbolic links of a local folder, and removes user, password and query from a remote URI.

    Args:
        uri: URI or local path.
        endpoint: URL of the store or name of the account, if other options state one. Of a URI with a query,
            PyArrow's ``endpoint_override`` is used.
    """
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        path = os.path.realpath(unquote(parts.path) if parts.scheme else uri)
        return f"file:{path}"
    scheme = arrow_scheme(parts.scheme)
    path = posixpath.normpath(f"/{parts.path.lstrip('/')}")
    query = dict(parse_qsl(parts.query))
    if endpoint is None and (override := query.get("endpoint_override")):
        endpoint = override if "://" in override else f"{query.get('scheme', 'https')}://{override}"
    at = "" if endpoint is None else f" at {_server(endpoint)}"
    # the part before the @ is the container in a URI of Azure, and a user elsewhere
    server = parts.netloc if scheme == "abfs" else parts.netloc.rpartition("@")[2]
    return f"{scheme}://{server}{path}{at}"


def _server(endpoint: str) -> str:
    """Returns the normalised URL of an object store; a text without scheme, such as an account, as it is."""
    url = urlsplit(endpoint)
    if not url.netloc:
        return endpoint
    return f"{url.scheme}://{address(url.scheme, url.hostname, url.port)}{url.path.rstrip('/')}"


def query_digest(query: str) -> str:
    """Returns a digest of a URL's query, with ``?`` before it; empty if the query decides nothing.

    A digest, because the values of a query may be secret. Parameters with the names of secrets are left out.
    """
    kept = sorted(
        (name, value)
        for name, value in parse_qsl(query, keep_blank_values=True)
        if not (secrets.is_secret(name) or SECRET_NAME.search(name))
    )
    return f"?{hashlib.sha256(repr(kept).encode()).hexdigest()[:12]}" if kept else ""


def address(scheme: str, host: str | None, port: int | None) -> str:
    """Returns host and port of a server; without a port, the default port of the protocol."""
    found = port or _PORTS.get(scheme)
    return f"{(host or 'localhost').lower()}{f':{found}' if found else ''}"
