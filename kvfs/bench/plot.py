"""The results as an SVG picture: a line for each job, a dot for each pair, a bar at the median.

Pure.
"""

from collections.abc import Sequence
from html import escape
from typing import Final

from kvfs.bench.results import JobResult

_LEFT: Final = 210
_SCALE: Final = 560
_RIGHT: Final = 90
_TOP: Final = 64
_ROW: Final = 28
_GRID: Final = 0.25
#: A larger ratio is drawn at the edge, so that one outlier does not squeeze all others.
_MOST: Final = 2.0
_GOOD, _BAD, _PLAIN = "#1a7f37", "#cf222e", "#0969da"


def plot(results: Sequence[JobResult], baseline_name: str) -> str:
    """Return an SVG document of the ratios of *results*."""
    highest = max((r for result in results for r in result.comparison.ratios), default=1.0)
    right = _GRID * (int(min(max(highest, 1.0), _MOST) / _GRID) + 1)
    width, bottom = _LEFT + _SCALE + _RIGHT, _TOP + _ROW * len(results)
    title = f"kvfs / {baseline_name}: each dot one pair of runs, bars the medians"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 40}" '
        f'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{bottom + 40}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="16">{escape(title)}</text>',
    ]
    for step in range(round(right / _GRID) + 1):
        lines += _grid_line(step * _GRID, right, bottom)
    for number, result in enumerate(results):
        lines += _row(result, _TOP + _ROW * number + _ROW // 2, right)
    lines.append(
        f'<text x="{_LEFT}" y="{bottom + 34}" fill="#57606a">'
        "to the right is faster; an open triangle marks the goal</text>"
    )
    return "\n".join([*lines, "</svg>\n"])


def _x(ratio: float, right: float) -> str:
    return f"{_LEFT + _SCALE * min(ratio, right) / right:.1f}"


def _grid_line(ratio: float, right: float, bottom: int) -> list[str]:
    x, even = _x(ratio, right), ratio == 1.0
    colour, weight = ("#24292f", 1.5) if even else ("#d0d7de", 1)
    return [
        f'<line x1="{x}" y1="{_TOP - 8}" x2="{x}" y2="{bottom}" stroke="{colour}" '
        f'stroke-width="{weight}"/>',
        f'<text x="{x}" y="{_TOP - 14}" text-anchor="middle" fill="#57606a">{ratio:.2f}</text>',
    ]


def _row(result: JobResult, y: int, right: float) -> list[str]:
    ratio, goal = result.comparison.ratio, result.job.goal
    colour = {None: _PLAIN, True: _GOOD, False: _BAD}[result.met]
    middle = _x(ratio.median, right)
    lines = [f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end">{result.job.name}</text>']
    lines += [
        f'<circle cx="{_x(each, right)}" cy="{y}" r="4" fill="{colour}" fill-opacity="0.35"/>'
        for each in result.comparison.ratios
    ]
    lines += [
        f'<line x1="{middle}" y1="{y - 9}" x2="{middle}" y2="{y + 9}" stroke="{colour}" '
        f'stroke-width="3"/>',
        f'<text x="{_LEFT + _SCALE + 14}" y="{y + 4}" fill="{colour}">{ratio.median:.2f}</text>',
    ]
    if goal is not None:
        x = float(_x(goal.at_least, right))
        points = f"{x - 4:.1f},{y + 13} {x + 4:.1f},{y + 13} {x:.1f},{y + 6}"
        lines.append(f'<polygon points="{points}" fill="none" stroke="#57606a"/>')
    return lines
