"""Spark's micro-batch loop in one Python process: ``python -m integration.chaos.loop SPEC.json``.

It calls a Python data source in the same order as Spark's ``MicroBatchExecution``: plan, write the offset
log, run the tasks, commit, write the commit log. After a restart it replays the batch that is in the offset
log but not in the commit log. A spec is::

    {"source": {…}, "sink": {…}, "checkpoint": …, "available_now": true, "restarts": 0, "mutations": [],
     "history": null, "state": null, "chained": null, "held": false, "marks": null, "undecodable": null,
     "lost_packet": null, "drops_packets": false, "prefix": "", "in_read": false, "lost_attempt": null,
     "exclusive_log": true}

``marks`` is a pattern: records whose value matches it are marked as invalid. ``undecodable`` is a pattern,
too: the reading tasks set such records aside. ``lost_packet`` is a file: as long as it does not exist, the
first packet with such records does not reach the sink; the file then exists. With ``drops_packets``, a step
drops the column of packets, and no task of the sink runs on a host of a reading task. Each value is written
with ``prefix`` before it. ``state`` holds the options of a stateful operator that counts rows (`stateful`).
``chained`` holds the options of two stateful steps (`chained`).
With ``exclusive_log`` false, a log entry replaces one that another driver wrote, as on some object stores.
``in_read`` lets the tasks that read stage the rows (``write=`` of `map_in_read`). ``lost_attempt`` is a file:
as long as it does not exist, the first reading task of a batch runs twice, and the sink gets the reports of
both attempts, as after the loss of a shuffle file; the file then exists.
``history`` is a file that records each try at a batch (`integration.support.history`). The process exits
with 0 when it has read the source up to where it ended at the start (``available_now``), or when it reads
"stop" on standard input. It also exits when its parent process ends.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.abc import MetaPathFinder
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from integration.chaos import undecodable
from integration.chaos.switches import switch_off
from integration.support.history import Record, Recorder, Send, SourceRange, Txn
from kafka_eos_source.datasource import KafkaEosDataSource, sink
from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.in_read.step import MapInRead, ReadColumn, ReadColumns
from kafka_eos_source.options.table import SINK_IN_READ
from kafka_eos_source.protocol.offset_log import SourcePosition
from kafka_eos_source.protocol.packing import CHANGELOG, BadRecords, packets, split_packets
from kafka_eos_source.spark.schema import INVALID
from kafka_eos_source.stage import staging

#: Spark's pause before it asks an idle source for new data again.
_IDLE_SECONDS = 0.05
_COLUMNS = ["key", "value"]


_sealing_plan = staging.sealing_plan


def _small_plan(kafka: Mapping[str, str], topic: str | None) -> staging.SealingPlan | None:
    """Makes tasks seal rows from 200 bytes on, so that small batches have sealed batches and rows."""
    plan = _sealing_plan(kafka, topic)
    return plan and replace(plan, least_bytes=200)


staging.sealing_plan = _small_plan


class Checkpoint:
    """Offset log and commit log of one query. As in Spark, a file appears whole or not at all, and once."""

    def __init__(self, path: Path, *, exclusive: bool = True) -> None:
        self._path = path
        self._exclusive = exclusive
        if not (path / "metadata").exists():
            self._write("metadata", json.dumps({"id": str(uuid.uuid4())}))

    @property
    def query_id(self) -> str:
        return str(json.loads((self._path / "metadata").read_text())["id"])

    def newest(self, log: str) -> int:
        """Returns the last batch id in ``offsets`` or ``commits``, or -1 if there is none."""
        return max((int(each.name) for each in (self._path / log).glob("[0-9]*")), default=-1)

    def offsets(self, batch_id: int) -> Any:
        """Returns the end offsets of a batch, as the source reported them."""
        return json.loads((self._path / "offsets" / str(batch_id)).read_text().splitlines()[-1])

    def log_offsets(self, batch_id: int, end: Any) -> None:
        metadata = {"batchWatermarkMs": 0, "batchTimestampMs": time.time_ns() // 1_000_000}
        self._write(f"offsets/{batch_id}", f"v1\n{json.dumps(metadata)}\n{json.dumps(end)}")

    def log_commit(self, batch_id: int) -> None:
        self._write(f"commits/{batch_id}", 'v1\n{"nextBatchWatermarkMs":0}')

    def _write(self, name: str, text: str) -> None:
        target = self._path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        temporary.write_text(text)
        if not self._exclusive:
            os.replace(temporary, target)
            return
        try:
            os.link(temporary, target)
        except FileExistsError:
            raise RuntimeError(
                f"{name}: multiple streaming queries are concurrently using this checkpoint"
            ) from None
        finally:
            temporary.unlink()


class Run:
    """One run of the query, from its start until it finishes or fails."""

    def __init__(self, spec: Mapping[str, Any], stop: threading.Event) -> None:
        self._spec = spec
        self._stop = stop
        self._run_id = str(uuid.uuid4())
        self._checkpoint = Checkpoint(Path(spec["checkpoint"]), exclusive=spec.get("exclusive_log", True))
        history = spec.get("history")
        self._recorder = Recorder(Path(history), f"loop-{os.getpid()}") if history else None
        in_read = _staged_in_read(spec["sink"]) if spec.get("in_read") else {}
        self._lost_attempt = Path(spec["lost_attempt"]) if spec.get("lost_attempt") else None
        self._lost_packet = Path(spec["lost_packet"]) if spec.get("lost_packet") else None
        sets_aside = spec.get("undecodable")
        if sets_aside is not None:
            in_read = undecodable.set_aside(sets_aside)
        source = KafkaEosDataSource({**spec["source"], **in_read})
        self._schema: StructType = source.schema()
        self._reader: Any = source.streamReader(self._schema)
        self._drops_packets = bool(spec.get("drops_packets"))
        self._columns = self._schema.names if in_read else _COLUMNS
        if self._drops_packets:
            self._columns = [name for name in self._columns if name != CHANGELOG]
            sink.recorded_senders = lambda _: ()
        fields = [self._schema[name] for name in self._columns]
        self._marks: str | None = spec.get("marks")
        if self._marks is not None:
            fields.append(StructField(INVALID, StringType()))
        self._written = StructType(fields)

    def to_the_end(self) -> None:
        checkpoint, reader = self._checkpoint, self._reader
        batch_id = checkpoint.newest("offsets")
        if batch_id < 0:
            position = reader.initialOffset()
        elif checkpoint.newest("commits") >= batch_id:
            position = checkpoint.offsets(batch_id)
        else:
            before = checkpoint.offsets(batch_id - 1) if batch_id else reader.initialOffset()
            position = checkpoint.offsets(batch_id)
            self._batch(batch_id, before, position)
        if self._spec.get("available_now", True):
            reader.prepareForTriggerAvailableNow()
        while True:
            end = reader.latestOffset(position, reader.getDefaultReadLimit())
            if end == position:
                if self._spec.get("available_now", True) or self._stop.is_set():
                    return
                self._stop.wait(_IDLE_SECONDS)
                continue
            batch_id += 1
            checkpoint.log_offsets(batch_id, end)
            self._batch(batch_id, position, end)
            position = end

    def _batch(self, batch_id: int, start: Any, end: Any) -> None:
        task_writer = pickle.loads(pickle.dumps(self._writer()))
        messages = []
        read: list[pa.RecordBatch] = []
        try:
            for number, rows in enumerate(self._tasks(start, end, read)):
                self._enter_task(batch_id, number)
                messages.append(task_writer.write(rows))
            with self._recorded(batch_id, start, end, read):
                self._writer().commit(messages, batch_id)
        except Exception:
            self._writer().abort(messages, batch_id)
            raise
        self._checkpoint.log_commit(batch_id)
        print("BATCH", batch_id, flush=True)

    def _writer(self) -> Any:
        """Creates a writer, as Spark does once for the tasks of a batch and again to commit or abort it."""
        return KafkaEosDataSource(dict(self._spec["sink"])).streamWriter(self._written, False)

    def _tasks(self, start: Any, end: Any, read: list[pa.RecordBatch]) -> Iterator[Iterator[pa.RecordBatch]]:
        """Yields each task's rows for the sink, read lazily while the sink consumes them."""
        for number, task in enumerate(pickle.loads(pickle.dumps(self._reader.partitions(start, end)))):
            rows = self._rows(task, read)
            if number == 0 and self._lost_attempt is not None and not self._lost_attempt.exists():
                self._lost_attempt.touch()
                rows = chain(rows, self._rows(task, read))
            yield rows

    def _rows(self, task: Any, read: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in self._reader.read(task):
            if self._recorder is not None:
                read.append(batch)
            if self._loses(batch):
                continue
            if self._drops_packets:
                batch, _ = split_packets(batch)
            rows = self._prefixed(batch.select(self._columns))
            yield rows if self._marks is None else _marked(rows, self._marks)

    def _loses(self, batch: pa.RecordBatch) -> bool:
        """Returns whether a batch gets lost before the sink: the first one of packets with bad records."""
        if self._lost_packet is None or self._lost_packet.exists():
            return False
        found = [] if CHANGELOG not in batch.schema.names else list(packets(batch.column(CHANGELOG)))
        if not any(isinstance(each, BadRecords) and each.records.nbytes for each in found):
            return False
        self._lost_packet.touch()
        return True

    def _prefixed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        prefix = self._spec.get("prefix", "").encode()
        if not prefix:
            return batch
        values = pc.binary_join_element_wise(pa.scalar(prefix), batch.column("value"), pa.scalar(b""))
        return batch.set_column(1, "value", values)

    @contextmanager
    def _recorded(self, batch_id: int, start: Any, end: Any, read: list[pa.RecordBatch]) -> Iterator[None]:
        """Records one try at a batch. A failed try may still have committed, so its outcome is unknown."""
        if self._recorder is None:
            yield
            return
        sink, prefix = self._spec["sink"], self._spec.get("prefix", "")
        reads = tuple(record for batch in read for record in _records(batch))
        begun = self._recorder.invoke(
            Txn(
                query=sink["application.id"],
                batch_id=batch_id,
                ranges=tuple(_ranges(start, end)),
                reads=reads,
                sends=tuple(Send(sink["topic"], None, each.key, prefix + each.value) for each in reads),
                run=self._run_id,
            )
        )
        try:
            yield
        except BaseException:
            self._recorder.info(begun)
            raise
        self._recorder.ok(begun)

    def _enter_task(self, batch_id: int, number: int) -> None:
        context: Any = TaskContext()
        context._localProperties = {
            "sql.streaming.queryId": self._checkpoint.query_id,
            "streaming.sql.batchId": str(batch_id),
            "spark.jobGroup.id": self._run_id,
        }
        context._attemptNumber, context._partitionId = 0, number
        TaskContext._taskContext = context


def _staged_in_read(sink: Mapping[str, str]) -> dict[str, str]:
    """Returns the options that `map_in_read` adds to the source."""
    columns = ReadColumns(tuple(ReadColumn(name, name) for name in _COLUMNS))
    rows = StructType([StructField(name, BinaryType()) for name in _COLUMNS])
    step = MapInRead(columns, rows, None, uuid.uuid4().hex).to_option()
    return {"step.in.read": step, **{f"{SINK_IN_READ}{name}": value for name, value in sink.items()}}


def _marked(rows: pa.RecordBatch, pattern: str) -> pa.RecordBatch:
    values = rows.column("value").cast(pa.string())
    marks = pc.if_else(
        pc.match_substring_regex(values, pattern), pc.binary_join_element_wise(values, "is bad", " "), None
    )
    return rows.append_column(INVALID, marks)


def _records(batch: pa.RecordBatch) -> Iterator[Record]:
    columns = (batch.column(name).to_pylist() for name in ("topic", "partition", "offset", "key", "value"))
    for topic, partition, offset, key, value in zip(*columns, strict=True):
        yield Record(topic, partition, offset, key.decode(), value.decode())


def _ranges(start: Any, end: Any) -> Iterator[SourceRange]:
    before, position = SourcePosition.from_dict(start).end, SourcePosition.from_dict(end)
    if position.jump:
        return  # nothing is read
    for tp, stop in position.end.items():
        if stop > before.get(tp, 0):
            yield SourceRange(tp.topic, tp.partition, before.get(tp, 0), stop)


class _WithoutPandas(MetaPathFinder):
    """Hides pandas from PyArrow, which would import it for its first array, for half a CPU second."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(fullname)


def main(path: str) -> None:
    sys.meta_path.insert(0, _WithoutPandas())
    stop = threading.Event()

    def listen() -> None:
        while told := os.read(0, 1024):
            if b"stop" in told:
                stop.set()
        os._exit(1)  # the parent process ended

    threading.Thread(target=listen, daemon=True).start()
    spec = json.loads(Path(path).read_text())
    switch_off(spec.get("mutations", ()))
    run: type[Any] = Run
    if "state" in spec:
        from integration.chaos.stateful import StatefulRun

        run = StatefulRun
    if "chained" in spec:
        from integration.chaos.chained import ChainedRun

        run = ChainedRun
    for restarts_left in range(spec.get("restarts", 0), -1, -1):
        try:
            run(spec, stop).to_the_end()
            break
        except (KafkaEosError, RuntimeError) as error:
            print("QUERY FAILED", type(error).__name__, error, flush=True)
            if not restarts_left:
                sys.exit(1)
    print("QUERY DONE", flush=True)
    os._exit(0)  # like a Spark worker, which ends without closing anything


if __name__ == "__main__":
    main(sys.argv[1])
