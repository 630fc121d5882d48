"""Truncating OPENs and CREATEs that were refused: the kernel looks the name up and tries again.

It tries within the same open(2), and sends a LOOKUP for each part of the path. Only the one that
asks for the name of what was refused is the second try: a link that was put in its place
meanwhile leads elsewhere, and what the thread looks up later is another call's.
"""

from collections import OrderedDict
from typing import Final, NamedTuple

from kvfs.core.former_names import Place
from kvfs.core.types import InodeNo

#: The kernel's LOOKUP follows at once; after this it is another call's.
RETRY_S: Final = 1.0
_NOTHING: Final = InodeNo(0)


class Refusal(NamedTuple):
    """What was answered ESTALE, and is tried again at once: an OPEN of *ino*, 0 for a CREATE."""

    ino: InodeNo
    until_s: float
    #: What the thread may have called it: its name, and the one it had until a moment ago.
    names: tuple[Place, ...]
    #: Whether it was to be read, too.
    reads: bool = True
    #: What the LOOKUP of the second try led to, 0 if nothing was found; None: it has not come.
    led_to: InodeNo | None = None

    def is_met_by(self, ino: InodeNo, now_s: float) -> bool:
        """Whether an OPEN of *ino* now tries again without a LOOKUP: by handle, or /proc/PID/fd."""
        return self.ino == ino and self.led_to is None and now_s < self.until_s

    def is_followed_by(self, ino: InodeNo) -> bool:
        """Whether an OPEN of *ino* now is the second try's own: there is no third."""
        return self.led_to == ino


class Refusals:
    """The refused opens by thread, the oldest first."""

    def __init__(self) -> None:
        self._by_thread: OrderedDict[int, Refusal] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether a LOOKUP may be a second try."""
        return bool(self._by_thread)

    def of(self, thread: int) -> Refusal | None:
        """Return what *thread* was refused, None if nothing."""
        return self._by_thread.get(thread)

    def note(self, thread: int, refusal: Refusal) -> None:
        """*thread* is answered ESTALE."""
        self._by_thread.pop(thread, None)
        self._by_thread[thread] = refusal

    def looked(self, thread: int, led_to: InodeNo = _NOTHING) -> None:
        """*thread* has looked the name up at its second try; what it finds later is another's."""
        before = self._by_thread.get(thread)
        if before is not None:
            self._by_thread[thread] = before._replace(led_to=led_to)

    def forget(self, thread: int) -> Refusal | None:
        """*thread* is done with its second try; return what it was."""
        return self._by_thread.pop(thread, None)

    def tick(self, now_s: float) -> None:
        """Forget those that were not tried again."""
        while self._by_thread and next(iter(self._by_thread.values())).until_s <= now_s:
            self._by_thread.popitem(last=False)
