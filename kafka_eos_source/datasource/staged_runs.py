"""Tells the sink which checkpoints belong to queries whose reading tasks stage the rows.

The metadata of a staged frame tell the sink that its rows are reports (`in_read.staged_frame`). Expressions
over the column, such as a cast, drop the metadata, and the sink would write the reports as records. So the
source's planning process, which lives as long as the run, holds a file of this host from before it plans the
first batch. Spark asks for the sink of each batch after that, also on the driver.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from typing import BinaryIO

from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.runtime.folders import PrivateFolder

_log = logging.getLogger(__name__)

#: The process of a query that was stopped a moment ago may live so much longer, in seconds.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 5.0, 0.05


class StagedRun:
    """A run of a query whose reading tasks stage the rows; held by the source's planning process.

    Args:
        checkpoint: option ``checkpointLocation`` in ``write=`` of `map_in_read`.
    """

    def __init__(self, checkpoint: str) -> None:
        self._held: BinaryIO | None = None
        try:
            self._held = _folder().hold(_name(checkpoint))
        except OSError as error:  # the protection is missing, and nothing else
            _log.warning("the sink cannot check that it gets an unchanged staged frame: %s", error)

    def end(self) -> None:
        """Says that the run has ended."""
        if self._held is not None:
            self._held.close()


def is_staged_in_read(checkpoint: str) -> bool:
    """Returns whether the reading tasks of the query with this checkpoint stage its rows.

    Args:
        checkpoint: option ``checkpointLocation`` of the sink.
    """
    folder, name = _folder(), _name(checkpoint)
    until = time.monotonic() + _PATIENCE_SECONDS
    try:
        while folder.is_held(name):
            if time.monotonic() > until:
                return True
            time.sleep(_PAUSE_SECONDS)
    except OSError as error:
        _log.warning("cannot check that the frame is an unchanged staged frame: %s", error)
    return False


def _folder() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-live").folder("staged")


def _name(checkpoint: str) -> str:
    fs, path = file_system(checkpoint)
    if fs.type_name == "local":
        path = os.path.realpath(path)
    return hashlib.sha256(f"{fs.type_name}:{path.rstrip('/')}".encode()).hexdigest()[:32]
