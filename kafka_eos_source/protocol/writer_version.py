"""Which version of this package wrote something that outlives it, so that a refusal can name that version.

Tokens, token records and identity files carry the version under the key ``by``. Every later format keeps
this key, so that an older version can read it although it can read nothing else.
"""

from __future__ import annotations

from functools import lru_cache

from kafka_eos_source.errors import NewerVersionError

#: Key of the version in JSON that this package writes.
BY = "by"

_PACKAGE = "kafka-eos-source"


@lru_cache(maxsize=1)
def package_version() -> str:
    """Returns the version of this package; "" if it runs from a folder that is not installed."""
    from importlib import metadata  # takes 7 ms, and only a commit needs it

    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return ""


def writer_of(found: object) -> str:
    """Returns the version that wrote this JSON, for messages about what only a newer version can read."""
    by = found.get(BY) if isinstance(found, dict) else None
    return f"kafka-eos {by}" if isinstance(by, str) and by else "a newer version of kafka-eos"


def newer_version(what: str, found: object, version: object, readable: int) -> NewerVersionError:
    """Returns the error for something that a newer version of this package wrote.

    Args:
        what: what was found, for the message.
        found: the JSON that was read.
        version: its format.
        readable: the newest format that this version reads.
    """
    writer = writer_of(found)
    own = f"kafka-eos {package_version()}" if package_version() else "a copy of kafka-eos without a version"
    return NewerVersionError(
        f"{what} has format {version}, written by {writer}; this is {own}, which reads format {readable}.",
        fix=f"run the query with {writer}, which has committed batches that this version cannot continue "
        "(docs/upgrading.md).",
    )
