"""What `make proof` keeps: each output is a whole one, of a commit before this, and not too old."""

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from make.proofs import KEPT, Kept, name_of, read_kept, table
from tests.support.mounts.mounting import ROOT

OUTPUTS: Final = sorted((ROOT / KEPT).glob("proof-*.txt"))
#: An output may be so many commits older than what it proves.
COMMITS_MAX: Final = 100
PAGE: Final = (ROOT / KEPT / "proofs.md").read_text()
#: Of the table: an output, and the folders whose code it proves.
_ROW: Final = re.compile(
    r"^\| \[(proof-[a-z-]+\.txt)\]\(\1\) \|.*\| ((?:`[a-z/]+` ?)+) \|$", re.MULTILINE
)
PROVES: Final = {name: re.findall(r"`([a-z/]+)`", folders) for name, folders in _ROW.findall(PAGE)}
HEAD: Final = """commit   0123456789ab
date     2026-11-28T06:00Z
machine  Linux 6.18.44, 2 cores, 24 GiB
command  pytest -m proof tests/system/test_soak.py

"""
LAST: Final = "======= 8 passed, 2 deselected in 512.08s (0:08:32) ========\n"


def git(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)


def has_history() -> bool:
    """Whether the commits before this one are here: not in an archive, a copy, a shallow clone."""
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        return False
    return int(git("rev-list", "--count", "HEAD").stdout or 0) > COMMITS_MAX


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda path: path.stem)
def test_an_output_is_of_a_whole_run_that_passed(output: Path) -> None:
    kept = read_kept(output.read_text())
    assert kept is not None, "the head is not as make/proofs.py writes it"
    assert kept.has_passed
    assert not kept.commit.endswith("-dirty")
    assert name_of(kept.test) == output.name
    assert (ROOT / kept.test).exists()


@pytest.mark.skipif(not has_history(), reason="the history of commits is not here")
@pytest.mark.parametrize("output", OUTPUTS, ids=lambda path: path.stem)
def test_its_commit_is_before_this_one_and_not_long(output: Path) -> None:
    kept = read_kept(output.read_text())
    assert kept is not None
    assert git("merge-base", "--is-ancestor", kept.commit, "HEAD").returncode == 0
    folders = PROVES[output.name]
    assert all((ROOT / folder).is_dir() for folder in folders)
    since = git("rev-list", "--count", f"{kept.commit}..HEAD", "--", *folders).stdout
    assert int(since) <= COMMITS_MAX, f"run it again: make proof PROOF={kept.test}"


def test_the_page_names_each_output_with_what_it_proves() -> None:
    assert list(PROVES) == [output.name for output in OUTPUTS]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (
            HEAD + LAST,
            Kept("0123456789ab", "2026-11-28T06:00Z", "tests/system/test_soak.py", True, "512.08s"),
        ),
        (HEAD + LAST.replace("8 passed", "1 failed, 7 passed"), None),
        (HEAD + LAST.replace("2 deselected", "1 error"), None),
        (HEAD + LAST.replace("2 deselected", "1 skipped"), None),
        (HEAD + LAST + "but for the one above, all is well\n", None),
        (HEAD, None),
    ],
)
def test_only_what_passed_wholly_has_passed(text: str, kept: Kept | None) -> None:
    found = read_kept(text)
    assert found is not None
    assert (found if found.has_passed else None) == kept


@pytest.mark.parametrize("changed", [("0123456789ab", "unknown"), ("date  ", "time  ")])
def test_a_head_of_another_kind_is_none(changed: tuple[str, str]) -> None:
    assert read_kept(HEAD.replace(*changed) + LAST) is None


def test_the_table_says_what_failed_and_what_is_from_before() -> None:
    passed = read_kept(HEAD + LAST)
    failed = read_kept(HEAD)
    assert passed is not None
    assert failed is not None
    assert list(table([("tests/a.py", passed, True), ("tests/other.py", failed, False)])) == [
        "tests/a.py      passed    512.08s  before  0123456789ab",
        "tests/other.py  FAILED             now     0123456789ab",
    ]
