"""Words, numbers and colours as people see them, the same in the terminal and in the notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone

from kafka_eos_source.observe.figures import Outcome, StepGroup
from kafka_eos_source.observe.view import BatchView, QueryView, Status, TopicLag

#: What the groups of steps mean.
MEANING: Mapping[StepGroup, str] = {
    StepGroup.TASKS: "Spark runs the tasks",
    StepGroup.VERIFY: "verify staged rows",
    StepGroup.DECIDE: "own the id, read the token",
    StepGroup.WRITE: "write records",
    StepGroup.COMMIT: "commit offsets and transaction",
    StepGroup.SINKS: "sinks outside Kafka",
    StepGroup.RETRY: "pause before a retry",
    StepGroup.TIDY: "tidy up",
}

#: Name of the fact about rates.
LAST_MINUTE = "last minute"

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def printable(text: str) -> str:
    """Returns a text without control characters, which could change a terminal or a page."""
    return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text)


def visible(text: str) -> str:
    r"""Returns a text on one line, with control characters as escapes, such as ``\x1b``.

    Use it for the contents of records: they could change a terminal, or look like other lines.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def utc(time_ms: int, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """Returns a time for people; the number itself if it is a 64-bit integer beyond the years 1 to 9999."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, timezone.utc).strftime(form)
    except (ValueError, OverflowError, OSError):
        return f"{time_ms} ms since 1970"


def duration(seconds: float) -> str:
    """Returns a duration with two or three significant digits."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} days"


def size(number: float) -> str:
    """Returns a number of bytes with its unit."""
    for unit, name in _UNITS:
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,.0f} bytes"


def rate(per_second: float) -> str:
    """Returns a rate without its unit."""
    return f"{per_second:,.0f}" if per_second >= 10 or per_second == 0 else f"{per_second:.1f}"


def lag(lag: Mapping[str, TopicLag]) -> str:
    """Returns how far a query is behind in all topics; "unknown" if there are none."""
    if not lag:
        return "unknown"
    offsets = sum(each.offsets for each in lag.values())
    if not offsets:
        return "0"
    return f"{offsets:,}{_behind(max(lag.values(), key=lambda each: each.seconds))}"


def topic_lag(lag: TopicLag) -> str:
    """Returns how far a query is behind in one topic."""
    return f"{lag.offsets:,}{_behind(lag)}"


def _behind(lag: TopicLag) -> str:
    if not lag.seconds:
        return ""
    return f" ({'over ' if lag.at_least else ''}{duration(lag.seconds)})"


def status(view: QueryView) -> str:
    """Returns the status in a few words, with the time since when it holds."""
    if view.status_since is None or view.status is Status.RUNNING:
        return view.status.value
    return f"{view.status.value} for {duration(max(0.0, view.at - view.status_since))}"


def batch_result(batch: BatchView) -> str:
    """Returns what a batch wrote, or how it ended if it wrote nothing."""
    if batch.outcome is Outcome.FAILED:
        return "failed"
    if batch.outcome is Outcome.SKIPPED:
        return "skipped"
    return f"{batch.records:,}"


def transactions(totals: Mapping[str, int]) -> str:
    """Returns the numbers of transactions by outcome; rare outcomes are left out while there are none."""
    found = [f"{totals.get('committed', 0):,} committed"]
    found += [
        f"{totals[name]:,} {word}"
        for name, word in (
            ("aborted", "aborted"),
            ("retried", "retried"),
            ("fenced", "fenced"),
            ("unknown", "of unknown outcome"),
        )
        if totals.get(name)
    ]
    return ", ".join(found)


def batches(totals: Mapping[str, int]) -> str:
    """Returns the numbers of micro-batches."""
    found = [f"{totals.get('batches', 0):,}"]
    found += [f"{totals[name]:,} {name}" for name in ("skipped", "failed") if totals.get(name)]
    return ", ".join(found)


def sink(figures: Mapping[str, float]) -> str:
    """Returns the figures of a sink outside Kafka."""
    found = [f"{figures.get('rows', 0):,.0f} rows", f"{figures.get('committed', 0):,.0f} batches committed"]
    found += [
        f"{figures[name]:,.0f} {word}"
        for name, word in (("aborted", "aborted"), ("recovered", "recovered"), ("retries", "retries"))
        if figures.get(name)
    ]
    if figures.get("held_back_seconds"):
        found.append(f"held back for {duration(figures['held_back_seconds'])}")
    return ", ".join(found)


def state(view: QueryView) -> str:
    """Returns what stateful operators did in this run; "" if there are none."""
    changes = view.totals.get("changes", 0)
    if not view.totals.get("shards"):
        return ""
    found = [f"{changes:,} changelog records"]
    if view.pressure:
        found.append(f"uncommitted state at {view.pressure:.0%} of its limit")
    found += [f"{number:,} {name}" for name, number in view.processor_counts.items()]
    return ", ".join(found)


def facts(view: QueryView) -> Iterable[tuple[str, str]]:
    """Yields what is known about a query, as names and values."""
    for topic, each in view.lag.items():
        yield f"behind in {topic}", topic_lag(each)
    if view.totals:
        yield (
            LAST_MINUTE,
            f"{rate(view.read_per_second)} offsets/s read, {rate(view.records_per_second)} records/s written",
        )
        yield (
            "this run",
            f"{batches(view.totals)} micro-batches, "
            f"{view.totals.get('offsets_read', 0):,} offsets read, "
            f"{view.totals.get('records', 0):,} records written, "
            f"{size(view.totals.get('staged_bytes', 0))} staged",
        )
        yield "transactions", transactions(view.totals)
    if view.sequence is not None:
        age = "" if view.token_at is None else f", {duration(max(0.0, view.at - view.token_at))} old"
        yield "token", f"transaction {view.sequence}{age}"
    of_state = state(view)
    if of_state:
        yield "state", of_state
    for name, figures in view.sinks.items():
        yield f"sink {name}", sink(figures)
    if view.events:
        last = view.events[-1]
        yield (
            "last event",
            f"{duration(max(0.0, view.at - last.at))} ago: {last.kind.value}: {last.text}",
        )


STEPS: Mapping[StepGroup, str] = {
    StepGroup.TASKS: "#5b8def",
    StepGroup.VERIFY: "#8d99a8",
    StepGroup.DECIDE: "#a878d8",
    StepGroup.WRITE: "#1fa9b5",
    StepGroup.COMMIT: "#35a45c",
    StepGroup.SINKS: "#dd9a24",
    StepGroup.RETRY: "#e0524f",
    StepGroup.TIDY: "#b6a48d",
}
STATUS: Mapping[Status, str] = {
    Status.RUNNING: "#35a45c",
    Status.IDLE: "#35a45c",
    Status.WAITING: "#dd9a24",
    Status.RETRYING: "#dd9a24",
    Status.FAILED: "#e0524f",
    Status.STOPPED: "#8d99a8",
    Status.ELSEWHERE: "#8d99a8",
}
