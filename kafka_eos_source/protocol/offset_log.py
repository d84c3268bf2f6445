"""Reads Spark's offset log, ``<checkpoint>/offsets/<batchId>``, which Spark writes before a batch runs.

::

    v1                                  v2
    {"batchWatermarkMs":0,…}            {"batchWatermarkMs":0,…}
    {"flights":{"0":42}}                <source name>:{"flights":{"0":42}}
    -

Each source has one line; ``-`` stands for a source without offsets yet (``OffsetSeqLog`` in Spark). Version
v2 names the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow.fs as pafs

from kafka_eos_source.errors import InvalidOptionError, OperatorError
from kafka_eos_source.protocol.token import digest
from kafka_eos_source.runtime.file_systems import file_system, names_in
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json

_NO_OFFSET = "-"


@dataclass(frozen=True)
class LoggedOffsets:
    """The entry of one batch in the offset log: its end offsets.

    Attributes:
        sources: the offset of each source as Spark logged it, by name or position; None if there is none yet.
        digest: digest of the batch id and the whole file. Spark writes each file once and never changes it,
            and the file contains the time when the batch was planned. So two entries with the same digest are
            the same plan of the same batch, whatever the sources are.
        planned_at_ms: when Spark planned the batch, in ms since the epoch; None if the entry does not say so.
    """

    sources: Mapping[str, str | None]
    digest: str
    planned_at_ms: int | None = None


def genesis_digest(query_id: str) -> str:
    """Returns the digest for the start of a checkpoint, in place of an entry before batch 0."""
    return digest(("genesis", query_id))


def parse(text: str, path: str, batch_id: int) -> LoggedOffsets:
    """Parses one file of the offset log.

    Args:
        text: the whole file.
        path: path of the file, for messages.
        batch_id: the batch of this entry.

    Raises:
        OperatorError: if the file has an unknown version or is truncated.
    """
    lines = text.splitlines()
    version = lines[0].strip() if lines else ""
    if version not in ("v1", "v2") or len(lines) < 2:
        raise OperatorError(
            f"Spark's offset log {path} starts with {version!r}; expected 'v1' or 'v2' and a line of "
            "metadata.",
            fix="run the query with the Spark version that wrote this checkpoint, or with a newer version of "
            "kafka-eos.",
        )
    entries = [line for line in lines[2:] if line]
    if version == "v1":
        found = {str(index): line for index, line in enumerate(entries)}
    else:
        found = {}
        for line in entries:
            name, separator, offset = line.partition(":")
            if not separator:
                raise OperatorError(
                    f"Spark's offset log {path} has a line without the name of a source: {line!r}.",
                    fix="restore the file from a copy of the checkpoint.",
                )
            found[name] = offset
    return LoggedOffsets(
        {name: None if line == _NO_OFFSET else line for name, line in found.items()},
        digest((str(batch_id), text.rstrip("\n"))),
        _planned_at_ms(lines[1]),
    )


def _planned_at_ms(metadata: str) -> int | None:
    try:
        found = parse_json(metadata)["batchTimestampMs"]
    except SHAPE_ERRORS:
        return None  # nothing but the figures about the batch depends on it
    return found if type(found) is int else None


def read(checkpoint: str, batch_id: int) -> LoggedOffsets | None:
    """Returns the entry of one batch; None if the log does not have it."""
    text = _read(checkpoint, f"offsets/{batch_id}")
    return None if text is None else parse(text, f"{checkpoint}/offsets/{batch_id}", batch_id)


@dataclass(frozen=True)
class PlannedBatch:
    """An entry of the offset log: the plan of one batch.

    Attributes:
        batch_id: the batch of this entry.
        digest: `LoggedOffsets.digest` of the entry.
    """

    batch_id: int
    digest: str


def newest(checkpoint: str) -> PlannedBatch | None:
    """Returns the newest entry of the log; None if the log is empty."""
    fs, path = file_system(checkpoint)
    names = names_in(fs, f"{path}/offsets")
    batch_id = max((int(name) for name in names if name.isdecimal()), default=None)
    if batch_id is None:
        return None
    entry = read(checkpoint, batch_id)
    return None if entry is None else PlannedBatch(batch_id, entry.digest)


def has_finished_batch(checkpoint: str) -> bool:
    """Returns whether a batch of the query has ended, in this or an earlier run."""
    fs, path = file_system(checkpoint)
    return any(name.isdecimal() for name in names_in(fs, f"{path}/commits"))


def query_id(checkpoint: str) -> str:
    """Returns Spark's id of the query, which the checkpoint keeps over all restarts.

    Raises:
        InvalidOptionError: if there is no checkpoint at this location.
        OperatorError: if the file with the id is damaged.
    """
    text = _read(checkpoint, "metadata")
    if text is None:
        raise InvalidOptionError(
            f"checkpointLocation={checkpoint!r} holds no checkpoint: it has no file 'metadata'.",
            fix="set an absolute path or the full URI. On Spark Connect, Spark and its Python processes have "
            "different working directories, so a relative path names two folders. Without a scheme, Spark "
            "uses its default file system (fs.defaultFS), but kafka-eos uses the local file system.",
        )
    try:
        return str(parse_json(text)["id"])
    except SHAPE_ERRORS as error:
        raise OperatorError(
            f"file {checkpoint}/metadata is damaged ({error}); expected JSON with the id of the query.",
            fix="restore the checkpoint from a copy. A new checkpoint begins at startingOffsets, which "
            "doubles or leaves out rows unless it continues where this query stopped "
            "(docs/runbooks.md, FOREIGN_QUERY).",
        ) from error


def has_native_state(checkpoint: str) -> bool:
    """Whether Spark keeps its own state for the query, such as an aggregation, a join or a deduplication."""
    fs, path = file_system(checkpoint)
    folder: pafs.FileInfo = fs.get_file_info(f"{path}/state")
    return bool(folder.type != pafs.FileType.NotFound)


def _read(checkpoint: str, name: str) -> str | None:
    fs, path = file_system(checkpoint)
    try:
        with fs.open_input_stream(f"{path}/{name}") as source:
            return str(source.read().decode())
    except FileNotFoundError:
        return None
