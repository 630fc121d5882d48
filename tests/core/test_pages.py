"""What somebody reads: the words are spelled right, and each link leads somewhere."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.mounts.mounting import ROOT

PAGES: Final = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
#: Where text stands that somebody reads; what programs printed is theirs.
READ: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")
FOLDERS: Final = ("docs", "kvfs", "mount", "make", "debian", "systemd")
NOT_READ: Final = "*.svg,*.json,*.pyc,proof-*.txt"
#: Words that the speller takes for others: systemctl reenable, names in code, the size of a block.
KNOWN: Final = "notin,reenable,anothers,ned,bloc"
_LINK: Final = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)")
_FENCED: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def spelled(*places: str | Path) -> subprocess.CompletedProcess[str]:
    """Let codespell read *places*."""
    speller = Path(sys.executable).with_name("codespell")
    command = [speller, "--skip", NOT_READ, "--ignore-words-list", KNOWN, *places]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_words_are_spelled_right(tmp_path: Path) -> None:
    done = spelled(*READ, *FOLDERS)
    assert done.returncode == 0, done.stdout
    (tmp_path / "page.md").write_text("A block is evicted when teh pool is full.\n")
    assert "teh ==> the" in spelled(tmp_path).stdout


def anchors(page: Path) -> set[str]:
    """Return the names of the headings of *page*, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    words = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in words}


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield file and place of each link to a file of the repository."""
    for target in _LINK.findall(_FENCED.sub("", page.read_text())):
        if not re.match(r"[a-z]+:", target):
            file, _, place = target.partition("#")
            yield file, place


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for file, place in links(page):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not place or place in anchors(target), f"{file}#{place}"


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Is it *so*?\n\n[here](#is-it-so) and [there](other.md#x)\n")
    assert anchors(page) == {"is-it-so"}
    assert list(links(page)) == [("", "is-it-so"), ("other.md", "x")]
