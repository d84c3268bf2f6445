"""The table at the end of the demo, from the verdicts and the broker's own log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kafka_eos_source.demo.markers import Marker, markers
from kafka_eos_source.demo.run import AT_LEAST_ONCE, EXACTLY_ONCE, History
from kafka_eos_source.testing.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table


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
