"""Gids: short names of sink transaction ids, as databases accept them for prepared transactions."""

from __future__ import annotations

import hashlib
import re

from kafka_eos_source.sinks.contract import SinkContext, SinkTxn

_PREFIX = "keos"
_GID = re.compile(r"keos_[0-9a-f]{16}_([0-9]{1,19})_([0-9a-f]{20})")


def prefix(context: SinkContext) -> str:
    """Returns the prefix of all gids of one sink of one query. Two sinks may share a database."""
    own = hashlib.sha256(f"{context.application_id}/{context.name}".encode()).hexdigest()[:16]
    return f"{_PREFIX}_{own}"


def gid(context: SinkContext, txn: SinkTxn) -> str:
    """Returns the gid of an id: at most 62 bytes. XA allows 64 and Postgres 200."""
    return f"{prefix(context)}_{txn.sequence}_{txn.attempt}"


def parse(context: SinkContext, text: str) -> SinkTxn | None:
    """Parses a gid; returns None if it does not belong to this sink."""
    found = _GID.fullmatch(text)
    if found is None or not text.startswith(prefix(context) + "_"):
        return None
    return SinkTxn(context.application_id, context.name, int(found[1]), found[2])
