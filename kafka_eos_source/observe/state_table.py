"""Draws rows of a store as HTML for a notebook, or as text for a terminal. Pure functions."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kafka_eos_source.observe.wording import printable

#: Longer cells are cut off.
_MOST_CHARACTERS = 60
#: Further columns are not shown.
_MOST_COLUMNS = 16
#: Lines of the terminal around the rows.
_OTHER_LINES = 6


class Mark(Enum):
    """How a row differs from the table of the batch before: the sign before it, and its colour."""

    NONE = ("", "")
    NEW = ("+", "#35a45c")
    CHANGED = ("~", "#dd9a24")

    @property
    def sign(self) -> str:
        return self.value[0]

    @property
    def colour(self) -> str:
        return self.value[1]


@dataclass(frozen=True)
class StateTable:
    """Some rows of a store at one moment.

    Attributes:
        title: names the store.
        facts: which batch this is, and how much of the store the rows are.
        columns: names of the columns.
        rows: cells of each row, as text.
        marks: of each row.
        problem: why the table is not up to date; "" = it is.
    """

    title: str
    facts: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    marks: Sequence[Mark] = ()
    problem: str = ""


def as_html(table: StateTable) -> str:
    """Returns the table as HTML, for light and dark notebooks."""
    parts = [
        f'<div><span style="font-weight:600">{_escaped(table.title)}</span> '
        f'<span style="opacity:.68">{_escaped(table.facts)}</span></div>'
    ]
    if table.problem:
        parts.append(
            '<div style="margin-top:6px;padding:5px 10px;border-left:3px solid #dd9a24;'
            f'background:rgba(128,128,128,.10)">{_escaped(table.problem)}</div>'
        )
    if table.rows:
        cell = "padding:1px 14px 1px 0;text-align:left;border:0;white-space:nowrap"
        head = "".join(
            f'<th style="{cell};opacity:.68">{_escaped(name)}</th>' for name in ["", *_shown(table.columns)]
        )
        rows = "".join(
            '<tr style="background:none">'
            f'<td style="{cell};font-weight:600;color:{mark.colour or "inherit"}">{mark.sign}</td>'
            + "".join(f'<td style="{cell}">{_escaped(_cut(each))}</td>' for each in _shown(row))
            + "</tr>"
            for row, mark in zip(table.rows, table.marks, strict=True)
        )
        parts.append(
            '<table style="border-collapse:collapse;border:0;margin-top:8px;color:inherit">'
            f"<tr>{head}</tr>{rows}</table>"
        )
    return (
        "<div style=\"font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:13px;"
        "font-variant-numeric:tabular-nums;padding:10px 14px;margin:4px 0;overflow-x:auto;"
        f'border:1px solid rgba(128,128,128,.35);border-radius:8px">{"".join(parts)}</div>'
    )


def as_text(table: StateTable, height: int | None = None) -> RenderableType:
    """Returns the table for a terminal.

    Args:
        table: the table.
        height: lines of the terminal; None = no limit.
    """
    parts: list[RenderableType] = [
        Text.assemble(_plain(table.title, "bold"), "  ", _plain(table.facts, "dim"))
    ]
    if table.problem:
        parts.append(_plain(table.problem, "#dd9a24"))
    if table.rows:
        drawn = Table(box=None, pad_edge=False, header_style="dim")
        for name in ["", *_shown(table.columns)]:
            drawn.add_column(_plain(name), no_wrap=True, overflow="ellipsis")
        most = len(table.rows) if height is None else max(1, height - _OTHER_LINES)
        for row, mark in list(zip(table.rows, table.marks, strict=True))[:most]:
            drawn.add_row(Text(mark.sign, mark.colour), *(_plain(_cut(each)) for each in _shown(row)))
        parts += [Text(), drawn]
    return Group(*parts)


def _shown(cells: Sequence[str]) -> list[str]:
    shown = list(cells[:_MOST_COLUMNS])
    return [*shown, "…"] if len(cells) > _MOST_COLUMNS else shown


def _cut(cell: str) -> str:
    line = " ".join(cell.split("\n"))
    return line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - 1] + "…"


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _plain(text: str, style: str = "") -> Text:
    """Returns a text of others as it is: nothing in it is markup, or a command to the terminal."""
    return Text(printable(text), style)
