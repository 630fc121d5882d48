"""The guards of the product, and the test that reaches each: ``python -m make.guards``.

A guard is a stretch that a comment or a docstring calls Atomic, or a bound: a setting or a constant
of a module with MAX or MOST in its name. make/guards.toml has a row for each, with a test;
tests/core/test_guards.py holds both to the source. ``--try`` drops guards, one
at a time, in a copy of the tree, and runs the test of each, which must fail:

- A bound is made a thousand times as large wherever it is used, also where a test sets it.
- Of a function with an atomic stretch each small edit is made alone; one at least must be found.

A name with MAX that is a number of the kernel's or of a format, and keeps nothing out, has the row
"a fact: " and where it is from. It is not dropped.
"""

import argparse
import ast
import io
import random
import re
import sys
import tempfile
import time
import tokenize
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from make.mutants import PRODUCT, ROOT, Copy
from make.small_edits import edits_of

TABLE: Final = ROOT / "make" / "guards.toml"
SETTINGS: Final = "kvfs/core/settings.py"
_BOUND: Final = re.compile(r"(^|_)(MAX|MOST)(_|$)", re.IGNORECASE)
#: Other files are not parsed.
_MAY_HAVE: Final = re.compile(r"Atomic|^\s*\w*(MAX|MOST|_max|_most)\w*\s*:", re.MULTILINE)
_ATOMIC: Final = re.compile(r"\bAtomic\b(?=[:.,])")
#: A row that names no test, but says where a number is from.
FACT: Final = re.compile(r"a fact: \S.*")
#: So many times as large a bound is no bound.
_DROPPED: Final = 1000
#: A test that takes longer has not failed, and not passed.
_EACH_S: Final = 40.0
#: Edits of one function that are tried, chosen by chance.
_EDITS_MAX: Final = 12


class Guard(NamedTuple):
    """A guard in the file *path*: the *name* of a bound, or of the function that is atomic."""

    path: str
    name: str
    is_bound: bool


def guards_of(path: str, text: str) -> list[Guard]:
    """Return the guards in the source *text* of *path*, by name."""
    if not _MAY_HAVE.search(text):
        return []
    tree = ast.parse(text)
    declared = tree.body
    if path == SETTINGS:
        declared = [*declared, *(line for each in declared for line in getattr(each, "body", ()))]
    names = {
        node.target.id
        for node in declared
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and _BOUND.search(node.target.id)
    }
    functions = {name for line in _atomic_lines(text, tree) for name in _around(tree, line)}
    bounds = [Guard(path, name, is_bound=True) for name in sorted(names)]
    return bounds + [Guard(path, name, is_bound=False) for name in sorted(functions)]


def _atomic_lines(text: str, tree: ast.Module) -> set[int]:
    if "Atomic" not in text:
        return set()
    lines = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and _ATOMIC.search(token.string)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            told = ast.get_docstring(node)
            if told is not None and _ATOMIC.search(told):
                lines.add(node.body[0].lineno)
    return lines


def _around(tree: ast.Module, line: int) -> Iterator[str]:
    """Yield the dotted name of the innermost function around *line*."""
    names: list[str] = []
    node: ast.AST = tree
    while True:
        inner = [
            each
            for each in ast.iter_child_nodes(node)
            if isinstance(each, ast.stmt) and each.lineno <= line <= (each.end_lineno or 0)
        ]
        if not inner:
            break
        node = inner[0]
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
    if names:
        yield ".".join(names)


def all_guards(root: Path) -> list[Guard]:
    """Return the guards of the product below *root*."""
    found: list[Guard] = []
    for folder in PRODUCT:
        for path in sorted((root / folder).rglob("*.py")):
            found += guards_of(path.relative_to(root).as_posix(), path.read_text())
    return found


def table_of(text: str) -> dict[tuple[str, str], str]:
    """Return the test of each guard, by path and name; a new one has none."""
    rows = tomllib.loads(text)
    return {(path, name): test for path, tests in rows.items() for name, test in tests.items()}


def written(rows: Mapping[tuple[str, str], str]) -> str:
    """Return the table of *rows* as text."""
    lines = ["# Each guard of the product, and a test that fails without it (make/guards.py)."]
    last = ""
    for (path, name), test in sorted(rows.items()):
        if path != last:
            lines += ["", f'["{path}"]']
            last = path
        key = name if "." not in name else f'"{name}"'
        lines.append(f'{key} = "{test}"')
    return "\n".join(lines) + "\n"


def without_bound(text: str, name: str) -> str:
    """Return the source *text* with the bound *name* a thousand times as large at each use."""
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    # What stands in f-strings has no place of its own in 3.11.
    placeless = {inner for text in texts for inner in ast.walk(text)}
    uses = [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == name)
        or (isinstance(node, ast.Attribute) and node.attr == name)
        if isinstance(node.ctx, ast.Load) and node not in placeless
    ]
    for node in sorted(uses, key=lambda each: (each.lineno, each.col_offset), reverse=True):
        if node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1].encode()
        start, end = node.col_offset, node.end_col_offset
        assert end is not None
        more = b"(" + line[start:end] + b" * %d)" % _DROPPED
        lines[node.lineno - 1] = (line[:start] + more + line[end:]).decode()
    return "".join(lines)


def edits_for(guard: Guard, root: Path, chance: random.Random) -> Iterator[dict[str, str]]:
    """Yield the ways to drop *guard*: for each the files below *root* that change, as text."""
    if guard.is_bound:
        edit: dict[str, str] = {}
        for folder in PRODUCT:
            for path in (root / folder).rglob("*.py"):
                text = path.read_text()
                is_own = path.as_posix().endswith(guard.path)
                if guard.name not in text or (guard.name.startswith("_") and not is_own):
                    continue
                changed = without_bound(text, guard.name)
                if changed != text:
                    edit[path.relative_to(root).as_posix()] = changed
        if edit:
            yield edit
        return
    text = (root / guard.path).read_text()
    first, last = _lines_of(ast.parse(text), guard.name)
    edits = [edit for edit in edits_of(text) if first <= edit.line <= last]
    for edit_ in chance.sample(edits, min(len(edits), _EDITS_MAX)):
        yield {guard.path: edit_.applied(text)}


def _lines_of(tree: ast.Module, name: str) -> tuple[int, int]:
    node: ast.AST = tree
    for part in name.split("."):
        node = next(
            each for each in ast.iter_child_nodes(node) if getattr(each, "name", "") == part
        )
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node.lineno, node.end_lineno or node.lineno


def is_found(copy: Copy, guard: Guard, test: str, chance: random.Random) -> bool:
    """Whether *test*, which passes as it is, fails once *guard* is dropped in some way."""
    began_s = time.monotonic()
    if not copy.passes([test], _EACH_S):
        return False
    wait_s = 2 * (time.monotonic() - began_s) + 10
    for edit in edits_for(guard, copy.root, chance):
        before = {path: (copy.root / path).read_text() for path in edit}
        try:
            for path, text in edit.items():
                (copy.root / path).write_text(text)
            if not copy.passes([test], wait_s):
                return True
        finally:
            for path, text in before.items():
                (copy.root / path).write_text(text)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """List the guards, or try those that match; 1 if the test of one does not find it dropped."""
    parser = argparse.ArgumentParser(
        prog="python -m make.guards",
        description="List the guards of the product and the test that reaches each.",
        epilog="example: python -m make.guards --try _DOUBTS_MAX",
    )
    parser.add_argument("--try", dest="tried", metavar="GUARD", help="drop those with this name")
    parser.add_argument("--seed", type=int, default=0, help="of the edits that are tried")
    asked = parser.parse_args(arguments)
    rows = table_of(TABLE.read_text())
    guards = all_guards(ROOT)
    if asked.tried is None:
        for guard in guards:
            test = rows.get((guard.path, guard.name), "")
            print(f"{guard.path}::{guard.name}  {test or '-'}")
        return 0
    lost = 0
    with tempfile.TemporaryDirectory(prefix="kvfs-guards-") as place:
        copy = Copy(ROOT, Path(place))
        for guard in guards:
            test = rows.get((guard.path, guard.name), "")
            if asked.tried not in guard.name or not test or FACT.fullmatch(test):
                continue
            found = is_found(copy, guard, test, random.Random(asked.seed))
            lost += not found
            print(f"{'found' if found else 'survived':<9} {guard.path}::{guard.name}", flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
