"""Writes the table of ``docs/metrics.md``: ``python -m kafka_eos_source.observe.metrics_docs``."""

from __future__ import annotations

from pathlib import Path

from kafka_eos_source.observe.metrics import APPLICATION, METRICS

BEGIN, END = "<!-- table of metrics: begin -->\n", "<!-- table of metrics: end -->\n"


def table() -> str:
    """Returns the Markdown table of all metrics."""
    rows = [
        f"| `{each.prometheus_name}` | `{each.name}` | {each.kind.value} | "
        f"{each.unit and f'`{each.unit}`'} | "
        f"{', '.join(f'`{label}`' for label in each.labels)} | {each.meaning} |"
        for each in METRICS
    ]
    head = [
        "| in Prometheus | in OpenTelemetry | type | unit | labels | meaning |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([f"Each metric also has the label `{APPLICATION}`.", "", *head, *rows]) + "\n"


def with_table(page: str) -> str:
    """Returns the page with the present table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    path = Path(__file__).parents[2] / "docs" / "metrics.md"
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
