"""The guards of the product: each is in the table with a test that exists, or has none yet."""

import ast
import random
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from make.guards import (
    FACT,
    SETTINGS,
    TABLE,
    Guard,
    all_guards,
    edits_for,
    guards_of,
    table_of,
    without_bound,
    written,
)
from tests.support.mounts.mounting import ROOT

SOURCE: Final = '''\
"""A module."""
_LOOKS_MAX: Final = 7
MOST_BYTES: Final[int] = 8
_MAXIMA: Final = 3


class Part:
    def take(self, looks: int) -> bool:
        """Take it. Atomic."""
        if looks > _LOOKS_MAX:
            return False
        return self.settings.names_max > looks

    def give(self) -> None:
        if self.held:
            # Atomic: nobody comes between.
            self.held = f"{_LOOKS_MAX}"

    def other(self) -> None:
        # An atomic group of a pattern.
        self.most = MOST_BYTES
'''


def test_every_guard_has_a_row_and_every_row_its_guard() -> None:
    rows = table_of(TABLE.read_text()).keys()
    guards = {(guard.path, guard.name) for guard in all_guards(ROOT)}
    assert guards - rows == set(), "a new guard: enter it in make/guards.toml, with its test"
    assert rows - guards == set(), "their guards are gone"


def test_the_table_is_written_as_the_script_writes_it() -> None:
    text = TABLE.read_text()
    assert text == written(table_of(text))


def test_each_guard_has_a_test_that_reaches_it() -> None:
    assert [guard for guard, test in table_of(TABLE.read_text()).items() if not test] == []


def test_the_tests_of_the_table_exist() -> None:
    missing = []
    for test in sorted(set(filter(None, table_of(TABLE.read_text()).values()))):
        if FACT.fullmatch(test):
            continue
        path, _, name = test.partition("::")
        names = {
            node.name
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if name not in names:
            missing.append(test)
    assert missing == []


def test_a_fact_says_where_it_is_from_and_is_a_number_of_no_settings() -> None:
    assert FACT.fullmatch("a fact: linux/limits.h, NGROUPS_MAX")
    assert not FACT.fullmatch("a fact:")
    assert not FACT.fullmatch("a fact: ")
    facts = [key for key, test in table_of(TABLE.read_text()).items() if FACT.fullmatch(test)]
    atomic = {(guard.path, guard.name) for guard in all_guards(ROOT) if not guard.is_bound}
    assert [key for key in facts if key in atomic or key[0] == SETTINGS] == []


def test_guards_are_bounds_and_what_is_called_atomic() -> None:
    assert guards_of("kvfs/a.py", SOURCE) == [
        Guard("kvfs/a.py", "MOST_BYTES", is_bound=True),
        Guard("kvfs/a.py", "_LOOKS_MAX", is_bound=True),
        Guard("kvfs/a.py", "Part.give", is_bound=False),
        Guard("kvfs/a.py", "Part.take", is_bound=False),
    ]


def test_of_the_settings_the_bounds_are_guards() -> None:
    text = "class Settings:\n    names_max: int = 3\n    wait_s: float = 1.0\n"
    assert guards_of(SETTINGS, text) == [Guard(SETTINGS, "names_max", is_bound=True)]
    assert guards_of("kvfs/a.py", text) == []


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("_LOOKS_MAX", [("looks > _LOOKS_MAX:", "looks > (_LOOKS_MAX * 1000):")]),
        ("names_max", [("self.settings.names_max", "(self.settings.names_max * 1000)")]),
        ("MOST_BYTES", [("self.most = MOST_BYTES", "self.most = (MOST_BYTES * 1000)")]),
    ],
)
def test_a_bound_is_dropped_where_it_is_used(name: str, changed: list[tuple[str, str]]) -> None:
    """And not where it is defined or shown, so that a test which sets it finds that, too."""
    expected = SOURCE
    for before, after in changed:
        expected = expected.replace(before, after)
    assert without_bound(SOURCE, name) == expected


def test_each_guard_can_be_dropped() -> None:
    chance = random.Random(0)
    guards = all_guards(ROOT)
    for guard in chance.sample(guards, 6):
        for edit in edits_for(guard, ROOT, chance):
            for path, text in edit.items():
                assert text != (ROOT / path).read_text()
                compile(text, path, "exec")


@pytest.mark.real_exec
def test_a_guard_is_tried_from_end_to_end(tmp_path: Path) -> None:
    """In a tree of its own: the test of one bound finds it dropped, that of another does not."""
    for folder in ("kvfs", "mount", "tests", "make"):
        (tmp_path / folder).mkdir()
    (tmp_path / "kvfs" / "__init__.py").touch()
    for name in ("guards.py", "mutants.py", "small_edits.py"):
        (tmp_path / "make" / name).write_text((ROOT / "make" / name).read_text())
    (tmp_path / "kvfs" / "bound.py").write_text(
        "A_MAX: Final = 8\nB_MAX: Final = 8\n\n\n"
        "def fits(a: int, b: int) -> bool:\n    return a <= A_MAX and b <= B_MAX\n".replace(
            "A_MAX: Final", "from typing import Final\n\nA_MAX: Final", 1
        )
    )
    test = "tests/test_bound.py::test_fits"
    (tmp_path / "tests" / "test_bound.py").write_text(
        "from kvfs.bound import fits\n\n\ndef test_fits():\n"
        "    assert fits(6, 6) and not fits(9, 6)\n"
    )
    table = {("kvfs/bound.py", "A_MAX"): test, ("kvfs/bound.py", "B_MAX"): test}
    (tmp_path / "make" / "guards.toml").write_text(written(table))
    done = subprocess.run(
        [sys.executable, "-m", "make.guards", "--try", "_MAX"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "found     kvfs/bound.py::A_MAX",
        "survived  kvfs/bound.py::B_MAX",
    ], done.stderr
    assert done.returncode == 1
