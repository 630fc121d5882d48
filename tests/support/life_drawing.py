"""The life of a block as docs/block-life.md draws it, made from the table itself.

``python -m tests.support.life_drawing`` writes it into the document.
"""

from pathlib import Path
from typing import Final

from kvfs.core.lifecycle import TABLE, Event, Goes, State

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "block-life.md"
BEGIN: Final = "<!-- life of a block: made by tests/support/life_drawing.py -->\n"
END: Final = "<!-- end of the life of a block -->\n"
_GOES: Final = {
    Goes.NEVER: "never",
    Goes.FIRST: "first",
    Goes.BY_POLICY: "by policy",
    Goes.AFTER_LEASES: "last",
}


def drawing() -> str:
    """Return a diagram of what leads where, and a row a state with all of its rules."""
    return "\n".join([*_diagram(), "", *_rows(), ""])


def _diagram() -> list[str]:
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> READY"]
    for state, row in TABLE.items():
        if state is State.GONE:
            continue
        ways: dict[State, list[str]] = {}
        for event, target in row.on.items():
            if target is not state and event is not Event.REMOVE:
                ways.setdefault(target, []).append(event.name)
        for target, events in ways.items():
            lines.append(f"    {state.name} --> {target.name}: {', '.join(events)}")
    return [*lines, "    GONE --> [*]", "```"]


def _rows() -> list[str]:
    lines = [
        "REMOVE leads from every state to GONE; what is not listed is illegal.",
        "",
        *(f"- {event.name}: {event.value}" for event in Event),
        "",
        "| state | seen by | evicted | stays at | goes to |",
        "|---|---|---|---|---|",
    ]
    for state, row in TABLE.items():
        stays = ", ".join(event.name for event, target in row.on.items() if target is state)
        leads = ", ".join(
            f"{event.name} → {target.name}"
            for event, target in row.on.items()
            if target is not state
        )
        lines.append(f"| {state.name} | {row.seen} | {_GOES[row.goes]} | {stays} | {leads} |")
    return lines


def drawn(text: str) -> str:
    """Return what document *text* shows between the marks. Raises ValueError without them."""
    begin = text.index(BEGIN) + len(BEGIN)
    return text[begin : text.index(END, begin)]


def main() -> None:
    """Write the drawing into the document."""
    text = DOCUMENT.read_text()
    begin = text.index(BEGIN) + len(BEGIN)
    DOCUMENT.write_text(text[:begin] + drawing() + text[text.index(END) :])


if __name__ == "__main__":
    main()
