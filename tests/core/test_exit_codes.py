"""docs/exit-codes.md and kvfs/core/errors.py hold each other: same codes, same meanings."""

import re
from pathlib import Path

from kvfs.cli.failures import (
    HUNG_UP_EXIT,
    INTERNAL_ERROR_EXIT,
    INTERRUPTED_EXIT,
    TERMINATED_EXIT,
)
from kvfs.core import errors
from kvfs.core.errors import CommandError

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)


def rows() -> list[tuple[int, str, str]]:
    """Return code, meaning and what to do, in the document's order."""
    text = (ROOT / "docs" / "exit-codes.md").read_text()
    return [(int(code), meaning, cure) for code, meaning, cure in ROW.findall(text)]


def kinds() -> list[type[CommandError]]:
    """Return every error that has an exit code of its own."""
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return [kind for kind in found if issubclass(kind, CommandError) and kind is not CommandError]


def test_every_exit_code_is_documented_once_and_in_order() -> None:
    others = [0, CommandError.exit_code, INTERNAL_ERROR_EXIT]
    others += [HUNG_UP_EXIT, INTERRUPTED_EXIT, TERMINATED_EXIT]
    assert [code for code, _, _ in rows()] == sorted(others + [kind.exit_code for kind in kinds()])


def test_the_meaning_is_what_the_error_says_of_itself() -> None:
    meanings = {code: meaning for code, meaning, _ in rows()}
    said = {kind.exit_code: (kind.__doc__ or "").replace("``", "`") for kind in kinds()}
    assert {code: meanings[code] for code in said} == said


def test_the_readme_leads_to_the_table() -> None:
    assert "(docs/exit-codes.md)" in (ROOT / "README.md").read_text()
