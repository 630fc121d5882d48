"""The cleaner that an operator runs beside a plain file system: the oldest files go.

``python -m kvfs.bench.replay.cleaner DIR ROOM_BYTES HIGH LOW BY LOOK_S``: every LOOK_S seconds, or
with ``-`` for each line on stdin: if more than HIGH of ROOM_BYTES is taken, delete the files with
the oldest atime or mtime (BY) until it is LOW. Such a script is what connectors without a delete
path are deployed with. A look is one statvfs(2); only one that finds too much taken walks the tree.
A replay runs it by the clock of the trace (``Script``).
"""

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvfs.bench.crew import Workers, hear, tell
from kvfs.bench.replay.trace import Request
from kvfs.bench.self_made import free_bytes

#: What a file's age is measured by. With relatime, the default of mount(8), atime is that of the
#: first use after the store, and then changes once a day.
BY: Final = ("atime", "mtime")


_PROGRAM = "kvfs.bench.replay.cleaner"


def taken(directory: str, room_bytes: int) -> float:
    """Return the share of *room_bytes* that is not free in the file system of *directory*."""
    return 1 - free_bytes(directory) / room_bytes


def files_below(directory: str) -> Iterator[os.DirEntry[str]]:
    """Yield every file below *directory*, but those that are being written.

    These have temporary names in every connector; otherwise no file could be deleted safely.
    """
    with os.scandir(directory) as listed:
        for each in listed:
            if each.is_dir(follow_symlinks=False):
                yield from files_below(each.path)
            elif not each.name.endswith(".tmp"):
                yield each


def clean(directory: str, room_bytes: int, low: float, by: str) -> int:
    """Delete the oldest files until *low* of *room_bytes* is taken; return how many went."""
    aged = []
    for each in files_below(directory):
        # A file that is renamed or deleted meanwhile is looked at the next time.
        with contextlib.suppress(FileNotFoundError):
            found = each.stat(follow_symlinks=False)
            aged.append((found.st_atime_ns if by == "atime" else found.st_mtime_ns, each.path))
    deleted = 0
    for _, path in sorted(aged):
        if taken(directory, room_bytes) <= low:
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            deleted += 1
    return deleted


def clean_if_full(directory: str, room_bytes: int, high: float, low: float, by: str) -> int:
    """Clean if more than *high* is taken; return how many files went."""
    return clean(directory, room_bytes, low, by) if taken(directory, room_bytes) > high else 0


class Habits(NamedTuple):
    """How an operator runs it: watermarks as shares of the room, the age that counts, how often."""

    high: float = 0.9
    low: float = 0.8
    by: str = "atime"
    #: Seconds of the trace between two looks.
    look_s: float = 60.0


class Script(Workers):
    """The cleaner beside *directory*; leaving the ``with`` ends it.

    With *waits* the replay stands still until a look is over. That is how a replay as fast as it
    goes is fair to the script, whose looks would otherwise take minutes of the trace's time.
    """

    def __init__(self, directory: str, room_bytes: int, habits: Habits, *, waits: bool) -> None:
        self._waits = waits
        self._look_s = habits.look_s
        self._next_s = 0.0
        self._looking = False
        self.deleted = 0
        self.cpu_ns = 0
        shares = (str(habits.high), str(habits.low))
        super().__init__(1, _PROGRAM, directory, str(room_bytes), *shares, habits.by, "-")

    def before_each(self, request: Request) -> None:
        """Let it look if that is due when *request* comes. Raises ``BenchFailed``."""
        if request.at_s < self._next_s:
            return
        self._next_s = (request.at_s // self._look_s + 1) * self._look_s
        (script,) = self.processes
        assert script.stdout is not None
        if self._looking and not select.select([script.stdout], [], [], 0)[0]:
            return  # an operator's timer does not start a second one beside the first
        self.finish()
        tell(script, {})
        self._looking = True
        if self._waits:
            self.finish()

    def finish(self) -> None:
        """Wait until no look is under way."""
        if self._looking:
            (script,) = self.processes
            reply = hear(script, "the cleaner")
            self._looking = False
            self.deleted += int(reply["deleted"])
            self.cpu_ns = int(reply["cpu_ns"])


def main() -> None:
    """Look until killed, or until stdin ends."""
    directory, room_bytes, high, low, by, look_s = sys.argv[1:]
    where = directory, int(room_bytes), float(high), float(low), by
    while look_s != "-":
        clean_if_full(*where)
        time.sleep(float(look_s))
    for _ in sys.stdin:
        try:
            reply: dict[str, object] = {
                "deleted": clean_if_full(*where),
                "cpu_ns": time.process_time_ns(),
            }
        except OSError as error:
            reply = {"failed": str(error)}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
