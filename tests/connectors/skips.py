"""The list of what is skipped, with its reasons, as docs/connectors/README.md has it."""

import re
from typing import Final

from tests.connectors.document import DOCUMENT

_HEADING: Final = "## Skipped, and why"


def listed() -> dict[str, str]:
    """What is skipped, by its name in the list: the reason."""
    section = DOCUMENT.read_text().partition(f"\n{_HEADING}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, flags=re.MULTILINE)
    return {what.strip("`"): why for what, why in rows[1:]}
