"""The folder in which this package keeps large files that it can make or download again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Returns ``KAFKA_EOS_CACHE``, else the folder ``kafka-eos`` in the user's cache folder."""
    configured = os.environ.get("KAFKA_EOS_CACHE")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kafka-eos"
