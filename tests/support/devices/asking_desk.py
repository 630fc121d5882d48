"""Requests that ask a drive for what they lack, which answers when a test says so."""

import threading
from collections.abc import Callable
from typing import Final

import trio

from kvfs.core.account import ROOT, Taken, Tenants
from kvfs.core.drives import ByDrive
from kvfs.core.errors import NotAtHand
from kvfs.core.types import NO_INODE, InodeNo
from kvfs.storage.background import Background
from mount.files.device_asks import DeviceAsks, Probe
from mount.files.device_shares import DeviceShares

DEADLINE_S: Final = 0.3
STORE_DEADLINE_S: Final = 0.1


class Suspicion:
    """A probe that says what a test wants."""

    def __init__(self) -> None:
        self.is_suspect = self.is_slow = self.is_silent = False
        self.hurried = trio.Event()

    def hurry(self) -> None:
        """Tell that a request waits."""
        self.hurried.set()


class Desk:
    """Asks over threads that serve, with work that waits until ``answer``."""

    def __init__(self) -> None:
        self.probe, self.other = Suspicion(), Suspicion()
        self.background = Background(100, drives=2)
        self.asides = 0
        #: Who makes the next request, and what work is left for each.
        self.uid, self.left = ROOT, Taken(Tenants())
        self.asks = self.asking(DEADLINE_S)
        self._answers = threading.Event()
        self.brought = 0
        self.has_brought = trio.Event()

    def _aside(self) -> Callable[[], None]:
        self.asides += 1
        return self._resume

    def _resume(self) -> None:
        self.asides -= 1

    def asking(self, deadline_s: float) -> DeviceAsks:
        """Return what asks, and gives a load up after *deadline_s*."""
        drives = ByDrive[Probe]([self.probe, self.other])
        shares = DeviceShares(self.left, lambda: self.uid)
        return DeviceAsks(
            self.background, self._aside, drives, deadline_s, STORE_DEADLINE_S, shares
        )

    def serve(self) -> None:
        """Begin to serve, with the loop that runs."""
        self.background.begin_serving(trio.lowlevel.current_trio_token())

    def answer(self) -> None:
        """Let the work go on."""
        self._answers.set()

    def lacks(
        self, *, stores: bool = False, in_order: bool = False, ino: InodeNo = NO_INODE
    ) -> NotAtHand:
        """Return what a request lacks until ``answer``."""

        def work() -> Callable[[], None]:
            self._answers.wait(30)
            return self._bring

        return NotAtHand("it", lambda: work, stores=stores, in_order=in_order, ino=ino)

    def _bring(self) -> None:
        self.brought += 1
        self.has_brought.set()

    def stop(self) -> None:
        """End the threads."""
        self.answer()
        self.background.end_serving()
        self.background.stop()
