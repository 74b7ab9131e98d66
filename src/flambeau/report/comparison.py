"""The web page of `flambeau compare`: tables, a histogram of ulps, and the first operator that differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from flambeau.compare.comparison import Comparison
from flambeau.compare.differences import Difference
from flambeau.compare.first_difference import First
from flambeau.report.sheet import html_page

HEADINGS = ("", "type", "differ", "of", "most ulps", "error of eager", "compiled", "ratio", "")
BAR, GAP, TALL, LEFT, TOP = 34, 10, 180, 44, 24  # sizes in the histogram, in pixels

STYLE = """tr.differs td:first-child { box-shadow: inset 4px 0 #ee6677 }
tr.equal td:first-child { box-shadow: inset 4px 0 #228833 }
td.worse { color: #ee6677; font-weight: 600 }
.first { border-left: 4px solid #ee6677; padding: .2rem 1rem; margin: 1rem 0 }
pre { margin: .3rem 0 }
svg text { font: 11px system-ui, sans-serif; fill: currentColor } svg rect { fill: #4477aa }
"""


def cells(d: Difference) -> tuple[str, ...]:
    """The cells of one row, as text."""
    ratio = "" if d.ratio is None else "∞" if math.isinf(d.ratio) else f"{d.ratio:.2f}"
    errors = ("" if e is None else f"{e:.2e}" for e in (d.rms_eager, d.rms_compiled))
    return (d.name, f"{d.dtype}{list(d.shape)}", f"{d.differ:,}", f"{d.total:,}", f"{d.max_ulps:,}", *errors, ratio,
            d.note.removeprefix("! "))


def page(report: Comparison, title: str) -> str:
    return html_page(f"{title}: compiled and eager", STYLE, parts(report))


def fragment(report: Comparison) -> str:
    """The same content for use inside another page, such as a notebook."""
    return f"<style>{STYLE}</style>" + "\n".join(parts(report))


def parts(report: Comparison) -> list[str]:
    body = [f"<p id=headline>{escape(report.headline())}</p>"]
    for heading, first in [("The first difference", report.first), *(("Also", f) for f in report.also)]:
        body += about(heading, first) if first is not None else []
    if report.histogram:
        body += ["<h2>Size of the differences</h2>", plot(report.histogram)]
    body += ["<h2>Results and gradients</h2>", table(report.rows)]
    if report.layers:
        body += ["<h2>Layers</h2><p>Results of submodules, from a compiled model that also returns them.</p>",
                 table(report.layers)]
    body += [f"<p class=note>{escape(note)}</p>" for note in report.notes]
    body.append("<p>Errors are root mean square differences from a float64 reference. The ratio is the error of "
                "compiled divided by the error of eager.</p>")
    return body


def about(heading: str, f: First) -> Iterator[str]:
    place = f"graph {f.graph}, {f.direction}" if f.graph else f.direction
    yield f"<h2>{heading}</h2><div class=first><p><b>{escape(f.operator)}</b> ({place}): {escape(f.why())}.</p>"
    if f.layer or f.file:
        where = f"{f.file}:{f.line}" if f.file else ""
        yield f"<p>{escape(f.layer and f'In layer {f.layer}.')}</p><pre>{escape(where)}\n  {escape(f.code)}</pre>"
    if len(f.fused) > 1:
        yield f"<p>In a kernel with {escape(', '.join(f.fused))}.</p>"
    yield "</div>"


def table(rows: Sequence[Difference]) -> str:
    out = ["<table><tr>" + "".join(f"<th>{h}</th>" for h in HEADINGS) + "</tr>"]
    for row in rows:
        kinds = ["", "", "n", "n", "n", "n", "n", "n worse" if (row.ratio or 0.0) > 1.0 else "n", ""]
        columns = "".join(f'<td class="{k}">{escape(c)}</td>' for k, c in zip(kinds, cells(row), strict=True))
        out.append(f'<tr class={"equal" if row.equal else "differs"}>{columns}</tr>')
    return "\n".join([*out, "</table>"])


def plot(bins: Mapping[str, int]) -> str:
    """Bars on a logarithmic scale, so that a single large difference is visible beside thousands of small ones."""
    most = math.log10(max(bins.values()) + 1)
    step = BAR + GAP
    bars = []
    for k, (name, n) in enumerate(bins.items()):
        x, tall = LEFT + k * step, TALL * math.log10(n + 1) / most
        y, middle = TOP + TALL - tall, x + BAR / 2
        bars.append(f'<rect x="{x}" y="{y:.1f}" width="{BAR}" height="{tall:.1f}"><title>{escape(name)}: {n:,}</title>'
                    f'</rect><text x="{middle}" y="{y - 4:.1f}" text-anchor="middle">{n:,}</text>'
                    f'<text x="{middle}" y="{TOP + TALL + 12}" text-anchor="end" '
                    f'transform="rotate(-40 {middle} {TOP + TALL + 12})">{escape(name)}</text>')
    width, height, middle = LEFT * 2 + step * len(bins) + 20, TOP + TALL + 100, TOP + TALL / 2
    bars += [f'<line x1="{LEFT - 6}" x2="{width - LEFT}" y1="{TOP + TALL}" y2="{TOP + TALL}" stroke="currentColor"/>',
             f'<text x="{LEFT + step * len(bins) / 2}" y="{height - 6}" text-anchor="middle">difference in ulps</text>',
             f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
             "number of values (logarithmic)</text>"]
    return (f'<svg id=histogram role=img aria-label="differences in ulps" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">{"".join(bars)}</svg>')
