"""The source tree as data: which files there are, what they import, define and call.

For the tidy tests; it reads, and judges nothing.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
SOURCES: Final = tuple(
    path for top in ("kvfs", "mount") for path in sorted((ROOT / top).rglob("*.py"))
)
TESTS: Final = tuple(sorted((ROOT / "tests").rglob("*.py")))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def shown(path: Path) -> str:
    """Return *path* as a reader of the repository knows it."""
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    """Return the name under which *path* is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES: Final = {module_of(path): path for path in SOURCES}


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of *path*."""
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[str]:
    """Yield what is imported, as full module names where kvfs's own modules are meant."""
    return _imports_in(path, tree_of(path))


def _imports_in(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path)}:{node.lineno}: import by full name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


def functions_of(path: Path) -> Iterator[Function]:
    """Yield every function and method."""
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def calls_of(node: ast.AST) -> Iterator[str]:
    """Yield the last part of the name of everything that is called: ``raises`` of pytest.raises."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            yield getattr(inner.func, "attr", getattr(inner.func, "id", ""))


def names_made(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every name that the file itself makes, its own among them, and the line."""
    yield path.stem, 1
    for node in ast.walk(tree_of(path)):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def names_used(path: Path) -> Iterator[str]:
    """Yield every name that the file mentions, but for those it only makes or imports."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def constants_of(path: Path) -> Iterator[tuple[str, float | str]]:
    """Yield each constant that the file names, private or not: its number, else its source."""
    for node in tree_of(path).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            number = _number(node.value)
            if node.target.id.isupper():
                value = ast.unparse(node.value) if number is None else number
                yield node.target.id.lstrip("_"), value


def _number(node: ast.expr) -> float | None:
    """Return what *node* comes to if it is made of numbers only."""
    parts = (ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)
    if not all(isinstance(inner, parts) for inner in ast.walk(node)):
        return None
    value = eval(ast.unparse(node), {"__builtins__": {}})  # of numbers only
    return value if isinstance(value, int | float) else None


def words_of(name: str) -> set[str]:
    """Return the words of a snake_case or CamelCase name, in small letters."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def lines_of(path: Path) -> int:
    """Return the number of lines."""
    return len(path.read_text().splitlines())


_NO_CODE: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
        tokenize.INDENT,
        tokenize.NEWLINE,
        tokenize.NL,
    }
)


#: What declares a setting: a name with its default, its reason and its bounds, and no code.
_DECLARES: Final = frozenset({"setting", "setting_table", "share"})
_DATA: Final = (ast.BinOp, ast.Constant, ast.Name, ast.Tuple, ast.UnaryOp)
_OF_DATA: Final = (ast.expr_context, ast.operator, ast.unaryop)


def is_declaration(node: ast.stmt) -> bool:
    """Whether *node*, of a class body, declares a setting, from plain data only."""
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Call):
        return False
    made = node.value
    if not isinstance(made.func, ast.Name) or made.func.id not in _DECLARES:
        return False
    given = [*made.args, *(keyword.value for keyword in made.keywords)]
    return all(isinstance(one, _DATA + _OF_DATA) for each in given for one in ast.walk(each))


@cache
def code_lines_of(path: Path) -> int:
    """Return the number of lines that hold code.

    Blank lines, comments, docstrings and the settings that a class declares are free.
    """
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    code = {
        number
        for token in tokens
        if token.type not in _NO_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            told = node.body[0]
            code -= _lines(told)
        if isinstance(node, ast.ClassDef):
            for declared in filter(is_declaration, node.body):
                code -= _lines(declared)
    return len(code)


def _lines(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def tracked_texts() -> Iterator[tuple[str, str]]:
    """Yield path and text of every file that a clone would have."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file():
            data = path.read_bytes()
            if b"\0" not in data[:8192]:
                yield name, data.decode(errors="replace")
