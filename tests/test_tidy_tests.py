"""What a test must be: collected, without sleep, and claiming something."""

import ast
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.house_rules import of_each
from tests.support.source_tree import TESTS, Function, calls_of, functions_of, shown, tree_of

CLAIMS: Final = frozenset({"raises", "warns", "fail"})


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
