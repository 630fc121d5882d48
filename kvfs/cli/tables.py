"""Tables on standard output, which is never too narrow for them: of plain text, and by rich.

Plain text is for commands that answer at once: the import of rich takes longer.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

LEAST_COLUMNS: Final = 60
_COLUMNS_WITHOUT_TERMINAL: Final = 120
_GAP: Final = "  "
_FOLDED_LEAST: Final = 10
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def columns_for_tables(least: int, without_terminal: int = _COLUMNS_WITHOUT_TERMINAL) -> int:
    """Return the width of standard output, *least* if it is narrower."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else without_terminal
    return max(least, columns)


def console_for_tables(
    least: int = LEAST_COLUMNS, without_terminal: int = _COLUMNS_WITHOUT_TERMINAL
) -> "Console":
    """Return standard output as a console of *least* columns or more.

    On a narrower terminal the lines wrap. Otherwise rich would leave out whole columns.
    """
    from rich.console import Console

    width = columns_for_tables(least, without_terminal)
    return Console(width=width, highlight=False, markup=False)


class Column(NamedTuple):
    """One column: figures stand on the right; the one that folds makes room for the others."""

    heading: str = ""
    right: bool = False
    folds: bool = False
    least: int = 0
    """Its least width, in characters."""


def table_lines(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int, *, stacks: bool = False
) -> Iterator[str]:
    """Yield the lines of a table, the headings first if there are any.

    A cell may have several lines. Only cells of columns that fold are broken, so that a line may be
    longer than *width* characters. If it *stacks*, cells then stand one below another instead.
    """
    rows = list(rows)
    cells = [[cell.split("\n") for cell in row] for row in rows]
    if any(column.heading for column in columns):
        cells.insert(0, [[column.heading] for column in columns])
    widths = [
        max([column.least, *(len(line) for row in cells for line in row[number])])
        for number, column in enumerate(columns)
    ]
    over = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    for number, column in enumerate(columns):
        if column.folds and over > 0:
            # Names may be broken beside figures; in what one reads, words stay whole.
            words = [len(word) for row in cells for word in " ".join(row[number]).split()]
            whole = max(words, default=0) if stacks and not column.heading else 0
            folded = max(widths[number] - over, len(column.heading), _FOLDED_LEAST, whole)
            folded = min(folded, widths[number])
            over -= widths[number] - folded
            widths[number] = folded
    if over > 0 and stacks:
        yield from _one_below_another(columns, rows, width)
        return
    for row in cells:
        folded_row = [_folded(lines, wide) for lines, wide in zip(row, widths, strict=True)]
        for line in zip_longest(*folded_row, fillvalue=""):
            placed = (
                text.rjust(wide) if column.right else text.ljust(wide)
                for text, wide, column in zip(line, widths, columns, strict=True)
            )
            yield _GAP.join(placed).rstrip()


def _one_below_another(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int
) -> Iterator[str]:
    """Yield each row as its first cell, and below it the others with their headings.

    Without headings, rows have a label and a value: these stay together. Lines break at words.
    """
    is_headed = any(column.heading for column in columns)
    if is_headed:
        yield columns[0].heading
    for first, *others in rows:
        if is_headed:
            yield from _broken(first, width)
            labels = [f"{_GAP}{column.heading}: " for column in columns[1:]]
            for label, cell in zip(labels, others, strict=True):
                yield from _broken(label + cell, width)
        else:
            yield from _broken(f"{first}: {' '.join(others)}".rstrip(": "), width)


def _broken(text: str, width: int) -> Iterator[str]:
    """Yield the lines of *text*, broken at words; what is not the first stands further right."""
    first, *others = text.split("\n")
    indent = " " * (len(first) - len(first.lstrip()) + len(_GAP))
    for line in (first, *(indent + other for other in others)):
        yield from wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def headed(text: str) -> str:
    """Return *text* as a heading: bold on a terminal, unless NO_COLOR is set."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return f"{_BOLD}{text}{_PLAIN}"
    return text


def _folded(lines: Iterable[str], wide: int) -> list[str]:
    """Return *lines* broken at *wide* characters, after a word that ends in the second half."""
    found = []
    for line in lines:
        rest = line
        while len(rest) > wide:
            at = rest.rfind(" ", wide // 2, wide + 1)
            if at < 0:
                found.append(rest[:wide])
                rest = rest[wide:]
            else:
                found.append(rest[:at])
                rest = rest[at + 1 :]
        found.append(rest)
    return found


def shown_time(time_s: float | None) -> str:
    """Return a time for a reader, in the largest unit of which it has at least two.

    Below a second in ms; "-" if there is none.
    """
    if time_s is None:
        return "-"
    if 0 < time_s < 0.9995:
        return f"{time_s * 1e3:.3g} ms"
    for unit, unit_s in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if time_s >= 2 * unit_s:
            return f"{time_s / unit_s:,.1f} {unit}"
    return f"{time_s:,.1f} s"
