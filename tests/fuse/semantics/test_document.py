"""docs/semantics.md and its tests hold each other: no paragraph without a test, and the reverse."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "semantics.md"
PARAGRAPH = re.compile(r"^`\[([a-z0-9-]+)\]`", re.MULTILINE)
QUOTE = re.compile(r"\[([a-z0-9-]+)\]")


def paragraph_ids() -> list[str]:
    """Return the ids of the document's paragraphs, in its order."""
    return PARAGRAPH.findall(DOCUMENT.read_text())


def quoting_tests() -> dict[str, list[str]]:
    """Return for every quoted id the tests that quote it in their docstring."""
    quotes: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            for quoted in QUOTE.findall(ast.get_docstring(node) or ""):
                quotes.setdefault(quoted, []).append(f"{file.name}::{node.name}")
    return quotes


def test_every_paragraph_has_an_id_of_its_own() -> None:
    """An id names one paragraph, and no paragraph behind the tenets goes without."""
    ids = paragraph_ids()
    assert len(set(ids)) == len(ids)
    _, rules = DOCUMENT.read_text().split("\n## Names\n")
    for paragraph in rules.split("\n\n"):
        text = paragraph.strip()
        assert not text or text.startswith(("## ", "`[")), f"no id: {text[:60]}"


def test_every_paragraph_has_a_test() -> None:
    """What the document promises, some test holds."""
    untested = set(paragraph_ids()) - set(quoting_tests())
    assert not untested, f"promised and held by no test: {sorted(untested)}"


def test_every_quote_has_its_paragraph() -> None:
    """A test that quotes a paragraph goes when the paragraph goes."""
    quotes = quoting_tests()
    stale = {quoted: quotes[quoted] for quoted in set(quotes) - set(paragraph_ids())}
    assert not stale, f"quoted, but not in the document: {stale}"
