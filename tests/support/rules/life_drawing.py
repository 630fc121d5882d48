"""The life of a block as docs/dev/block-life.md draws it, made from the tables themselves.

``python -m tests.support.rules.life_drawing`` writes it into the document.
"""

import itertools
from collections.abc import Callable
from typing import Final

from kvfs.core.lifecycle import TABLE, Event, Goes, State
from kvfs.core.writing import LAST_CLOSE, Left, Writing
from tests.support.rules.drawings import Drawing, rows

_GOES: Final = {
    Goes.NEVER: "never",
    Goes.FIRST: "first",
    Goes.BY_POLICY: "by policy",
    Goes.AFTER_LEASES: "last",
}

# ---- the life of a block ----


def draw_life() -> str:
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


# ---- its flags while it is written ----

FLAGS: Final = (
    "unfinished",
    "torn",
    "outlives",
    "overrun",
    "appended_only",
    "renamed",
    "emptied",
    "met",
    "locked",
)

#: Every method of ``Writing`` that sets a flag, in words.
EVENTS: Final[dict[str, tuple[Callable[[Writing], None], ...]]] = {
    "it is created": (Writing.create,),
    "its first writer opens a draft": (
        lambda one: one.begin(State.DRAFT, appends=True),
        lambda one: one.begin(State.SLAB_DRAFT, appends=False),
    ),
    "its first writer opens anything else": (
        lambda one: one.begin(State.PUBLISHED, appends=True),
        lambda one: one.begin(State.SLAB, appends=False),
    ),
    "… and only appends, or it is empty": (lambda one: one.begin(State.LEASED, appends=True),),
    "a writer, the first or one more, does not only append": (
        lambda one: one.begin(State.DRAFT, appends=False),
        lambda one: one.join(appends=False),
        Writing.join_renamed,
    ),
    "processes share it, while it is empty": (Writing.meet,),
    "… and it is still empty when all but one have closed it": (Writing.part,),
    "a lock of a writer is seen": (Writing.see_lock,),
    "it becomes REWRITE": (Writing.rewrite,),
    "space is allocated for a draft": (lambda one: one.allocate(State.SLAB_DRAFT),),
    "a file server empties it": (Writing.empty,),
    "it is truncated, or allocated in REWRITE": (Writing.resize,),
    "a write is refused; the server stops": (Writing.spoil,),
    "its open is refused, and nobody else opened it to write": (Writing.refuse,),
    "a writer dies of a signal; a close stays unproven": (Writing.tear,),
    "it takes room that is not there": (Writing.outrun,),
    "the server stops and a client writes on": (Writing.outlive,),
    "it is renamed": (Writing.move,),
    "its last writer closes, and it has no name": (lambda one: one.end(whole=False),),
    "its last writer closes": (lambda one: one.end(whole=True),),
}


def draw_writing() -> str:
    """Return what sets and clears each flag, and what the last close makes of them."""
    flags = [
        ("event", "sets", "clears"),
        *(_flags(words, *calls) for words, calls in EVENTS.items()),
    ]
    heads = ("state before", *(left.value for left in Left))
    closes = [
        (state.name, *(event.name if (event := row[left]) else "as before" for left in Left))
        for state, row in LAST_CLOSE.items()
    ]
    return "\n".join([*rows(*flags), "", *rows(heads, *closes), ""])


def _flags(words: str, *calls: Callable[[Writing], None]) -> tuple[str, str, str]:
    """Return a row: what each of *calls* sets and clears, whatever the flags were before."""
    sets, clears = [], []
    for flag in FLAGS:
        always, fresh = ({_after(call, flag, start) for call in calls for start in starts}
                         for starts in (STARTS, _UNFINISHED))  # fmt: skip
        if always == {True}:
            sets.append(flag)
        elif always == {False}:
            clears.append(flag)
        elif fresh == {True} and flag != "unfinished" and not _keeps(calls, flag):
            sets.append(f"{flag}, if unfinished")
    return words, ", ".join(sets), ", ".join(clears)


STARTS: Final = list(itertools.product((False, True), repeat=len(FLAGS)))
_UNFINISHED: Final = [start for start in STARTS if start[0]]


def _after(call: Callable[[Writing], None], flag: str, start: tuple[bool, ...]) -> bool:
    """Return *flag* after *call* on flags of *start*."""
    one = Writing()
    vars(one).update(zip(FLAGS, start, strict=True))
    call(one)
    return bool(getattr(one, flag))


def _keeps(calls: tuple[Callable[[Writing], None], ...], flag: str) -> bool:
    """Whether *calls* never change *flag*."""
    place = FLAGS.index(flag)
    return all(_after(call, flag, start) == start[place] for call in calls for start in STARTS)


PAGE: Final = "dev/block-life.md"
LIFE: Final = Drawing(PAGE, "life of a block", "life_drawing", draw_life)
WRITING: Final = Drawing(PAGE, "flags of an open block", "life_drawing", draw_writing)


def main() -> None:
    """Write both into the document."""
    LIFE.write()
    WRITING.write()


if __name__ == "__main__":
    main()
