"""Who sets the fields of an open inode: each part's own module, and nobody else."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.rules.source_tree import MODULES, imports_of, module_of, tree_of

_HOME: Final = "kvfs.pool.open.open_inodes"
_WHOLE: Final = "OpenInode"
#: What others have under the same name, as their owners call it.
_NAMESAKES: Final = frozenset({("handle", "flushed"), ("goal", "attributes")})


@cache
def fields() -> dict[str, tuple[str, str]]:
    """Return each field of an open inode, with the module and the class that it is a part of."""
    classes = {
        node.name: (module, node)
        for module in (_HOME, *imports_of(MODULES[_HOME]))
        if module in MODULES
        for node in tree_of(MODULES[module]).body
        if isinstance(node, ast.ClassDef)
    }
    names = [_WHOLE, *(ast.unparse(base) for base in classes[_WHOLE][1].bases)]
    return {
        field: (classes[name][0], name) for name in names for field in _set_in(classes[name][1])
    }


def _set_in(part: ast.ClassDef) -> Iterator[str]:
    for node in part.body:
        if isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and node.value and isinstance(node.target, ast.Name):
            yield node.target.id


def set_elsewhere(path: Path) -> Iterator[str]:
    """Yield each place of *path* that sets a field of a part that is not defined there."""
    for owner, node in _attributes_set(tree_of(path)):
        module, part = fields().get(node.attr, ("", ""))
        parts = {name for _, name in fields().values()}
        shown = ast.unparse(node)
        if not part:
            continue
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            if owner in parts and owner != part:
                yield f"line {node.lineno}: {shown} is a field of {part}"
        elif module != module_of(path) and not _is_namesake(node):
            yield f"line {node.lineno}: {shown} is set by a method of {part}"


def _attributes_set(tree: ast.Module) -> Iterator[tuple[str, ast.Attribute]]:
    """Yield each attribute that is set, with the class at the top of the file, if in one."""
    for top in tree.body:
        for node in ast.walk(top):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                yield getattr(top, "name", ""), node


def _is_namesake(node: ast.Attribute) -> bool:
    owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
    return (owner, node.attr) in _NAMESAKES
