"""Advises how large the next micro-batch may be, so that the state it changes fits into memory (KIP-892).

Kafka Streams commits early when uncommitted state grows too large. Spark cannot: a batch's offsets are fixed
before it runs. So the commit of a batch says how much state the *next* one may change, and the source plans
no more records than that. Both run in processes of the driver, which share a file on the driver's machine,
named after their ``application.id``. It is advice: a lost file costs nothing but a batch that is too large.
"""

from __future__ import annotations

import json
import logging

from kafka_eos_source.runtime.private_folders import PrivateFolder, warn_once

_log = logging.getLogger(__name__)

#: Records per batch aim at this part of the limit.
_AIM = 0.8
#: Below this part of the limit the next batch may be larger again, by this factor.
_LOW, _GROWTH = 0.4, 2


def next_limit(limit: int | None, records: int, pressure: float) -> int | None:
    """Records that the next batch may read; None = as many as the options say.

    Args:
        limit: what was advised for this batch.
        records: that it read.
        pressure: uncommitted bytes of its fullest shard, as a part of ``statestore.uncommitted.max.bytes``.
    """
    if records and pressure > 1:
        return max(1, int(records / pressure * _AIM))
    if limit is None or pressure > _LOW or records < limit:
        return limit  # a small batch says nothing about a large one
    return limit * _GROWTH


def read(application_id: str) -> int | None:
    """What the last commit of the query advised.

    Returns:
        None if there is no advice, or none that can be believed; the query then reads as many records as its
        options allow.
    """
    try:
        text = _folder().read(_file(application_id))
        return None if text is None else _records(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError) as error:
        warn_once(
            _log,
            f"cannot read the advised batch size of application.id={application_id!r}: {error}. Batches are "
            "planned without it: one that changes too much state fails instead of being made smaller.",
        )
        return None


def write(application_id: str, records: int | None) -> None:
    """Leaves advice for the source; None takes it back."""
    try:
        if records is None:
            _folder().remove(_file(application_id))
        else:
            _folder().write(_file(application_id), json.dumps({"records": records}))
    except OSError as error:
        warn_once(
            _log,
            f"cannot write the advised batch size of application.id={application_id!r}: {error}. The source "
            "does not adapt its batches to the memory that the state may take.",
        )


def _records(advice: dict[str, object]) -> int:
    """
    Raises:
        ValueError: the advice is no positive integer. 0 would stop the query.
    """
    records = advice["records"]
    if type(records) is not int or records < 1:
        raise ValueError(f"it is {records!r}; expected a positive integer")
    return records


def _folder() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-batches")


def _file(application_id: str) -> str:
    return f"{application_id}.json"
