"""README.md as a package index shows it: alone, where a link to another file leads nowhere.

There is no address of the repository to point to. So a link to a file becomes the file's path, and
a line says where the files are.
"""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
#: A link without a scheme: to a file beside README.md, or to a place in it.
_RELATIVE: Final = re.compile(r"\[([^]]+)\]\((?![a-z]+:)([^)]+)\)")
#: Only a repository shows it.
_PICTURE: Final = re.compile(r"<picture>.*?</picture>\n\n", re.DOTALL)
_WHERE: Final = (
    "Files that are named here, such as docs/install.md, are in the source package, and after an "
    "installation in `share/doc/kvfs` below its prefix."
)


def long_description() -> str:
    """Return README.md without relative links and pictures."""
    title, _, rest = (ROOT / "README.md").read_text().partition("\n")
    return f"{title}\n\n{_WHERE}\n{_RELATIVE.sub(_as_path, _PICTURE.sub('', rest))}"


def _as_path(link: re.Match[str]) -> str:
    text, target = link.groups()
    return text if text == target else f"{text} ({target})"
