"""What is called through an attribute that somebody sets later, and stand-ins until then.

Whoever reads such a call cannot tell from the imports where it goes. A part takes what it calls in
its constructor instead; a Protocol there says what that is.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.rules.source_tree import SOURCES, Function, functions_of, tree_of

_CALLABLE: Final = frozenset({"Callable", "Protocol"})


@cache
def methods() -> frozenset[str]:
    """Return the names of methods that no class has as data, too."""
    called: set[str] = set()
    data: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            for inner in node.body:
                if isinstance(inner, Function):
                    (data if inner.decorator_list else called).add(inner.name)
                elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    data.add(inner.target.id)
                elif isinstance(inner, ast.Assign):
                    data |= {each.id for each in inner.targets if isinstance(each, ast.Name)}
    return frozenset(called - data)


def _is_of_callable(value: ast.expr) -> bool:
    return isinstance(value, ast.Subscript) and getattr(value.value, "id", "") == "Callable"


@cache
def callable_types() -> frozenset[str]:
    """Return the names of types that are called or answer calls: Protocols, and Callables' own."""
    found = set(_CALLABLE)
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                if any(getattr(base, "id", "") == "Protocol" for base in node.bases):
                    found.add(node.name)
            elif isinstance(node, ast.Assign) and _is_of_callable(node.value):
                found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return frozenset(found)


def late_bound(path: Path) -> Iterator[str]:
    """Yield each assignment from outside that makes another's attribute callable, or may.

    And each public attribute of *path*'s classes that is declared as such, if the constructor
    neither was given what it is nor made it.
    """
    for function in (node for node in ast.walk(tree_of(path)) if isinstance(node, Function)):
        arguments = function.args
        given = {each.arg for each in [*arguments.args, *arguments.kwonlyargs]}
        local = given | {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if _is_anothers(target) and _is_callable(node.value, path, local):
                        yield f"line {node.lineno}: {ast.unparse(target)}"
            elif isinstance(node, ast.AnnAssign) and _is_public_callable(node):
                is_given = isinstance(node.value, ast.Name) and node.value.id in given
                is_own = isinstance(node.value, ast.Call)  # made here
                if function.name != "__init__" or not (is_given or is_own):
                    yield f"line {node.lineno}: {ast.unparse(node.target)}"


def _is_anothers(target: ast.expr) -> bool:
    owner = target.value if isinstance(target, ast.Attribute) else None
    return owner is not None and not (isinstance(owner, ast.Name) and owner.id == "self")


def _is_callable(value: ast.expr, path: Path, local: set[str]) -> bool:
    if isinstance(value, ast.Lambda):
        return True
    if isinstance(value, ast.Attribute):
        if isinstance(value.value, ast.Name) and value.value.id == "self":
            return any(node.name == value.attr for node in functions_of(path))
        return value.attr in methods()
    return isinstance(value, ast.Name) and value.id not in local and value.id in _functions(path)


def _functions(path: Path) -> set[str]:
    """Return what *path* defines or imports that is named as a function is."""
    found = {node.name for node in tree_of(path).body if isinstance(node, Function)}
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name for alias in node.names}
            found |= {name for name in names if name.lower() == name}
    return found


def _is_public_callable(node: ast.AnnAssign) -> bool:
    target = node.target
    if not isinstance(target, ast.Attribute) or target.attr.startswith("_"):
        return False
    kind = node.annotation
    parts = [kind.left, kind.right] if isinstance(kind, ast.BinOp) else [kind]
    names = {getattr(getattr(each, "value", each), "id", getattr(each, "id", "")) for each in parts}
    return bool(names & callable_types())


def stand_ins(path: Path) -> Iterator[str]:
    """Yield each function of *path* that does nothing and returns a constant, if anything."""
    for node in tree_of(path).body:
        if isinstance(node, Function) and all(map(_is_idle, node.body)):
            yield node.name


def _is_idle(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr | ast.Return):
        return statement.value is None or isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass | ast.Delete)
