"""Every file that a page or a comment names exists: who follows a walk must not end at a wall."""

import io
import re
import tokenize
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = [
    *sorted(page.name for page in ROOT.glob("*.md")),
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")),
]
SOURCES: Final = sorted(
    str(path.relative_to(ROOT)) for top in ("kvfs", "mount") for path in (ROOT / top).rglob("*.py")
)
#: A path from the top of the repository; a star stands for any part of a name.
PATH: Final = re.compile(r"(?<![\w/.~-])((?:kvfs|mount|tests|docs|systemd|make)/[\w./*@-]*[\w*/])")
#: A file by its name alone. A page about other programs names files of theirs.
NAME: Final = re.compile(r"(?<![\w/.*-])(\w+\.py)\b")
OTHERS_FILES: Final = "docs/connectors/"
ARCHITECTURE_LINES_MAX: Final = 150


def is_there(pattern: str) -> bool:
    return any(ROOT.glob(pattern.rstrip("/")))


def comments_of(source: str) -> str:
    """The comments and texts of a Python file."""
    tokens = tokenize.generate_tokens(io.StringIO((ROOT / source).read_text()).readline)
    return "\n".join(t.string for t in tokens if t.type in (tokenize.COMMENT, tokenize.STRING))


@pytest.mark.parametrize("page", PAGES)
def test_paths_on_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    missing = {path for path in PATH.findall(text) if not is_there(path)}
    if not page.startswith(OTHERS_FILES):
        missing |= {name for name in NAME.findall(text) if not is_there(f"[kmt]*/**/{name}")}
    assert not missing, f"{page} names what is not there: {sorted(missing)}"


@pytest.mark.parametrize("source", SOURCES)
def test_paths_in_comments_exist(source: str) -> None:
    text = comments_of(source)
    paths = {path for path in PATH.findall(text) if path.endswith((".py", ".md"))}
    missing = {path for path in paths if not is_there(path)}
    missing |= {name for name in NAME.findall(text) if not is_there(f"[kmt]*/**/{name}")}
    assert not missing, f"{source} names what is not there: {sorted(missing)}"


def test_the_architecture_is_short_enough_to_be_read() -> None:
    lines = (ROOT / "docs" / "dev" / "architecture.md").read_text().splitlines()
    assert len(lines) <= ARCHITECTURE_LINES_MAX
