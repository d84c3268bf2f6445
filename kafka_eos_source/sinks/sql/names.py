"""Gids: short names of sink transaction ids, as databases accept them for prepared transactions."""

from __future__ import annotations

import re

from kafka_eos_source.sinks.contract import SinkContext, SinkTxn

_PREFIX = "keos"
_GID = re.compile(r"keos_([0-9a-f]{16})_([0-9]{1,19})_([0-9a-f]{20})")


def prefix(context: SinkContext) -> str:
    """Returns the prefix of all gids of one sink of one query on one cluster, which may share a database."""
    return f"{_PREFIX}_{context.owner}"


def gid(txn: SinkTxn) -> str:
    """Returns the gid of an id: at most 62 bytes. XA allows 64 and Postgres 200."""
    return f"{_PREFIX}_{txn.owner}_{txn.sequence}_{txn.attempt}"


def parse(context: SinkContext, text: str) -> SinkTxn | None:
    """Parses a gid; returns None if it does not belong to this sink."""
    found = _GID.fullmatch(text)
    if found is None or found[1] != context.owner:
        return None
    return context.txn(int(found[2]), found[3])
