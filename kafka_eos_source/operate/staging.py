"""What lies in a staging folder, and what may go. Nothing is deleted here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow.fs as pafs

from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.stage.files import PROBE

#: Of a batch write (``df.write``), and of a probe that was never renamed.
_WRITE = re.compile(r"write-[0-9a-f]{32}")
_LOST_PROBE = re.compile(re.escape(PROBE) + r"\.[0-9a-f]{32}")


@dataclass(frozen=True)
class Staged:
    """One entry of a staging folder: a batch's parts, or a file that was left.

    Attributes:
        name: in the folder: a batch id, ``write-…`` of a batch write, or something else.
        is_folder: whether it is one.
        files: in it; 1 for a file.
        size_bytes: of all of them.
        newest_seconds: when the newest of them was written, since 1970; 0 = unknown.
    """

    name: str
    is_folder: bool
    files: int = 0
    size_bytes: int = 0
    newest_seconds: float = 0.0

    @property
    def batch_id(self) -> int | None:
        """Of a micro-batch; None = it is something else."""
        return int(self.name) if self.is_folder and re.fullmatch("[0-9]+", self.name) else None


def entries(location: str) -> list[Staged]:
    """What is in the folder, batches first, in their order. The probe is left out; no folder has nothing."""
    fs, path = file_system(location)
    found: dict[str, Staged] = {}
    for info in fs.get_file_info(pafs.FileSelector(path, recursive=True, allow_not_found=True)):
        name, _, below = info.path[len(path.rstrip("/")) + 1 :].partition("/")
        if name == PROBE and not below:
            continue
        so_far = found.setdefault(name, Staged(name, bool(below) or not info.is_file))
        at_seconds = info.mtime.timestamp() if info.mtime is not None else 0.0
        found[name] = replace(
            so_far,
            files=so_far.files + info.is_file,
            size_bytes=so_far.size_bytes + (info.size or 0 if info.is_file else 0),
            newest_seconds=max(so_far.newest_seconds, at_seconds),
        )
    return sorted(found.values(), key=lambda each: (each.batch_id is None, each.batch_id or 0, each.name))


@dataclass(frozen=True)
class Judged:
    """An entry, and whether it may go.

    Attributes:
        staged: the entry.
        goes: whether it may be deleted.
        why: or why not.
    """

    staged: Staged
    goes: bool
    why: str


def judge(
    found: Sequence[Staged], *, token_batch: int | None, older_than_seconds: float, now_seconds: float
) -> list[Judged]:
    """What may go, of a staging folder.

    A batch above the token's is never touched: it is about to be committed. That of the token itself may be
    staged again at this moment by a driver that does not know yet, so it goes by age, as orphans do.

    Args:
        found: by `entries`.
        token_batch: newest batch that is in Kafka, of the query that stages here; None = not known.
        older_than_seconds: age from which an orphan goes.
        now_seconds: since 1970.
    """
    return [_judged(each, token_batch, now_seconds - older_than_seconds, now_seconds) for each in found]


def _judged(each: Staged, token_batch: int | None, before_seconds: float, now_seconds: float) -> Judged:
    old = each.newest_seconds < before_seconds
    age = f"{_duration(now_seconds - each.newest_seconds)} old"
    batch_id = each.batch_id
    if batch_id is not None:
        if token_batch is None:
            return Judged(each, False, "whether it is in Kafka is not known")
        if batch_id > token_batch:
            return Judged(each, False, f"above the token (batch {token_batch})")
        if batch_id == token_batch and not old:
            return Judged(each, False, f"the token's own batch, {age}: a restart may be staging it again")
        return Judged(each, True, "in Kafka")
    if each.is_folder and _WRITE.fullmatch(each.name):
        return Judged(each, old, f"a batch write's, {age}")
    if not each.is_folder and _LOST_PROBE.fullmatch(each.name):
        return Judged(each, old, f"a probe that was left, {age}")
    return Judged(each, False, "not made by kafka-eos")


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
