"""The figures that a source adds to ``lastProgress``, so that they also reach users of Spark Connect.

``lastProgress["sources"][i]["latestOffset"]`` is what `reportLatestOffset` returns: the latest offsets in the
form of a source position. Its key ``"@"`` holds what is not an offset, and there the figures have one key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kafka_eos_source.observe.figures import BatchFigures
from kafka_eos_source.protocol.offset_log import OURS
from kafka_eos_source.runtime.json_input import JsonError, parse_json

_LIVE = "live"


def with_figures(latest: Mapping[str, Any], batch: BatchFigures | None) -> dict[str, Any]:
    """Adds the newest micro-batch to the JSON of a source position.

    Args:
        latest: the position, as `SourcePosition.to_dict` returns it.
        batch: the newest micro-batch of the query; None if it is not known.
    """
    if batch is None:
        return dict(latest)
    return {**latest, OURS: {**latest.get(OURS, {}), _LIVE: parse_json(batch.to_json())}}


def figures_in(latest: object) -> BatchFigures | None:
    """Returns the micro-batch that `with_figures` added; None if there is none.

    Args:
        latest: ``latestOffset`` of a source in a progress report: an object of JSON, or its text.
    """
    try:
        found = parse_json(latest) if isinstance(latest, str) else latest
    except JsonError:
        return None
    ours = found.get(OURS) if isinstance(found, dict) else None
    live = ours.get(_LIVE) if isinstance(ours, dict) else None
    return None if live is None else BatchFigures.from_json(json.dumps(live))
