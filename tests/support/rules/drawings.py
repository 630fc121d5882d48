"""Drawings in documents that are made from the tables themselves."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

DOCS: Final = Path(__file__).parents[3] / "docs"


class Drawing(NamedTuple):
    """A part of a document between two marks, which *make* writes; *module* is run to renew it."""

    document: str
    name: str
    module: str
    make: Callable[[], str]

    def _split(self) -> tuple[str, str, str]:
        """Return the document before the drawing, the drawing, and what follows."""
        begin = f"<!-- {self.name}: made by tests/support/rules/{self.module}.py -->\n"
        text = (DOCS / self.document).read_text()
        above, _, rest = text.partition(begin)
        end = f"<!-- end of {self.name} -->\n"
        drawn, found, below = rest.partition(end)
        assert found, f"docs/{self.document} has no marks for {self.name}"
        return above + begin, drawn, end + below

    def shown(self) -> str:
        """Return what the document shows."""
        return self._split()[1]

    def write(self) -> None:
        """Write the drawing into the document."""
        above, _, below = self._split()
        (DOCS / self.document).write_text(above + self.make() + below)


def rows(*cells: Sequence[str]) -> list[str]:
    """Return a table of Markdown; the first of *cells* are its heads."""
    head, *body = (f"| {' | '.join(row)} |" for row in cells)
    return [head, f"|{'---|' * len(cells[0])}", *body]
