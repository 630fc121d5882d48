"""What a supervisor does as docs/availability.md draws it, made from the table itself.

``python -m tests.support.rules.supervisor_drawing`` writes it into the document.
"""

from typing import Final

from mount.supervisor.states import TABLE, Act, MountEvent, MountState, Step
from tests.support.rules.drawings import Drawing, rows


def draw() -> str:
    """Return a diagram of what leads where, the words, and a row a state with all that it does."""
    words: list[str] = []
    for title, meanings in (("States", MountState), ("Events", MountEvent), ("What it does", Act)):
        told = (f"- {word.name}: {word.value}" for word in meanings if word is not Act.NOTHING)
        words += [f"**{title}**", "", *told, ""]
    heads = ("state", "stays at", "goes on")
    body = [
        (state.name, _stays(state), _leads(state))
        for state in MountState
        if state is not MountState.OVER
    ]
    return "\n".join([*_diagram(), "", *words, *rows(heads, *body), ""])


def _diagram() -> list[str]:
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> NO_MOUNT", "    [*] --> WAITS"]
    for state, row in TABLE.items():
        ways: dict[MountState, list[str]] = {}
        for event, (to, _) in row.items():
            if to is not state:
                ways.setdefault(to, []).append(event.name)
        for to, events in ways.items():
            lines.append(f"    {state.name} --> {to.name}: {', '.join(events)}")
    return [*lines, "    OVER --> [*]", "```"]


def _stays(state: MountState) -> str:
    """Return what is done in *state* that does not end it."""
    return ", ".join(
        f"{event.name}: {step.act.name}"
        for event, step in TABLE[state].items()
        if step.to is state and step.act is not Act.NOTHING
    )


def _leads(state: MountState) -> str:
    """Return what ends *state*, what is done then, and where that leads."""
    return ", ".join(
        f"{event.name}: {_told(step)}"
        for event, step in TABLE[state].items()
        if step.to is not state
    )


def _told(step: Step) -> str:
    act = "" if step.act is Act.NOTHING else f"{step.act.name} "
    return f"{act}→ {step.to.name}"


DRAWING: Final = Drawing("availability.md", "states of a supervisor", "supervisor_drawing", draw)


if __name__ == "__main__":
    DRAWING.write()
