"""``python -m benchmarks.json_documents``: compares decoders of JSON documents with a schema.

The contenders are `JsonDecoding`, a typed decoder of msgspec whose objects become columns with PyArrow, and
pyarrow.json over all documents as lines, which cannot tell which document is bad and gets none. The program
prints CPU time in nanoseconds per document, the lowest of some rounds. One document in a hundred is bad.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click
import msgspec
import pyarrow as pa
import pyarrow.json
from pyspark.sql import types

from kafka_eos_source.documents.decode import JsonDecoding

_KINDS: tuple[tuple[types.DataType, type, Callable[[random.Random], Any]], ...] = (
    (types.LongType(), int, lambda chance: chance.randrange(10**6)),
    (types.StringType(), str, lambda chance: f"value {chance.randrange(10**6)}"),
    (types.DoubleType(), float, lambda chance: round(chance.random() * 1000, 3)),
    (types.TimestampType(), datetime, lambda chance: f"2026-01-02T03:04:{chance.randrange(60):02}.5Z"),
    (types.BooleanType(), bool, lambda chance: chance.random() < 0.5),
)


def document(chance: random.Random, size: int) -> bytes:
    """Returns a document of about `size` bytes, whose fields have the types of `_KINDS` in turn."""
    fields: dict[str, Any] = {}
    used = 2
    while used < size:
        name, value = f"field_{len(fields)}", _KINDS[len(fields) % len(_KINDS)][2](chance)
        fields[name] = value
        used += len(name) + len(json.dumps(value)) + 4
    return json.dumps(fields, separators=(",", ":")).encode()


def best(run: Callable[[], object], documents: int, rounds: int) -> float:
    """Returns the CPU time of the fastest round, in nanoseconds per document."""
    times = []
    gc.disable()  # it would count for those who make objects, and depends on what else is in the process
    for _ in range(rounds):
        begun = time.thread_time_ns()
        run()
        times.append(time.thread_time_ns() - begun)
    gc.enable()
    return min(times) / documents


def with_msgspec(column: pa.Array, arrow_type: pa.StructType) -> list[pa.Array]:
    kinds = [_KINDS[at % len(_KINDS)][1] | None for at in range(arrow_type.num_fields)]
    names = [field.name for field in arrow_type]
    made = msgspec.defstruct("Row", [(n, k, None) for n, k in zip(names, kinds, strict=True)], gc=False)
    decode = msgspec.json.Decoder(made).decode
    rows = []
    for each in column.to_pylist():
        try:
            rows.append(decode(each))
        except msgspec.DecodeError:
            rows.append(made())
    return [pa.array([getattr(row, field.name) for row in rows], field.type) for field in arrow_type]


@click.command()
@click.option("--rounds", default=7, show_default=True)
def main(rounds: int) -> None:
    chance = random.Random(1)
    click.echo("| fields | bytes | kafka-eos | MB/s | msgspec | pyarrow.json |\n|--:|--:|--:|--:|--:|--:|")
    for declared in (3, 20, 200):
        schema = types.StructType(
            [types.StructField(f"field_{at}", _KINDS[at % len(_KINDS)][0]) for at in range(declared)]
        )
        decoding = JsonDecoding(schema)
        lines = pyarrow.json.ParseOptions(
            explicit_schema=pa.schema(list(decoding.arrow_type)), unexpected_field_behavior="ignore"
        )
        reading = pyarrow.json.ReadOptions(use_threads=False, block_size=1 << 24)
        for size, count in ((120, 20_000), (1024, 5000), (10_240, 1000)):
            good = [document(chance, size) for _ in range(count)]
            column = pa.array([each if at % 100 else each[:-5] for at, each in enumerate(good)], pa.binary())
            joined = pa.py_buffer(b"\n".join(good))
            ours = best(lambda: decoding.decode(column), count, rounds)  # noqa: B023
            theirs = best(lambda: with_msgspec(column, decoding.arrow_type), count, rounds)  # noqa: B023
            arrow = best(
                lambda: pyarrow.json.read_json(pa.BufferReader(joined), reading, lines),  # noqa: B023
                count,
                rounds,
            )
            speed = sum(map(len, good)) / count / ours * 1000
            figures = " | ".join(f"{each:,.0f}" for each in (ours, speed, theirs, arrow))
            click.echo(f"| {declared} | {size:,} | {figures} |")


if __name__ == "__main__":
    main()
