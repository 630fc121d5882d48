"""The lines of the hints socket: a batch of hints each (docs/hints.md). Pure: bytes in, values out.

Whatever a client sends is a batch: what is out of bounds is clipped, what cannot be understood is
left out, and both are counted.
"""

import json
import math
from enum import StrEnum
from typing import Any, Final, NamedTuple

from kvfs.core.hints import DURATION_MAX_S, PRIORITY_MAX, PRIORITY_USUAL

#: Blocks that one line may hint; of more the rest is left out.
BLOCKS_MAX: Final = 1 << 16


class Do(StrEnum):
    """What a hint asks for."""

    #: Its blocks go after those without a priority, for a while.
    RETAIN = "retain"
    #: They go first.
    DEMOTE = "demote"
    #: They are read into the page cache, in this order.
    FETCH = "fetch"
    #: What was told of them is forgotten.
    RELEASE = "release"


class ToldHint(NamedTuple):
    """One hint, and the blocks that it is about."""

    do: Do
    #: Paths below the mountpoint, beginnings of such paths, and sessions.
    names: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    priority: int = PRIORITY_USUAL
    #: From now on (s); None: until the block goes.
    duration_s: float | None = None


class HintBatch(NamedTuple):
    """What one line says."""

    hints: tuple[ToldHint, ...] = ()
    #: What the client calls the batch, if it wants an answer.
    id: str | int | None = None
    #: Values beyond their bound, and hints that cannot be understood.
    clipped: int = 0
    unknown: int = 0


class HintClient(NamedTuple):
    """Who sends hints."""

    uid: int
    gids: frozenset[int]


class TakenHints:
    """What became of the hints of one line."""

    def __init__(self) -> None:
        self.taken = self.clipped = self.unknown = self.refused = 0


def batch_of(line: bytes) -> HintBatch:
    """Return what *line* says. Never raises."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return HintBatch(unknown=1)
    if not isinstance(said, dict) or not isinstance(said.get("hints"), list):
        return HintBatch(unknown=1)
    named = said.get("id")
    hints: list[ToldHint] = []
    clipped = unknown = 0
    for one in said["hints"]:
        try:
            hint, beyond = _hint_of(one)
        except ValueError:
            unknown += 1
            continue
        hints.append(hint)
        clipped += beyond
    return HintBatch(
        tuple(hints),
        named if isinstance(named, (str, int)) else None,
        clipped=clipped,
        unknown=unknown,
    )


_KEYS: Final = frozenset({"do", "names", "prefixes", "sessions", "priority", "duration_s"})


def _hint_of(said: object) -> tuple[ToldHint, int]:
    """Return one hint, and how many of its values were clipped. Raises ValueError."""
    if not isinstance(said, dict) or not said.keys() <= _KEYS:
        raise ValueError("not a hint")
    do, priority, duration_s = Do(str(said.get("do"))), PRIORITY_USUAL, None
    clipped = 0
    if "priority" in said:
        asked = _number(said["priority"])
        priority = round(min(max(0, asked), PRIORITY_MAX))
        clipped += asked < 0 or asked > PRIORITY_MAX
    if "duration_s" in said:
        asked = _number(said["duration_s"])
        if asked <= 0:
            raise ValueError("it is over before it begins")
        duration_s = float(min(asked, DURATION_MAX_S))
        clipped += asked > DURATION_MAX_S
    if do is Do.RETAIN and priority == 0:
        do = Do.RELEASE
    names, prefixes, sessions = (_texts(said, key) for key in ("names", "prefixes", "sessions"))
    return ToldHint(do, names, prefixes, sessions, priority, duration_s), clipped


def _texts(said: dict[str, Any], key: str) -> tuple[str, ...]:
    found = said.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(key)
    return tuple(found)


def _number(said: object) -> int | float:
    if isinstance(said, bool) or not isinstance(said, (int, float)):
        raise ValueError("not a number")
    if isinstance(said, float) and math.isnan(said):
        raise ValueError("not a number")
    return said
