"""Hints on how long blocks are worth keeping: the attribute ``user.kvfs.hint``, and its values.

A hint biases eviction and never pins. With a priority a block goes after all without one. With
``once`` it goes before them.
"""

import re
from typing import Final, NamedTuple

from kvfs.core.sizes import parse_age

PRIORITY_MAX: Final = 100
#: The priority of who names none, as of ``ttl=1h`` alone.
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
