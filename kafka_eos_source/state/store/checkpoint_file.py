"""The files ``.checkpoint`` and ``.position`` of Kafka Streams (`OffsetCheckpoint`), read once and written.

::

    0                    version
    2                    lines that follow
    <topic> <partition> <offset>

``.checkpoint`` has the offset of the last changelog record in the data, so one less than the next; Kafka
wrote -4 for "unknown". Ours is for tools, which read how far a store is without opening it, and for a
release that knows no better; the database knows best. ``.position`` has the last input offset.
"""

from __future__ import annotations

from pathlib import Path

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.store.files import replace_text
from kafka_eos_source.state.store.records import Offsets

CHECKPOINT = ".checkpoint"
POSITION = ".position"

_VERSION = "0"


def read_last_offsets(path: Path) -> Offsets | None:
    """Offset of the last record by partition, without the unknown ones.

    None = no file, or one that is not to be trusted: of another version, cut short, or not readable at all.
    """
    try:
        version, count, *lines = path.read_text().splitlines()
        if version.strip() != _VERSION or int(count) != len(lines):
            return None
        entries = [line.split() for line in lines]
        offsets = {TopicPartition(topic, int(partition)): int(at) for topic, partition, at in entries}
    except (OSError, ValueError):
        return None
    return {tp: offset for tp, offset in offsets.items() if offset >= 0 and tp.partition >= 0}


def write_checkpoint(folder: Path, next_offsets: Offsets) -> None:
    """Writes ``.checkpoint`` for stores that would go on from these offsets."""
    known = sorted((tp, offset - 1) for tp, offset in next_offsets.items() if offset > 0)
    lines = [_VERSION, str(len(known)), *(f"{tp.topic} {tp.partition} {offset}" for tp, offset in known)]
    text = "\n".join(lines) + "\n"
    path = folder / CHECKPOINT
    try:
        if path.read_text() == text:
            return
    except (OSError, ValueError):
        pass  # none yet, or not one that can be read: written anew
    replace_text(path, text)
