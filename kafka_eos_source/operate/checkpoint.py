"""What a checkpoint says by itself: Spark's two logs, our mark, the staged parts. No broker is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow.fs as pafs

from kafka_eos_source.commit.facts import Batch, Digests
from kafka_eos_source.commit.first_batch import FirstBatch, read_first_batch
from kafka_eos_source.commit.session import digests
from kafka_eos_source.commit.sources import OwnOffsets, SourceRange, ranges
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.identity import derived_application_id
from kafka_eos_source.protocol.offset_log import LoggedOffsets
from kafka_eos_source.runtime.file_systems import file_system


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint.

    Attributes:
        location: URI or path.
        query_id: Spark's id of the query.
        planned: newest batch in Spark's offset log, written before a batch runs; None = none yet.
        planned_at_seconds: when that entry was written, since 1970.
        committed: newest batch in Spark's commit log, written after a batch ended; None = none yet.
        first_batch: its first-batch file; None = it was never committed through this package.
        logged: offsets of the batch ``planned``.
        before: offsets of the batch before it, where the log has them.
    """

    location: str
    query_id: str
    planned: int | None = None
    planned_at_seconds: float | None = None
    committed: int | None = None
    first_batch: FirstBatch | None = None
    logged: LoggedOffsets | None = None
    before: LoggedOffsets | None = None

    @property
    def next_batch(self) -> int:
        """The batch that a restart begins with (``MicroBatchExecution.populateStartOffsets``)."""
        if self.planned is None:
            return 0
        return self.planned + 1 if self.committed == self.planned else self.planned

    @property
    def replays(self) -> bool:
        """Whether a restart repeats a batch that was planned before."""
        return self.planned is not None and self.next_batch == self.planned

    def sources(self) -> Sequence[SourceRange]:
        """What the next batch reads. One that is not planned yet has no end: its ends are its starts."""
        if self.logged is None:
            return ()
        if self.replays:
            return ranges(self.logged, self.before)
        return [replace(each, start=each.end) for each in ranges(self.logged, self.before)]

    def next(self, application_id: str, own: OwnOffsets) -> Batch:
        """The next batch as the decision sees it.

        Args:
            application_id: transactional id.
            own: its offsets on the sink's cluster, of `sources`.
        """
        known = self.replays and self.logged is not None
        start = self.before if self.replays else self.logged
        return Batch(
            application_id=application_id,
            query_id=self.query_id,
            run_id="",
            batch_id=self.next_batch,
            start=digests(start, self.query_id),
            end=digests(self.logged, self.query_id) if known else Digests(),
            starts=own.starts,
            ends=own.ends if known else None,
            comparable=own.comparable and known,
            jump=known and any(each.jump for each in self.sources()),
            jumped=own.jumped if known else frozenset(),
            shared=own.shared,
            promised=self.first_batch is not None and self.first_batch.promises_token(self.next_batch),
        )


def read(location: str) -> Checkpoint | None:
    """The checkpoint; None = there is none.

    Raises:
        OperatorError: a file of it is damaged, or of an unknown version.
        InvalidOptionError: no file system for the location.
    """
    fs, path = file_system(location)
    if fs.get_file_info(f"{path}/metadata").type != pafs.FileType.File:
        return None
    planned, planned_at_seconds = _newest(fs, f"{path}/offsets")
    logged = before = None
    if planned is not None:
        logged = offset_log.read(location, planned)
        before = offset_log.read(location, planned - 1) if planned > 0 else None
    return Checkpoint(
        location=location,
        query_id=offset_log.query_id(location),
        planned=planned,
        planned_at_seconds=planned_at_seconds,
        committed=_newest(fs, f"{path}/commits")[0],
        first_batch=read_first_batch(location),
        logged=logged,
        before=before,
    )


def application_id(given: str | None, checkpoint: Checkpoint | None) -> str:
    """The transactional id: as given, as the checkpoint was committed, or as it is derived.

    Raises:
        InvalidOptionError: neither a name nor a checkpoint is known.
    """
    if given is not None:
        return given
    if checkpoint is None:
        raise InvalidOptionError(
            "there is no checkpoint that tells the application.id.",
            fix="correct --checkpoint, or give --application-id.",
        )
    first_batch = checkpoint.first_batch
    if first_batch is not None and first_batch.query_id == checkpoint.query_id:
        return first_batch.application_id
    return derived_application_id(checkpoint.query_id)


def _newest(fs: pafs.FileSystem, folder: str) -> tuple[int | None, float | None]:
    """Of a log of Spark's: files named by batch id. Its own temporary files and checksums are none."""
    found = fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    named = [(int(each.base_name), each) for each in found if each.base_name.isdigit() and each.is_file]
    if not named:
        return None, None
    batch_id, info = max(named, key=lambda each: each[0])
    return batch_id, info.mtime.timestamp() if info.mtime is not None else None
