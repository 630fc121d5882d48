"""Has the drive of a recording hang: it answers nothing until the mount calls it silent, and on."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Final

from tests.support.clients.stepping import until
from tests.support.devices.failing_drive import FailingDrive
from tests.support.devices.power_cuts.writing_kernel import Kernel
from tests.support.mounts.supervised import Supervised

#: For how long it hangs when the mount has noticed, before and after what is done meanwhile.
_HANGS_ON_S: Final = ((1.0, 3.0), (0.5, 1.0))


class Hangs:
    """The silences of one drive, below one mount."""

    def __init__(
        self, drive: FailingDrive, mounted: Supervised, kernel: Kernel, draw: random.Random
    ) -> None:
        """*kernel* writes to the drive on behalf of the writer, who shall not wait for that."""
        self._drive = drive
        self._mounted = mounted
        self._kernel = kernel
        self._draw = draw
        #: From when until when it answered nothing.
        self.silences_ns: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Inside the ``with`` the mount has known for a while that the drive is silent."""
        before_s, after_s = _HANGS_ON_S
        with self._kernel.resting():
            begun_ns = time.monotonic_ns()
            with self._drive.silent():
                until(lambda: self._mounted.status()["device_state"] == "silent", "it is silent")
                self._pass(*before_s)
                yield
                self._pass(*after_s)
                self.silences_ns.append((begun_ns, time.monotonic_ns()))

    def _pass(self, least_s: float, most_s: float) -> None:
        threading.Event().wait(self._draw.uniform(least_s, most_s))
