"""Whether the drives below still work, and how they wear; looked at at every tick.

A device that fails says so. Blocks that it fails to write or to read lose their names
(device_errors.py). If the file system has shut itself down, the device is lost. Then the index must
not be used any more: it is a mapping, and a page that is not in memory raises SIGBUS. A device that
hangs says nothing, and one that is gone may leave the file system as it was: the probe finds out
(kvfs/pool/space/device_probe.py).
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvfs.engine.blocks.publishing import Publishing
from kvfs.engine.recovery.device_errors import Unreadable, WriteBack
from kvfs.engine.recovery.lost_drives import LostDrives
from kvfs.machine.hardware import Endurance, endurance_of, written_bytes
from kvfs.machine.kernel_log import KernelLog
from kvfs.pool.figures.cache_figures import Tally
from kvfs.pool.pool import Pool
from kvfs.pool.space.drive import PoolDrive
from kvfs.storage.index_map import STATE


class DriveWatch:
    """The checks of one drive."""

    def __init__(self, pool: Pool, publishing: Publishing, drive: PoolDrive) -> None:
        self.drive: Final = drive
        self._pool_fd = pool.device.pool_fds[drive.number]
        self._syscalls = pool.syscalls
        self._log = KernelLog(pool.device.pool_fds[drive.number])
        self._probe = drive.probe
        self.write_back = WriteBack(pool, publishing, drive)
        self._unreadable = Unreadable(
            *(pool.open.inodes, pool.rules.heat, pool.extents, pool.departures.removed),
            *(pool.numbers, publishing, drive),
        )
        #: How often the kernel's log told of failures there.
        self._told = 0

    @property
    def errors(self) -> int:
        """How often reads, writes or flushes of the drive were found to have failed.

        One failure may be found twice: in the kernel's log and by a flush.
        """
        return self._told + self.write_back.failures

    def why_failed(self) -> str:
        """Return why the drive can never be used again, or ""."""
        try:
            self._syscalls.check_alive(self._pool_fd)
        except OSError as error:
            return f"its file system has failed: {error.strerror}"
        return self._probe.why_gone

    def run_due(self, now_s: float) -> None:
        """Check the drive."""
        errors = self._log.errors()
        self._told += errors.reads or errors.writes
        if errors.reads:
            self._unreadable.suspect(now_s)
        if errors.writes:
            self.write_back.hint()
        failures = self.write_back.failures
        self.write_back.run_due(now_s)
        if errors.writes or self.write_back.failures > failures:
            self._probe.doubt()
        self._unreadable.run_due(now_s)
        self._probe.run_due(now_s)

    def close(self) -> None:
        """End the checks; wait for the one under way."""
        self._unreadable.close()
        self.write_back.close()
        self._log.close()


class DeviceWatch:
    """The checks of one pool's drives. If all fail, or the one with the index, all is lost.

    An index in the pool is on one drive (``Device.home``); one in memory needs none.
    """

    def __init__(self, pool: Pool, publishing: Publishing, lost_drives: LostDrives) -> None:
        self._pool = pool
        self._lost_drives = lost_drives
        self.drives: Final = [DriveWatch(pool, publishing, each) for each in pool.space.drives.all]
        #: Why the pool can never be used again; empty while it works.
        self.lost = ""
        pool.ends_first(self.close)

    def run_due(self, now_s: float) -> None:
        """Check the drives; takes 3 us for each while nothing is wrong."""
        if self.lost:
            return
        failed = {watch: why for watch in self._serving() if (why := watch.why_failed())}
        if why := self._why_lost(failed):
            self.lost = why
            with contextlib.suppress(OSError):  # if it fails, XFS's dirty log says the same
                self._pool.run.distrust()
            return
        for watch in self._serving():
            if watch in failed:
                self._lost_drives.give_up(watch.drive, failed[watch])
            else:
                watch.run_due(now_s)

    def _serving(self) -> list[DriveWatch]:
        return [watch for watch in self.drives if not watch.drive.has_failed]

    @property
    def failures(self) -> int:
        """How often a look found that a drive had failed to write."""
        return sum(drive.write_back.failures for drive in self.drives)

    def settle(self) -> bool:
        """Look at all drives before a stop (``WriteBack.settle``); whether the index is right."""
        settled = [watch.write_back.settle() for watch in self._serving()]
        return all(settled)

    def _why_lost(self, failed: Mapping[DriveWatch, str]) -> str:
        """Return why the pool is lost, or "", if *failed* drives have failed now."""
        home = self.drives[self._pool.device.home.header.drive]
        if home in failed and not self._pool.index_dir:
            return failed[home]
        if failed and len(failed) == len(self._serving()):
            return next(iter(failed.values()))
        if STATE.lost:
            return "pages of its index cannot be read"
        return home.write_back.index_error

    def close(self) -> None:
        """End the checks; wait for those under way."""
        for drive in self.drives:
            drive.close()


#: Time between two looks at the counter, and the time that the rate covers.
_LOOK_S: Final = 5.0
_RATE_S: Final = 60.0
#: How often the drive is asked, since it wears in months; and the first time, after the start.
_ASK_S: Final = 3600.0
_FIRST_ASK_S: Final = 10.0


class DeviceWear:
    """How fast a drive is written, and how much of its endurance is left.

    The counters of the kernel are read now and then. The drive itself is asked in a thread of its
    own: a failing one answers late or never, and neither requests nor other jobs may wait for it.
    """

    def __init__(
        self,
        pool_fd: int,
        written: Callable[[int], int | None] = written_bytes,
        ask: Callable[[int], Endurance] = endurance_of,
    ) -> None:
        """*pool_fd* is the pool's directory there.

        *written* and *ask* take a device number (st_dev), as in hardware.py.
        """
        self._device = os.fstat(pool_fd).st_dev
        self._written = written
        self._ask = ask
        #: Bytes written to the device before the server started; None: not known.
        self._before = written(self._device)
        #: When (s), and the counter then.
        self._looks: deque[tuple[float, int]] = deque()
        self._ask_at_s: float | None = None
        self._asking: threading.Thread | None = None
        self._told = Endurance()

    def run_due(self, now_s: float) -> None:
        """Look at the counter, or ask the drive, if that is due."""
        if self._before is not None and (not self._looks or now_s - self._looks[-1][0] >= _LOOK_S):
            now_bytes = self._written(self._device)
            if now_bytes is not None:
                self._looks.append((now_s, now_bytes))
            while len(self._looks) > 1 and now_s - self._looks[0][0] > _RATE_S:
                self._looks.popleft()
        # A drive that has not answered yet is not asked again.
        idle = self._asking is None or not self._asking.is_alive()
        if self._ask_at_s is None:
            self._ask_at_s = now_s + _FIRST_ASK_S
        elif idle and now_s >= self._ask_at_s:
            self._ask_at_s = now_s + _ASK_S
            self._asking = threading.Thread(target=self._ask_drive, name="kvfs-wear", daemon=True)
            self._asking.start()

    def _ask_drive(self) -> None:
        self._told = self._ask(self._device)

    @property
    def counted_bytes(self) -> int | None:
        """Bytes written to the device by the last look, since the server started."""
        if not self._looks or self._before is None:
            return None
        return self._looks[-1][1] - self._before

    def shown(self) -> dict[str, Any]:
        """Return the figures for `kvfs status`: bytes, bytes a second, a share; None: not known."""
        rate = None
        if self._looks:
            (first_s, first_bytes), (last_s, last_bytes) = self._looks[0], self._looks[-1]
            if last_s > first_s:
                rate = round((last_bytes - first_bytes) / (last_s - first_s), 1)
        left, life_bytes = self._told
        left_bytes = None
        if left is not None and life_bytes is not None:
            left_bytes = max(0, int(left * life_bytes))
        return {
            "written_bytes": self.counted_bytes,
            "write_rate": rate,
            "endurance_left": left,
            "endurance_left_bytes": left_bytes,
        }


def whole_wear(wears: Sequence[DeviceWear]) -> dict[str, Any]:
    """Return the figures of all drives together: of the endurance, what the most worn has left."""
    shown = [wear.shown() for wear in wears]
    known = {name: [one[name] for one in shown if one[name] is not None] for name in shown[0]}
    sums = {name: sum(values) if values else None for name, values in known.items()}
    return sums | {"endurance_left": min(known["endurance_left"], default=None)}


def drive_figures(
    pool: Pool, watches: Sequence[DriveWatch], wears: Sequence[DeviceWear]
) -> dict[str, dict[str, Any]]:
    """Return what is on each drive, and what it did since the start, by its number.

    Without those that were removed. Sizes in bytes, times in seconds. *watches* and *wears* are
    those of the drives, by number.
    """
    device, none = pool.device, Tally()
    counts, tallies = pool.drive_counts.of_all(pool.counters), pool.figures.tallies.by_drive()
    return {
        str(drive.number): {
            "source": one.source,
            "state": drive.state.value,
            "uuid": one.uuid,
            "capacity_bytes": drive.space.capacity_bytes,
            "used_bytes": count.used_bytes,
            "blocks": count.blocks,
            "opens": tallies.get(drive.number, none).hits,
            "stores": tallies.get(drive.number, none).stored_blocks,
            "errors": watch.errors,
            "slowest_probe_s": round(drive.probe.slowest_s, 6),
            **wear.shown(),
        }
        for drive, one, count, watch, wear in zip(
            *(pool.space.drives.all, device.drives, counts, watches, wears), strict=True
        )
        if not drive.is_removed
    }
