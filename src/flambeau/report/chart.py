"""Charts of ratios or seconds on a logarithmic axis, as SVG: on each line a bar for us, and a mark for every peer.

Written without a plotting library, so that the documentation needs none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Line = tuple[str, dict[str, float]]  # label, ratio by series

WIDTH, LABELS, RIGHT, TOP, PITCH, BOTTOM = 900, 270, 60, 64, 19, 34
TICKS = (1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
INK, FAINT, PAPER = "#24292f", "#d8dee4", "#ffffff"
FONT = "font-family='system-ui, sans-serif'"


@dataclass(frozen=True)
class Series:
    key: str
    label: str
    colour: str
    mark: str  # of MARKS


MARKS = {
    "circle": "<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{c}' stroke='#ffffff' stroke-width='0.8'/>",
    "square": "<rect x='{l:.1f}' y='{t:.1f}' width='7' height='7' fill='{c}' stroke='#ffffff' stroke-width='0.8'/>",
    "diamond": "<path d='M{x:.1f} {t:.1f} l4 4 l-4 4 l-4 -4 z' fill='{c}' stroke='#ffffff' stroke-width='0.8'/>",
}
MARKS["bar"] = MARKS["square"]  # used in the legend


def mark(series: Series, x: float, y: float) -> str:
    return MARKS[series.mark].format(x=x, y=y, l=x - 3.5, t=y - (4 if series.mark == "diamond" else 3.5),
                                     c=series.colour)


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, more: str = "") -> str:
    return (f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-size='{size}' fill='{INK}' text-anchor='{anchor}'{more}>"
            f"{escape(words)}</text>")


def ratio_chart(title: str, lines: Sequence[Line], series: Sequence[Series], unit: str = "×") -> str:
    """One line for each case. A series with the mark "bar" is drawn as a bar, with its number at the right."""
    values = [v for _, ratios in lines for v in ratios.values()]
    low, high = min(0.9, *values), max(2.0, *values) * 1.1
    bottom = TOP + PITCH * len(lines)
    height = bottom + BOTTOM

    def at(value: float) -> float:
        part = math.log(value / low) / math.log(high / low)
        return LABELS + part * (WIDTH - LABELS - RIGHT)

    out = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img' "
           f"aria-label='{escape(title, quote=True)}'>",
           f"<rect width='{WIDTH}' height='{height}' rx='6' fill='{PAPER}'/>",
           text(16, 24, title, size=15, more=" font-weight='600'")]
    for k, s in enumerate(series):
        out += [mark(s, LABELS + 8 + 110 * k, 43), text(LABELS + 18 + 110 * k, 47, s.label)]
    for tick in (t for t in TICKS if low <= t <= high):
        x = at(tick)
        out += [f"<line x1='{x:.1f}' y1='{TOP - 6}' x2='{x:.1f}' y2='{bottom}' "
                f"stroke='{INK if tick == 1 else FAINT}'/>", text(x, bottom + 18, f"{tick:g}{unit}", "middle")]
    for k, (label, ratios) in enumerate(lines):
        y = TOP + PITCH * k + PITCH / 2
        out.append(text(LABELS - 10, y + 4, label, "end"))
        for s in series:
            if s.key in ratios and s.mark == "bar":
                start, end = sorted((at(1.0), at(ratios[s.key])))
                out += [f"<rect x='{start:.1f}' y='{y - 5:.1f}' width='{max(end - start, 2):.1f}' height='10' rx='1' "
                        f"fill='{s.colour}'/>"]
        out += [mark(s, at(ratios[s.key]), y) for s in series if s.key in ratios and s.mark != "bar"]
        out += [text(WIDTH - RIGHT + 12, y + 4, f"{ratios[s.key]:.2f}{unit}", size=11, more=" fill-opacity='0.8'")
                for s in series if s.key in ratios and s.mark == "bar"]
    return "\n".join([*out, "</svg>", ""])
