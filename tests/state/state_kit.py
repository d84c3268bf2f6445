"""Shared by the tests of the state store: identities, a predictable workload, and a second process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests import ROOT

TOPIC = "app-counts-changelog"
TP = TopicPartition(TOPIC, 0)
INPUT = TopicPartition("input", 0)
IDENTITY = StoreIdentity("app", "counts", 0, 4, TOPIC)

#: Factor for the number of examples, rounds and crashes; 1 is quick.
EFFORT = int(os.environ.get("KAFKA_EOS_TEST_EFFORT", "1"))

#: Settings with memtables so small that RocksDB flushes and compacts all the time.
TINY = StoreConfig(write_buffer_bytes=64 << 10, max_wal_bytes=128 << 10)

#: As `TINY`, and so little memory for staged writes that most transactions go to disk.
SPILLING = replace(TINY, uncommitted_max_bytes=6_000)

Model = dict[bytes, bytes]


def record(batch_id: int, task_attempt_id: str = "") -> BatchRecord:
    return BatchRecord("query", batch_id, task_attempt_id or f"attempt{batch_id}")


def binary(items: Iterable[bytes | None] = ()) -> pa.BinaryArray:
    return pa.array(list(items), pa.binary())


def key(number: int) -> bytes:
    return b"\1k%05d" % number


def put_rows(store: TransactionalStateStore, rows: Iterable[tuple[bytes, bytes | None]]) -> None:
    """Stages rows; a value of None deletes."""
    rows = list(rows)
    store.put_many(binary(key for key, _ in rows), binary(value for _, value in rows))


@dataclass
class Workload:
    """Commits that a seed determines, so that any process knows what the store holds after the n-th commit.

    The n-th commit sets the changelog offset and the batch id to n, and the key ``last`` too.
    """

    seed: int
    model: Model = field(default_factory=dict)
    done: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def step(self, store: TransactionalStateStore | None) -> None:
        """Applies the next commit to the model and, unless it is None, to the store."""
        number = self.done + 1
        rng = self._random
        kind = rng.choice(("commit", "commit", "promote", "restore", "ranges"))
        rows: dict[bytes, bytes | None] = {}
        for _ in range(rng.choice((3, 40, 300))):
            value = b"%d-" % number * rng.choice((1, 30))
            rows[key(rng.randrange(2000))] = None if rng.random() < 0.25 else value
        low = rng.randrange(2000)
        span = (key(low), key(low + rng.choice((20, 600))))
        if kind == "ranges":
            for gone in [k for k in self.model if span[0] <= k < span[1]]:
                del self.model[gone]
        rows[b"\1last"] = b"%d" % number
        for k, value in rows.items():
            if value is None:
                self.model.pop(k, None)
            else:
                self.model[k] = value
        self.done = number
        if store is not None:
            self._apply(store, kind, rows, span, number)

    def _apply(
        self,
        store: TransactionalStateStore,
        kind: str,
        rows: dict[bytes, bytes | None],
        span: tuple[bytes, bytes],
        number: int,
    ) -> None:
        if kind == "restore":
            store.restore_chunk(binary(rows), binary(rows.values()), {TP: number}, batch=record(number))
            return
        if kind == "ranges":
            store.delete_range(*span)
        put_rows(store, list(rows.items()))
        if kind == "promote":
            store.persist_pending(record(number, "loser"))
            if kind == "ranges":
                store.delete_range(*span)
            put_rows(store, list(rows.items()))
            store.persist_pending(record(number))
            store.promote(record(number), {TP: number})
        else:
            store.commit({TP: number}, batch=record(number))

    @classmethod
    def after(cls, seed: int, done: int) -> Model:
        """Returns what a store holds after this number of commits."""
        workload, models = _AFTER.setdefault(seed, (cls(seed), [{}]))
        while len(models) <= done:
            workload.step(None)
            models.append(dict(workload.model))
        return models[done]


_AFTER: dict[int, tuple[Workload, list[Model]]] = {}


_LOOP = """
import json, os, sys, traceback
from pathlib import Path
from tests.state.state_kit import *
space = dict(globals())
for line in sys.stdin:
    space["result"] = None
    try:
        exec(json.loads(line), space)
        answer = {"result": space["result"]}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), flush=True)
"""


class OtherProcess:
    """A Python process that runs statements; tests stop it, kill it, or let it hold a lock."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.pid = self._process.pid

    def send(self, code: str) -> None:
        """Sends statements without waiting for their result."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Returns the variable ``result`` of the oldest statements that have no answer yet."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def run(self, code: str) -> Any:
        self.send(code)
        return self.answer()

    def kill(self) -> None:
        """Kills the process with SIGKILL and waits for its end."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                stream.close()


@contextmanager
def other_process() -> Iterator[OtherProcess]:
    other = OtherProcess()
    try:
        yield other
    finally:
        other.kill()
