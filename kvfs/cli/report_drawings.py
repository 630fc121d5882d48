"""How ``kvfs report`` looks: its style, and drawings as SVG in the text, in the theme's colours.

Light and dark, from 400 pixels on, printable. The colours of text keep a contrast of 4.5 to 1 or
more to what lies behind them. Every figure of a drawing also stands in words or a table beside it.
Widths are those of the narrowest screen, so that letters are never smaller than they are meant to
be.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

from kvfs.cli.tables import shown_time

STYLE: Final = """
:root {
  color-scheme: light dark;
  --back: #f6f7f9; --card: #ffffff; --text: #1b1f24; --soft: #57606a; --edge: #d8dee4;
  --one: #0969da; --two: #8250df; --good: #1a7f37; --bad: #b3261e; --rest: #e6eaef;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #0d1117; --card: #161b22; --text: #e6edf3; --soft: #9aa4af; --edge: #30363d;
    --one: #58a6ff; --two: #bc8cff; --good: #56d364; --bad: #ff7b72; --rest: #2a313a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 16px; max-width: 1400px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif;
}
h1 { margin: 0; font-size: 24px; overflow-wrap: anywhere; }
h2 { margin: 0 0 8px; font-size: 16px; }
ul { margin: 0; padding-left: 20px; } li { margin-bottom: 8px; overflow-wrap: anywhere; }
p { margin: 0 0 8px; }
.soft, caption { color: var(--soft); font-size: 13px; }
header { margin-bottom: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.cards {
  display: grid; grid-auto-flow: dense; gap: 12px; margin-top: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
}
.tile, .card {
  min-width: 0; padding: 12px 14px; background: var(--card); border: 1px solid var(--edge);
  border-radius: 8px;
}
.wide { grid-column: 1 / -1; }
.tile b { display: block; font-size: 22px; overflow-wrap: anywhere; }
.scrolls { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: 4px 8px 4px 0; border-bottom: 1px solid var(--edge); text-align: left; }
th { color: var(--soft); font-size: 13px; font-weight: 600; }
td { vertical-align: top; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.name { min-width: 9em; overflow-wrap: anywhere; }
code { font-size: 13px; overflow-wrap: anywhere; white-space: pre-wrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
.drawing { display: block; width: 100%; max-width: 640px; height: auto; }
.drawing text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--edge); stroke-width: 1; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
.one { stroke: var(--one); } .two { stroke: var(--two); stroke-dasharray: 5 3; }
.dot { stroke: none; fill: var(--one); } .two.dot { fill: var(--two); }
.bar { fill: var(--one); } .rest { fill: var(--rest); }
.half { stroke: var(--text); stroke-width: 2; }
.key { display: inline-block; width: 18px; margin: 0 4px 4px 0; border-top: 3px solid var(--one); }
.key.two { border-top: 3px dashed var(--two); margin-left: 12px; }
.cell { vertical-align: middle; }
@media print { body { max-width: none; } .card, .tile { break-inside: avoid; } }
"""


WIDTH: Final = 340
_HEIGHT: Final = 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 12, 30
_GRID_LINES: Final = 4
#: The axis of ages: from a second to a month.
_YOUNGEST_S: Final = 1.0
_OLDEST_S: Final = 30 * 86_400.0
_AGE_MARKS: Final = ((1.0, "1 s"), (60.0, "1 min"), (3600.0, "1 h"), (86_400.0, "1 d"))


class Line(NamedTuple):
    """A line of a drawing: its class in the style sheet, and its points; None is a gap."""

    style: str
    points: Sequence[tuple[float, float | None]]


def lines_over(
    lines: Iterable[Line],
    *,
    title: str,
    top: float,
    y_marks: Sequence[str],
    x_marks: Mapping[float, str],
    dots: bool = False,
) -> str:
    """Return a drawing of *lines*: x from 0 to 1, y from 0 to *top*.

    *y_marks* are written from the bottom to the top, *x_marks* below their x.
    """
    parts = list(_grid(y_marks, x_marks))
    for line in lines:
        placed = [(x, None if y is None else y / top if top else 0.0) for x, y in line.points]
        for run in _runs(placed):
            path = " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in run)
            parts.append(f'<polyline class="{line.style}" points="{path}"/>')
            shown = run if dots or len(run) == 1 else []
            parts += [
                f'<circle class="{line.style} dot" cx="{_x(x):.1f}" cy="{_y(y):.1f}" r="3"/>'
                for x, y in shown
            ]
    return _drawing(title, _HEIGHT, parts)


def ages(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return a drawing of quantiles of ages: a bar from a tenth to nine tenths, a mark at half."""
    parts = []
    bottom = 14 + 34 * len(rows)
    for age_s, text in _AGE_MARKS:
        x = _age_x(age_s)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="6" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 16, text, "middle"))
    for number, (name, quantiles) in enumerate(rows):
        y = 20 + 34 * number
        parts.append(_text(_LEFT, y, name, "start"))
        low_s, middle_s, high_s = (quantiles.get(key) for key in ("p10_s", "p50_s", "p90_s"))
        if low_s is None or middle_s is None or high_s is None:
            continue
        left, right = _age_x(low_s), _age_x(high_s)
        parts.append(
            f'<rect class="bar" x="{left:.1f}" y="{y + 5}" width="{max(2.0, right - left):.1f}" '
            'height="9" rx="2"/>'
        )
        middle = _age_x(middle_s)
        parts.append(
            f'<line class="half" x1="{middle:.1f}" y1="{y + 2}" x2="{middle:.1f}" y2="{y + 17}"/>'
        )
    said = "; ".join(f"{name}: half after {shown_time(each.get('p50_s'))}" for name, each in rows)
    return _drawing(f"Ages of blocks. {said}", bottom + 24, parts)


def share_bar(share: float | None) -> str:
    """Return a bar for a share, 0 to 1, for a cell of a table."""
    wide = 0.0 if share is None else 60 * min(1.0, max(0.0, share))
    return (
        '<svg class="cell" viewBox="0 0 60 8" width="60" height="8" aria-hidden="true">'
        '<rect class="rest" width="60" height="8" rx="2"/>'
        f'<rect class="bar" width="{wide:.1f}" height="8" rx="2"/></svg>'
    )


def _drawing(title: str, height: int, parts: Iterable[str]) -> str:
    return (
        f'<svg class="drawing" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {WIDTH} {height}">{"".join(parts)}</svg>'
    )


def _grid(y_marks: Sequence[str], x_marks: Mapping[float, str]) -> Iterator[str]:
    for number, text in enumerate(y_marks):
        y = _y(number / (len(y_marks) - 1))
        yield f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>'
        if text:
            yield _text(_LEFT - 5, y + 4, text, "end")
    for x, text in x_marks.items():
        anchor = "start" if x <= 0 else "end" if x >= 1 else "middle"
        yield _text(_x(x), _HEIGHT - 10, text, anchor)


def _runs(
    points: Iterable[tuple[float, float | None]],
) -> Iterator[list[tuple[float, float]]]:
    """Yield the points between two gaps."""
    run: list[tuple[float, float]] = []
    for x, y in points:
        if y is not None:
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _x(share: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * share


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(1.0, max(0.0, share))


def _age_x(age_s: float) -> float:
    bounded_s = min(_OLDEST_S, max(_YOUNGEST_S, age_s))
    return _x(math.log(bounded_s / _YOUNGEST_S) / math.log(_OLDEST_S / _YOUNGEST_S))
