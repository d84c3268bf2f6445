"""Reads Spark's offset log, ``<checkpoint>/offsets/<batchId>``, which Spark writes before a batch runs.

::

    v1                                  v2
    {"batchWatermarkMs":0,…}            {"batchWatermarkMs":0,…}
    {"flights":{"0":42}}                <source name>:{"flights":{"0":42}}
    -

Each source has one line; ``-`` stands for a source without offsets yet (``OffsetSeqLog`` in Spark). Version
v2 names the sources.

The line of a Kafka source is its `SourcePosition`. ``{"flights":{"0":42,"1":40},"@":{…}}`` holds the next
offset to read of each partition, as Spark's built-in source writes it, so that a query that used that source
can be continued. Spark's source cannot read the key ``"@"``, which cannot be the name of a topic. It carries
what Spark would otherwise lose:

``start``
    where the batch begins in partitions that the previous position does not contain. Batch 0 names all its
    partitions, because Spark calls ``initialOffset`` again on a replay, and *latest* has moved by then. Later
    batches name partitions that are new, that belong to a topic that was created again, or whose log was cut
    below the previous position.
``cluster``
    Kafka's id of the cluster that was read. The sink uses it to decide whether it commits the offsets.
``epochs``
    the leader epochs (KIP-320) that belong to the ends, as one list for each topic: the epochs of the
    partitions above, in the order of their numbers; -1 = unknown. They reveal that a log was cut and filled
    again (`plan.source`). A partition that the batch does not read keeps its epoch, so a new leader alone
    starts no batch.
``topics``
    topic ids (KIP-516), which reveal that a topic was deleted and created again.
``tick``
    a number that changes when the source needs a micro-batch without data: for what is due in the state of
    operators, or to renew the query's token before it expires (`plan.source`).
``jump``
    true if the source continues from the offsets that Kafka holds for the query, because its checkpoint is
    an old copy. Such a batch reads nothing from this source, and the sink never moves its committed offsets.
``app``
    the option ``application.id`` of the source, if it is set. The sink refuses the batch if its own differs.
``lossy``
    true if the user accepts lost records (``failOnDataLoss=false``). If a topic was deleted or created again
    after the batch was planned, neither the source nor the sink then fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyarrow.fs import FileType

from kafka_eos_source.errors import InvalidOptionError, OperatorError
from kafka_eos_source.model import Epochs, Offsets, TopicPartition
from kafka_eos_source.protocol.token import digest
from kafka_eos_source.runtime.file_systems import file_system, names_in
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, JsonError, parse_json

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


def digest_of(logged: LoggedOffsets | None, query_id: str) -> str:
    """Returns the digest of an entry of the offset log; None = the start of a checkpoint, before batch 0."""
    return digest(("genesis", query_id)) if logged is None else logged.digest


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
    return bool(fs.get_file_info(f"{path}/state").type != FileType.NotFound)


def _read(checkpoint: str, name: str) -> str | None:
    fs, path = file_system(checkpoint)
    try:
        with fs.open_input_stream(f"{path}/{name}") as source:
            return str(source.read().decode())
    except FileNotFoundError:
        return None


# -- the line of a Kafka source -------------------------------------------------------------------------

#: The key that only this package writes.
OURS = "@"

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_PARTITION = re.compile(r"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True)
class SourcePosition:
    """The position of one Kafka source at the end of a batch.

    Attributes:
        end: next offset to read, per partition.
        start: first offset of partitions that do not begin at the end of the previous position: all
            partitions in batch 0, in later batches new ones and those whose log was cut. None if there are
            none, and in offsets of Spark's own source.
        cluster_id: Kafka's id of the cluster that was read; None in offsets of Spark's own source.
        topic_ids: id of each topic, as far as the brokers returned one.
        tick: number of an empty micro-batch; 0 for an ordinary batch.
        jump: whether the batch skips records that Kafka already holds, and reads none.
        lossy: whether the source continues after a loss (``failOnDataLoss=false``).
        epochs: leader epochs that belong to ``end``, as far as they are known.
        application_id: option ``application.id`` of the source; None if it is not set.
    """

    end: Offsets
    start: Offsets | None = None
    cluster_id: str | None = None
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    tick: int = 0
    jump: bool = False
    lossy: bool = False
    epochs: Epochs = field(default_factory=dict)
    application_id: str | None = None

    @property
    def begins_query(self) -> bool:
        """Whether this is the start of a new query, or batch 0 of a query that has read nothing yet."""
        return self.start is not None and self.start == self.end

    @property
    def has_records(self) -> bool:
        """Whether a batch that ends here, and begins at another position, was planned to read offsets.

        It depends on the end alone, so the source and the commit come to the same result, although the source
        gets another start whenever Spark repeats batch 0.
        """
        return not (self.tick or self.jump or self.begins_query)

    @property
    def digest(self) -> str:
        """Digest of the whole position. Equal positions have equal digests."""
        return digest((self.to_json(),))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields in sorted order, so that equal positions have equal JSON."""
        ours: dict[str, Any] = {}
        if self.start is not None:
            ours["start"] = _nested(self.start)
        if self.cluster_id is not None:
            ours["cluster"] = self.cluster_id
        epochs = _listed(self.epochs, self.end)
        if epochs:
            ours["epochs"] = epochs
        if self.topic_ids:
            ours["topics"] = dict(sorted(self.topic_ids.items()))
        if self.tick:
            ours["tick"] = self.tick
        if self.jump:
            ours["jump"] = True
        if self.lossy:
            ours["lossy"] = True
        if self.application_id is not None:
            ours["app"] = self.application_id
        return {**({OURS: ours} if ours else {}), **_nested(self.end)}

    def to_json(self) -> str:
        """Returns the offset as Spark logs it."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> SourcePosition:
        """Reads an offset of this source or of Spark's own Kafka source.

        Raises:
            OperatorError: if the offset belongs to neither.
        """
        if not _is_position(found):
            raise OperatorError(
                f"{json.dumps(found)} is not the offset of a Kafka source; "
                'expected {"topic":{"0":42}}, as format("kafka") and format("kafka-eos") write it.',
                fix="check checkpointLocation: the checkpoint belongs to another query, or the sources of "
                "this query were changed. A new checkpoint needs a new application.id, and begins at "
                "startingOffsets.",
            )
        ours = found.get(OURS, {})
        end = _flat({name: entry for name, entry in found.items() if name != OURS})
        return cls(
            end=end,
            start=_flat(ours["start"]) if "start" in ours else None,
            cluster_id=ours.get("cluster"),
            topic_ids=ours.get("topics", {}),
            tick=ours.get("tick", 0),
            jump=ours.get("jump", False),
            lossy=ours.get("lossy", False),
            epochs=_unlisted(ours.get("epochs", {}), end),
            application_id=ours.get("app"),
        )

    @classmethod
    def from_json(cls, text: str) -> SourcePosition:
        """Reads an offset from the text that Spark logged.

        Raises:
            OperatorError: if the text is not the offset of a Kafka source.
        """
        try:
            found = parse_json(text)
        except JsonError as error:
            raise OperatorError(
                f"the offset {text[:200]!r} is not JSON: {error}.",
                fix="restore the checkpoint from a copy. A new checkpoint begins at startingOffsets, which "
                "doubles or leaves out rows unless it continues where this query stopped "
                "(docs/runbooks.md, FOREIGN_QUERY).",
            ) from error
        return cls.from_dict(found)


def is_kafka_offset_json(text: str) -> bool:
    """Whether a Kafka source, of this package or Spark's own, wrote this line of the offset log.

    Other sources write ``42`` (rate, memory), ``{"logOffset":3}`` (files), ``{"sourceVersion":1,…}`` (Delta)
    or ``{"0":7}`` (rate per micro-batch, sockets). An empty ``{}`` is a Kafka source that has no partition
    yet. A connector that writes the same form for other systems, such as the one for Azure Event Hubs, cannot
    be recognised; for it the option ``source.cluster`` decides.
    """
    try:
        return _is_position(parse_json(text))
    except JsonError:
        return False


def _is_position(found: object) -> bool:
    return isinstance(found, dict) and all(
        _is_ours(entry, found) if name == OURS else bool(_TOPIC.fullmatch(name)) and _is_topic(entry)
        for name, entry in found.items()
    )


def _is_topic(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and bool(entry)
        and all(
            _PARTITION.fullmatch(partition)
            and isinstance(offset, int)
            and not isinstance(offset, bool)
            and 0 <= offset < 1 << 63
            for partition, offset in entry.items()
        )
    )


def _is_ours(entry: object, position: Mapping[str, object]) -> bool:
    """Whether the value of ``"@"`` is valid. Keys of later versions are allowed."""
    if not isinstance(entry, dict):
        return False
    start, topics, epochs = entry.get("start", {}), entry.get("topics", {}), entry.get("epochs", {})
    return (
        isinstance(start, dict)
        and all(map(_is_topic, start.values()))
        and isinstance(entry.get("cluster", ""), str)
        and isinstance(epochs, dict)
        and all(_are_epochs(listed, position.get(topic)) for topic, listed in epochs.items())
        and isinstance(entry.get("app", ""), str)
        and isinstance(topics, dict)
        and all(isinstance(topic_id, str) for topic_id in topics.values())
        and type(entry.get("tick", 0)) is int
        and isinstance(entry.get("jump", False), bool)
        and isinstance(entry.get("lossy", False), bool)
    )


def _are_epochs(listed: object, partitions: object) -> bool:
    return (
        isinstance(listed, list)
        and isinstance(partitions, dict)
        and len(listed) == len(partitions)
        and all(type(epoch) is int and epoch >= -1 for epoch in listed)
    )


def _listed(epochs: Epochs, end: Offsets) -> dict[str, list[int]]:
    """Returns the epochs of the partitions of each topic, without topics of which none is known."""
    listed: dict[str, list[int]] = {}
    for tp in sorted(end):
        listed.setdefault(tp.topic, []).append(epochs.get(tp, -1))
    return {topic: found for topic, found in listed.items() if max(found) >= 0}


def _unlisted(listed: Mapping[str, list[int]], end: Offsets) -> dict[TopicPartition, int]:
    left = {topic: iter(found) for topic, found in listed.items()}
    epochs = {tp: next(left[tp.topic]) for tp in sorted(end) if tp.topic in left}
    return {tp: epoch for tp, epoch in epochs.items() if epoch >= 0}


def _nested(offsets: Offsets) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for tp, offset in sorted(offsets.items()):
        nested.setdefault(tp.topic, {})[str(tp.partition)] = offset
    return nested


def _flat(nested: Mapping[str, Mapping[str, int]]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, int(partition)): offset
        for topic, partitions in nested.items()
        for partition, offset in partitions.items()
    }
