"""How fast the drives of a pool are written, and how much of their endurance is left."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvfs.machine.hardware import endurance_left, written_bytes

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
        ask: Callable[[int], float | None] = endurance_left,
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
        self._left: float | None = None

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
        self._left = self._ask(self._device)

    def shown(self) -> dict[str, Any]:
        """Return the figures for `kvfs status`: bytes, bytes a second, a share; None: not known."""
        written = rate = None
        if self._looks and self._before is not None:
            (first_s, first_bytes), (last_s, last_bytes) = self._looks[0], self._looks[-1]
            written = last_bytes - self._before
            if last_s > first_s:
                rate = round((last_bytes - first_bytes) / (last_s - first_s), 1)
        return {"written_bytes": written, "write_rate": rate, "endurance_left": self._left}


def whole_wear(wears: Sequence[DeviceWear]) -> dict[str, Any]:
    """Return the figures of all drives together: of the endurance, what the most worn has left."""
    shown = [wear.shown() for wear in wears]
    known = {name: [one[name] for one in shown if one[name] is not None] for name in shown[0]}
    sums = {name: sum(values) if values else None for name, values in known.items()}
    return sums | {"endurance_left": min(known["endurance_left"], default=None)}
