"""docs/connectors.md as tests read it: its indented examples, which they run as they stand."""

import re
from typing import Final

from tests.connectors.connector import ROOT

DOCUMENT: Final = ROOT / "docs" / "connectors.md"


def examples() -> list[str]:
    """The indented examples, unindented, lines that a backslash continues made one."""
    found = re.findall(r"(?:^    .*\n)+", DOCUMENT.read_text(), flags=re.MULTILINE)
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
