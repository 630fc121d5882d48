"""Waiting for the device on behalf of requests, while the loop answers others.

A request that lacks something (NotAtHand) has it brought by a thread, and is done again from its
start. A request that gave the device's thread work waits until that is done. No wait is for ever: a
store is refused as soon as the device seems silent, or after ``device_silent_s`` where it is slow,
and a load after ``device_deadline_s``; so is a request that others outrun so long, because they
take each time what was brought for it, a fresh extent say. What a thread does for a request that
has given up ends by itself. How much of all that one tenant may have is in device_shares.py.
"""

import functools
import itertools
import os
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

import trio

from kvfs.core.drives import ByDrive
from kvfs.core.errors import DeviceSilent, NotAtHand
from kvfs.core.types import NO_INODE, InodeNo
from kvfs.pool.open.open_inodes import OpenInode
from kvfs.storage.background import Background
from kvfs.storage.device_thread import DeviceThread
from mount.files.device_shares import DeviceShares
from mount.fuse.late import AboutToWait

R = TypeVar("R")
#: How often a request that waits looks whether the device answers at all.
_LOOK_S: Final = 0.1

_Follow = Callable[[], None]


class Probe(Protocol):
    """Knows whether a drive answers."""

    @property
    def is_suspect(self) -> bool:
        """Whether it may be silent."""

    @property
    def is_silent(self) -> bool:
        """Whether it has not answered for ``device_silent_s``."""

    @property
    def is_slow(self) -> bool:
        """Whether it takes longer than a busy device does."""

    def hurry(self) -> None:
        """Find out soon."""


class DeviceAsks:
    """What the requests of one mount ask of the device."""

    def __init__(
        self,
        background: Background,
        about_to_wait: AboutToWait,
        probes: ByDrive[Probe],
        deadline_s: float,
        store_deadline_s: float,
        shares: DeviceShares,
    ) -> None:
        """*about_to_wait* is called by handlers of pyfuse3 before they wait."""
        self.shares: Final = shares
        self._background = background
        self.about_to_wait = about_to_wait
        self._probes: Final = probes.all
        self._probe_of: Final = probes.of
        self._deadline_s = deadline_s
        self._store_deadline_s = store_deadline_s
        #: Requests that were refused because the device did not answer.
        self.refused = 0

    async def bring(self, lack: NotAtHand, about_to_wait: AboutToWait | None = None) -> None:
        """Return once what was lacking is there. Raises DeviceSilent, and what its work raises."""
        threads, uid = self._background.of(lack.ino), self.shares.payer()
        thread = threads.device if lack.in_order else threads.asks
        probe = self._probe_of(lack.ino)
        if (lack.stores or thread.is_crowded) and probe.is_suspect:
            self._refuse()
        if probe.is_suspect:
            self.shares.require(uid)
        work = lack.begin()
        wait = _Wait(uid, self.shares.begin_work(uid))
        thread.submit(work, wait.end, failed=wait.fail, at_once=True)
        await self._until(wait, probe, about_to_wait, stores=lack.stores)

    def require_room(self, ino: InodeNo) -> None:
        """Raise DeviceSilent for a change of *ino* whose work would wait behind too much already.

        Raises Damaged.
        """
        if self._background.of(ino).device.is_crowded and self._probe_of(ino).is_suspect:
            self._refuse()

    def require_device(self, ino: InodeNo) -> None:
        """Raise DeviceSilent for a store that surely needs *ino*'s drive, if that is silent.

        Not if it only seems so: on a busy machine that may be the probe's own fault. Raises
        Damaged.
        """
        if self._probe_of(ino).is_silent:
            self._refuse()

    async def settle(self, opened: OpenInode, about_to_wait: AboutToWait | None = None) -> None:
        """Return once times and length of *opened* are set, as requests before asked for.

        Raises DeviceSilent, OSError.
        """
        while opened.settling:
            await self.in_order(about_to_wait, ino=opened.ino)
        opened.require_settled()

    async def in_order(
        self, about_to_wait: AboutToWait | None = None, *, ino: InodeNo = NO_INODE
    ) -> None:
        """Return once the thread of *ino*'s drive has done what it was given until now.

        Raises DeviceSilent.
        """
        wait = _Wait(self.shares.payer())
        self._background.of(ino).device.after_all(wait.done.set)
        await self._until(wait, self._probe_of(ino), about_to_wait, stores=True)

    def after_all(self, follow: Callable[[], None], ino: InodeNo) -> None:
        """Do *follow* once the thread of *ino*'s drive has done what it was given until now."""
        self._background.of(ino).device.after_all(follow)

    async def at_hand(
        self,
        call: Callable[[], R | Awaitable[R]],
        about_to_wait: AboutToWait | None = None,
        *,
        calls_max: int | None = None,
    ) -> R:
        """Return what *call* does, which is called again when what it lacked was brought.

        At most *calls_max* times, or until the deadline; then NotAtHand is raised. Raises
        DeviceSilent, and what *call* and its work raise.
        """
        until_s = trio.current_time() + self._deadline_s
        for calls in itertools.count(1):
            try:
                answer = call()
                return await answer if isinstance(answer, Awaitable) else answer
            except NotAtHand as lack:
                if calls == calls_max or trio.current_time() >= until_s:
                    raise
                lacking = lack
            await self.bring(lacking, about_to_wait)
        raise AssertionError("unreachable")

    async def transfer(
        self,
        work: Callable[[int], R],
        fd: int,
        about_to_wait: AboutToWait | None = None,
        *,
        ino: InodeNo,
        stores: bool,
    ) -> R:
        """Return what *work* does with a descriptor of *ino*'s file behind *fd*, in a thread.

        The descriptor is its own: it may go on when nobody waits for it any more. Raises
        DeviceSilent, and what *work* raises.
        """
        threads, probe, uid = self._transfers_of(ino)
        own_fd = os.dup(fd)

        def do() -> R:
            try:
                return work(own_fd)
            finally:
                os.close(own_fd)

        return await self._in_thread(threads, probe, do, uid, about_to_wait, stores=stores)

    async def compare(self, work: Callable[[], R], *, ino: InodeNo, stores: bool) -> R:
        """Return what *work* does in a thread, for a handler: it reads all of block *ino*.

        That may take longer than the deadline, as long as the device answers. Raises DeviceSilent,
        and what *work* raises.
        """
        threads, probe, uid = self._transfers_of(ino)
        return await self._in_thread(threads, probe, work, uid, None, stores=stores, is_long=True)

    def _transfers_of(self, ino: InodeNo) -> tuple[DeviceThread, Probe, int]:
        """Return the threads, what knows whether they get an answer, and for whom one waits."""
        threads, probe = self._background.of(ino).transfers, self._probe_of(ino)
        uid = self.shares.payer()
        if probe.is_suspect:
            if threads.is_crowded:
                self._refuse()
            self.shares.require(uid)
        return threads, probe, uid

    async def _in_thread(
        self,
        threads: DeviceThread,
        probe: Probe,
        work: Callable[[], R],
        uid: int,
        about_to_wait: AboutToWait | None,
        *,
        stores: bool,
        is_long: bool = False,
    ) -> R:
        results, wait = list[R](), _Wait(uid, self.shares.begin_work(uid))

        def do() -> Callable[[], None]:
            return functools.partial(results.append, work())

        threads.submit(do, wait.end, failed=wait.fail)
        await self._until(wait, probe, about_to_wait, stores=stores, is_long=is_long)
        return results[0]

    def require_answers(self, since_s: float) -> None:
        """Raise DeviceSilent if a drive seems silent, and a wait since *since_s* is too long."""
        if trio.current_time() - since_s < self._deadline_s:
            return
        if any(probe.is_suspect for probe in self._probes):
            self._refuse()

    async def _until(
        self,
        wait: "_Wait",
        probe: Probe,
        about_to_wait: AboutToWait | None,
        *,
        stores: bool,
        is_long: bool = False,
    ) -> None:
        if not wait.done.is_set():
            self.shares.begin_wait(wait.uid)
            try:
                await self._wait_for(wait, probe, about_to_wait, stores=stores, is_long=is_long)
            finally:
                self.shares.end_wait(wait.uid)
        if wait.error is not None:
            raise wait.error

    async def _wait_for(
        self,
        wait: "_Wait",
        probe: Probe,
        about_to_wait: AboutToWait | None,
        *,
        stores: bool,
        is_long: bool,
    ) -> None:
        """Return when *wait* is over. Raises DeviceSilent if that takes too long.

        A handler of pyfuse3 lets others read requests at once; another task counts as one that is
        under way at first.
        """
        begun_s = trio.current_time()
        # The channel must know at once that the request of a handler is no longer the present one.
        is_handler = about_to_wait is None or about_to_wait == self.about_to_wait
        resume = self.about_to_wait() if is_handler else None
        try:
            while not wait.done.is_set():
                with trio.move_on_after(_LOOK_S):
                    await wait.done.wait()
                    return
                if resume is None and about_to_wait is not None:
                    resume = about_to_wait()
                probe.hurry()
                is_suspect = probe.is_suspect
                if is_suspect and not stores:
                    self.shares.require_wait(wait.uid)
                waited_s = trio.current_time() - begun_s
                is_late = waited_s >= self._deadline_s and (is_suspect or not is_long)
                is_late_store = stores and waited_s >= self._store_deadline_s
                if is_late or (stores and is_suspect) or (is_late_store and probe.is_slow):
                    self._refuse()
        finally:
            if resume is not None:
                resume()  # no checkpoint from here until the answer is written

    def _refuse(self) -> None:
        self.refused += 1
        raise DeviceSilent("the device does not answer")


class _Wait:
    """Waits for one piece of work, for *uid*."""

    def __init__(self, uid: int, ended: Callable[[], None] = lambda: None) -> None:
        """*ended* is called when the work has ended."""
        self.uid: Final = uid
        self._ended: Final = ended
        self.done = trio.Event()
        self.error: Exception | None = None

    def end(self, follow: _Follow) -> None:
        """Do what follows the work; what that raises is for whoever waits."""
        self._ended()
        try:
            follow()
        except Exception as error:
            self.error = error
        self.done.set()

    def fail(self, error: Exception) -> None:
        """Give *error*, which the work has raised, to whoever waits."""
        self._ended()
        self.error = error
        self.done.set()
