"""Records what the processes of a run do, while they do it, so that a checker can judge the run afterwards.

Each process appends to its own file, one JSON object per line. A line is one ``write``, so a killed process
loses at most the line that it was writing. As in Jepsen's histories, lines come in pairs: an ``invoke``
before the operation, and the outcome after it::

    {"process": "driver-7", "op": 0, "kind": "txn", "phase": "invoke", "time_ns": 51,
     "query": "app", "batch_id": 4, "run": "…", "ranges": [["in", 0, 20, 30]],
     "reads": [["in", 0, 20, "k", "k:1"], …], "sends": [["out", 3, "k", "k:1"], …]}
    {"process": "driver-7", "op": 0, "kind": "txn", "phase": "ok", "time_ns": 68}
    {"process": "reader", "op": 9, "kind": "poll", "phase": "ok", "time_ns": 70,
     "isolation": "read_committed", "records": [["out", 3, 17, "k", "k:1"], …]}
    {"process": "soak", "op": 2, "kind": "fault", "phase": "info", "time_ns": 60, "what": "kill driver"}

Outcomes: ``ok`` = it happened; ``fail`` = it certainly did not happen and never will; ``info`` = unknown,
which is also the outcome of an ``invoke`` without a second line. If in doubt, use ``info``: a wrong ``fail``
makes the checker report aborted reads. Within a topic, the values of a key must be unique.

Times are of the monotonic clock, which all processes of a machine share, so a history is of one machine.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from kafka_eos_source.errors import OperatorError
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json

READ_COMMITTED = "read_committed"
READ_UNCOMMITTED = "read_uncommitted"


class Phase(str, Enum):
    """The start of an operation, or its outcome."""

    INVOKE = "invoke"
    OK = "ok"
    FAIL = "fail"  #: it did not happen and never will
    INFO = "info"  #: unknown


#: Identifies a value wherever it is sent or read: topic, key and value.
Identity: TypeAlias = tuple[str, str | None, str]


class Record(NamedTuple):
    """A record that was read."""

    topic: str
    partition: int
    offset: int
    key: str | None
    value: str

    @property
    def identity(self) -> Identity:
        """Identifies the value wherever it is sent or read."""
        return self.topic, self.key, self.value


class Send(NamedTuple):
    """A record to be written; ``partition`` is None if a partitioner chooses it."""

    topic: str
    partition: int | None
    key: str | None
    value: str

    @property
    def identity(self) -> Identity:
        """Identifies the value wherever it is sent or read."""
        return self.topic, self.key, self.value


class SourceRange(NamedTuple):
    """Offsets that a micro-batch reads, from ``start`` (inclusive) to ``end`` (exclusive)."""

    topic: str
    partition: int
    start: int
    end: int


@dataclass(frozen=True)
class Txn:
    """One attempt at a transaction: a micro-batch, or one transaction of a plain producer.

    Attributes:
        query: the query to which the batch id belongs. Attempts of any process with the same ``query`` and
            ``batch_id`` are one transaction.
        batch_id: id of the batch; it grows with the source offsets.
        ranges: offsets that it reads; empty if the source is not Kafka.
        reads: records that it read; None = not recorded, which differs from "no records".
        sends: records that it writes, those of one key in their order.
        run: Spark's run id, for people.
    """

    query: str
    batch_id: int
    ranges: tuple[SourceRange, ...] = ()
    reads: tuple[Record, ...] | None = None
    sends: tuple[Send, ...] = ()
    run: str = ""


@dataclass(frozen=True)
class Poll:
    """One poll of a reader. A reader that seeks or restarts needs a new process name."""

    records: tuple[Record, ...] = ()
    isolation: str = READ_COMMITTED


@dataclass(frozen=True)
class Fault:
    """An injected fault. The checker ignores it; it helps people who read the history."""

    what: str
    detail: Mapping[str, str] = field(default_factory=dict)


T = TypeVar("T", Txn, Poll, Fault)


@dataclass(frozen=True)
class Operation(Generic[T]):
    """An operation from its start to its end.

    Attributes:
        process: name of the process.
        phase: its outcome; `Phase.INFO` if the process died before it recorded one.
        invoked_ns, completed_ns: monotonic time; None = not recorded.
        what: the operation itself.
    """

    process: str
    phase: Phase
    invoked_ns: int | None
    completed_ns: int | None
    what: T

    @property
    def time_ns(self) -> int:
        """When the operation began; if that was not recorded, when it ended; else 0."""
        return next((each for each in (self.invoked_ns, self.completed_ns) if each is not None), 0)


@dataclass(frozen=True)
class History:
    """All operations of a run, each kind sorted by time.

    Attributes:
        txns, polls, faults: the operations.
        torn_lines: number of lines that a killed process did not complete; their operations did not begin.
    """

    txns: tuple[Operation[Txn], ...] = ()
    polls: tuple[Operation[Poll], ...] = ()
    faults: tuple[Operation[Fault], ...] = ()
    torn_lines: int = 0


class Invoked(NamedTuple):
    """An operation that has begun; to be passed to `Recorder.ok`, `Recorder.fail` or `Recorder.info`."""

    op: int
    kind: str


class Recorder:
    """Records what one process does. Threads may share it; a forked child needs its own.

    When a call returns, the operating system has the line: it survives the death of the process, but not of
    the machine. A recorder continues the file of an earlier process, and removes a line that this one did not
    complete.

    Args:
        path: the file; created if it does not exist.
        process: name of the process, unique among all that are recorded (the process id is fine).
        clock: returns monotonic time in ns.
    """

    def __init__(self, path: Path, process: str, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._process = process
        self._clock = clock
        self._lock = threading.Lock()
        self._next_op = _remove_torn_line(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def invoke(self, what: Txn | Poll) -> Invoked:
        """Records an operation that is about to begin. Call it before any of its effects can be visible."""
        return self._write(None, Phase.INVOKE, what)

    def ok(self, begun: Invoked, what: Txn | Poll | None = None) -> None:
        """Records that the operation happened; ``what`` replaces the operation, if more is known now."""
        self._write(begun, Phase.OK, what)

    def fail(self, begun: Invoked, what: Txn | Poll | None = None) -> None:
        """Records that the operation did not happen and never will."""
        self._write(begun, Phase.FAIL, what)

    def info(self, begun: Invoked, what: Txn | Poll | None = None) -> None:
        """Records that the outcome of the operation is unknown."""
        self._write(begun, Phase.INFO, what)

    def polled(self, records: Iterable[Record], isolation: str = READ_COMMITTED) -> None:
        """Records the records of a poll in one line instead of two: a poll that dies has read nothing."""
        self._write(None, Phase.OK, Poll(tuple(records), isolation))

    def fault(self, what: str, **detail: str) -> None:
        """Records a fault that is about to be injected."""
        self._write(None, Phase.INFO, Fault(what, detail))

    def _write(self, begun: Invoked | None, phase: Phase, what: Txn | Poll | Fault | None) -> Invoked:
        with self._lock:
            if begun is None:
                begun = Invoked(self._next_op, type(what).__name__.lower())
                self._next_op += 1
            line = {
                "process": self._process,
                "op": begun.op,
                "kind": begun.kind,
                "phase": phase.value,
                "time_ns": self._clock(),
            }
            if what is not None:
                line.update(vars(what))
            left = memoryview(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            while left:
                left = left[os.write(self._fd, left) :]
        return begun


def _remove_torn_line(path: Path) -> int:
    """Removes a last line that was not completed.

    Returns:
        The number of remaining lines, which no operation in the file has as its number.
    """
    if not path.exists():
        return 0
    written = path.read_bytes()
    whole = written.rfind(b"\n") + 1
    if whole < len(written):
        os.truncate(path, whole)
    return written.count(b"\n")


def read_history(paths: Iterable[Path]) -> History:
    """Reads the files of all processes as one history, sorted by time. Processes may still write to them.

    Raises:
        OperatorError: if a file contains a line that no `Recorder` wrote.
    """
    txns: list[Operation[Txn]] = []
    polls: list[Operation[Poll]] = []
    faults: list[Operation[Fault]] = []
    torn_lines = 0
    for path in paths:
        operations: dict[int, Operation[Any]] = {}
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    torn_lines += 1
                    continue
                try:
                    _add(operations, parse_json(line))
                except SHAPE_ERRORS as error:
                    raise OperatorError(
                        f"line {number} of the history {str(path)!r} is not valid: {error!r}.",
                        fix="use only files that integration.support.history.Recorder wrote.",
                    ) from error
        for each in operations.values():
            if isinstance(each.what, Txn):
                txns.append(each)
            elif isinstance(each.what, Poll):
                polls.append(each)
            else:
                faults.append(each)
    return History(
        txns=tuple(sorted(txns, key=_time)),
        polls=tuple(sorted(polls, key=_time)),
        faults=tuple(sorted(faults, key=_time)),
        torn_lines=torn_lines,
    )


def _time(operation: Operation[Any]) -> int:
    return operation.time_ns


def _add(operations: dict[int, Operation[Any]], line: dict[str, Any]) -> None:
    """Adds the start or the end of an operation of one file."""
    op, phase, at_ns = line["op"], Phase(line["phase"]), line["time_ns"]
    begun = operations.get(op)
    what = _what(line)
    if what is None:
        if begun is None:
            raise ValueError("the operation has an end but no start")
        what = begun.what
    if phase is Phase.INVOKE:
        operations[op] = Operation(line["process"], Phase.INFO, at_ns, None, what)
    else:
        invoked_ns = None if begun is None else begun.invoked_ns
        operations[op] = Operation(line["process"], phase, invoked_ns, at_ns, what)


def _what(line: dict[str, Any]) -> Txn | Poll | Fault | None:
    """Returns the operation that a line describes; None if it contains only an outcome."""
    kind = line["kind"]
    if kind == "txn":
        if "query" not in line:
            return None
        reads = line["reads"]
        return Txn(
            query=line["query"],
            batch_id=line["batch_id"],
            ranges=tuple(map(SourceRange._make, line["ranges"])),
            reads=None if reads is None else tuple(map(Record._make, reads)),
            sends=tuple(map(Send._make, line["sends"])),
            run=line["run"],
        )
    if kind == "poll":
        if "records" not in line:
            return None
        return Poll(tuple(map(Record._make, line["records"])), line["isolation"])
    if kind == "fault":
        return Fault(line["what"], line["detail"])
    raise ValueError(f"unknown kind {kind!r}")
