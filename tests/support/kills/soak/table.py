"""What all clients of a soak know of each other: a file of rows in shared memory, one a name.

A row's owner is the one client that changes the name. It says before each change what may be found
from now on, and after it what must be; every other client holds its loads against that.
"""

import mmap
import os
from pathlib import Path
from typing import Final, NamedTuple

#: Versions that a row remembers, so that a load which takes long can be judged as well.
REMEMBERED: Final = 7
#: Of the version of a name that is not there.
ABSENT: Final = 0
CLIENTS_MAX: Final = 16

_ROW_WORDS: Final = 16
_LOCK, _BEGUN, _SETTLED, _SHOWN, _LOSSY, _VERSION, _SIZE, _FILLED, _CERTAIN, _FIRST = range(10)
_EPOCH_BITS: Final = 32
_EPOCH, _ENDS, _BEATS = 0, 1, 2
_HEAD_WORDS: Final = _BEATS + CLIENTS_MAX


class Found(NamedTuple):
    """What is under a name: the version, its bytes, and how many of them were written."""

    version: int
    size_bytes: int
    filled_bytes: int


NOTHING: Final = Found(ABSENT, 0, 0)


class Row(NamedTuple):
    """A name at one moment."""

    #: Changes that were begun, and that came to their end.
    begun: int
    settled: int
    #: The last change of which others may see a part: it was made in place.
    shown: int
    #: The last change that takes the name if the server is killed, and the epoch it began in.
    lossy: int
    lossy_epoch: int
    #: What the last settled change left.
    left: Found
    #: Whether it must be there: nothing may take it but its owner.
    certain: bool
    versions: tuple[int, ...]

    @property
    def quiet(self) -> bool:
        """Whether no change is going on."""
        return self.begun == self.settled

    def versions_until(self, later: "Row") -> set[int]:
        """Return each version that may have been found between this moment and *later*."""
        changes = range(self.settled + 1, later.begun + 1)
        return {self.left.version, *(later.versions[change % REMEMBERED] for change in changes)}

    def may_be_lost(self, epoch: int) -> bool:
        """Whether a change that a server's end cut off before *epoch* may have taken the name."""
        return self.lossy > self.settled and self.lossy_epoch != epoch

    def tells_nothing_until(self, later: "Row") -> bool:
        """Whether a load that took until *later* may have met a change made in place."""
        return later.shown > self.settled or later.begun - self.settled >= REMEMBERED


class Table:
    """The rows in the file at *path*; a process writes those of its own names only."""

    def __init__(self, path: Path | str) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("Q")
        self.names = (len(self._words) - _HEAD_WORDS) // _ROW_WORDS

    @staticmethod
    def make(path: Path, names: int) -> "Table":
        """Make the file, for names 0 to *names* - 1, none of which is there."""
        path.write_bytes(bytes(8 * (_HEAD_WORDS + names * _ROW_WORDS)))
        return Table(path)

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._memory.close()

    @property
    def epoch(self) -> int:
        """Even while a server serves, odd while none does; each server has its own."""
        return self._words[_EPOCH]

    def next_epoch(self) -> None:
        """Say so before a server is ended, and when the next one serves."""
        self._words[_EPOCH] += 1

    @property
    def ends(self) -> bool:
        """Whether the clients are to come to their end."""
        return self._words[_ENDS] == 1

    def end(self) -> None:
        """Tell the clients to come to their end."""
        self._words[_ENDS] = 1

    def beat(self, client: int, now_s: float) -> None:
        """Say that *client* begins something at *now_s*; 0 while it does nothing."""
        self._words[_BEATS + client] = int(now_s * 1000)

    def busy_s(self, client: int, now_s: float) -> float:
        """Return for how long *client* has been at what it does."""
        began_ms = self._words[_BEATS + client]
        return now_s - began_ms / 1000 if began_ms else 0.0

    def row(self, number: int) -> Row:
        """Return the row of a name as it was at one moment."""
        at = _HEAD_WORDS + number * _ROW_WORDS
        while True:
            words = tuple(self._words[at : at + _ROW_WORDS])
            again = tuple(self._words[at : at + _ROW_WORDS])
            if words == again and words[_LOCK] % 2 == 0:
                return Row(
                    words[_BEGUN],
                    words[_SETTLED],
                    words[_SHOWN],
                    words[_LOSSY] >> _EPOCH_BITS,
                    words[_LOSSY] % (1 << _EPOCH_BITS),
                    Found(words[_VERSION], words[_SIZE], words[_FILLED]),
                    bool(words[_CERTAIN]),
                    words[_FIRST:],
                )

    def begin(self, number: int, version: int, *, shown: bool = False, lossy: bool = False) -> None:
        """Say that *version* may be found from now on; *shown*: or a part of it.

        *lossy*: a server that is killed before the change is settled may take the name.
        """
        at = _HEAD_WORDS + number * _ROW_WORDS
        words = self._words
        words[at + _LOCK] += 1
        change = words[at + _BEGUN] + 1
        words[at + _FIRST + change % REMEMBERED] = version
        if shown:
            words[at + _SHOWN] = change
        if lossy:
            words[at + _LOSSY] = change << _EPOCH_BITS | self.epoch
        words[at + _BEGUN] = change
        words[at + _LOCK] += 1

    def settle(self, number: int, left: Found, *, certain: bool) -> None:
        """Say what all changes begun until now have left, and whether it must be there."""
        at = _HEAD_WORDS + number * _ROW_WORDS
        words = self._words
        words[at + _LOCK] += 1
        words[at + _VERSION], words[at + _SIZE], words[at + _FILLED] = left
        words[at + _CERTAIN] = certain
        words[at + _SETTLED] = words[at + _BEGUN]
        words[at + _LOCK] += 1


def path_of(root: str, number: int) -> str:
    """Return where block *number* lies; the even directories hide drafts from others."""
    return f"{root}/{number % 4}/{number:06d}.kv"


def hides_drafts(number: int) -> bool:
    """Tell whether *number* lies in a directory with ``user.kvfs.drafts`` = ``owner``."""
    return number % 2 == 0
