"""Checks of one query: how long Kafka keeps its token, and whether its staging folder can be used."""

from __future__ import annotations

import os
import uuid

import pyarrow.fs as pafs

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.operate.doctor.finding import Finding, Severity, ok
from kafka_eos_source.operate.inspect import Inspection
from kafka_eos_source.runtime.file_systems import file_system

_HOUR_SECONDS = 3_600.0
#: A source without new records renews the token this often if it may not read the broker's setting.
_LEAST_RETENTION_SECONDS = 4 * _HOUR_SECONDS
_DAY_SECONDS = 24 * _HOUR_SECONDS
#: Part of the retention time that must be left.
_LEAST_PART_LEFT = 0.25


def retention(
    found: Inspection, retention_ms: int | KafkaEosError, now_seconds: float, token_topic: str | None
) -> Finding:
    """Compares how long Kafka keeps the token with the time since the query last planned a batch.

    Args:
        found: the state of the query, including Kafka and its checkpoint.
        retention_ms: ``offsets.retention.minutes`` in ms, or why it is not known.
        now_seconds: the current time, seconds since 1970.
        token_topic: the query's option ``token.topic``; None = not set.
    """
    why = (
        "a query commits its token as an offset of a group without members, which Kafka deletes after "
        "offsets.retention.minutes; a restart then ends with TOKEN_MISSING"
    )
    rescue = (
        f" The token topic {token_topic!r} keeps a copy, with which a restart continues."
        if token_topic
        else ""
    )
    planned = found.checkpoint.planned_at_seconds if found.checkpoint is not None else None
    idle = "" if planned is None else f"; the newest batch was planned {_span(now_seconds - planned)} ago"
    if isinstance(retention_ms, KafkaEosError):
        text = f"offsets.retention.minutes is not known{idle}: {retention_ms.message}"
        fix = "grant DescribeConfigs on the cluster, or ask its operators; the default is 7 days."
        return Finding("retention", Severity.NOTE, text, why, fix)
    kept = retention_ms / 1000
    text = f"Kafka keeps offsets for {_span(kept)}{idle}.{rescue}"
    fix = "raise offsets.retention.minutes above the longest planned stop, or set token.topic."
    has_token = found.kafka is not None and found.kafka.token is not None
    promised = found.checkpoint is not None and found.checkpoint.identity is not None
    if found.kafka is not None and promised and not has_token:
        severity = Severity.WARNING if token_topic else Severity.BAD
        return Finding(
            "retention", severity, f"the token is gone. {text}", why, "see docs/runbooks.md, TOKEN_MISSING."
        )
    left = kept if planned is None else kept - (now_seconds - planned)
    if has_token and not token_topic and left < _LEAST_PART_LEFT * kept:
        due = f"in {_span(left)}" if left > 0 else "at any moment"
        return Finding(
            "retention",
            Severity.WARNING,
            f"{text} Unless the query runs, Kafka deletes its token {due}",
            why,
            "start the query soon, or set token.topic.",
        )
    if kept < _LEAST_RETENTION_SECONDS and not token_topic:
        return Finding("retention", Severity.WARNING, text, why, fix)
    if kept < _DAY_SECONDS and not token_topic:
        return Finding("retention", Severity.NOTE, text, why, fix)
    return ok("retention", text)


def staging(location: str) -> Finding:
    """Checks that this machine can write, read and delete in the staging folder."""
    why = "rows that are too large for a commit message are staged there"
    try:
        fs, path = file_system(location)
        if isinstance(fs, pafs.LocalFileSystem) and not os.path.isdir(path):
            parent = _nearest_existing(path)
            if not os.path.isdir(parent):
                raise NotADirectoryError(f"{parent} is not a folder")
            if not os.access(parent, os.W_OK | os.X_OK):
                raise PermissionError(f"{parent} is not writable")
            return ok("staging", f"{location} does not exist yet, and can be created")
        probe, text = f"{path}/.doctor-{uuid.uuid4().hex}", uuid.uuid4().hex.encode()
        with fs.open_output_stream(probe) as out:
            out.write(text)
        try:
            with fs.open_input_stream(probe) as file:
                if file.read() != text:
                    raise OSError("a file that was just written has other contents")
        finally:
            fs.delete_file(probe)
    except (OSError, KafkaEosError) as error:
        return Finding(
            "staging",
            Severity.BAD,
            f"this machine cannot use {location}: {error}",
            why,
            "correct staging.location, or the rights on that folder.",
        )
    return ok("staging", f"this machine can use {location}")


def _nearest_existing(path: str) -> str:
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _span(seconds: float) -> str:
    for unit, size in (("days", _DAY_SECONDS), ("hours", _HOUR_SECONDS), ("minutes", 60.0)):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,.0f} seconds"
