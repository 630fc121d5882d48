"""`make mutants`: the edits of a source, which lines they are of, and which tests are asked."""

import ast
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from make.mutants import Nearest, Tried, imports_of, report, touched_lines
from make.small_edits import edits_of
from tests.support.mounts.mounting import ROOT

SOURCE: Final = '''\
def share(used: int, whole: int) -> int:
    """Return it."""
    if whole <= 0:
        return 0
    note(used)
    part = used * 2
    total = part + 1
    return part if used > 3 and whole is not None else total
'''


def lines_changed(text: str) -> set[str]:
    """Return what each edit leaves of *text* that *text* has not, and its description."""
    old = text.splitlines()
    found = set()
    for edit in edits_of(text):
        new = edit.applied(text).splitlines()
        assert len(new) == len(old)
        assert new[edit.line - 1] != old[edit.line - 1]
        compile("\n".join(new), "edited", "exec")
        found.add(new[edit.line - 1].strip())
    return found


def test_each_kind_of_edit_is_made() -> None:
    assert lines_changed(SOURCE) == {
        "if whole < 0:",
        "if not (whole <= 0):",
        "if False:",
        "if whole <= 1:",
        "return 1",
        "pass",
        "part = used * 2",  # swapped with the line before
        "part = used * 3",
        "total = part + 1",
        "total = part + 2",
        "return part if used >= 3 and whole is not None else total",
        "return part if used > 4 and whole is not None else total",
        "return part if used > 3 or whole is not None else total",
        "return part if used > 3 and whole is None else total",
    }


def test_columns_count_characters_and_not_bytes() -> None:
    text = 'said = "überall", one < two\n'
    (edit,) = edits_of(text)
    assert edit.applied(text) == 'said = "überall", one <= two\n'


@pytest.mark.parametrize(
    "text",
    [
        "flag = True\n",
        "big = 1 << (99999)\n".replace("1", "70000"),
        '"""A text."""\nx = y\n',
        "if (a := b):\n    pass\n",
    ],
)
def test_what_says_the_same_or_cannot_be_cut_is_left(text: str) -> None:
    assert edits_of(text) == []


def test_all_edits_of_the_product_are_python() -> None:
    files = sorted((ROOT / "kvfs" / "core").glob("*.py"))
    chance = random.Random(1)
    for path in files:
        text = path.read_text()
        edits = edits_of(text)
        for edit in chance.sample(edits, min(len(edits), 12)):
            applied = edit.applied(text)
            assert ast.dump(ast.parse(applied)) != ast.dump(ast.parse(text)), edit


def test_lines_are_those_that_a_change_made_new() -> None:
    diff = (
        "diff --git a/kvfs/a.py b/kvfs/a.py\n--- a/kvfs/a.py\n+++ b/kvfs/a.py\n"
        "@@ -3 +3,2 @@ def f() -> None:\n-x\n+y\n+z\n@@ -9,2 +10,0 @@\n-gone\n-gone\n"
        "diff --git a/kvfs/b.py b/kvfs/b.py\n--- a/kvfs/b.py\n+++ b/kvfs/b.py\n"
        "@@ -1 +1 @@\n-q\n+r\n"
    )
    assert touched_lines(diff) == {"kvfs/a.py": {3, 4}, "kvfs/b.py": {1}}


def test_imports_are_read_over_several_lines() -> None:
    source = (
        "import os\nfrom kvfs.core import sizes\nfrom kvfs.pool.pool import (\n    A,\n    B,\n)\n"
    )
    assert imports_of(source) == {
        *("os", "kvfs.core", "kvfs.core.sizes", "kvfs.pool.pool"),
        *("kvfs.pool.pool.A", "kvfs.pool.pool.B"),
    }


def test_the_nearest_tests_come_first() -> None:
    nearest = Nearest(ROOT)
    near = {"tests/core/test_ages.py", "tests/core/test_reuse_distance.py"}
    assert near == set(nearest.tests("kvfs/core/reuse.py")[:2])
    # Nobody imports these but who serves them.
    assert any("ready" in test for test in nearest.tests("kvfs/pool/open/ready_extents.py"))
    assert any("link" in test for test in nearest.tests("kvfs/engine/blocks/renames.py"))
    assert nearest.tests("kvfs/of/no/name.py") == ()


def test_the_report_names_what_survived() -> None:
    (edit, *_) = edits_of("a < b\n")
    rows = [Tried("kvfs/a.py", edit, how, ()) for how in ("found", "survived", "no test")]
    assert list(report(rows, 4)) == [
        "survived  kvfs/a.py:1  < -> <=",
        "no test   kvfs/a.py:1  < -> <=",
        "3 edits: 1 found, 1 survived, 1 without a test; 4 not tried",
    ]


@pytest.mark.real_exec
def test_a_change_is_tried_from_end_to_end(tmp_path: Path) -> None:
    """In a repository of its own: one edit is found, one is not."""
    for folder in ("kvfs", "mount", "tests", "make"):
        (tmp_path / folder).mkdir()
    (tmp_path / "kvfs" / "__init__.py").touch()
    for name in ("mutants.py", "small_edits.py"):
        (tmp_path / "make" / name).write_text((ROOT / "make" / name).read_text())
    (tmp_path / "kvfs" / "bound.py").write_text("def fits(size: int) -> bool:\n    return True\n")
    (tmp_path / "tests" / "test_bound.py").write_text(
        "from kvfs.bound import fits\n\n\ndef test_fits():\n    assert fits(6) and not fits(9)\n"
    )
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "before"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    (tmp_path / "kvfs" / "bound.py").write_text(
        "def fits(size: int) -> bool:\n    return size < 8\n"
    )
    command = [sys.executable, "-m", "make.mutants", "--since=HEAD", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    told = {row["edit"]["what"]: row["outcome"] for row in json.loads(done.stdout)}
    assert told == {"< -> <=": "survived", "8 -> 9": "survived"}
    assert (tmp_path / "kvfs" / "bound.py").read_text().endswith("return size < 8\n")
    test = tmp_path / "tests" / "test_bound.py"
    test.write_text(test.read_text().replace("fits(9)", "fits(8)"))
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr


def test_an_unknown_commit_is_one_line() -> None:
    command = [sys.executable, "-m", "make.mutants", "--since=nobody"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "nobody" in done.stderr
