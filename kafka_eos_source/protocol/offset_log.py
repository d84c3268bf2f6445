"""Spark's offset log: ``<checkpoint>/offsets/<batchId>``, written before the batch runs.

::

    v1                                  v2
    {"batchWatermarkMs":0,…}            {"batchWatermarkMs":0,…}
    {"flights":{"0":42}}                <source name>:{"flights":{"0":42}}
    -

One line a source, ``-`` for a source without offsets yet (``OffsetSeqLog`` in Spark; v2 names sources).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from kafka_eos_source.errors import InvalidOptionError, OperatorError
from kafka_eos_source.protocol.token import digest
from kafka_eos_source.runtime.file_systems import file_system

_NO_OFFSET = "-"


@dataclass(frozen=True)
class LoggedOffsets:
    """The end offsets of one batch.

    Attributes:
        sources: each source's offset as Spark logged it, by name or position; None = none yet.
        digest: of the batch id and the whole file. Spark writes each file once and never changes it, and it
            holds the time at which the batch was planned. So two entries with one digest are the same plan of
            the same batch, whatever the sources are.
    """

    sources: Mapping[str, str | None]
    digest: str

    @property
    def digest_of_format_1(self) -> str:
        """As tokens of format 1 have it: over the sources' lines alone."""
        return digest(f"{name}:{line or _NO_OFFSET}" for name, line in sorted(self.sources.items()))


def genesis_digest(query_id: str) -> str:
    """The digest of where a checkpoint starts: stands in for the offset log entry before batch 0."""
    return digest(("genesis", query_id))


def parse(text: str, path: str, batch_id: int) -> LoggedOffsets:
    """Reads one file of the log.

    Args:
        text: the whole file.
        path: of the file, for messages.
        batch_id: whose entry it is.

    Raises:
        OperatorError: the file has an unknown version or is cut short.
    """
    lines = text.splitlines()
    version = lines[0].strip() if lines else ""
    if version not in ("v1", "v2") or len(lines) < 2:
        raise OperatorError(
            f"Spark's offset log {path} starts with {version!r}; expected 'v1' or 'v2', then its metadata.",
            fix="run the Spark version that wrote this checkpoint, or a newer kafka-eos.",
        )
    entries = [line for line in lines[2:] if line]
    if version == "v1":
        found = {str(index): line for index, line in enumerate(entries)}
    else:
        found = {}
        for line in entries:
            name, separator, offset = line.partition(":")
            if not separator:
                raise OperatorError(f"Spark's offset log {path}: no source name in {line!r}.")
            found[name] = offset
    return LoggedOffsets(
        {name: None if line == _NO_OFFSET else line for name, line in found.items()},
        digest((str(batch_id), text.rstrip("\n"))),
    )


def read(checkpoint: str, batch_id: int) -> LoggedOffsets | None:
    """The offsets of one batch; None when the log does not have it."""
    text = _read(checkpoint, f"offsets/{batch_id}")
    return None if text is None else parse(text, f"{checkpoint}/offsets/{batch_id}", batch_id)


def query_id(checkpoint: str) -> str:
    """The id that the checkpoint gives to its query, the same over all restarts.

    Raises:
        InvalidOptionError: there is no checkpoint at this location.
    """
    text = _read(checkpoint, "metadata")
    if text is None:
        raise InvalidOptionError(
            f"checkpointLocation={checkpoint!r} holds no checkpoint (no file 'metadata').",
            fix="give the full URI: Spark takes a path without a scheme as one on its default file system "
            "(fs.defaultFS), kafka-eos as a local one.",
        )
    return str(json.loads(text)["id"])


def _read(checkpoint: str, name: str) -> str | None:
    fs, path = file_system(checkpoint)
    try:
        with fs.open_input_stream(f"{path}/{name}") as source:
            return str(source.read().decode())
    except FileNotFoundError:
        return None
