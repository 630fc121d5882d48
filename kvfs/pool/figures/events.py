"""Events of blocks for listeners: stored, missing, evicted, removed.

Without a listener nothing is kept, and an event costs one look at a flag. With one, it costs a row
in a queue that is bounded in bytes; the text is made when rows are taken (docs/events.md).
"""

import json
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, NamedTuple

from kvfs.core.types import SECOND_NS, InodeNo
from kvfs.pool.rules.paths import Paths, cut
from kvfs.storage.index import Index

#: Most bytes of the events that wait to be taken; beyond it the oldest are lost, and counted.
WAITING_MAX_BYTES: Final = 8 << 20
#: About what a row takes in memory beside directory and name.
_ROW_BYTES: Final = 480
#: Rows of the index read for paths between two calls of ``pop``, at some 4 us each; further events
#: are lost. Only lookups in ever other directories, hundreds of levels deep, need more.
_STEPS_MAX: Final = 8192


class Kind(StrEnum):
    """What happened."""

    STORED = "stored"
    MISSING = "missing"
    EVICTED = "evicted"
    REMOVED = "removed"


class _Row(NamedTuple):
    kind: Kind
    time_ns: int
    directory: bytes
    name: bytes
    more: dict[str, Any]

    @property
    def size_bytes(self) -> int:
        """About how much memory it takes."""
        return _ROW_BYTES + len(self.directory) + len(self.name)


class Events:
    """The events of one pool that were not taken yet."""

    def __init__(self, index: Index, clock_ns: Callable[[], int]) -> None:
        self._clock_ns: Final = clock_ns
        self._paths: Final = Paths(index)
        self._steps_left = _STEPS_MAX
        self._waiting: deque[_Row] = deque()
        self._waiting_bytes = 0
        #: Whether anybody listens; otherwise ``add`` need not be called.
        self.wanted = False
        #: Events lost since the last ``take_lost``.
        self.lost = 0

    def listen(self, *, wanted: bool) -> None:
        """Keep events from now on, or drop them all if not *wanted*."""
        self.wanted = wanted
        if not wanted:
            self._waiting.clear()
            self._waiting_bytes = 0
            self._paths.clear()
            self._steps_left = _STEPS_MAX
            self.lost = 0

    def tree_changed(self) -> None:
        """A directory moved: what happens below it from now on has another path."""
        self._paths.clear()

    def add(self, kind: Kind, parent: InodeNo, name: bytes, **more: object) -> None:
        """Keep one event of the block *name* in directory *parent*.

        Its path is looked up at once, because the directory may be gone later.
        """
        if self._steps_left <= 0:
            self.lost += 1
            return
        directory, steps = self._paths.of(parent)
        self._steps_left -= steps
        row = _Row(kind, self._clock_ns(), directory, name, more)
        self._waiting.append(row)
        self._waiting_bytes += row.size_bytes
        while self._waiting_bytes > WAITING_MAX_BYTES:
            self._waiting_bytes -= self._waiting.popleft().size_bytes
            self.lost += 1

    def pop(self, count_max: int) -> list[bytes]:
        """Return up to *count_max* of the oldest events, each a line of JSON, and forget them."""
        self._steps_left = _STEPS_MAX
        taken = [self._waiting.popleft() for _ in range(min(count_max, len(self._waiting)))]
        self._waiting_bytes -= sum(row.size_bytes for row in taken)
        return [_line(row) for row in taken]

    def take_lost(self) -> int:
        """Return how many events were lost since the last call."""
        lost, self.lost = self.lost, 0
        return lost


def _line(row: _Row) -> bytes:
    path = cut(row.directory.rstrip(b"/") + b"/" + row.name)
    told = {
        "event": row.kind.value,
        "time": round(row.time_ns / SECOND_NS, 6),
        "path": path.decode(errors="surrogateescape"),
        **row.more,
    }
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"
