"""Lists what a staging folder contains, and decides what can be deleted. Deletes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow.fs as pafs

from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.stage.files import PROBE

#: Names of the folder of a batch write (``df.write``), and of a probe file that was never renamed.
_WRITE = re.compile(r"write-[0-9a-f]{32}")
_LOST_PROBE = re.compile(re.escape(PROBE) + r"\.[0-9a-f]{32}")


@dataclass(frozen=True)
class StagedEntry:
    """One entry of a staging folder: the parts of a batch, or a leftover file.

    Attributes:
        name: its name in the folder: a batch id, ``write-…`` for a batch write, or something else.
        is_folder: whether it is a folder.
        files: number of files in it; 1 for a file.
        size_bytes: size of all these files.
        newest_seconds: when the newest file was written, in seconds since 1970; 0 = unknown.
    """

    name: str
    is_folder: bool
    files: int = 0
    size_bytes: int = 0
    newest_seconds: float = 0.0

    @property
    def batch_id(self) -> int | None:
        """Id of the micro-batch; None if the entry is not a micro-batch."""
        return int(self.name) if self.is_folder and re.fullmatch("[0-9]+", self.name) else None


def staged_entries(location: str) -> list[StagedEntry]:
    """Lists the folder, micro-batches first in order of their ids.

    Leaves out the probe file. A folder that does not exist has no entries.
    """
    fs, path = file_system(location)
    found: dict[str, StagedEntry] = {}
    for info in fs.get_file_info(pafs.FileSelector(path, recursive=True, allow_not_found=True)):
        name, _, below = info.path[len(path.rstrip("/")) + 1 :].partition("/")
        if name == PROBE and not below:
            continue
        so_far = found.setdefault(name, StagedEntry(name, bool(below) or not info.is_file))
        at_seconds = info.mtime.timestamp() if info.mtime is not None else 0.0
        found[name] = replace(
            so_far,
            files=so_far.files + info.is_file,
            size_bytes=so_far.size_bytes + (info.size or 0 if info.is_file else 0),
            newest_seconds=max(so_far.newest_seconds, at_seconds),
        )
    return sorted(found.values(), key=lambda each: (each.batch_id is None, each.batch_id or 0, each.name))


@dataclass(frozen=True)
class SweepDecision:
    """Whether one entry can be deleted.

    Attributes:
        entry: the entry.
        delete: whether it can be deleted.
        reason: why, or why not.
    """

    entry: StagedEntry
    delete: bool
    reason: str


def sweep_decisions(
    found: Sequence[StagedEntry], *, token_batch: int | None, older_than_seconds: float, now_seconds: float
) -> list[SweepDecision]:
    """Decides for each entry whether it can be deleted.

    A batch above the token's batch is always kept: a driver is about to commit it. A driver that does not
    know the token yet may be staging the token's own batch again, so that batch is deleted only at the same
    age as orphans.

    Args:
        found: result of `entries`.
        token_batch: newest batch of this query that Kafka holds; None = not known.
        older_than_seconds: age from which an orphan is deleted.
        now_seconds: the current time, in seconds since 1970.
    """
    return [_decide(each, token_batch, now_seconds - older_than_seconds, now_seconds) for each in found]


def _decide(
    each: StagedEntry, token_batch: int | None, before_seconds: float, now_seconds: float
) -> SweepDecision:
    old = each.newest_seconds < before_seconds
    age = f"{_duration(now_seconds - each.newest_seconds)} old"
    batch_id = each.batch_id
    if batch_id is not None:
        if token_batch is None:
            return SweepDecision(each, False, "it is not known whether Kafka holds it")
        if batch_id > token_batch:
            return SweepDecision(
                each, False, f"Kafka does not hold it yet; the token is at batch {token_batch}"
            )
        if batch_id == token_batch and not old:
            return SweepDecision(each, False, f"batch of the token, {age}; a restart may be staging it again")
        return SweepDecision(each, True, "Kafka holds it")
    if each.is_folder and _WRITE.fullmatch(each.name):
        return SweepDecision(each, old, f"batch write, {age}")
    if not each.is_folder and _LOST_PROBE.fullmatch(each.name):
        return SweepDecision(each, old, f"leftover probe file, {age}")
    return SweepDecision(each, False, "not created by kafka-eos")


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
