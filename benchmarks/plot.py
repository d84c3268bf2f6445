"""Draws bar charts as SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

_WIDTH, _LABELS, _FIGURES, _ROW, _HEAD = 900, 360, 110, 26, 54


def plot(path: Path, title: str, unit: str, values: Mapping[str, float]) -> None:
    """Writes a chart with a bar for each value, kafka-eos in another colour; no file without values."""
    if not values:
        return
    longest = max(values.values()) or 1.0
    room = _WIDTH - _LABELS - _FIGURES
    height = _HEAD + _ROW * len(values) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="16">{escape(title)}</text>',
        f'<text x="10" y="42" fill="#666">{escape(unit)}</text>',
    ]
    for number, (name, value) in enumerate(values.items()):
        top = _HEAD + number * _ROW
        colour = "#2b6cb0" if name.startswith("kafka-eos") else "#a0aec0"
        figure = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        length = max(1.0, room * value / longest)
        lines += [
            f'<text x="10" y="{top + 15}">{escape(name)}</text>',
            f'<rect x="{_LABELS}" y="{top + 2}" width="{length:.0f}" height="18" fill="{colour}"/>',
            f'<text x="{_LABELS + length + 6:.0f}" y="{top + 15}">{figure}</text>',
        ]
    path.write_text("\n".join([*lines, "</svg>"]) + "\n")
