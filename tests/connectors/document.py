"""docs/connectors/ as tests read it: its indented examples, which they run as they stand."""

import re
from typing import Final

from tests.connectors.connector import ROOT

FOLDER: Final = ROOT / "docs" / "connectors"
#: The table of all connectors, and the list of what is skipped.
DOCUMENT: Final = FOLDER / "README.md"


def examples() -> list[str]:
    """The indented examples of all pages, unindented, lines that a backslash continues made one."""
    pages = [page.read_text() for page in sorted(FOLDER.glob("*.md"))]
    found = re.findall(r"(?:^    .*\n)+", "\n".join(pages), flags=re.MULTILINE)
    texts = [re.sub(r"^    ", "", one, flags=re.MULTILINE) for one in found]
    return [text.replace("\\\n", " ") for text in texts]


def example(*words: str) -> str:
    """The one example that begins with the first word and holds the others."""
    (found,) = [
        text
        for text in examples()
        if text.startswith(words[0]) and all(word in text for word in words)
    ]
    return found
