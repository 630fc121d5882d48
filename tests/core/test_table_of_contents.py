"""Each folder of docs/ lists its pages once, README leads there, and no link leads nowhere."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.support.mounts.mounting import ROOT

DOCS: Final = ROOT / "docs"
#: Pages for users, of the programs on a mount, and for developers.
FOLDERS: Final = (DOCS, DOCS / "connectors", DOCS / "dev")
PAGES: Final = (*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("**/*.md")))
_ROW: Final = re.compile(r"^\| \[([a-z-]+\.md)\]\(\1\) \| (.+) \|$", re.MULTILINE)
_LINK: Final = re.compile(r"(?:\]\(|srcset=\"|src=\")([^)#:\"]+)(?:#[^)]*)?[)\"]")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_page_has_a_line(folder: Path) -> None:
    listed = [name for name, _ in _ROW.findall((folder / "README.md").read_text())]
    assert len(listed) == len(set(listed))
    assert set(listed) == {page.name for page in folder.glob("*.md")} - {"README.md"}


def test_the_readme_leads_to_the_tables() -> None:
    for folder in FOLDERS:
        assert f"({folder.relative_to(ROOT)}/README.md)" in (ROOT / "README.md").read_text()


#: What README says it costs, and how the page that measures it says that.
FIGURES: Final = {
    "| 461 us |": "| CPU, store cycle | 461.0 us |",
    "| 36 us |": "| CPU, warm open + close | 35.9 us |",
    "| 9.1 ms a GB |": "| CPU, load of 32 MiB blocks | 9.1 ms/GB |",
    "| 0.72 to 1.12 |": "| load-4m-2t-direct | 8.39 GB/s | 8.92 GB/s | 1.12 |",
    ": 0.72 to 1.12 of XFS": "| store-4m-2t-direct | 7.34 GB/s | 5.12 GB/s | 0.72 |",
    "| 0.62 / 0.15 |": "| store-4m-2t-buffered | 23.8 GB/s | 3.52 GB/s | 0.15 |",
    "of 32 MiB / 4 MiB | 0.62": "| store-32m-2t-buffered | 26.5 GB/s | 16.8 GB/s | 0.62 |",
    "3.5 GB/s in blocks of 4 MiB": "| store-4m-2t-buffered | 23.8 GB/s | 3.52 GB/s |",
    "16.8 GB/s in blocks of 32 MiB": "| store-32m-2t-buffered | 26.5 GB/s | 16.8 GB/s |",
    "| 10 % | XFS, cleaned every 1 s | 24.2 % | 0 |": "14.7 GB | 10 / 27 s | 0 |",
    "| 5 % | XFS, cleaned every 1 s | 16.6 % | 0 |": "16.2 GB | 11 / 26 s | 0 |",
    "seven times as fast": "XFS stores seven times as fast",
    "| 10 % | kvfs | 27.6 % | 0 |": "| 10 % | kvfs, lru | 27.6 % |",
    "| 5 % | kvfs | 19.2 % | 0 |": "| 5 % | kvfs, lru | 19.2 % |",
    "| 10 % | XFS, cleaned every 60 s | 24.5 % | 7,575 |": "14.1 GB | 7 / 27 s | 7,575 |",
    "| 5 % | XFS, cleaned every 60 s | 17.4 % | 119,593 |": "8.0 GB | 4 / 17 s | 119,593 |",
    "let 7 stores fail": "| XFS, with a cleaner | 16.37 GB/s | 3659 us | 16799 us | 7 |",
    "0.71 of the rate": "over XFS with a cleaner: rate 0.71",
    "at 0.49 with blocks": "over XFS with a cleaner: rate 0.49",
    "| 512 tokens | 64 MiB | 20 | 54 | 26 |": "| 20 (35) | 45 (53) | 37 (49) | 54 (70) |",
    "| 4 GiB | 1,395 | 904 | 160 |": "926 (1,043) | 904 (1,040) | 157 (167) | 160 (161)",
    "| 56 MB |": "a store started on an index of a million blocks (RssAnon) | 56 MB",
}


@pytest.mark.parametrize(("said", "measured"), FIGURES.items())
def test_figures_of_the_readme_are_those_of_the_pages(said: str, measured: str) -> None:
    assert said in (ROOT / "README.md").read_text()
    pages = (DOCS / name for name in ("performance.md", "eviction.md"))
    assert any(measured in page.read_text() for page in pages)


def test_the_buffered_stores_are_told_once_with_when_they_matter() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("0.15") == 1
    _, _, after = text.partition("0.15")
    assert "*When it matters:*" in after
    assert "*When it does not:*" in after


def test_cells_of_the_readme_are_short() -> None:
    """A telephone and a terminal show them; what a link leads to is not seen."""
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    cells = [re.sub(r"\]\([^)]*\)", "]", cell) for row in rows for cell in row.split(" | ")]
    assert len(cells) > 50
    assert [cell for cell in cells if len(cell) > 90] == []


@pytest.mark.parametrize(
    "section", ["Why not XFS", "What it costs", "Several drives", "Limits", "All pages"]
)
def test_the_readme_answers_what_a_newcomer_asks(section: str) -> None:
    assert f"\n## {section}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


_SEQUENCE: Final = re.compile(r"^```mermaid\nsequenceDiagram\n(.+?)^```", re.DOTALL | re.MULTILINE)


def test_a_line_of_a_drawn_sequence_has_no_semicolon() -> None:
    """Mermaid ends a statement there, and shows an error in place of the picture."""
    drawn = [text for page in PAGES for text in _SEQUENCE.findall(page.read_text())]
    assert drawn
    assert not any(";" in text for text in drawn)


_PROOF: Final = re.compile(
    r"^\| (?:\[(proof-[a-z-]+\.txt)\]\(\1\) \| )?`(tests/\S+)` \|", re.MULTILINE
)


def test_the_page_of_proofs_has_each_proof_and_each_output() -> None:
    rows = _PROOF.findall((DOCS / "dev" / "proofs.md").read_text())
    kept = [output for output, _ in rows if output]
    assert sorted(kept) == sorted(path.name for path in DOCS.glob("**/proof-*.txt"))
    assert all((DOCS / "dev" / output).exists() for output in kept)
    marked = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("tests/**/test_*.py")
        if re.search(r"pytest\.mark\.proof\b", path.read_text())
    }
    assert {test for _, test in rows} == marked
