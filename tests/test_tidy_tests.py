"""What a test must be: collected, without sleep, claiming something, and outside the engine."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.rules.house_rules import of_each
from tests.support.rules.source_tree import (
    TESTS,
    Function,
    calls_of,
    functions_of,
    imports_of,
    shown,
    tree_of,
)

CLAIMS: Final = frozenset({"raises", "warns", "fail"})

#: Where a store is driven: with an engine alone, and with the mount's files on it.
DRIVERS: Final = [
    path for path in TESTS if shown(path).startswith(("tests/engine/", "tests/fuse/"))
]
#: Who imports one of these drives a store.
STORES: Final = frozenset({"Drive", "Driven", "Host", "drive", "driven", "host"})
INSIDE: Final = ("kvfs.engine", "kvfs.pool")
#: What a store is made of: no way leads through them but the facade's.
PARTS: Final = frozenset({"engine", "parts", "pool"})
#: Ways into the engine, each with the line on which it is to be found.
WAYS: Final = """
from kvfs.pool.space import Space
from kvfs.pool import heat
from tests.support.store.stores import Host, host
from kvfs.core.types import InodeNo

def test_it(running, patch):
    store = running.store
    assert store.pool.space.used_bytes
    engine = store.engine
    desk.store.engine.reclaim.evict(1)
    Files(store.engine, store.settings)
    Space(store.parts, 1)
    patch.setattr("kvfs.pool.pins._STEP", 2)
    assert store.space.used_bytes
"""


def named_tests(path: Path) -> list[Function]:
    return [node for node in functions_of(path) if node.name.startswith("test_")]


@cache
def functions_by_name() -> dict[str, list[Function]]:
    named: dict[str, list[Function]] = {}
    for path in TESTS:
        for function in functions_of(path):
            named.setdefault(function.name, []).append(function)
    return named


def claims_something(function: Function, seen: frozenset[str] = frozenset()) -> bool:
    """Tell whether *function*, or what it calls under tests/, can fail by its own will."""
    if any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(function)):
        return True
    called = set(calls_of(function)) - seen
    return bool(called & CLAIMS) or any(
        claims_something(inner, seen | called)
        for name in called
        for inner in functions_by_name().get(name, [])
    )


# Classes in a file called *contract* are collected where a test module subclasses them.
@of_each(TESTS)
def test_every_test_is_collected(path: Path) -> None:
    if path.name.startswith("test_"):
        # Tests can be inherited from a contract, or made by hypothesis from a state machine.
        classes = [node.name for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
        made = "TestCase" in path.read_text() or any(name.startswith("Test") for name in classes)
        assert named_tests(path) or made, f"{shown(path)} holds no test"
    elif "contract" not in path.stem:
        lost = [test.name for test in named_tests(path)]
        assert not lost, f"{shown(path)}: pytest does not look here for {lost}"


# A driver runs in a process of its own and may have to poll a connector that offers no event; a
# benchmark paces its load.
@of_each([path for path in TESTS if not {"drivers", "bench"} & set(path.parts)])
def test_no_test_sleeps(path: Path) -> None:
    sleeps = [
        node.lineno
        for node in ast.walk(tree_of(path))
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "sleep"
            and isinstance(node.value, ast.Name)
            and node.value.id == "time"
        )
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and "sleep" in {alias.name for alias in node.names}
        )
    ]
    assert not sleeps, f"{shown(path)}: sleeps in lines {sleeps}; wait for the event itself"


@of_each(TESTS)
def test_every_test_claims_something(path: Path) -> None:
    silent = [test.name for test in named_tests(path) if not claims_something(test)]
    assert not silent, f"{shown(path)}: these assert nothing: {silent}"


# ---- the facade ----


def drives_a_store(tree: ast.Module) -> bool:
    """Whether a file with *tree* has a store, its own or a fixture's."""
    return any(
        (isinstance(node, ast.ImportFrom) and STORES & {alias.name for alias in node.names})
        or (isinstance(node, ast.arg) and node.arg in ("running", "desk"))
        for node in ast.walk(tree)
    )


def names_inside(path: Path) -> Iterator[str]:
    """Yield what *path* names inside the engine, but for the part that it is called after."""
    own = path.stem.removeprefix("test_")
    nodes = list(ast.walk(tree_of(path)))
    # Handed on whole: to the mount, or to the part under test.
    handed = {id(node.body) for node in nodes if isinstance(node, ast.Lambda)}
    handed |= {id(each) for node in nodes if isinstance(node, ast.Call) for each in node.args}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith(tuple(f"{top}." for top in INSIDE)):
                yield f"{node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Attribute) and (
            node.attr == "pool" or (node.attr in PARTS and id(node) not in handed)
        ):
            yield f"{node.lineno}: {ast.unparse(node)}"
    for name in set(imports_of(path)):
        if name.startswith(INSIDE) and name.rpartition(".")[2] != own:
            yield f"imports {name}"


@of_each(DRIVERS)
def test_who_drives_a_store_names_nothing_inside_it(path: Path) -> None:
    if drives_a_store(tree_of(path)):
        found = sorted(names_inside(path))
        assert not found, f"{shown(path)}: ask tests/support/store/driven.py instead: {found}"


def test_ways_inside_are_found(tmp_path: Path) -> None:
    path = tmp_path / "test_space.py"
    path.write_text(WAYS)
    assert drives_a_store(tree_of(path))
    assert sorted(names_inside(path)) == [
        "10: store.engine",
        "11: desk.store.engine",
        "14: 'kvfs.pool.pins._STEP'",
        "9: store.pool",
        "imports kvfs.pool",
    ]
