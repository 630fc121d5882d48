"""Extents without a name, waiting to be unlinked; strays wait longer, for the end of their grace.

Their bytes count as taken until they are really free. If a request needs space, they are unlinked
at once; otherwise when no request waits. An extent that is still open or mapped waits, because
unlinking it would free nothing. With passthrough the kernel releases an extent a moment after its
reader's close.
"""

import functools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.core.drives import ByDrive
from kvfs.core.errors import Damaged
from kvfs.core.types import SECOND_NS, InodeNo
from kvfs.pool.space.space import Space
from kvfs.storage.background import Background
from kvfs.storage.kept_aside import Stray, StrayFiles

_log: Final = logging.getLogger(__name__)
#: Unlinking takes some 5 us per MiB of page cache. Larger extents are unlinked in a thread.
_LONG_UNLINK_BYTES: Final = 64 << 20
#: Extents in use that are checked at a time, some 10 us each; if there are more, they take turns.
_LOOKS: Final = 16


class _Unlink(NamedTuple):
    remove: Callable[[], None]
    size_bytes: int
    #: Whether somebody has it open or mapped; None: that is impossible.
    in_use: Callable[[], bool] | None


class _Outcome(NamedTuple):
    """What became of a removal: the extent was in use, and so stays; or an error; or neither."""

    in_use: bool
    error: Exception | None = None


def _carry_out(unlink: _Unlink) -> _Outcome:
    """Remove an extent unless it is in use; it may wait for the device."""
    try:
        if unlink.in_use is not None and unlink.in_use():
            return _Outcome(in_use=True)
        unlink.remove()
    except Damaged:
        return _Outcome(in_use=False)  # its drive has failed: there is nothing to remove
    except Exception as error:  # raised once its bytes are accounted for
        return _Outcome(in_use=False, error=error)
    return _Outcome(in_use=False)


class UnlinkQueue:
    """The removals that are due on one drive, oldest first."""

    def __init__(self, background: Background, ino: InodeNo, space: Space) -> None:
        """*ino* stands for the drive, and *space* is what is taken there."""
        self._background = background
        self._ino = ino
        self._device: Final = background.of(ino).device
        self._space = space
        self._waiting: deque[_Unlink] = deque()
        #: Removals whose extent was in use; the one checked longest ago first.
        self._lingering: deque[_Unlink] = deque()
        #: How many of these are being checked again.
        self._checked = 0
        #: Removals of large extents that the thread has ended, and that are not counted yet.
        self._finished: deque[tuple[_Unlink, _Outcome]] = deque()
        self._under_way = 0

    def __len__(self) -> int:
        """Return how many removals are waiting or under way, without those still in use."""
        return len(self._waiting) + self._under_way

    @property
    def lingering(self) -> int:
        """How many extents have no handle any more but are still in use."""
        return len(self._lingering) + self._checked

    def add(
        self,
        remove: Callable[[], None],
        size_bytes: int,
        in_use: Callable[[], bool] | None = None,
    ) -> None:
        """Queue *remove*, which frees *size_bytes* unless the extent is *in_use*."""
        self._space.pending_delete_bytes += size_bytes
        self._waiting.append(_Unlink(remove, size_bytes, in_use))
        self._background.submit(self._next)

    def hurry(self, size_bytes: int) -> None:
        """Unlink now until *size_bytes* are unclaimed, or the queue is empty.

        While requests are served, that only begins it: see ``Space.coming_bytes``.
        """
        self.settle()
        space, begun = self._space, len(self._waiting)
        while self._waiting and space.unclaimed_bytes + space.coming_bytes < size_bytes:
            self._background.do(self._begin_first)
        if len(self._waiting) < begun:  # somebody waits for the space, or soon will
            self._background.hand_over_work()

    def settle(self) -> None:
        """Count what the thread has freed, and queue extents that are no longer in use."""
        while self._finished:
            unlink, outcome = self._finished.popleft()
            self._background.do(functools.partial(self._end, unlink, outcome))
        if self._checked:
            return
        for _ in range(min(_LOOKS, len(self._lingering))):
            self._checked += 1
            unlink = self._lingering.popleft()
            self._device.submit(
                functools.partial(_is_in_use, unlink), functools.partial(self._end_check, unlink)
            )

    def dismiss(self) -> None:
        """Queue all for unlinking, in use or not, because the pool stops."""
        while self._lingering:
            self._leave(self._lingering.popleft()._replace(in_use=None))
        self._waiting = deque(unlink._replace(in_use=None) for unlink in self._waiting)

    def _end_check(self, unlink: _Unlink, in_use: bool) -> None:
        self._checked -= 1
        if in_use:
            self._lingering.append(unlink)
        else:
            self._leave(unlink)

    def _leave(self, unlink: _Unlink) -> None:
        self._space.deleted_open_bytes -= unlink.size_bytes
        self.add(*unlink)

    def _next(self) -> None:
        """Unlink the next one, as a background job, if ``hurry`` has left one."""
        self.settle()
        if not self._waiting:
            return
        if self._waiting[0].size_bytes <= _LONG_UNLINK_BYTES:
            self._begin_first()
            return
        unlink = self._waiting.popleft()
        self._under_way += 1
        end = self._finished.append
        self._background.submit_long(lambda: end((unlink, _carry_out(unlink))), self._ino)

    def _begin_first(self) -> None:
        unlink = self._waiting.popleft()
        self._under_way += 1
        self._space.coming_bytes += unlink.size_bytes
        self._device.submit(
            functools.partial(_carry_out, unlink), functools.partial(self._end_coming, unlink)
        )

    def _end_coming(self, unlink: _Unlink, outcome: _Outcome) -> None:
        self._space.coming_bytes -= unlink.size_bytes
        self._end(unlink, outcome)

    def _end(self, unlink: _Unlink, outcome: _Outcome) -> None:
        """Count what became of *unlink*. Raises what its removal raised."""
        self._under_way -= 1
        self._space.pending_delete_bytes -= unlink.size_bytes
        if outcome.in_use:
            self._lingering.append(unlink)
            self._space.deleted_open_bytes += unlink.size_bytes
        if outcome.error is not None:
            raise outcome.error


def _is_in_use(unlink: _Unlink) -> bool:
    return unlink.in_use is not None and unlink.in_use()


class Strays:
    """The strays of one pool, oldest first: files that may have lost their names by an error.

    Their space is the first to be freed when the pool needs it. Times are arguments, in ns since
    the epoch, because a grace time outlives a restart.
    """

    def __init__(
        self,
        files: StrayFiles,
        spaces: ByDrive[Space],
        queues: ByDrive[UnlinkQueue],
        *,
        grace_s: float,
        most: int,
    ) -> None:
        """*most*: how many files are kept at once; for one more the oldest is removed."""
        self._files = files
        self._spaces = spaces
        self._queues = queues
        self._grace_ns = int(grace_s * SECOND_NS)
        self._most = most if grace_s > 0 else 0
        self._kept: OrderedDict[InodeNo, Stray] = OrderedDict()
        #: How many were removed because their space was needed, or there were too many.
        self.gave_way = 0

    @property
    def keeps(self) -> bool:
        """Whether strays are kept at all."""
        return self._most > 0

    def load(self) -> None:
        """Read what former servers kept; an error is logged, and does not refuse the start."""
        try:
            held = self._files.held()
        except OSError as error:
            _log.warning("the strays cannot be read: %s", error)
            return
        for stray in held:
            self.add(stray)

    def move_aside(self, ino: InodeNo, now_ns: int, *, of_node: bool) -> Stray | None:
        """Move the file of *ino* aside, in any thread; pass the result to ``add``."""
        return self._files.move_in(ino, now_ns, of_node=of_node)

    def add(self, stray: Stray) -> None:
        """Keep *stray* until its grace ends."""
        self._kept[stray.ino] = stray
        self._spaces.of(stray.ino).stray_bytes += stray.size_bytes
        while len(self._kept) > self._most:
            self.gave_way += 1
            self._remove_oldest()

    def run_due(self, now_ns: int) -> None:
        """Remove strays whose grace is over. One dated in the future counts from now on."""
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if oldest.since_ns > now_ns:
                self._kept[oldest.ino] = oldest._replace(since_ns=now_ns)
                return
            if now_ns - oldest.since_ns < self._grace_ns:
                return
            self._remove_oldest()

    def give_way(self, size_bytes: int, space: Space | None = None) -> int:
        """Remove the oldest until *size_bytes* are being freed; return the bytes being freed.

        Only those of the drive with *space*, or of all drives.
        """
        freed_bytes = 0
        for ino in list(self._kept) if self._kept else ():
            if freed_bytes >= size_bytes:
                break
            if space is None or self._spaces.of(ino) is space:
                self.gave_way += 1
                freed_bytes += self._remove(ino)
        return freed_bytes

    def _remove_oldest(self) -> None:
        self._remove(next(iter(self._kept)))

    def _remove(self, ino: InodeNo) -> int:
        stray = self._kept.pop(ino)
        self._spaces.of(ino).stray_bytes -= stray.size_bytes
        remove = functools.partial(self._files.remove, ino)
        self._queues.of(ino).add(remove, stray.size_bytes)
        return stray.size_bytes

    def describe(self, now_ns: int) -> dict[str, int | float]:
        """Return the figures `kvfs status` shows."""
        oldest = next(iter(self._kept.values()), None)
        age_ns = 0 if oldest is None else max(0, now_ns - oldest.since_ns)
        return {
            "files": len(self._kept),
            "bytes": sum(space.stray_bytes for space in self._spaces.all),
            "oldest_s": age_ns // SECOND_NS,
            "gave_way": self.gave_way,
        }
