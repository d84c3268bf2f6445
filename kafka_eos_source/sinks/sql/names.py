"""The id of a prepared batch as a database takes it: short, of safe characters, and the sink's own."""

from __future__ import annotations

import hashlib
import re

from kafka_eos_source.sinks.contract import SinkContext, SinkTxn

_PREFIX = "keos"
_GID = re.compile(r"keos_[0-9a-f]{16}_([0-9]{1,19})_([0-9a-f]{20}|[0-9a-f]{16})")
#: Digits of the attempt in an old id.
_OLD_ATTEMPT = 16


def prefix(context: SinkContext) -> str:
    """Of all ids of one sink of one query: two sinks of a query may share a database."""
    own = hashlib.sha256(f"{context.application_id}/{context.name}".encode()).hexdigest()[:16]
    return f"{_PREFIX}_{own}"


def gid(context: SinkContext, txn: SinkTxn) -> str:
    """At most 62 bytes: XA takes 64, Postgres 200. The attempt tells an old id from one of this version."""
    return f"{prefix(context)}_{txn.sequence}_{txn.attempt}"


def parse(context: SinkContext, text: str) -> SinkTxn | None:
    """The id behind a name; None if it is not this sink's."""
    found = _GID.fullmatch(text)
    if found is None or not text.startswith(prefix(context) + "_"):
        return None
    name = "" if len(found[2]) == _OLD_ATTEMPT else context.name
    return SinkTxn(context.application_id, name, int(found[1]), found[2])
