"""The small edits that can be made in a Python source: each changes what one expression says.

Nothing here knows files: a source is text, and an edit is a piece of it that becomes another.
"""

import ast
import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

_TURNED: Final[dict[type[ast.cmpop], str]] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
#: What ends a branch early: an ``if`` with such a body is a guard.
_ENDS: Final = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class Edit(NamedTuple):
    """At *line* (from 1) the characters from *start* to *end* of the source become *text*."""

    line: int
    start: int
    end: int
    text: str
    what: str

    def applied(self, source: str) -> str:
        """Return *source* with this edit."""
        return source[: self.start] + self.text + source[self.end :]


class _Source:
    """A source by lines, for the columns of ``ast``, which count bytes of UTF-8."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """Return the place of a line and column in the text."""
        before = self._lines[line - 1].encode()[:column]
        return self._starts[line - 1] + len(before.decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where *node* begins and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.at(node.lineno, node.col_offset),
            self.at(node.end_lineno, node.end_col_offset),
        )


def edits_of(text: str) -> list[Edit]:
    """Return the small edits of the source *text*, by line. Raises SyntaxError."""
    source = _Source(text)
    found: list[Edit] = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Compare():
                found += _turned(source, node)
            case ast.BoolOp():
                found += _joined_otherwise(source, node)
            case ast.If() | ast.While():
                found += _decided_otherwise(source, node)
            case ast.Constant() if isinstance(node.value, int) and _is_bound(node):
                start, end = source.span(node)
                more = str(node.value + 1)
                found.append(Edit(node.lineno, start, end, more, f"{node.value} -> {more}"))
            case _:
                pass
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                found += _of_statements(source, block)
    return sorted(set(found))


def _is_bound(node: ast.Constant) -> bool:
    # Not True, and no large number, of which one more says the same.
    return not isinstance(node.value, bool) and isinstance(node.value, int) and node.value < 1 << 16


def _turned(source: _Source, node: ast.Compare) -> Iterator[Edit]:
    left = node.left
    for operator, right in zip(node.ops, node.comparators, strict=True):
        _, start = source.span(left)
        end, _ = source.span(right)
        between = source.text[start:end]
        # A comment between them, or a bracket that closes there, stays.
        if "#" not in between and ")" not in between and "(" not in between:
            turned = f" {_TURNED[type(operator)]} "
            what = f"{between.strip()} -> {turned.strip()}"
            yield Edit(right.lineno, start, end, turned, what)
        left = right


def _joined_otherwise(source: _Source, node: ast.BoolOp) -> Iterator[Edit]:
    is_and = isinstance(node.op, ast.And)
    old, new = ("and", "or") if is_and else ("or", "and")
    # One at a time would need brackets; all of one expression are turned.
    if len(node.values) == 2:
        _, start = source.span(node.values[0])
        end, _ = source.span(node.values[1])
        between = source.text[start:end]
        if between.count(old) == 1 and "#" not in between:
            yield Edit(node.lineno, start, end, between.replace(old, new), f"{old} -> {new}")


def _decided_otherwise(source: _Source, node: ast.If | ast.While) -> Iterator[Edit]:
    start, end = source.span(node.test)
    test = source.text[start:end]
    if "\n" in test or ":=" in test:
        return
    if isinstance(node, ast.If):
        yield Edit(node.lineno, start, end, f"not ({test})", f"condition turned: {test}")
        if isinstance(node.body[-1], _ENDS) and not node.orelse:
            yield Edit(node.lineno, start, end, "False", f"guard dropped: {test}")


def _of_statements(source: _Source, block: Sequence[ast.stmt]) -> Iterator[Edit]:
    for statement in block:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call | ast.Await):
            start, end = source.span(statement)
            what = f"call dropped: {source.text[start:end].splitlines()[0]}"
            yield Edit(statement.lineno, start, end, "pass", what)
    for first, second in itertools.pairwise(block):
        simple = (ast.Expr, ast.Assign, ast.AugAssign)
        is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if not isinstance(first, simple) or not isinstance(second, simple) or is_text:
            continue
        if "\n" in source.text[source.span(first)[1] : source.span(second)[0]].strip(" "):
            begin, between = source.span(first)
            after, end = source.span(second)
            text = source.text
            swapped = text[after:end] + text[between:after] + text[begin:between]
            yield Edit(first.lineno, begin, end, swapped, "swapped with the next statement")
