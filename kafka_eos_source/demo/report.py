"""What the demo shows at the end: a table of what was counted, and a picture of the run.

Transactions are counted in the broker's own log files, independently of any client. A transaction that ends
leaves a control batch in every partition it wrote to, commit or abort, with the producer's id and epoch
(KIP-98). Layout of a batch, message format 2::

    baseOffset 8 | length 4 | leaderEpoch 4 | magic 1 | crc 4 | attributes 2 | lastOffsetDelta 4 |
    baseTimestamp 8 | maxTimestamp 8 | producerId 8 | producerEpoch 2 | baseSequence 4 | count 4 | records

Bit 5 of the attributes marks a control batch; the key of its one record is version 2 | type 2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kafka_eos_source.demo.run import AT_LEAST_ONCE, EXACTLY_ONCE, History
from kafka_eos_source.testing.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

_HEADER = struct.Struct(">qiibIhiqqqhii")
_LENGTH_ENDS_AT = 12
_CONTROL = 0x20
_ABORT, _COMMIT = 0, 1


@dataclass(frozen=True)
class Marker:
    """One control record of a transaction."""

    partition: str
    offset: int
    committed: bool
    producer_id: int
    producer_epoch: int


def markers(log_dirs: Path) -> Iterator[Marker]:
    """Yields every marker in the log segments under a broker's ``log.dirs``."""
    for segment in sorted(log_dirs.glob("*/*.log")):
        yield from _markers(segment.parent.name, segment.read_bytes())


def _markers(partition: str, segment: bytes) -> Iterator[Marker]:
    at = 0
    while at + _HEADER.size <= len(segment):
        base, length, _, magic, _, attributes, *_, producer_id, epoch, _, count = _HEADER.unpack_from(
            segment, at
        )
        end = at + _LENGTH_ENDS_AT + length
        if length <= 0 or end > len(segment):
            return  # the rest is preallocated, or the broker is writing it
        if magic == 2 and attributes & _CONTROL and count:
            kind = _control_type(segment, at + _HEADER.size)
            if kind in (_ABORT, _COMMIT):
                yield Marker(partition, base, kind == _COMMIT, producer_id, epoch)
        at = end


def _control_type(segment: bytes, at: int) -> int:
    _, at = varint(segment, at)  # length
    at += 1  # attributes
    _, at = varint(segment, at)  # timestamp delta
    _, at = varint(segment, at)  # offset delta
    _, at = varint(segment, at)  # key length
    return int(struct.unpack_from(">h", segment, at + 2)[0])


def varint(segment: bytes, at: int) -> tuple[int, int]:
    """Decodes a zigzag number of Kafka's record format; returns it and the position after it."""
    value = shift = 0
    while True:
        byte = segment[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return (value >> 1) ^ -(value & 1), at


# -- the table -------------------------------------------------------------------------------------


def verdict_json(verdict: Verdict) -> dict[str, int | bool]:
    """Returns how an output differs from the expected rows, as a JSON object."""
    return {
        "exactly_once": verdict.exactly_once,
        "expected": verdict.expected,
        "found": verdict.found,
        "missing": verdict.missing,
        "doubled": verdict.doubled,
        "foreign": verdict.foreign,
    }


def transactions(log_dirs: Path) -> tuple[int, int]:
    """Returns the numbers of committed and aborted transactions, by the markers in ``log.dirs``."""
    return count_transactions(markers(log_dirs))


def count_transactions(found: Iterable[Marker]) -> tuple[int, int]:
    """Returns the numbers of committed and aborted transactions.

    Each committed transaction includes offsets of one group, so it has exactly one marker in
    ``__consumer_offsets``. An aborted one may have no marker there. But a producer's epoch ends with its
    first abort, so each pair of producer id and epoch counts as one aborted transaction.
    """
    committed = 0
    aborted: set[tuple[int, int]] = set()
    for each in found:
        if not each.committed:
            aborted.add((each.producer_id, each.producer_epoch))
        elif each.partition.startswith("__consumer_offsets-"):
            committed += 1
    return committed, len(aborted)


def table(
    verdicts: Mapping[str, Verdict], history: History, counted: tuple[int, int] | None, batches: int
) -> Table:
    """Returns the results, with one column for each guarantee.

    Args:
        verdicts: verdict by guarantee.
        history: history of the run.
        counted: numbers of committed and aborted transactions; None = the broker's log is not accessible.
        batches: number of micro-batches of the exactly-once query that Spark logged as committed.
    """
    from rich.table import Table

    columns = {EXACTLY_ONCE: "exactly once", AT_LEAST_ONCE: "at least once"}
    shown = [guarantee for guarantee in columns if guarantee in verdicts]
    result = Table(title=f"driver killed {len(history.kills)} times, restarted {history.starts - 1} times")
    result.add_column("")
    for guarantee in shown:
        result.add_column(columns[guarantee], justify="right")
    for label, field in (
        ("events in", "expected"),
        ("events out (read_committed)", "found"),
        ("missing", "missing"),
        ("duplicated", "doubled"),
        ("with other content", "foreign"),
    ):
        result.add_row(label, *(f"{getattr(verdicts[guarantee], field):,}" for guarantee in shown))
    rows = [("batches committed by Spark", str(batches))]
    if counted is None:
        rows += [("transactions", "not counted (--bootstrap)")]
    else:
        rows += [("transactions committed", str(counted[0])), ("transactions aborted", str(counted[1]))]
    for label, value in rows:
        result.add_row(label, value, *("-" for _ in shown[1:]))
    return result


# -- the picture -----------------------------------------------------------------------------------


def draw(history: History, total: int, path: Path) -> None:
    """Writes a PNG with committed input offsets, records of the at-least-once output, and kills."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 5), dpi=120)
    axes.axhline(total, color="0.6", linewidth=1)
    axes.annotate(f"{total:,} events", (0, total), xytext=(4, 4), textcoords="offset points", color="0.4")
    axes.step(
        history.seconds,
        history.committed,
        where="post",
        color="#0b6e4f",
        linewidth=2,
        label="exactly once: input offsets committed",
    )
    if any(history.written):
        axes.step(
            history.seconds,
            history.written,
            where="post",
            color="#c8553d",
            linewidth=1.5,
            linestyle="--",
            label="at least once: records written",
        )
        if history.written[-1] > total:
            axes.annotate(
                f"{history.written[-1] - total:,} too many",
                (history.seconds[-1], history.written[-1]),
                xytext=(0, 4),
                textcoords="offset points",
                ha="right",
                color="#c8553d",
            )
    for number, (at, what) in enumerate(history.kills):
        axes.axvline(
            at, color="#222222", linewidth=1, linestyle=":", label=None if number else "driver killed"
        )
        axes.annotate(
            "SIGKILL" if what == "random" else f"SIGKILL at {what}",
            (at, 0.02),
            xycoords=axes.get_xaxis_transform(),
            xytext=(3, 0),
            textcoords="offset points",
            rotation=90,
            fontsize=8,
            color="#222222",
        )
    axes.set_xlabel("seconds")
    axes.set_ylabel("events")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.9))
    axes.set_title(f"Driver killed {len(history.kills)} times: what was committed, over time")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
