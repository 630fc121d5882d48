"""What happens to blocks, for those who listen: stored, missing, evicted, removed.

While nobody listens nothing is kept, and an event costs one look at a flag. While somebody does, it
costs a row in a bounded queue; who takes the rows makes the text (docs/events.md).
"""

import json
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, NamedTuple

from kvfs.core.types import SECOND_NS, InodeNo
from kvfs.pool.policies import path_of
from kvfs.storage.index import Index

#: Events that wait to be taken; the oldest of more are lost, and counted.
_WAITING_MAX: Final = 16_384


class Kind(StrEnum):
    """What happened."""

    STORED = "stored"
    MISSING = "missing"
    EVICTED = "evicted"
    REMOVED = "removed"


class _Row(NamedTuple):
    kind: Kind
    time_ns: int
    directory: str
    name: bytes
    more: dict[str, Any]


class Events:
    """The events of one pool that nobody has taken yet."""

    def __init__(self, index: Index, clock_ns: Callable[[], int]) -> None:
        self._index: Final = index
        self._clock_ns: Final = clock_ns
        self._waiting: deque[_Row] = deque(maxlen=_WAITING_MAX)
        #: Whether anybody listens; without, ``note`` need not be called.
        self.wanted = False
        #: Events that came while too many waited.
        self.lost = 0

    def listen(self, *, wanted: bool) -> None:
        """Keep events from now on, or none."""
        self.wanted = wanted
        if not wanted:
            self._waiting.clear()
            self.lost = 0

    def note(self, kind: Kind, parent: InodeNo, name: bytes, **more: object) -> None:
        """Keep one event of the block *name* in directory *parent*.

        Its path is looked up at once, because the directory may be gone later.
        """
        if len(self._waiting) == _WAITING_MAX:
            self.lost += 1
        directory = path_of(self._index, parent)
        self._waiting.append(_Row(kind, self._clock_ns(), directory, name, more))

    def take(self, count_max: int) -> list[bytes]:
        """Return the oldest events, each a line of JSON, and forget them."""
        taken = min(count_max, len(self._waiting))
        return [_line(self._waiting.popleft()) for _ in range(taken)]

    def take_lost(self) -> int:
        """Return how many were lost since the last call."""
        lost, self.lost = self.lost, 0
        return lost


def _line(row: _Row) -> bytes:
    name = row.name.decode(errors="surrogateescape")
    told = {
        "event": row.kind.value,
        "time": round(row.time_ns / SECOND_NS, 6),
        "path": f"{row.directory.rstrip('/')}/{name}",
        **row.more,
    }
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"
