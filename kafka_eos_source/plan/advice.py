"""Advises how many records the next micro-batch may read, so that its state fits into memory (KIP-892).

Kafka Streams commits early if uncommitted state grows too large. Spark cannot, because it fixes the offsets
of a batch before it runs. Therefore the commit of each batch writes down how many records the *next* batch
may read, and the source plans no more than that. Both run in processes on the driver's host, and share a file
that is named after their ``application.id``. If the file is lost, the only harm is one batch that is too
large.
"""

from __future__ import annotations

import json
import logging

from kafka_eos_source.runtime.private_folders import PrivateFolder, warn_once

_log = logging.getLogger(__name__)

#: A batch aims at this fraction of the memory limit.
_AIM = 0.8
#: A batch that used less than the first fraction of the limit lets the next one grow by the second factor.
_LOW, _GROWTH = 0.4, 2


def next_limit(limit: int | None, records: int, pressure: float) -> int | None:
    """Returns how many records the next batch may read; None if only the options limit it.

    Args:
        limit: the advice for this batch.
        records: number of records that this batch read.
        pressure: uncommitted bytes of its fullest shard, as a fraction of
            ``statestore.uncommitted.max.bytes``.
    """
    if records and pressure > 1:
        return max(1, int(records / pressure * _AIM))
    if limit is None or pressure > _LOW or records < limit:
        return limit  # a small batch does not show how much state a large one changes
    return limit * _GROWTH


def read(application_id: str) -> int | None:
    """Returns the advice of the query's last commit: a number of records.

    Returns:
        None if there is no advice or the file is damaged. The query then reads as many records as its options
        allow.
    """
    try:
        text = _folder().read(_file(application_id))
        return None if text is None else _records(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError) as error:
        warn_once(
            _log,
            f"the source cannot read the advised batch size of application.id={application_id!r}: {error}. "
            "It plans batches without the advice, so a batch that changes too much state fails instead of "
            "being smaller.",
        )
        return None


def write(application_id: str, records: int | None) -> None:
    """Writes the advice for the source; None deletes it."""
    try:
        if records is None:
            _folder().remove(_file(application_id))
        else:
            _folder().write(_file(application_id), json.dumps({"records": records}))
    except OSError as error:
        warn_once(
            _log,
            f"the commit cannot write the advised batch size of application.id={application_id!r}: {error}. "
            "The source does not adapt the size of its batches to the memory limit of the state.",
        )


def _records(advice: dict[str, object]) -> int:
    """Returns the number of records in the advice.

    Raises:
        ValueError: if it is not a positive integer. 0 would stop the query.
    """
    records = advice["records"]
    if type(records) is not int or records < 1:
        raise ValueError(f"it has the value {records!r}; expected a positive integer")
    return records


def _folder() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-batches")


def _file(application_id: str) -> str:
    return f"{application_id}.json"
