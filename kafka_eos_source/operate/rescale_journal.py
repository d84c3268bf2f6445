"""What a rescale has committed so far, so that it continues after a kill, and what it reports meanwhile.

Each *slice* of a copy is one transaction: its records, and the journal in the metadata of the group's offsets
on the copy topic. So the journal is never ahead of the records, nor behind them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kafka_eos_source.errors import ChangelogError
from kafka_eos_source.observe import wording
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json
from kafka_eos_source.state.changelog.move import Move
from kafka_eos_source.state.reading.stores import Cut

#: Key of the record in partition 0 of the copy with the entries that belong to no key.
NOTES_KEY = b"\x00kafka-eos-rescale"

_VERSION = 1
_FILLED = "filled"


@dataclass(frozen=True)
class CopyJournal:
    """How far the changelog is copied. The tokens of the query are still in place.

    Attributes:
        cut: `digest` of the state that is copied. If the query has run meanwhile, the copy starts again.
        to: new number of shards.
        copy_id: Kafka's id of the copy topic.
        shard: shard that is being copied; all shards before it are complete.
        offset: offset in its changelog from which to continue.
        notes: offset of the record under `NOTES_KEY`; -1 = there is none yet.
        records: number of records in the copy.
        since_ms: when the copy of that shard began, ms since the epoch. Compaction may have removed deletes
            of what was copied, if that is too long ago.
    """

    cut: str
    to: int
    copy_id: str
    shard: int = 0
    offset: int = 0
    notes: int = -1
    records: int = 0
    since_ms: int = 0

    def encode(self) -> str:
        """Returns the journal as offset metadata. No reader takes it for a token."""
        return json.dumps({"rescale": _VERSION, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def decode(cls, metadata: str) -> CopyJournal | None:
        """Returns the journal in an offset's metadata; None if there is none that this version can read."""
        try:
            found = parse_json(metadata.rstrip("\0"))
            if found.pop("rescale") == _VERSION:
                journal = cls(**found)
                types = [str if name in ("cut", "copy_id") else int for name in asdict(journal)]
                if [type(value) for value in asdict(journal).values()] == types:
                    return journal
        except SHAPE_ERRORS:
            pass  # another text; the copy then begins anew, which is always correct
        return None

    def continues(self, cut: Cut, to: int, copy_id: str) -> bool:
        """Whether the copy holds a part of exactly this state, for this number of shards."""
        return (self.cut, self.to, self.copy_id) == (digest(cut), to, copy_id)


def digest(cut: Cut) -> str:
    """Returns a digest of a committed state: offsets, and the task attempts that they belong to."""
    batches = {
        shard: None if batch is None else [batch.query_id, batch.batch_id, batch.task_attempt_id]
        for shard, batch in cut.batches.items()
    }
    told = json.dumps([cut.topic_id, sorted(cut.ends.items()), sorted(batches.items())])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def with_filled(move: Move, topic_id: str, offset: int) -> str:
    """Returns the move record with the offset up to which a partition of the copy is in the new changelog."""
    return json.dumps({**parse_json(move.encode()), _FILLED: [topic_id, offset]}, separators=(",", ":"))


def filled_until(metadata: str, topic_id: str) -> int:
    """Returns the offset that `with_filled` wrote for this changelog topic; 0 if there is none."""
    try:
        found, offset = parse_json(metadata.rstrip("\0"))[_FILLED]
        return int(offset) if found == topic_id else 0
    except SHAPE_ERRORS:
        return 0


def encode_notes(done: Mapping[bytes, bytes], running: Mapping[bytes, bytes]) -> bytes:
    """Returns the value under `NOTES_KEY`: entries of no key, of complete shards and of the running one."""
    return json.dumps([{k.hex(): v.hex() for k, v in each.items()} for each in (done, running)]).encode()


def decode_notes(value: bytes) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """Returns what `encode_notes` encoded.

    Raises:
        ChangelogError: if another program wrote the value.
    """
    try:
        done, running = (
            {bytes.fromhex(k): bytes.fromhex(v) for k, v in each.items()} for each in parse_json(value)
        )
        return done, running
    except SHAPE_ERRORS as error:
        raise ChangelogError(
            f"the notes in the copy of the changelog are damaged ({error!r}): {value[:80]!r}.",
            fix="delete that topic, and run the command again; the state itself is not damaged.",
        ) from error


@dataclass
class Progress:
    """Progress of one stage of a rescale, in this run of the command.

    Attributes:
        stage: ``"copy"`` or ``"fill"``.
        done, total: offsets that are processed, and all of them. Compacted offsets have no record.
        records, size_bytes: records that this run has committed, and the size of their keys and values.
        slices: number of transactions that this run has committed.
    """

    stage: str
    done: int
    total: int
    records: int = 0
    size_bytes: int = 0
    slices: int = 0
    _done_before: int = field(init=False)
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._done_before, self._since = self.done, time.monotonic()

    @property
    def seconds(self) -> float:
        """Duration of the stage so far."""
        return time.monotonic() - self._since

    @property
    def left_seconds(self) -> float | None:
        """Estimated remaining duration; None = nothing was processed yet."""
        moved = self.done - self._done_before
        return None if moved <= 0 else self.seconds * (self.total - self.done) / moved

    def to_json(self) -> dict[str, Any]:
        """Returns the progress as JSON values."""
        left = self.left_seconds
        return {
            "stage": self.stage,
            "records": self.records,
            "bytes": self.size_bytes,
            "slices": self.slices,
            "offsets_done": self.done,
            "offsets_total": self.total,
            "seconds": round(self.seconds, 3),
            "left_seconds": None if left is None else round(left, 3),
        }

    def __str__(self) -> str:
        share = 100 if self.total <= 0 else 100 * self.done // self.total
        left = self.left_seconds
        rest = "" if left is None or self.done >= self.total else f", about {wording.duration(left)} left"
        return (
            f"{self.stage}: {share} %, {self.records:,} records ({wording.size(self.size_bytes)}) in "
            f"{self.slices} transaction(s){rest}"
        )
