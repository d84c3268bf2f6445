"""Draws queries and rows of a store: as text for a terminal of any width, or as HTML for a notebook.

Pure functions. The HTML contains inline SVG, and suits light and dark notebooks.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import floor, log10

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kafka_eos_source.observe import wording
from kafka_eos_source.observe.figures import Outcome, StepGroup
from kafka_eos_source.observe.view import BatchView, QueryView, usual_longest

#: Without colours, a letter stands for each group.
_LETTERS = {group: "x" if group is StepGroup.TIDY else group.value[0] for group in StepGroup}
#: Terminals below this width do not show the columns that matter least.
_NARROW = 90
_WIDEST_BAR = 60
#: Lines of the frame around the list of micro-batches.
_OTHER_LINES = 14


def frame(views: Sequence[QueryView], height: int | None) -> RenderableType:
    """Returns one frame: a table of several queries, or everything about a single one.

    Args:
        views: the queries.
        height: lines of the terminal; None = no limit.
    """
    if not views:
        return Text(
            "No query of this user has committed a micro-batch on this host during the last seven days."
        )
    if len(views) > 1:
        return _Overview(views)
    return _Details(views[0], 30 if height is None else max(3, height - _OTHER_LINES))


def _plain(text: str, style: str = "") -> Text:
    """Returns a text of others as it is: nothing in it is markup, or a command to the terminal."""
    return Text(wording.printable(text), style)


class _Overview:
    """One line per query."""

    def __init__(self, views: Sequence[QueryView]) -> None:
        self._views = views

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("application.id", overflow="ellipsis", no_wrap=True, max_width=max(12, width // 3))
        table.add_column("status", overflow="ellipsis", no_wrap=True)
        table.add_column("lag", justify="right", no_wrap=True)
        if width >= _NARROW:
            for name in ("read/s", "written/s", "batch", "took"):
                table.add_column(name, justify="right", no_wrap=True)
        for view in self._views:
            narrow = width < _NARROW
            lag = f"{view.total_lag:,}" if narrow and view.total_lag is not None else wording.lag(view.lag)
            state = view.status.value if narrow else wording.status(view)
            cells: list[str | Text] = [
                _plain(view.title),
                Text(state, f"bold {wording.STATUS[view.status]}"),
                lag,
            ]
            if not narrow:
                last = view.batches[-1] if view.batches else None
                cells += [
                    wording.rate(view.read_per_second),
                    wording.rate(view.records_per_second),
                    "" if last is None else str(last.batch_id),
                    "" if last is None else wording.duration(last.total_seconds),
                ]
            table.add_row(*cells)
        yield table
        yield Text()
        for view in self._views:
            if view.status_text:
                yield _plain(f"{view.title}: {view.status_text}", wording.STATUS[view.status])
        yield Text("`kafka-eos top QUERY` shows the micro-batches of one query.", "dim")


class _Details:
    """Everything about one query."""

    def __init__(self, view: QueryView, most_batches: int) -> None:
        self._view = view
        self._most_batches = most_batches

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view = self._view
        head = Text.assemble(
            _plain(view.title, "bold"), "  ", (wording.status(view), f"bold {wording.STATUS[view.status]}")
        )
        yield head
        if view.status_text:
            yield _plain(view.status_text, wording.STATUS[view.status])
        yield Text()
        facts = Table(box=None, show_header=False, pad_edge=False)
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        for name, value in wording.facts(view):
            facts.add_row(_plain(name), _plain(value))
        yield facts
        if view.batches:
            yield Text()
            yield _batches(view.batches[-self._most_batches :], options.max_width, console)
            yield _legend_text(view.batches, console)


def _batches(batches: Sequence[BatchView], width: int, console: Console) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("records", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    longest = usual_longest(batches)
    room = max(8, min(_WIDEST_BAR, width - 34))
    for each in reversed(batches):
        table.add_row(
            str(each.batch_id),
            wording.batch_result(each),
            wording.duration(each.total_seconds),
            bar(each, longest, room, colour=console.color_system is not None and not console.no_color),
        )
    return table


def bar(batch: BatchView, longest: float, width: int, *, colour: bool) -> Text:
    """Returns a bar whose parts are the groups of steps.

    Args:
        batch: the micro-batch.
        longest: duration whose bar has the full width, in seconds. Longer bars are cut off, with a mark.
        width: in characters.
        colour: whether colours tell the groups apart; if not, first letters do.
    """
    found = Text()
    done, drawn = 0.0, 0
    for group, seconds in batch.seconds.items():
        done += seconds
        until = min(width, round(width * done / longest))
        found.append(
            ("█" if colour else _LETTERS[group]) * (until - drawn), wording.STEPS[group] if colour else ""
        )
        drawn = until
    if done > longest * (1 + 0.5 / width):
        found.right_crop(1)
        found.append("›")
    return found


def _legend_text(batches: Sequence[BatchView], console: Console) -> Text:
    colour = console.color_system is not None and not console.no_color
    shown = [group for group in StepGroup if any(group in each.seconds for each in batches)]
    found = Text()
    for group in shown:
        found.append("█ " if colour else f"{_LETTERS[group]} ", wording.STEPS[group] if colour else "")
        found.append(f"{group.value}  ", "dim")
    return found


# -- queries in a notebook -------------------------------------------------------------------------

_MOST_BATCHES = 60
#: The chart, in its own units.
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 150, 46, 16, 8
_FONT = "font-family:system-ui,-apple-system,'Segoe UI',sans-serif"
_FADED = "opacity:.68"


def panel(view: QueryView) -> str:
    """Returns one frame of the panel."""
    parts = [_head(view), _tiles(view)]
    if view.batches:
        shown = view.batches[-_MOST_BATCHES:]
        parts += [_chart(shown), _legend(shown)]
    parts.append(_details(view))
    return (
        f'<div style="{_FONT};font-size:13px;line-height:1.45;max-width:760px;padding:10px 14px;margin:4px 0;'
        'border:1px solid rgba(128,128,128,.35);border-radius:8px;overflow-x:auto;overflow-wrap:anywhere">'
        f"{''.join(parts)}</div>"
    )


def _escaped(text: str) -> str:
    """Returns text as HTML, without control characters."""
    return html.escape(wording.printable(text))


def _head(view: QueryView) -> str:
    text = ""
    if view.status_text:
        text = (
            '<div style="margin-top:6px;padding:5px 10px;border-left:3px solid '
            f"{wording.STATUS[view.status]};"
            f'background:rgba(128,128,128,.10)">{_escaped(view.status_text)}</div>'
        )
    return (
        '<div style="display:flex;align-items:center;gap:8px;flex-wrap:wrap">'
        f'<span style="display:inline-block;width:9px;height:9px;border-radius:50%;'
        f'background:{wording.STATUS[view.status]}"></span>'
        f'<span style="font-weight:600">{_escaped(view.title)}</span>'
        f'<span style="{_FADED}">{_escaped(wording.status(view))}</span></div>{text}'
    )


def _tiles(view: QueryView) -> str:
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:6px 28px;margin:10px 0 6px">'
        + "".join(
            f'<div><div style="{_FADED};font-size:11px">{_escaped(name)}</div>'
            '<div style="font-size:18px;font-weight:600;font-variant-numeric:tabular-nums">'
            f"{_escaped(value)}</div></div>"
            for name, value in _headlines(view)
        )
        + "</div>"
    )


def _headlines(view: QueryView) -> Iterable[tuple[str, str]]:
    yield "offsets behind", f"{view.total_lag:,}" if view.total_lag is not None else "unknown"
    seconds = max((each.seconds for each in view.lag.values()), default=0.0)
    if seconds:
        yield "behind for", wording.duration(seconds)
    yield "read per second", wording.rate(view.read_per_second)
    if view.totals:
        yield "written per second", wording.rate(view.records_per_second)
        yield "records written", f"{view.totals.get('records', 0):,}"
    if view.batches:
        last = view.batches[-1]
        yield f"batch {last.batch_id} took", wording.duration(last.total_seconds)


def _chart(batches: Sequence[BatchView]) -> str:
    """Returns one stacked bar per micro-batch; each part is a group of steps."""
    longest = usual_longest(batches)
    room = (_WIDTH - _LEFT) / max(20, len(batches))
    height = _HEIGHT - _BOTTOM - _TOP
    found = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Duration of the newest micro-batches" '
        f'style="display:block;width:100%;{_FONT};font-size:10px" fill="currentColor">'
    ]
    for tick in _ticks(longest):
        y = _TOP + height * (1 - tick / longest)
        found.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            f'stroke-opacity="{0.12 if tick else 0.35}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 3:.1f}" text-anchor="end" fill-opacity=".68">'
            f"{wording.duration(tick) if tick else '0'}</text>"
        )
    for index, batch in enumerate(batches):
        x = _LEFT + index * room
        found.append(f"<g><title>{_escaped(_tooltip(batch))}</title>")
        found.append(_bar(batch, x + room * 0.12, room * 0.76, height, longest))
        found.append("</g>")
    for index in sorted({0, len(batches) - 1}):
        x = _LEFT + (index + 0.5) * room
        is_at_edge = x > _WIDTH - 40
        anchor = "start" if index == 0 else "end" if is_at_edge else "middle"
        at = _LEFT if index == 0 else _WIDTH if is_at_edge else x
        found.append(
            f'<text x="{at:.1f}" y="{_HEIGHT - 4}" text-anchor="{anchor}" '
            f'fill-opacity=".68">batch {batches[index].batch_id}</text>'
        )
    found.append("</svg>")
    return "".join(found)


def _ticks(longest: float) -> list[float]:
    """Returns two to five round durations from 0 to ``longest``, in seconds."""
    magnitude = 10.0 ** floor(log10(longest))
    step = next(each * magnitude for each in (0.2, 0.5, 1.0, 2.0, 5.0) if longest / (each * magnitude) < 5)
    return [number * step for number in range(int(longest / step + 1e-9) + 1)]


def _bar(batch: BatchView, x: float, width: float, height: float, longest: float) -> str:
    found, done = [], 0.0
    bottom = _TOP + height
    for group, seconds in batch.seconds.items():
        begin, done = done, done + seconds
        low, high = (min(1.0, each / longest) * height for each in (begin, done))
        if high > low:
            found.append(
                f'<rect x="{x:.1f}" y="{bottom - high:.1f}" width="{width:.1f}" height="{high - low:.2f}" '
                f'fill="{wording.STEPS[group]}"/>'
            )
    if done > longest * 1.005:  # the bar is cut off
        found.append(
            f'<path d="M{x:.1f} {_TOP - 1} l{width / 2:.1f} -6 l{width / 2:.1f} 6 z" fill-opacity=".6"/>'
        )
    if batch.outcome is Outcome.FAILED or batch.retried:
        colour = wording.STEPS[StepGroup.RETRY]
        found.append(
            f'<rect x="{x:.1f}" y="{bottom + 1:.1f}" width="{width:.1f}" height="2.5" fill="{colour}"/>'
        )
    return "".join(found)


def _tooltip(batch: BatchView) -> str:
    steps = [f"{wording.MEANING[group]}: {wording.duration(each)}" for group, each in batch.seconds.items()]
    head = f"batch {batch.batch_id}: {wording.duration(batch.total_seconds)}, {wording.batch_result(batch)}"
    if batch.outcome is Outcome.COMMITTED:
        head += " records"
    return "\n".join([head, *steps])


def _legend(batches: Sequence[BatchView]) -> str:
    totals = {
        group: sum(each.seconds.get(group, 0.0) for each in batches) / len(batches) for group in StepGroup
    }
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:2px 14px;font-size:11px;margin:4px 0 4px">'
        + "".join(
            f'<span title="{_escaped(wording.MEANING[group])}; mean of the batches shown" '
            'style="display:inline-flex;align-items:center;gap:4px">'
            f'<span style="width:9px;height:9px;border-radius:2px;background:{wording.STEPS[group]}"></span>'
            f'<span>{group.value} <span style="{_FADED}">{wording.duration(mean)}</span></span></span>'
            for group, mean in totals.items()
            if mean
        )
        + "</div>"
    )


def _details(view: QueryView) -> str:
    rows = "".join(
        f'<tr style="background:none"><td style="{_FADED};padding:1px 14px 1px 0;text-align:left;'
        f'vertical-align:top;white-space:nowrap;border:0">{_escaped(name)}</td>'
        f'<td style="padding:1px 0;text-align:left;border:0">{_escaped(value)}</td></tr>'
        for name, value in wording.facts(view)
        if name != wording.LAST_MINUTE  # the headlines have it
    )
    style = "border-collapse:collapse;border:0;margin:10px 0 0;font-size:12px;color:inherit"
    return f'<table style="{style}">{rows}</table>'


# -- rows of a store -------------------------------------------------------------------------------

#: Longer cells are cut off.
_MOST_CHARACTERS = 60
#: Further columns are not shown.
_MOST_COLUMNS = 16
#: Lines of the terminal around the rows.
_LINES_AROUND_ROWS = 6


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
        most = len(table.rows) if height is None else max(1, height - _LINES_AROUND_ROWS)
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
