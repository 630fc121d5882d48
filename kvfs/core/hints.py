"""Hints on how long blocks are worth keeping: the attribute ``user.kvfs.hint``, and its values.

A hint biases eviction and never pins. With a priority a block goes after all without one. With
``once`` it goes before them.

A line of the hints socket is a batch of them (docs/hints.md). Pure: bytes in, values out. Whatever
a client sends is a batch: what is out of bounds is clipped, what cannot be understood is left out,
and both are counted.
"""

import json
import math
import re
from enum import StrEnum
from typing import Any, Final, NamedTuple

from kvfs.core.sizes import parse_age

PRIORITY_MAX: Final = 100
#: The priority of a hint that names none, such as ``ttl=1h``.
PRIORITY_USUAL: Final = 50
#: Longer makes no sense, and the seconds since 1970 of the end must fit into 32 bits.
DURATION_MAX_S: Final = 10 * 365 * 86_400.0
#: The value that overrides the hint of a directory above.
NO_HINT: Final = b"none"

_SESSION: Final = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")
_TTL_LEAST_S: Final = 1.0


class BlockHint(NamedTuple):
    """What a file or a directory says about the blocks that it stands for."""

    #: 1 to 100: the higher, the later its blocks go; 0: they go as if nothing was said.
    priority: int = 0
    #: Whether the blocks are of no use again, and go first.
    once: bool = False
    #: Seconds after which the priority of a stored block ends; None: never.
    ttl_s: float | None = None
    #: By which the hints socket names these blocks; "" for none.
    session: str = ""
    #: The attribute's value.
    text: bytes = NO_HINT


def hint_of(value: bytes) -> BlockHint:
    """Return what attribute *value* says, as ``priority=80,ttl=1h,session=S``. Raises ValueError.

    ``none`` says nothing, and overrides what a directory above says.
    """
    if value == NO_HINT:
        return BlockHint()
    said: dict[str, str] = {}
    for part in value.decode("ascii", errors="replace").split(","):
        key, _, text = part.partition("=")
        if key in said:
            raise ValueError(f"{key} is said twice")
        said[key] = text
    if said.get("once"):
        raise ValueError("once takes no value")
    ttl_s = _ttl_of(said["ttl"]) if "ttl" in said else None
    usual = PRIORITY_USUAL if "ttl" in said else 0
    hint = BlockHint(
        priority=_priority_of(said["priority"]) if "priority" in said else usual,
        once="once" in said,
        ttl_s=ttl_s,
        session=_session_of(said["session"]) if "session" in said else "",
        text=value,
    )
    if unknown := said.keys() - {"priority", "once", "ttl", "session"}:
        raise ValueError(f"{min(unknown)!r}: say priority=0..100, once, ttl=AGE, session=ID, none")
    if hint.once and (hint.priority or ttl_s is not None):
        raise ValueError("once goes with neither a priority nor a ttl")
    return hint


def is_session(text: str) -> bool:
    """Whether *text* may name a session."""
    return _SESSION.fullmatch(text) is not None


def _priority_of(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 3 or int(text) > PRIORITY_MAX:
        raise ValueError(f"priority must be 0 to {PRIORITY_MAX}")
    return int(text)


def _ttl_of(text: str) -> float:
    ttl_s = parse_age(text)
    if not _TTL_LEAST_S <= ttl_s <= DURATION_MAX_S:
        raise ValueError(f"ttl must be {_TTL_LEAST_S:g} s to 3650d")
    return ttl_s


def _session_of(text: str) -> str:
    if not is_session(text):
        raise ValueError("session must be 1 to 128 letters, digits, '_', '.', ':', '@' or '-'")
    return text


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
    #: Hints told of them before count no more.
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
