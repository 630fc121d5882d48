"""What O_TRUNC does as docs/dev/rewrites.md draws it, made from the tables themselves.

``python -m tests.support.rules.rewrite_drawing`` writes it into the document.
"""

from typing import Final

from kvfs.core.rewriting import EVERYTHING_KEPT, LOOKUP, LOSES_NAME, OPEN, Answer, Found, Try
from tests.support.rules.drawings import Drawing, rows

#: Where an answer leaves the open(2); a LOOKUP that is refused nothing goes on to its OPEN.
_ENDS: Final = {Answer.RETRY: Try.REFUSED.name, Answer.REPLACE: "[*]", Answer.STALE: "[*]"}


def draw_answers() -> str:
    """Return a diagram of one open(2), its words, and a table for each kind of request."""
    words = [f"- {word.name}: {word.value}" for word in (*Try, *Found, *Answer)]
    return "\n".join(
        [*_diagram(), "", *words, "", *_table("OPEN", OPEN), "", *_table("LOOKUP", LOOKUP), ""]
    )


def _diagram() -> list[str]:
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> FIRST", "    [*] --> UNKNOWN"]
    for tried, row in OPEN.items():
        ways: dict[tuple[str, Answer], list[str]] = {}
        for found in (found for found in Found if found in row):
            answer = row[found]
            ways.setdefault((_ENDS.get(answer, "[*]"), answer), []).append(found.name)
        for (target, answer), founds in ways.items():
            lines.append(f"    {tried.name} --> {target}: OPEN {', '.join(founds)} → {answer.name}")
    for tried, leads in LOOKUP.items():
        answers = [answer.name for answer in Answer if answer in leads.values()]
        lines.append(f"    {tried.name} --> {Try.LOOKED.name}: LOOKUP → {', '.join(answers)}")
    return [*lines, "```"]


def _table(request: str, table: dict[Try, dict[Found, Answer]]) -> list[str]:
    heads = [found for found in Found if any(found in row for row in table.values())]
    body = [(tried.name, *(row[found].name for found in heads)) for tried, row in table.items()]
    return rows((request, *(found.name for found in heads)), *body)


def draw_keeps() -> str:
    """Return who keeps what lost its name."""
    heads = ("what loses its name", "its writer may rename it", "others are led to it")
    body = [
        (loser.value, *("yes" if kept else "no" for kept in keeps))
        for loser, keeps in LOSES_NAME.items()
    ]
    return "\n".join([*rows(heads, *body), ""])


def draw_kept() -> str:
    """Return what is kept, for how long and how much of it."""
    body = [(kept.what, f"{kept.wait_s:g} s", str(kept.most or "")) for kept in EVERYTHING_KEPT]
    return "\n".join([*rows(("what is kept", "for", "at most"), *body), ""])


ANSWERS: Final = Drawing("dev/rewrites.md", "answers to O_TRUNC", "rewrite_drawing", draw_answers)
KEEPS: Final = Drawing("dev/rewrites.md", "who keeps what", "rewrite_drawing", draw_keeps)
KEPT: Final = Drawing("dev/rewrites.md", "what a rewrite keeps", "rewrite_drawing", draw_kept)


def main() -> None:
    """Write all into the document."""
    ANSWERS.write()
    KEEPS.write()
    KEPT.write()


if __name__ == "__main__":
    main()
