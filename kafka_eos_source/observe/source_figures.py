"""What is measured of a source: one immutable record each time its planner looks at the brokers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.observe.lines import (
    VERSION,
    Writer,
    integers,
    items,
    mapping,
    number,
    numbers,
    parsed,
    text,
    to_line,
)
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS


class SourceState(Enum):
    """What the source of a query does."""

    PLANNED = "planned"  #: it has planned a batch, which Spark now runs
    IDLE = "idle"  #: nothing to read, or not enough yet
    ASKING = "asking"  #: it has been waiting for an answer of the brokers
    STOPPED = "stopped"  #: the run of the query has ended


@dataclass(frozen=True)
class SourceFigures:
    """One source of a query, as its planner saw it.

    Attributes:
        at: when this was written, in seconds since 1970.
        writer: the planning process.
        state: what the source does.
        state_since: since when it does that.
        reason: what it waits for; "" if it only waits for records.
        application_id: option ``application.id``, or "" if the source does not know the query.
        name: what the source reads, for people.
        start: next offset to read per partition, at the end of the newest committed batch.
        planned: next offset to read per partition, at the end of the newest planned batch.
        latest: what readers can read up to, per partition, when the brokers were last asked.
        planned_at: when the newest batch was planned, in seconds since 1970; None if none was.
        positions: `position_id` of the newest positions, oldest first, which connect a source to its query.
        behind_since: since when the oldest record after ``start`` has been available, in seconds since 1970,
            per topic that has such a record.
        behind_at_least: topics of which that record may have been available even before.
        hidden: number of offsets that open transactions hide from readers, per partition that has any.
        hidden_since: since when the source has seen that, without a pause, in seconds since 1970.
        retention_seconds: how long Kafka keeps the committed offsets, and with them the token, of a query
            that commits nothing (``offsets.retention.minutes``); None if that is not known.
    """

    at: float
    writer: Writer
    state: SourceState
    state_since: float
    reason: str = ""
    application_id: str = ""
    name: str = ""
    start: Offsets = field(default_factory=dict)
    planned: Offsets = field(default_factory=dict)
    latest: Offsets = field(default_factory=dict)
    planned_at: float | None = None
    positions: tuple[str, ...] = ()
    behind_since: Mapping[str, float] = field(default_factory=dict)
    behind_at_least: tuple[str, ...] = ()
    hidden: Offsets = field(default_factory=dict)
    hidden_since: float | None = None
    retention_seconds: float | None = None

    def to_json(self) -> str:
        """Returns the figures as one line."""
        return to_line(
            {
                "v": VERSION,
                "kind": "source",
                "at": round(self.at, 3),
                "writer": self.writer.to_json(),
                "state": self.state.value,
                "since": round(self.state_since, 3),
                "reason": self.reason,
                "application": self.application_id,
                "name": self.name,
                "start": _nested(self.start),
                "planned": _nested(self.planned),
                "latest": _nested(self.latest),
                "planned_at": None if self.planned_at is None else round(self.planned_at, 3),
                "positions": list(self.positions),
                "behind_since": {topic: round(each, 3) for topic, each in self.behind_since.items()},
                "behind_at_least": list(self.behind_at_least),
                "hidden": _nested(self.hidden),
                "hidden_since": None if self.hidden_since is None else round(self.hidden_since, 3),
                "retention": self.retention_seconds,
            }
        )

    @classmethod
    def from_json(cls, line: str) -> SourceFigures | None:
        """Reads what `to_json` wrote; returns None if it is something else."""
        found = parsed(line, "source")
        try:
            return (
                None
                if found is None
                else cls(
                    at=number(found["at"]),
                    writer=Writer.from_json(mapping(found["writer"])),
                    state=SourceState(found["state"]),
                    state_since=number(found["since"]),
                    reason=text(found["reason"]),
                    application_id=text(found["application"]),
                    name=text(found["name"]),
                    start=_flat(found["start"]),
                    planned=_flat(found["planned"]),
                    latest=_flat(found["latest"]),
                    planned_at=None if found["planned_at"] is None else number(found["planned_at"]),
                    positions=tuple(map(text, items(found["positions"]))),
                    behind_since=numbers(found["behind_since"]),
                    behind_at_least=tuple(map(text, items(found["behind_at_least"]))),
                    hidden=_flat(found.get("hidden", {})),
                    hidden_since=_number_or_none(found.get("hidden_since")),
                    retention_seconds=_number_or_none(found.get("retention")),
                )
            )
        except SHAPE_ERRORS:
            return None

    def lag(self, committed: Offsets) -> dict[str, int]:
        """Returns per topic how many offsets of the source are behind ``latest``."""
        found: dict[str, int] = {}
        for tp, end in self.latest.items():
            if tp in committed:
                found[tp.topic] = found.get(tp.topic, 0) + max(0, end - committed[tp])
        return found


def position_id(end: Offsets) -> str:
    """Returns a short text that identifies a position: the next offset to read of each partition.

    The source plans a position and does not know its query; the commit reads the position in the checkpoint.
    """
    text_of_all = ";".join(f"{tp.topic}-{tp.partition}:{offset}" for tp, offset in sorted(end.items()))
    return blake2b(text_of_all.encode(), digest_size=8).hexdigest()


def _number_or_none(found: object) -> float | None:
    return None if found is None else number(found)


def _nested(offsets: Offsets) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for tp, offset in offsets.items():
        nested.setdefault(tp.topic, {})[str(tp.partition)] = offset
    return nested


def _flat(found: object) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, int(partition)): offset
        for topic, partitions in mapping(found).items()
        for partition, offset in integers(partitions).items()
    }
