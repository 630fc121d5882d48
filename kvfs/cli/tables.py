"""The console for the tables of a command: standard output, never too narrow for them."""

import shutil
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

LEAST_COLUMNS: Final = 60
_COLUMNS_WITHOUT_TERMINAL: Final = 120


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
