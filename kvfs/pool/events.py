"""What happens to blocks, for those who listen: stored, missing, evicted, removed.

While nobody listens nothing is kept, and an event costs one look at a flag. While somebody does, it
costs a row in a queue bounded in bytes; who takes the rows makes the text (docs/events.md).
"""

import json
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, NamedTuple

from kvfs.core.types import SECOND_NS, InodeNo
from kvfs.pool.paths import Paths, cut
from kvfs.storage.index import Index

#: What the events that wait to be taken may hold; the oldest of more are lost, and counted.
WAITING_MAX_BYTES: Final = 8 << 20
#: What a row takes beside directory and name.
_ROW_BYTES: Final = 480
#: Rows of the index read for paths between two calls of ``take``, at some 4 us each. Only somebody
#: who looks into ever other directories, hundreds of levels deep, needs more: his are lost.
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
        """About what it holds."""
        return _ROW_BYTES + len(self.directory) + len(self.name)


class Events:
    """The events of one pool that nobody has taken yet."""

    def __init__(self, index: Index, clock_ns: Callable[[], int]) -> None:
        self._clock_ns: Final = clock_ns
        self._paths: Final = Paths(index)
        self._steps_left = _STEPS_MAX
        self._waiting: deque[_Row] = deque()
        self._waiting_bytes = 0
        #: Whether anybody listens; without, ``note`` need not be called.
        self.wanted = False
        #: Events that came while too many waited.
        self.lost = 0

    def listen(self, *, wanted: bool) -> None:
        """Keep events from now on, or none."""
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

    def note(self, kind: Kind, parent: InodeNo, name: bytes, **more: object) -> None:
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

    def take(self, count_max: int) -> list[bytes]:
        """Return the oldest events, each a line of JSON, and forget them."""
        self._steps_left = _STEPS_MAX
        taken = [self._waiting.popleft() for _ in range(min(count_max, len(self._waiting)))]
        self._waiting_bytes -= sum(row.size_bytes for row in taken)
        return [_line(row) for row in taken]

    def take_lost(self) -> int:
        """Return how many were lost since the last call."""
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
