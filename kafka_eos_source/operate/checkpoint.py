"""Reads what a checkpoint contains, without contacting Kafka.

That is: Spark's offset log and commit log, and the identity file of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow.fs as pafs

from kafka_eos_source.commit.facts import Batch
from kafka_eos_source.commit.identity_file import Identity, read_identity
from kafka_eos_source.commit.session import digest_of
from kafka_eos_source.commit.sources import OwnOffsets, SourceRange, ranges
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.identity import derived_application_id
from kafka_eos_source.protocol.offset_log import LoggedOffsets
from kafka_eos_source.runtime.file_systems import file_system


@dataclass(frozen=True)
class Checkpoint:
    """The contents of one checkpoint.

    Attributes:
        location: URI or path.
        query_id: Spark's id of the query.
        planned: newest batch in Spark's offset log, which Spark writes before it runs the batch; None = no
            batch.
        planned_at_seconds: when that entry was written, in seconds since 1970.
        committed: newest batch in Spark's commit log, which Spark writes after the batch; None = no batch.
        identity: the identity file; None = this package has not committed a batch of this checkpoint.
        logged: offsets of the batch ``planned``.
        before: offsets of the batch before ``planned``, if the log still has them.
    """

    location: str
    query_id: str
    planned: int | None = None
    planned_at_seconds: float | None = None
    committed: int | None = None
    identity: Identity | None = None
    logged: LoggedOffsets | None = None
    before: LoggedOffsets | None = None

    @property
    def next_batch(self) -> int:
        """Id of the batch that a restart begins with (``MicroBatchExecution.populateStartOffsets``)."""
        if self.planned is None:
            return 0
        return self.planned + 1 if self.committed == self.planned else self.planned

    @property
    def replays(self) -> bool:
        """Whether a restart repeats a batch that Spark has already planned."""
        return self.planned is not None and self.next_batch == self.planned

    @property
    def unproven_since(self) -> int | None:
        """The first batch that ``at_least_once`` may have written since the last token; else None."""
        return None if self.identity is None else self.identity.unproven_since

    @property
    def has_native_state(self) -> bool:
        """Whether Spark keeps its own state for the query, such as an aggregation or a deduplication."""
        return offset_log.has_native_state(self.location)

    def sources(self) -> Sequence[SourceRange]:
        """Returns the offset ranges of the next batch; empty ranges if Spark has not planned it."""
        if self.logged is None:
            return ()
        if self.replays:
            return ranges(self.logged, self.before)
        return [replace(each, start=each.end) for each in ranges(self.logged, self.before)]

    def describe_next_batch(self, application_id: str, own: OwnOffsets, target: str) -> Batch:
        """Returns the next batch in the form that `batch_verdict` takes.

        Args:
            application_id: the transactional id.
            own: offsets of the next batch's `sources` that lie on the sink's cluster.
            target: where the query writes, as its token says; commands assume that this did not change.
        """
        known = self.replays and self.logged is not None
        start = self.before if self.replays else self.logged
        return Batch(
            application_id=application_id,
            query_id=self.query_id,
            run_id="",
            batch_id=self.next_batch,
            start=digest_of(start, self.query_id),
            end=digest_of(self.logged, self.query_id) if known else "",
            target=target,
            starts=own.starts,
            ends=own.ends if known else None,
            comparable=own.comparable and known,
            jump=known and any(each.jump for each in self.sources()),
            jumped=own.jumped if known else frozenset(),
            shared=own.shared,
            promised=self.identity is not None and self.identity.query_id == self.query_id,
        )


def read_checkpoint(location: str) -> Checkpoint | None:
    """Reads a checkpoint; returns None if the location contains no checkpoint.

    Raises:
        OperatorError: if one of its files is damaged or has an unknown version.
        InvalidOptionError: if no file system supports the location.
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
        identity=read_identity(location),
        logged=logged,
        before=before,
    )


def known_application_id(given: str | None, checkpoint: Checkpoint | None) -> str:
    """Returns the transactional id: the given one, else the checkpoint's, else the derived one.

    Raises:
        InvalidOptionError: if neither an id nor a checkpoint is known.
    """
    if given is not None:
        return given
    if checkpoint is None:
        raise InvalidOptionError(
            "the application.id is not known, because --checkpoint is not set or names no checkpoint.",
            fix="correct --checkpoint, or add --application-id.",
        )
    identity = checkpoint.identity
    if identity is not None and identity.query_id == checkpoint.query_id:
        return identity.application_id
    return derived_application_id(checkpoint.query_id)


def _newest(fs: pafs.FileSystem, folder: str) -> tuple[int | None, float | None]:
    """Returns the newest batch id in a log folder of Spark, and when its file was written.

    Spark names these files by batch id; its temporary files and checksums have other names.
    """
    found = fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    named = [(int(each.base_name), each) for each in found if each.base_name.isdigit() and each.is_file]
    if not named:
        return None, None
    batch_id, info = max(named, key=lambda each: each[0])
    return batch_id, info.mtime.timestamp() if info.mtime is not None else None
