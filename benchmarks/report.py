"""Writes the result tables: the figures of each contender, and the ratios between contenders."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.contenders.base import Target
from benchmarks.latency import LatencyRun, Percentiles
from benchmarks.measure import Run
from benchmarks.restart import RestartRun

MILLION = 1_000_000


class AnyRun(Protocol):
    """A run of any task, with its problem and its noise."""

    @property
    def problem(self) -> str: ...
    @property
    def others_cores(self) -> float: ...


R_co = TypeVar("R_co", bound=AnyRun, covariant=True)


@dataclass(frozen=True)
class Runs(Generic[R_co]):
    """All runs of one contender.

    Attributes:
        name, title, guarantee, settings: those of the contender.
        records: number of records in the workload.
        runs: the runs, in order.
    """

    name: str
    title: str
    guarantee: str
    settings: str
    records: int
    runs: Sequence[R_co]

    @property
    def problem(self) -> str:
        """The first problem of any run; a contender that is wrong once has no figures."""
        return next((run.problem for run in self.runs if run.problem), "" if self.runs else "did not run")

    @property
    def others_cores(self) -> float:
        """Number of cores that other processes used."""
        return statistics.median(run.others_cores for run in self.runs)


@dataclass(frozen=True)
class Result(Runs[Run]):
    """Result of a task that measures records per second."""

    @property
    def rate(self) -> float:
        """Median records per second from the first record processed; 0 without figures."""
        return self._median([self.records / run.seconds for run in self.runs]) if not self.problem else 0.0

    @property
    def with_start_rate(self) -> float:
        """The same from the start of the process."""
        return self._median([self.records / run.with_start_seconds for run in self.runs])

    @property
    def first_visible_seconds(self) -> float:
        """Seconds from the start of the process until the first records are visible."""
        return self._median([run.first_visible_seconds for run in self.runs])

    @property
    def sustained(self) -> float:
        """The rate after the first quarter of the records."""
        return self._median([run.sustained for run in self.runs])

    @property
    def warm(self) -> float:
        """The rate for comparisons: after the first quarter, or of the whole run if it is one commit."""
        return self.sustained or self.rate

    @property
    def sustained_cpu_per_million(self) -> float:
        """CPU seconds for a million records after the first quarter."""
        return self._median([run.sustained_cpu * MILLION for run in self.runs])

    @property
    def sustained_cpu_by_process(self) -> Mapping[str, float]:
        """The same by kind of process, and of the broker: the median of each."""
        kinds = dict.fromkeys(kind for run in self.runs for kind in run.sustained_cpu_by_process)
        return {
            kind: self._median([run.sustained_cpu_by_process.get(kind, 0.0) * MILLION for run in self.runs])
            for kind in kinds
        }

    @property
    def warm_batch_ms(self) -> float:
        """Median duration of a micro-batch, in ms, in the second half of a run; 0 without Spark."""
        warm = [list(run.batches_ms)[len(run.batches_ms) // 2 :] for run in self.runs]
        return self._median([statistics.median(batches) if batches else 0.0 for batches in warm])

    @property
    def cpu_per_million(self) -> float:
        """CPU seconds per million records, without the start."""
        return self._median([run.cpu_seconds * MILLION / self.records for run in self.runs])

    def _median(self, values: Sequence[float]) -> float:
        return statistics.median(values)


@dataclass(frozen=True)
class LatencyResult(Runs[LatencyRun]):
    """Latency of a contender's output."""

    @property
    def end_to_end_ms(self) -> Percentiles:
        """The median over the runs of each percentile."""
        return _medians([run.end_to_end_ms for run in self.runs])

    @property
    def cores(self) -> float:
        """Median number of cores that the contender used."""
        return statistics.median(run.cores for run in self.runs)

    @property
    def trigger_ms(self) -> Percentiles | None:
        """The same of micro-batches; None = there are none."""
        found = [run.trigger_ms for run in self.runs if run.trigger_ms is not None]
        return _medians(found) if found else None

    @property
    def transaction_ms(self) -> float | None:
        """Median of the transaction of a micro-batch; None = the contender tells nothing about it."""
        found = [run.transaction_ms for run in self.runs if run.transaction_ms is not None]
        return statistics.median(found) if found else None

    @property
    def parts_ms(self) -> Mapping[str, float]:
        """The same of each part of a micro-batch, the longest first."""
        names = list(dict.fromkeys(name for run in self.runs for name in run.parts_ms))
        return {name: statistics.median(run.parts_ms.get(name, 0.0) for run in self.runs) for name in names}


@dataclass(frozen=True)
class RestartResult(Runs[RestartRun]):
    """Duration of a contender's outage."""

    @property
    def seconds(self) -> float:
        """Median seconds from the start of the new processes to their first visible record."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def cold_seconds(self) -> float:
        """Median seconds from the first start of the processes to their first visible record."""
        return statistics.median(run.cold_seconds for run in self.runs)

    @property
    def again(self) -> int:
        """Median number of records that the kill duplicated."""
        return round(statistics.median(run.again for run in self.runs))


def _medians(runs: Sequence[Percentiles]) -> Percentiles:
    p50, p95, p99 = (statistics.median(column) for column in zip(*runs, strict=True))
    return p50, p95, p99


def contenders_table(results: Sequence[Result]) -> str:
    """Returns a Markdown table with a row for each contender."""
    rows = [
        [
            "",
            "guarantee",
            "records/s",
            "process start included",
            "first visible after",
            "after the first quarter",
            "CPU s per million",
            "after the first quarter",
            "of that, and of the broker",
            "others' cores",
        ],
        ["---", "---", *["--:"] * 6, "---", "--:"],
    ]
    for result in results:
        if result.problem:
            figures = [verdict(result.problem), *[""] * 7]
        else:
            rates = [result.rate, result.with_start_rate, result.sustained]
            figures = [f"{round(rate, -2):,.0f}" if rate else "one commit" for rate in rates]
            figures.insert(2, f"{result.first_visible_seconds:.1f} s")
            figures.append(f"{result.cpu_per_million:.1f}")
            figures.append(f"{result.sustained_cpu_per_million:.1f}" if result.sustained else "one commit")
            figures.append(by_process(result.sustained_cpu_by_process))
            figures.append(f"{result.others_cores:.1f}")
        rows.append([result.title, result.guarantee, *figures])
    return _markdown(rows)


def by_process(cpu: Mapping[str, float]) -> str:
    """Returns CPU seconds per million records by kind of process as text, the largest first."""
    return ", ".join(
        f"{kind} {seconds:.2f}"
        for kind, seconds in sorted(cpu.items(), key=lambda each: -each[1])
        if seconds >= 0.005
    )


def latency_table(results: Sequence[LatencyResult]) -> str:
    """Returns a Markdown table with a row for each contender: p50, p95 and p99 in ms."""
    head = ["end to end p50, p95, p99", "trigger p50, p95, p99", "cores used", "others' cores"]
    rows = [["", "guarantee", *head]]
    rows.append(["---", "---", *("--:" for _ in head)])
    for result in results:
        figures = [verdict(result.problem), "", "", ""]
        if not result.problem:
            triggers = "" if result.trigger_ms is None else _ms(result.trigger_ms)
            figures = [
                _ms(result.end_to_end_ms),
                triggers,
                f"{result.cores:.2f}",
                f"{result.others_cores:.1f}",
            ]
        rows.append([result.title, result.guarantee, *figures])
    return _markdown(rows)


def parts_table(results: Sequence[LatencyResult]) -> str:
    """Returns a Markdown table of the parts of a micro-batch, with a column for each Spark contender."""
    told = [result for result in results if not result.problem and result.parts_ms]
    names = list(dict.fromkeys(name for result in told for name in result.parts_ms))
    rows = [["part of a micro-batch, p50 in ms", *(result.title for result in told)]]
    rows.append(["---", *("--:" for _ in told)])
    rows += [[name, *(f"{result.parts_ms.get(name, 0.0):,.0f}" for result in told)] for name in names]
    return _markdown(rows) if told else ""


def restart_table(results: Sequence[RestartResult]) -> str:
    """Returns a Markdown table with a row for each contender."""
    head = ["cold start", "first committed record after the restart", "records doubled", "others' cores"]
    rows = [["", "guarantee", *head]]
    rows.append(["---", "---", *("--:" for _ in head)])
    for result in results:
        figures = [verdict(result.problem), "", "", ""]
        if not result.problem:
            figures = [f"{result.cold_seconds:.1f} s", f"{result.seconds:.1f} s"]
            figures += [f"{result.again:,}", f"{result.others_cores:.1f}"]
        rows.append([result.title, result.guarantee, *figures])
    return _markdown(rows)


def _ms(percentiles: Percentiles) -> str:
    return " / ".join(f"{each:,.0f}" for each in percentiles) + " ms"


def ratios_table(results: Sequence[Result], ours: Sequence[str]) -> str:
    """Markdown: a row for each contender of ours, a column for each peer; empty if either is missing."""
    rows_of = [result for result in results if result.name in ours]
    peers = [result for result in results if result.name not in ours]
    if not rows_of or not peers:
        return ""
    rows = [
        ["times as fast as (after the first quarter)", *(peer.title for peer in peers)],
        ["---", *("--:" for _ in peers)],
    ]
    rows += [[each.title, *(times(each, peer) for peer in peers)] for each in rows_of]
    return _markdown(rows)


def times(one: Result, other: Result) -> str:
    """Returns the ratio of two rates, or a dash if one of them has no figures."""
    return "–" if one.problem or other.problem else f"{one.warm / other.warm:.1f} ×"


def verdict(problem: str) -> str:
    """Returns the text that replaces a number in the table."""
    return "WRONG" if problem.startswith("WRONG") else "FAILED"


def targets_lines(results: Sequence[Result], targets: Sequence[Target]) -> list[str]:
    """Returns a line for each target whose contenders ran."""
    by_name: Mapping[str, Result] = {result.name: result for result in results}
    lines = []
    for target in targets:
        if target.ours in by_name and target.peer in by_name:
            ours, peer = by_name[target.ours], by_name[target.peer]
            reached = not ours.problem and not peer.problem and ours.warm >= target.times * peer.warm
            lines.append(
                f"{'reached' if reached else 'MISSED '}: {ours.title} ≥ {target.times:g} × {peer.title}: "
                f"{times(ours, peer)}"
            )
    return lines


def as_json(results: Sequence[Runs[Any]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns everything that was measured."""
    return {
        **about,
        "contenders": [
            {**asdict(result), "problem": result.problem, **({} if result.problem else _figures(result))}
            for result in results
        ],
    }


def _figures(result: Runs[Any]) -> dict[str, Any]:
    """The medians."""
    figures: dict[str, Any] = {"others_cores": result.others_cores}
    if isinstance(result, Result):
        figures["rate"] = result.rate
        figures["with_start_rate"] = result.with_start_rate
        figures["first_visible_seconds"] = result.first_visible_seconds
        figures["sustained"] = result.sustained
        figures["cpu_seconds_per_million"] = result.cpu_per_million
        figures["sustained_cpu_seconds_per_million"] = result.sustained_cpu_per_million
        figures["sustained_cpu_seconds_per_million_by_process"] = result.sustained_cpu_by_process
    return figures


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def in_short(run: Run | LatencyRun | RestartRun, records: int) -> str:
    """Returns a short summary of a run, printed as soon as it is done."""
    if run.problem:
        return run.problem
    if isinstance(run, LatencyRun):
        return _ms(run.end_to_end_ms)
    if isinstance(run, RestartRun):
        return f"{run.seconds:.1f} s"
    return f"{records / run.seconds:,.0f} records/s"
