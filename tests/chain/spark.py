"""A model of Spark for the chain model: the micro-batch loop, its checkpoint on disk, and sources.

The loop follows Spark's ``MicroBatchExecution``: it plans a batch, writes ``offsets/N``, runs the tasks, lets
the sink commit, and writes ``commits/N``. A restart first replays the last planned batch, and for batch 0 it
asks the source for its initial offset again.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kafka_eos_source.errors import DataLossError
from kafka_eos_source.plan.source import SourcePlan
from kafka_eos_source.protocol.offset_log import SourcePosition
from tests.chain.cluster import Cluster, ModelAdmin, Process, Record
from tests.chain.product import TopicPartition, read_options

#: Spark's ``spark.sql.streaming.minBatchesToRetain``.
RETAINED = 2

Row = tuple[bytes, bytes]


class SparkConflictError(Exception):
    """Another driver wrote this entry of the log in the checkpoint, so Spark stops the query."""


@dataclass
class Outside:
    """The clock, and the input of sources that do not read Kafka."""

    files: list[str] = field(default_factory=list)
    ticks: int = 0
    clock_ms: int = 1_700_000_000_000


@dataclass(frozen=True)
class Settings:
    """Settings that a restart of the query may change.

    Attributes:
        limit: offsets, files or ticks in one micro-batch; 0 means no limit.
        adopt: whether the sink and the operator adopt the work of another checkpoint.
        keeps_adopt: whether the person who set ``adopt`` leaves it in the job.
        from_group: whether a new checkpoint starts from the offsets of the group.
        missing, moved_offsets, moved_checkpoint, missing_state: options ``onMissingToken`` and so on; None
            means that the option is not set.
        guarantee: option ``processing.guarantee``.
    """

    limit: int = 0
    adopt: bool = False
    keeps_adopt: bool = False
    from_group: bool = False
    missing: str | None = None
    moved_offsets: str | None = None
    moved_checkpoint: str | None = None
    missing_state: str | None = None
    guarantee: str = "exactly_once"

    def answers(self) -> dict[str, str]:
        """Returns the options of the sink that are set, other than ``onForeignQuery``."""
        if self.guarantee != "exactly_once":
            return {"processing.guarantee": self.guarantee}
        stated = {
            "onMissingToken": self.missing,
            "onMovedOffsets": self.moved_offsets,
            "onMovedCheckpoint": self.moved_checkpoint,
        }
        return {name: value for name, value in stated.items() if value is not None}


class Source(Protocol):
    """One source of a query, as Spark sees it. Offsets are JSON text; None means no offset yet."""

    def initial(self) -> str | None: ...
    def latest(self, start: str | None) -> str | None: ...
    def rows(self, start: str | None, end: str) -> Iterator[Record]: ...


class EosSource:
    """The source of this package: the real `SourcePlan`, with the brokers of the model."""

    def __init__(
        self,
        cluster: Cluster,
        process: Process,
        topic: str,
        settings: Settings,
        outside: Outside,
        **options: str,
    ) -> None:
        if settings.limit:
            options["maxOffsetsPerTrigger"] = str(settings.limit)
        if settings.from_group:
            options["startingOffsets"] = "group"
        self._cluster, self._process = cluster, process
        self._fails = options.get("failOnDataLoss", "true") == "true"
        self._plan = SourcePlan(
            read_options(subscribe=topic, **options),
            ModelAdmin(cluster),
            lambda: outside.clock_ms / 1000,
            lambda: outside.clock_ms,
        )

    def initial(self) -> str | None:
        return self._plan.initial().to_json()

    def latest(self, start: str | None) -> str | None:
        assert start is not None
        self._process.reach("latest")
        return self._plan.latest(SourcePosition.from_json(start)).to_json()

    def rows(self, start: str | None, end: str) -> Iterator[Record]:
        assert start is not None
        tasks = self._plan.tasks(SourcePosition.from_json(start), SourcePosition.from_json(end))
        self._process.reach("read")
        for task in tasks:
            for each in task:
                topic = self._cluster.topics[each.tp.topic]
                log = topic.logs[each.tp.partition]
                if each.end > len(log) and self._fails:
                    raise DataLossError(f"{each.tp}: offsets {each.start} to {each.end} are not there")
                yield from (record for record in log[each.start : each.end] if record is not None)


class SparkKafkaSource:
    """Spark's own Kafka source: it logs no ``"@"``, and keeps the start of batch 0 in the checkpoint."""

    def __init__(self, process: Process, topic: str, settings: Settings, log: Path) -> None:
        self._cluster, self._process, self._topic = process.cluster, process, topic
        self._limit, self._log = settings.limit, log

    def initial(self) -> str | None:
        path = self._log / "0"
        if not path.exists():
            self._log.mkdir(parents=True, exist_ok=True)
            path.write_text(self._json(dict.fromkeys(self._cluster.partitions([self._topic]), 0)))
        return path.read_text()

    def latest(self, start: str | None) -> str | None:
        assert start is not None
        self._process.reach("latest")
        at = self._offsets(start)
        left = self._limit or 1 << 30
        for tp in self._cluster.partitions([self._topic]):
            more = max(0, min(left, self._cluster.end(tp) - at.get(tp, 0)))
            at[tp] = at.get(tp, 0) + more
            left -= more
        return self._json(at)

    def rows(self, start: str | None, end: str) -> Iterator[Record]:
        assert start is not None
        self._process.reach("read")
        starts = self._offsets(start)
        for tp, until in self._offsets(end).items():
            log = self._cluster.topics[tp.topic].logs[tp.partition][starts.get(tp, 0) : until]
            yield from (record for record in log if record is not None)

    def _json(self, offsets: Mapping[TopicPartition, int]) -> str:
        return json.dumps({self._topic: {str(tp.partition): at for tp, at in sorted(offsets.items())}})

    def _offsets(self, text: str) -> dict[TopicPartition, int]:
        found = json.loads(text).get(self._topic, {})
        return {TopicPartition(self._topic, int(at)): offset for at, offset in found.items()}


class FileSource:
    """Spark's file source: its offset is a counter, and a log in the checkpoint lists the files."""

    def __init__(self, outside: Outside, process: Process, settings: Settings, log: Path) -> None:
        self._outside, self._process, self._limit, self._log = outside, process, settings.limit, log

    def initial(self) -> str | None:
        return None

    def latest(self, start: str | None) -> str | None:
        self._process.reach("latest")
        entries = self._entries()
        seen = {name for names in entries.values() for name in names}
        new = [name for name in self._outside.files if name not in seen]
        at = max(entries, default=-1)
        if new:
            at += 1
            self._log.mkdir(parents=True, exist_ok=True)
            (self._log / str(at)).write_text(json.dumps(new[: self._limit or None]))
        return None if at < 0 else json.dumps({"logOffset": at})

    def rows(self, start: str | None, end: str) -> Iterator[Record]:
        first = -1 if start is None else json.loads(start)["logOffset"]
        for number, names in sorted(self._entries().items()):
            if first < number <= json.loads(end)["logOffset"]:
                yield from (Record(b"file", name.encode()) for name in names)

    def _entries(self) -> dict[int, list[str]]:
        if not self._log.exists():
            return {}
        return {int(each.name): json.loads(each.read_text()) for each in self._log.iterdir()}


class RateSource:
    """Spark's rate source: a counter that grows with time."""

    def __init__(self, outside: Outside, process: Process, settings: Settings) -> None:
        self._outside, self._process, self._limit = outside, process, settings.limit

    def initial(self) -> str | None:
        return "0"

    def latest(self, start: str | None) -> str | None:
        assert start is not None
        self._process.reach("latest")
        return str(min(self._outside.ticks, int(start) + (self._limit or 1 << 30)))

    def rows(self, start: str | None, end: str) -> Iterator[Record]:
        assert start is not None
        for tick in range(int(start), int(end)):
            yield Record(b"tick", b"tick/%d" % tick)


class Sink(Protocol):
    """Runs the tasks of one micro-batch, and commits their rows."""

    def run(
        self, query_id: str, batch_id: int, run_id: str, rows: Sequence[tuple[int, Record]]
    ) -> list[Any]: ...
    def commit(self, messages: list[Any], batch_id: int) -> None: ...


#: The checkpoint whose content is at a path that several checkpoints share.
_MOUNTED: dict[Path, Checkpoint] = {}


class Checkpoint:
    """A checkpoint folder in Spark's format.

    Args:
        folder: its path, as the driver sees it.
        stored: where its content is while its driver does not run; None if it always is at its path. Drivers
            on several hosts can have different volumes at one path.
    """

    def __init__(self, folder: Path, stored: Path | None = None) -> None:
        self.folder = folder
        self.stored = stored

    @property
    def content(self) -> Path:
        """The folder with the content, wherever it is now."""
        return self.folder if self.stored is None or _MOUNTED.get(self.folder) is self else self.stored

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Puts the content at its path, in place of the volume of another host."""
        before = _MOUNTED.get(self.folder)
        if self.stored is None or before is self:
            yield
            return
        if before is not None and before.stored is not None:
            self.folder.rename(before.stored)
        self.stored.rename(self.folder)
        _MOUNTED[self.folder] = self
        try:
            yield
        finally:
            self.folder.rename(self.stored)
            if before is None or before.stored is None:
                del _MOUNTED[self.folder]
            else:
                before.stored.rename(self.folder)
                _MOUNTED[self.folder] = before

    def query_id(self) -> str:
        path = self.content / "metadata"
        if not path.exists():
            self.content.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"id": str(uuid.uuid4())}))
        return str(json.loads(path.read_text())["id"])

    def last(self, log: str) -> int | None:
        found = self.content / log
        return max((int(each.name) for each in found.iterdir()), default=None) if found.exists() else None

    def add(self, log: str, batch_id: int, text: str) -> None:
        path = self.content / log / str(batch_id)
        path.parent.mkdir(exist_ok=True)
        try:
            with path.open("x") as out:
                out.write(text)
        except FileExistsError as error:
            raise SparkConflictError(f"{log}/{batch_id} is there") from error
        (self.content / log / str(batch_id - RETAINED)).unlink(missing_ok=True)

    def offsets(self, batch_id: int) -> list[str | None]:
        _, _, *lines = (self.content / "offsets" / str(batch_id)).read_text().splitlines()
        return [None if line == "-" else line for line in lines]

    def unseen(self, batch_id: int, rows: Sequence[tuple[int, Record]]) -> list[tuple[int, Record]]:
        """Drops duplicates, with the state that Spark keeps in the checkpoint for each batch."""
        folder = self.content / "state"
        folder.mkdir(exist_ok=True)
        before = folder / str(batch_id - 1)
        seen = set(json.loads(before.read_text())) if before.exists() else set()
        new = {record.value.hex(): (n, record) for n, record in reversed(rows) if record.value is not None}
        (folder / str(batch_id)).write_text(json.dumps(sorted(seen | new.keys())))
        return [row for value, row in new.items() if value not in seen]

    def promises(self) -> bool:
        """Whether the checkpoint records that Kafka must hold a token."""
        return (self.content / "kafka-eos" / "identity.json").exists()

    def snapshot(self) -> dict[str, bytes]:
        """Returns the content of the folder, for a backup."""
        files = (each for each in self.content.rglob("*") if each.is_file())
        return {str(each.relative_to(self.content)): each.read_bytes() for each in files}

    def restore(self, snapshot: Mapping[str, bytes]) -> None:
        shutil.rmtree(self.content, ignore_errors=True)
        for name, content in snapshot.items():
            path = self.content / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


class Run:
    """One run of a query: Spark's ``MicroBatchExecution``.

    Args:
        distinct: whether the query drops records that it has seen before.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        process: Process,
        sources: Sequence[Source],
        sink: Sink,
        outside: Outside,
        *,
        distinct: bool = False,
    ) -> None:
        self.process = process
        self.run_id = uuid.uuid4().hex[:8]
        self._checkpoint, self._sources, self._sink, self._outside = checkpoint, sources, sink, outside
        self._distinct = distinct
        self._query_id = checkpoint.query_id()
        self._batch_id = 0
        self._planned = False
        nothing: list[str | None] = [None] * len(sources)
        self._committed, self._available = list(nothing), list(nothing)
        last = checkpoint.last("offsets")
        if last is None:
            return
        self._batch_id, self._available, self._planned = last, checkpoint.offsets(last), True
        if last > 0:
            self._committed = checkpoint.offsets(last - 1)
        if checkpoint.last("commits") == last:
            self._batch_id, self._committed, self._planned = last + 1, list(self._available), False

    def batch(self) -> bool:
        """Runs one micro-batch. Returns False if there is nothing to do."""
        if not self._planned and not self._plan():
            return False
        rows: list[tuple[int, Record]] = []
        for number, source in enumerate(self._sources):
            start, end = self._committed[number], self._available[number]
            if end is not None and end != start:
                start = source.initial() if start is None else start
                rows += [(number, record) for record in source.rows(start, end)]
        if self._distinct:
            rows = self._checkpoint.unseen(self._batch_id, rows)
        self.process.reach("tasks")
        messages = self._sink.run(self._query_id, self._batch_id, self.run_id, rows)
        self.process.reach("staged")
        self._sink.commit(messages, self._batch_id)
        self.process.reach("committed")
        self._checkpoint.add("commits", self._batch_id, "v1\n" + json.dumps({"nextBatchWatermarkMs": 0}))
        self.process.reach("logged")
        self._committed, self._planned = list(self._available), False
        self._batch_id += 1
        return True

    def _plan(self) -> bool:
        found: list[str | None] = []
        for number, source in enumerate(self._sources):
            start = self._available[number]
            found.append(source.latest(source.initial() if start is None else start))
        if not any(new is not None and new != old for new, old in zip(found, self._committed, strict=True)):
            return False
        self._outside.clock_ms += 1
        metadata = {"batchWatermarkMs": 0, "batchTimestampMs": self._outside.clock_ms, "conf": {}}
        lines = ["v1", json.dumps(metadata), *(line or "-" for line in found)]
        self.process.reach("plan")
        self._checkpoint.add("offsets", self._batch_id, "\n".join(lines))
        self._available, self._planned = found, True
        self.process.reach("planned")
        return True
