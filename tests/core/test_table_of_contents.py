"""docs/README.md lists every page once, README leads to it, and no link of a page leads nowhere."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.support.mounting import ROOT

DOCS: Final = ROOT / "docs"
PAGES: Final = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md")))
_ROW: Final = re.compile(r"^\| \[([a-z-]+\.md)\]\(\1\) \| (.+) \|$", re.MULTILINE)
_LINK: Final = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def test_every_page_has_a_line() -> None:
    listed = [name for name, _ in _ROW.findall((DOCS / "README.md").read_text())]
    assert len(listed) == len(set(listed))
    assert set(listed) == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


def test_the_readme_leads_to_the_table() -> None:
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target
