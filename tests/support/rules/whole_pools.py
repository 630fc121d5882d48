"""What takes a whole pool, and what of it that uses: itself, and by all to whom it hands the pool.

A class that uses a few parts of a pool takes these parts: then its constructor says what it can
touch, and a test of it needs no pool.
"""

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Final

from tests.support.rules.source_tree import SOURCES, Function, tree_of

#: A class that uses so many attributes of a pool may take it whole.
MANY: Final = 6
#: And so may a function, which keeps nothing.
SEVERAL: Final = 2
_POOL: Final = "Pool"
#: A change of the pool updates all that must agree with the index.
_CHANGES: Final = "change"
_CHANGE: Final = "PoolChange"

Taker = Function | ast.ClassDef


def takers(path: Path) -> Iterator[Taker]:
    """Yield each function of *path* that takes a whole pool, and class whose constructor does."""
    for node in tree_of(path).body:
        if isinstance(node, Taker) and _parameter(node):
            yield node


def uses(taker: Taker, beside: Sequence[Path] = ()) -> frozenset[str]:
    """Return the attributes of the pool that *taker* uses, and those to whom it hands the pool.

    These are looked for in the product, and in the files *beside* it.
    """
    known = dict(_known()) | {each.name: each for path in beside for each in takers(path)}
    found, seen, left = set[str](), set[str](), [taker]
    while left:
        one = left.pop()
        if one.name in seen:
            continue
        seen.add(one.name)
        found |= _used_by(one)
        left += [known[name] for name in _handed_to(one) if name in known]
    return frozenset(found)


def may_take(taker: Taker, attributes: frozenset[str]) -> bool:
    """Whether *taker*, which uses *attributes* of a pool, may take it whole."""
    least = MANY if isinstance(taker, ast.ClassDef) else SEVERAL
    return len(attributes) >= least or _CHANGES in attributes


@cache
def _known() -> dict[str, Taker]:
    return {each.name: each for path in SOURCES for each in takers(path)}


def _parameter(taker: Taker) -> str | None:
    """Return the name of the parameter that is the pool, None if there is none."""
    function: ast.stmt | None = taker
    if isinstance(taker, ast.ClassDef):
        own = (node for node in taker.body if isinstance(node, Function))
        function = next((node for node in own if node.name == "__init__"), None)
    if not isinstance(function, Function):
        return None
    given = chain(function.args.posonlyargs, function.args.args, function.args.kwonlyargs)
    return next((each.arg for each in given if _is_pool(each.annotation)), None)


def _is_pool(annotation: ast.expr | None) -> bool:
    if isinstance(annotation, ast.BinOp):
        return _is_pool(annotation.left) or _is_pool(annotation.right)
    return isinstance(annotation, ast.Name) and annotation.id == _POOL


def _pools(taker: Taker) -> set[str]:
    """Return what *taker* calls the pool: its parameter, and names and fields made from it."""
    names, more = {str(_parameter(taker))}, True
    while more:
        made = {name for name, value in _assigned(taker) if value in names}
        more = not made <= names
        names |= made
    return names


def _assigned(taker: Taker) -> Iterator[tuple[str, str]]:
    """Yield each name or field that *taker* sets, with the name or field that it is set to."""
    for node in ast.walk(taker):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                yield from ((ast.unparse(left), ast.unparse(right)) for left, right in pairs)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield ast.unparse(node.target), ast.unparse(node.value)


def _used_by(taker: Taker) -> set[str]:
    pools = _pools(taker)
    used = {
        node.attr
        for node in ast.walk(taker)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in pools
    }
    bases = taker.bases if isinstance(taker, ast.ClassDef) else []
    return used | {_CHANGES for base in bases if ast.unparse(base) == _CHANGE}


def _handed_to(taker: Taker) -> Iterator[str]:
    """Yield the name of each class or function that *taker* calls with the pool."""
    pools = _pools(taker)
    for node in ast.walk(taker):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = [*node.args, *(each.value for each in node.keywords)]
            starred = [each.value for each in given if isinstance(each, ast.Starred)]
            given += [one for each in starred if isinstance(each, ast.Tuple) for one in each.elts]
            if any(ast.unparse(each) in pools for each in given):
                yield node.func.id
