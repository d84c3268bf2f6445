"""Makes the report of a run from its folder: figures, as JSON, and a page, as Markdown."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from integration.chaos.soak import samples
from integration.chaos.soak.folder import RunFolder
from integration.chaos.soak.judge import total
from integration.chaos.soak.samples import Slope

_UNITS = {"rss": (2**20, "MiB"), "fds": (1, "file descriptors"), "threads": (1, "threads")}
_WRONG = (
    "lost",
    "doubled",
    "foreign",
    "invisible",
    "sink_faults",
    "state_faults",
    "readers_differ",
    "anomalies",
)


def figures(run: RunFolder) -> dict[str, Any]:
    """Returns the figures of a run, as far as it has come."""
    chunks, faults, events = list(run.chunks), list(run.faults), list(run.events)
    per_query: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for chunk in chunks:
        for name, result in chunk["queries"].items():
            per_query[name].append(result)
    queries = {name: total(results) for name, results in per_query.items()}
    sums = total(result for results in per_query.values() for result in results)
    recovered = [each for each in faults if each["kind"] == "recovered"]
    helps = [each for each in events if each["kind"] in ("help", "stuck")]
    seconds = sum(chunk["seconds"] for chunk in chunks)
    calm = sum(chunk["calm"]["seconds"] for chunk in chunks)
    stall = max(chunks, key=lambda chunk: chunk["stall"], default=None)
    return {
        "settings": run.settings(),
        "good": bool(chunks) and all(chunk["good"] for chunk in chunks) and not helps,
        "chunks": len(chunks),
        "wrong_chunks": [chunk["chunk"] for chunk in chunks if not chunk["good"]],
        "sessions": sum(1 for each in events if each["kind"] == "session"),
        "hours": seconds / 3600,
        "transactions": sums.get("transactions", 0),
        "per_second": sums.get("transactions", 0) / seconds if seconds else 0.0,
        "calm_per_second": sum(chunk["calm"]["batches"] for chunk in chunks) / calm if calm else 0.0,
        "calm_share": calm / seconds if seconds else 0.0,
        "input_rows": sum(chunk["input_rows"] for chunk in chunks),
        "lost_input": sum(chunk["lost_input"] for chunk in chunks),
        "sums": sums,
        "queries": queries,
        "faults": dict(Counter(each["what"] for each in faults if each["kind"] == "fault").most_common()),
        "drivers": dict(Counter(each["host"] for each in events if each["kind"] == "start")),
        "recovered": sum(1 for each in recovered if not each["helped"]),
        "helps": len(helps),
        "recovery_seconds": _spread([each["seconds"] for each in recovered]),
        "longest_stall": {"seconds": stall["stall"], "query": stall["stalled"]} if stall else None,
        "slopes": [{**asdict(each), "grows": each.grows} for each in samples.slopes(run.samples)],
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": median(seconds), "longest": max(seconds)} if seconds else {}


def markdown(found: Mapping[str, Any]) -> str:
    """Returns the report as a page."""
    sums, settings = found["sums"], found["settings"]
    verdict = "every record exactly once" if found["good"] else "**WRONG**"
    stall = found["longest_stall"] or {"seconds": 0.0, "query": "-"}
    spread = found["recovery_seconds"] or {"median": 0.0, "longest": 0.0}
    wrong = ", ".join(f"{name.replace('_', ' ')} {sums.get(name, 0)}" for name in _WRONG)
    facts = [
        ("transactions", f"{found['transactions']:,}"),
        (
            "hours with input",
            f"{found['hours']:.2f}, in {found['chunks']} chunks and {found['sessions']} session(s)",
        ),
        (
            "transactions per second",
            f"{found['per_second']:.1f}; {found['calm_per_second']:.1f} while no fault was open "
            f"({found['calm_share']:.0%} of the time)",
        ),
        ("input records; output records", f"{found['input_rows']:,}; {sums.get('rows', 0):,}"),
        ("wrong", wrong),
        (
            "rows in external sinks; keys of state compared",
            f"{sums.get('sink_rows', 0):,}; {sums.get('state_keys', 0):,}",
        ),
        ("faults", f"{sum(found['faults'].values()):,}"),
        ("recoveries without help; help needed", f"{found['recovered']:,}; {found['helps']}"),
        ("time to recover", f"median {spread['median']:.0f} s, longest {spread['longest']:.0f} s"),
        ("longest stall of a query", f"{stall['seconds']:.0f} s ({stall['query']})"),
        ("processes started", ", ".join(f"{name} {times}" for name, times in found["drivers"].items())),
    ]
    parts = [
        f"# Soak, seed {settings['seed']}: {verdict}",
        _table(("what", "result"), facts),
        _table(("fault", "times"), found["faults"].items()),
        _table(
            ("query", "transactions", "micro-batches", "records", "lost", "doubled"),
            [
                (
                    name,
                    f"{each['transactions']:,}",
                    f"{each['batches']:,}",
                    f"{each['rows']:,}",
                    each["lost"],
                    each["doubled"],
                )
                for name, each in found["queries"].items()
            ],
        ),
        "## Memory, file descriptors, threads",
        f"Of processes that lived {samples.SHORTEST_LIFE_SECONDS / 60:.0f} minutes or longer, without the "
        "first third of their lives. Slopes per hour are medians of the processes, in brackets the widest "
        "limits of their 95 % confidence intervals. A process grows if its interval lies above zero, and its "
        "slope above what is tolerated.",
        _table(
            ("processes", "metric", "lives", "longest", "mean", "slope per hour", "grow"),
            _slopes(found["slopes"]),
        ),
    ]
    if found["wrong_chunks"]:
        parts.append(f"Wrong chunks: {found['wrong_chunks']}; see `chunks.jsonl`.")
    return "\n\n".join(parts) + "\n"


def _slopes(found: Iterable[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    groups: dict[tuple[str, str], list[Slope]] = defaultdict(list)
    for each in found:
        fields = {name: value for name, value in each.items() if name != "grows"}
        groups[each["role"], each["metric"]].append(Slope(**fields))
    rows: list[tuple[object, ...]] = []
    for (role, metric), lives in groups.items():
        factor, unit = _UNITS[metric]
        growing = [f"{each.pid}: {each.per_hour / factor:+.1f}" for each in lives if each.grows]
        middle, low, high = (
            median(each.per_hour for each in lives),
            min(each.low for each in lives),
            max(each.high for each in lives),
        )
        rows.append(
            (
                role,
                unit,
                len(lives),
                f"{max(each.seconds for each in lives) / 60:.0f} min",
                f"{fmean(each.mean for each in lives) / factor:,.0f}",
                f"{middle / factor:+.1f} ({low / factor:+.1f} to {high / factor:+.1f})",
                ", ".join(growing) or "-",
            )
        )
    return rows


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def measures(found: Mapping[str, Any]) -> dict[str, int]:
    """Returns the numbers for the table in `docs/faults.md` (`integration.support.faults.Measures`)."""
    sums = found["sums"]
    return {
        "drivers": sum(found["drivers"].values()),
        "batches": found["transactions"],
        "rows": sums["rows"],
        "lost": sums["lost"],
        "doubled": sums["doubled"] + sums["foreign"],
    }


def write(run: RunFolder) -> dict[str, Any]:
    """Writes ``report.json`` and ``report.md``; returns the figures."""
    found = figures(run)
    (run.path / "report.json").write_text(json.dumps(found, indent=1))
    (run.path / "report.md").write_text(markdown(found))
    return found
