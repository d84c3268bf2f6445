"""``python -m benchmarks.crash``: time until state is usable after its process was killed on the same host.

It needs neither Spark nor a broker: after a crash, a task takes the end offset and the attempt of the last
committed batch from the query's group, and reads no changelog if the state is on its disk. One process fills
a store with distinct, unordered keys and random values, commits some micro-batches, makes the next one
pending, and kills itself (SIGKILL). Another process opens the store, promotes or drops the pending batch, and
reads a key.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.store.transactional import TransactionalStateStore

_TP = TopicPartition("crash-changelog", 0)
_IDENTITY = StoreIdentity("crash", "s", 0, 1, _TP.topic)
_CHUNK = 130_000
_CHANGED = 100_000
_VALUE_BYTES = 230
_BATCHES = 3


@click.group(invoke_without_command=True)
@click.option("--gb", default=10.0, show_default=True, help="Size of the keys and values.")
@click.option("--rounds", default=5, show_default=True, help="Number of crashes.")
@click.pass_context
def main(context: click.Context, gb: float, rounds: int) -> None:
    """Fills a store, and then kills its process and opens it again, several times."""
    if context.invoked_subcommand is not None:
        return
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        store = Path(folder, "s")
        keys = round(gb * 1e9 / (9 + _VALUE_BYTES))
        began = time.perf_counter()
        _child("fill", str(store), str(keys))
        seconds = time.perf_counter() - began
        click.echo(f"{keys:,} keys, {_megabytes(store):,.0f} MB on disk, filled in {seconds:.0f} s")
        for number in range(rounds):
            settle = "promote" if number % 2 == 0 else "drop"
            _child("crash", str(store), str(keys), str(number), killed=True)
            found = json.loads(_child("reopen", str(store), str(number), settle))
            click.echo(
                f"killed; {settle} the pending batch: opened in {found['open_ms']:.0f} ms, "
                f"settled in {found['settle_ms']:.0f} ms, a key read in {found['read_ms']:.1f} ms"
            )


@main.command(hidden=True)
@click.argument("folder")
@click.argument("keys", type=int)
def fill(folder: str, keys: int) -> None:
    """Writes the keys as a restore does."""
    random = np.random.default_rng(1)
    with TransactionalStateStore.open(folder, _IDENTITY) as store:
        for first in range(0, keys, _CHUNK):
            last = min(first + _CHUNK, keys)
            record = BatchRecord("q", 0, "filled") if last == keys else None
            values = random.integers(0, 256, (last - first, _VALUE_BYTES), np.uint8)
            store.restore_chunk(_keys(np.arange(first, last)), _binary(values), {_TP: last}, batch=record)


@main.command(hidden=True)
@click.argument("folder")
@click.argument("keys", type=int)
@click.argument("number", type=int)
def crash(folder: str, keys: int, number: int) -> None:
    """Commits micro-batches, makes one pending, and kills this process."""
    random = np.random.default_rng(2 + number)
    with TransactionalStateStore.open(folder, _IDENTITY) as store:
        offset = store.next_offset(_TP) or 0
        for batch in range(_BATCHES + 1):
            changed = _keys(random.integers(0, keys, _CHANGED)).to_pylist()
            for key in changed:
                store.put(key, b"%d" % number * _VALUE_BYTES)
            if batch == _BATCHES:
                store.persist_pending(_pending(number))
                os.kill(os.getpid(), signal.SIGKILL)
            offset += _CHANGED
            store.commit({_TP: offset}, batch=BatchRecord("q", 1 + number, f"attempt-{number}-{batch}"))


@main.command(hidden=True)
@click.argument("folder")
@click.argument("number", type=int)
@click.argument("settle", type=click.Choice(["promote", "drop"]))
def reopen(folder: str, number: int, settle: str) -> None:
    """Opens the store, promotes or drops the pending batch, and reads a key."""
    times = [time.perf_counter()]
    with TransactionalStateStore.open(folder, _IDENTITY) as store:
        times.append(time.perf_counter())
        if [each.record for each in store.pending()] != [_pending(number)]:
            raise click.ClickException("the batch is not pending")
        if settle == "promote":
            store.promote(_pending(number), {_TP: (store.next_offset(_TP) or 0) + _CHANGED})
        else:
            store.drop_pending()
        times.append(time.perf_counter())
        if store.get(_keys(np.arange(1))[0].as_py()) is None:
            raise click.ClickException("a key is missing")
        times.append(time.perf_counter())
    steps: list[Any] = [1000 * (end - begin) for begin, end in itertools.pairwise(times)]
    click.echo(json.dumps(dict(zip(("open_ms", "settle_ms", "read_ms"), steps, strict=True))))


def _pending(number: int) -> BatchRecord:
    return BatchRecord("q", 2 + number, f"attempt-{number}")


def _child(*arguments: str, killed: bool = False) -> str:
    command = [sys.executable, "-m", "benchmarks.crash", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != (-signal.SIGKILL if killed else 0):
        raise click.ClickException(f"{arguments[0]} ended with {done.returncode}")
    return done.stdout


def _keys(numbers: np.ndarray) -> pa.BinaryArray:
    """Returns a distinct key of 9 bytes for each number, in the table of users' keys, in no order."""
    keys = np.empty((len(numbers), 9), np.uint8)
    keys[:, 0] = 1
    scattered = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys[:, 1:] = scattered.view(np.uint8).reshape(-1, 8)
    return _binary(keys)


def _binary(rows: np.ndarray) -> pa.BinaryArray:
    kind = pa.binary(rows.shape[1])
    fixed = pa.FixedSizeBinaryArray.from_buffers(kind, len(rows), [None, pa.py_buffer(rows.tobytes())])
    return fixed.cast(pa.binary())


def _megabytes(path: Path) -> float:
    return sum(each.stat().st_size for each in path.rglob("*.sst")) / 1e6


if __name__ == "__main__":
    main()
