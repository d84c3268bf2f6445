"""How large the next micro-batch may be, so that the state it changes fits into memory (KIP-892).

Kafka Streams commits early when uncommitted state grows too large. Spark cannot: a batch's offsets are fixed
before it runs. So the commit of a batch says how much state the *next* one may change, and the source plans
no more records than that. Both run in processes of the driver, which meet in a file of the driver's machine,
by the ``application.id`` they share. It is advice: a lost file costs nothing but a batch that is too large.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile

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
    """What the last commit of the query advised; None = nothing."""
    try:
        with open(_path(application_id), encoding="utf-8") as file:
            return int(json.load(file)["records"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("advice on the size of batches of %s cannot be read: %s", application_id, error)
        return None


def write(application_id: str, records: int | None) -> None:
    """Leaves advice for the source, or takes it back."""
    path = _path(application_id)
    try:
        if records is None:
            if os.path.exists(path):
                os.remove(path)
            return
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump({"records": records}, file)
        os.replace(f"{path}.new", path)
    except OSError as error:
        _log.warning("advice on the size of batches of %s cannot be left: %s", application_id, error)


def _path(application_id: str) -> str:
    return os.path.join(tempfile.gettempdir(), f"kafka-eos-batches-{os.getuid()}", f"{application_id}.json")
