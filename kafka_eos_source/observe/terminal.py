"""Draws views of queries for a terminal of any width, with or without colours."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kafka_eos_source.observe import colours, wording
from kafka_eos_source.observe.figures import StepGroup
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
            "No query of this user has run on this host during the last ten minutes. --all shows older ones."
        )
    if len(views) > 1:
        return _Overview(views)
    return _Details(views[0], 30 if height is None else max(3, height - _OTHER_LINES))


def _text(text: str, style: str = "") -> Text:
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
                _text(view.title),
                Text(state, f"bold {colours.STATUS[view.status]}"),
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
                yield _text(f"{view.title}: {view.status_text}", colours.STATUS[view.status])
        yield Text("Name a query with --application-id to see its micro-batches.", "dim")


class _Details:
    """Everything about one query."""

    def __init__(self, view: QueryView, most_batches: int) -> None:
        self._view = view
        self._most_batches = most_batches

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view = self._view
        head = Text.assemble(
            _text(view.title, "bold"), "  ", (wording.status(view), f"bold {colours.STATUS[view.status]}")
        )
        yield head
        if view.status_text:
            yield _text(view.status_text, colours.STATUS[view.status])
        yield Text()
        facts = Table(box=None, show_header=False, pad_edge=False)
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        for name, value in wording.facts(view):
            facts.add_row(_text(name), _text(value))
        yield facts
        if view.batches:
            yield Text()
            yield _batches(view.batches[-self._most_batches :], options.max_width, console)
            yield _legend(view.batches, console)


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
            ("█" if colour else _LETTERS[group]) * (until - drawn), colours.STEPS[group] if colour else ""
        )
        drawn = until
    if done > longest * (1 + 0.5 / width):
        found.right_crop(1)
        found.append("›")
    return found


def _legend(batches: Sequence[BatchView], console: Console) -> Text:
    colour = console.color_system is not None and not console.no_color
    shown = [group for group in StepGroup if any(group in each.seconds for each in batches)]
    found = Text()
    for group in shown:
        found.append("█ " if colour else f"{_LETTERS[group]} ", colours.STEPS[group] if colour else "")
        found.append(f"{group.value}  ", "dim")
    return found
