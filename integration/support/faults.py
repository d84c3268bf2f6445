"""Generates the table in `docs/faults.md` from a test run: ``pytest … --faults-table docs/faults.md``.

A test declares the faults it injects with ``@pytest.mark.fault("T07", "what breaks", "when")``, once for
each fault. Tests may attach `Measures` to their report, which become columns of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

FAULTS, MEASURES = "faults", "measures"
_BEGIN, _END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass(frozen=True)
class Measures:
    """What one test measured.

    Attributes:
        drivers: number of driver processes started.
        batches: number of transactions committed.
        rows: number of records that should be in the output.
        lost, doubled: number of records that were missing, or present too often.
    """

    drivers: int
    batches: int
    rows: int
    lost: int
    doubled: int


@dataclass
class Line:
    """One row of the table: a fault, summed over all tests that inject it."""

    what: str
    when: str
    injected: int = 0
    measured: list[Measures] = field(default_factory=list)
    tests: set[str] = field(default_factory=set)


class Table:
    """Collects the reports of a run."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}

    def add(self, test: str, properties: Iterable[tuple[str, Any]]) -> None:
        """Adds the faults and measures of a test that passed."""
        told = dict(properties)
        for name, what, when in told.get(FAULTS, ()):
            line = self._lines.setdefault(name, Line(what, when))
            line.injected += 1
            line.tests.add(test.partition("[")[0])
            if MEASURES in told:
                line.measured.append(Measures(**told[MEASURES]))

    def write(self, path: Path) -> None:
        """Updates the table between the two marker comments of the document.

        Rows of faults that this run did not inject are kept, because long tests run separately.
        """
        text = path.read_text()
        before, _, rest = text.partition(_BEGIN)
        known, _, after = rest.partition(_END)
        told = [
            *known.strip().splitlines(),
            *self.markdown().splitlines(),
        ]  # rows of this run replace older ones
        rows = {row.split(" | ")[0].removeprefix("| "): row for row in told}
        head = [rows.pop("id"), rows.pop("---")]
        ordered = [rows[name] for name in sorted(rows, key=_number)]
        path.write_text(f"{before}{_BEGIN}\n" + "\n".join([*head, *ordered]) + f"\n{_END}{after}")

    def markdown(self) -> str:
        """Returns the table as Markdown, sorted by fault id."""
        head = ["id", "fault", "when", "runs", *(each.name for each in fields(Measures)), "test"]
        rows = [head, ["---"] * len(head)]
        for name, line in sorted(self._lines.items(), key=lambda item: _number(item[0])):
            sums = [
                str(sum(getattr(each, column.name) for each in line.measured)) if line.measured else "-"
                for column in fields(Measures)
            ]
            tests = "<br>".join(f"`{each.rpartition('/')[2]}`" for each in sorted(line.tests))
            rows.append([name, line.what, line.when, str(line.injected), *sums, tests])
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _number(name: str) -> tuple[str, int, str]:
    found = re.match(r"([A-Z]*)(\d*)", name)
    assert found is not None
    return found[1], int(found[2] or 0), name
