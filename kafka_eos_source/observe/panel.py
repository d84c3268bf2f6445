"""Draws the view of a query as HTML with inline SVG, for light and dark notebooks. A pure function."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from math import floor, log10

from kafka_eos_source.observe import colours, wording
from kafka_eos_source.observe.figures import Outcome, StepGroup
from kafka_eos_source.observe.view import BatchView, QueryView, usual_longest

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
            f"{colours.STATUS[view.status]};"
            f'background:rgba(128,128,128,.10)">{_escaped(view.status_text)}</div>'
        )
    return (
        '<div style="display:flex;align-items:center;gap:8px;flex-wrap:wrap">'
        f'<span style="display:inline-block;width:9px;height:9px;border-radius:50%;'
        f'background:{colours.STATUS[view.status]}"></span>'
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
                f'fill="{colours.STEPS[group]}"/>'
            )
    if done > longest * 1.005:  # the bar is cut off
        found.append(
            f'<path d="M{x:.1f} {_TOP - 1} l{width / 2:.1f} -6 l{width / 2:.1f} 6 z" fill-opacity=".6"/>'
        )
    if batch.outcome is Outcome.FAILED or batch.retried:
        colour = colours.STEPS[StepGroup.RETRY]
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
            f'<span style="width:9px;height:9px;border-radius:2px;background:{colours.STEPS[group]}"></span>'
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
