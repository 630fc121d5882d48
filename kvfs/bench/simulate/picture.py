"""The picture of a simulation: hits and writes by the size of the pool, a line for each policy."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

from kvfs.bench.simulate.served import Outcome

#: Pixels: where the two panels begin, their size, and the room for names on the right.
_LEFT: Final = 56
_ABOVE: Final = 64
_WIDE: Final = 300
_HIGH: Final = 240
_GAP: Final = 70
_NAMES: Final = 130
_TEXT, _SOFT, _GRID = "#24292f", "#57606a", "#d0d7de"
#: One for each policy, told apart by those who see few colours.
_COLOURS: Final = ("#57606a", "#0969da", "#8250df", "#1a7f37", "#bf8700", "#cf222e")
_STEPS: Final = 5


def picture_of(
    title: str,
    sizes: Sequence[str],
    outcomes: Mapping[str, Sequence[Outcome]],
    *,
    found: str,
    of: str,
) -> str:
    """Return an SVG document. *sizes*: as they are shown; *outcomes*: by policy, one a size.

    *found* says what a hit is, and *of* what rates are shares of.
    """
    width, height = _LEFT + 2 * _WIDE + _GAP + _NAMES, _ABOVE + _HIGH + 60
    panels = (
        (f"{found}, % of all {of}", _hits),
        (f"written, % of all {of}", _written),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _words(16, 24, title, _TEXT),
    ]
    for number, (heading, value_of) in enumerate(panels):
        left = _LEFT + number * (_WIDE + _GAP)
        most = max((value_of(one) for each in outcomes.values() for one in each), default=0)
        top_value = max(10, 10 * -(-int(most) // 10))
        parts += _panel(left, heading, sizes, top_value)
        for colour, each in zip(_COLOURS, outcomes.values(), strict=False):
            values = [value_of(one) for one in each]
            parts.append(_line(left, values, top_value, colour))
    for number, (name, colour) in enumerate(zip(outcomes, _COLOURS, strict=False)):
        x, y = _LEFT + 2 * _WIDE + _GAP + 24, _ABOVE + 20 * number
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(_words(x + 18, y + 11, name, _TEXT))
    return "\n".join([*parts, "</svg>\n"])


def _hits(outcome: Outcome) -> float:
    return outcome.prefix_hits


def _written(outcome: Outcome) -> float:
    return outcome.written


def _panel(left: int, heading: str, sizes: Sequence[str], top_value: int) -> Iterator[str]:
    bottom = _ABOVE + _HIGH
    yield _words(left, _ABOVE - 14, heading, _SOFT)
    for step in range(_STEPS + 1):
        y = bottom - _HIGH * step / _STEPS
        yield (f'<line x1="{left}" y1="{y:g}" x2="{left + _WIDE}" y2="{y:g}" stroke="{_GRID}"/>')
        yield _words(left - 8, y + 4, f"{top_value * step / _STEPS:g}", _SOFT, "end")
    for number, size in enumerate(sizes):
        x = _x(left, number, len(sizes))
        yield _words(x, bottom + 18, size, _SOFT, "middle")
    yield _words(left, bottom + 40, "size of the pool, of all blocks", _SOFT)


def _line(left: int, values: Sequence[float], top_value: int, colour: str) -> str:
    points = [
        (_x(left, number, len(values)), _ABOVE + _HIGH * (1 - value / top_value))
        for number, value in enumerate(values)
    ]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
    return f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'


def _x(left: int, number: int, count: int) -> float:
    return left + _WIDE * (number + 0.5) / count


def _words(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
