"""Small edits of the lines that a change touched, and who finds them: ``python -m make.mutants``.

Each edit is made alone, in a copy of the tree, and the tests nearest to its file are run there:
those that import it, or import what does, by the least number of steps. What no test finds has
survived; the report says where, and what the edit was. ``make mutants SINCE=COMMIT`` looks at all
that changed since.

Operators are those of Budd and of Offutt et al. (1996), by whom a few kinds of edit stand for most:
conditions, bounds, guards, calls, and the order of statements.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from make.small_edits import Edit, edits_of

ROOT: Final = Path(__file__).resolve().parents[1]
PRODUCT: Final = ("kvfs", "mount")
#: All edits together, and a file of tests; one that takes longer is not run.
_ALL_S: Final = 600.0
_EACH_S: Final = 30.0
#: Test files that are run for one edit, the nearest ones.
_FILES_MAX: Final = 4
_STEPS_MAX: Final = 6
_IMPORT: Final = re.compile(
    r"^\s*(?:from (\S+) import ([^\n(]+|\([^)]*\))|import (\S+))", re.MULTILINE
)
_HUNK: Final = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
_IGNORED: Final = ("__pycache__", ".venv*", ".git", "*.egg-info", "build", "dist")


class Tried(NamedTuple):
    """An edit of *path*, and what became of it: ``found``, ``survived`` or ``no test``."""

    path: str
    edit: Edit
    outcome: str
    tests: tuple[str, ...]


def touched_lines(diff: str) -> dict[str, set[int]]:
    """Return which lines of which files are new in *diff*, which has no lines of context."""
    found: dict[str, set[int]] = {}
    for part in diff.split("\n+++ b/")[1:]:
        path, _, hunks = part.partition("\n")
        lines = found.setdefault(path, set())
        for start, count in _HUNK.findall(hunks):
            lines.update(range(int(start), int(start) + int(count or 1)))
    return {path: lines for path, lines in found.items() if lines}


def imports_of(source: str) -> set[str]:
    """Return the modules, and the names in modules, that *source* imports, dotted."""
    found: set[str] = set()
    for package, names, module in _IMPORT.findall(source):
        if module:
            found.add(module)
            continue
        found.add(package)
        bare = (name.split(" as ")[0].strip(" ()\n,") for name in names.split(","))
        found.update(f"{package}.{name}" for name in bare if name)
    return found


class Nearest:
    """Which test files are nearest to a module, by the imports of all files below *root*."""

    def __init__(self, root: Path) -> None:
        self._importers: dict[str, set[str]] = {}
        self._texts: dict[str, str] = {}
        for folder in (*PRODUCT, "tests"):
            for path in (root / folder).rglob("*.py"):
                name = path.relative_to(root).as_posix()
                self._texts[name] = path.read_text()
                for module in imports_of(self._texts[name]):
                    self._importers.setdefault(module, set()).add(name)

    def tests(self, path: str) -> tuple[str, ...]:
        """Return the test files nearest to the product's file *path*, the nearest first.

        Of those that are as near, first who speaks most of what the file is named after.
        """
        seen, layer, found = {path}, [path], list[str]()
        word = Path(path).stem.removesuffix("s")
        for _ in range(_STEPS_MAX):
            importers = {one for name in layer for one in self._importers.get(_module(name), ())}
            layer = sorted(importers - seen)
            seen.update(layer)
            tests = [name for name in layer if Path(name).name.startswith("test_")]
            found += sorted(tests, key=lambda name: -self._texts[name].count(word))
            if len(found) >= _FILES_MAX:
                break
        return tuple(found[:_FILES_MAX])


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Copy:
    """A copy of the tree, in which one file at a time is another."""

    def __init__(self, root: Path, place: Path) -> None:
        self.root = place / "tree"
        ignored = shutil.ignore_patterns(*_IGNORED)
        shutil.copytree(root, self.root, symlinks=True, ignore=ignored)

    def passes(self, tests: Sequence[str], wait_s: float) -> bool:
        """Whether *tests* pass within *wait_s*."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command, cwd=self.root, timeout=wait_s, stdout=subprocess.DEVNULL, check=False
            )
        except subprocess.TimeoutExpired:
            return False  # it hangs, where the tests as they are do not
        return done.returncode == 0

    def try_edit(self, path: str, edit: Edit, tests: Sequence[str], wait_s: float) -> bool:
        """Whether *tests* find the *edit* of *path*, which is undone."""
        file = self.root / path
        before = file.read_text()
        file.write_text(edit.applied(before))
        try:
            return not self.passes(tests, wait_s)
        finally:
            file.write_text(before)


def tried(
    copy: Copy, edits: Sequence[tuple[str, Edit]], nearest: Nearest, end_s: float
) -> Iterator[Tried]:
    """Try *edits* until *end_s* of the monotonic clock, by tests that pass as they are in time."""
    takes_s: dict[str, float | None] = {}
    for path, edit in edits:
        tests = tuple(
            test for test in nearest.tests(path) if _takes_s(copy, test, takes_s) is not None
        )
        if not tests:
            yield Tried(path, edit, "no test", tests)
            continue
        whole_s = sum(takes_s[test] or 0.0 for test in tests)
        if time.monotonic() + whole_s > end_s:
            return
        # Twice as long as unchanged, and a bit: a loaded machine is no finding.
        found = copy.try_edit(path, edit, tests, 2 * whole_s + 10)
        yield Tried(path, edit, "found" if found else "survived", tests)


def _takes_s(copy: Copy, test: str, known: dict[str, float | None]) -> float | None:
    """Return how long the file *test* takes; None: too long, or it does not pass as it is."""
    if test not in known:
        began_s = time.monotonic()
        has_passed = copy.passes([test], _EACH_S)
        known[test] = time.monotonic() - began_s if has_passed else None
    return known[test]


def chosen(
    changed: Mapping[str, set[int]], root: Path, chance: random.Random
) -> list[tuple[str, Edit]]:
    """Return the edits of all *changed* lines, in the order of *chance*."""
    all_edits = [
        (path, edit)
        for path, lines in sorted(changed.items())
        if path.endswith(".py") and path.partition("/")[0] in PRODUCT and (root / path).exists()
        for edit in edits_of((root / path).read_text())
        if edit.line in lines
    ]
    chance.shuffle(all_edits)
    return all_edits


def report(rows: Sequence[Tried], left: int) -> Iterator[str]:
    """Return the lines of the report: what survived, and the counts."""
    for row in rows:
        if row.outcome != "found":
            yield f"{row.outcome:<9} {row.path}:{row.edit.line}  {row.edit.what}"
    counts = {name: sum(row.outcome == name for row in rows) for name in ("found", "survived")}
    untested = len(rows) - sum(counts.values())
    yield (
        f"{len(rows)} edits: {counts['found']} found, {counts['survived']} survived, "
        f"{untested} without a test; {left} not tried"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the edits of a change; 1 if one survives, 2 if they cannot be tried."""
    parser = argparse.ArgumentParser(
        prog="make mutants",
        description="Make small edits in the lines that a change touched; say which no test finds.",
        epilog="example: make mutants SINCE=HEAD~5",
    )
    parser.add_argument("--since", default="HEAD~1", metavar="COMMIT", help="default: HEAD~1")
    parser.add_argument("--seconds", type=float, default=_ALL_S, help="for all (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which they are tried")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("files", nargs="*", metavar="FILE", help="only these")
    asked = parser.parse_args(arguments)
    git = ["git", "diff", "--unified=0", asked.since, "--", *(asked.files or PRODUCT)]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"mutants: {done.stderr.strip().splitlines()[0]}", file=sys.stderr)
        return 2
    edits = chosen(touched_lines("\n" + done.stdout), ROOT, random.Random(asked.seed))
    end_s = time.monotonic() + asked.seconds
    with tempfile.TemporaryDirectory(prefix="kvfs-mutants-") as place:
        rows = list(tried(Copy(ROOT, Path(place)), edits, Nearest(ROOT), end_s))
    if asked.json:
        print(json.dumps([row._asdict() | {"edit": row.edit._asdict()} for row in rows]))
    else:
        print(*report(rows, len(edits) - len(rows)), sep="\n")
    return 1 if any(row.outcome != "found" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
