"""Short-lived memory: which opens were refused with ESTALE, and which names changed hands.

After ESTALE the kernel tries again within the same open(2). It sends a LOOKUP for each part of the
path. Only the LOOKUP of the refused file's name is the second try. If a symlink has taken that name
meanwhile, the path leads elsewhere, and later LOOKUPs of the thread belong to another call.
"""

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from kvfs.core.rewriting import REFUSAL, Kept, Try
from kvfs.core.types import NO_INODE, InodeNo

#: A directory's inode and a name in it.
Place = tuple[InodeNo, bytes]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(Generic[_Key, _Value]):
    """Values that are valid for a short time. If there are too many, the oldest are forgotten."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._noted: OrderedDict[_Key, tuple[_Value, float]] = OrderedDict()

    def note(self, key: _Key, value: _Value, now_s: float) -> None:
        """Keep *value* from now on."""
        self._noted[key] = (value, now_s + self._kept.wait_s)
        self._noted.move_to_end(key)
        if len(self._noted) > self._kept.most:
            self._noted.popitem(last=False)

    def of(self, key: _Key, now_s: float) -> _Value | None:
        """Return the value noted for *key*, if it is still valid, else None."""
        noted = self._noted.get(key)
        return None if noted is None or noted[1] <= now_s else noted[0]

    def take(self, key: _Key, now_s: float) -> _Value | None:
        """Return what ``of`` returns, and forget it."""
        value = self.of(key, now_s)
        self._noted.pop(key, None)
        return value


class Refusal(NamedTuple):
    """A request answered with ESTALE, which is tried again: an OPEN of *ino*, or a CREATE (0)."""

    ino: InodeNo
    until_s: float
    #: Names that the thread may have used: the inode's, and the one it had before a recent rename.
    names: tuple[Place, ...]
    #: Whether the open was for reading, too.
    reads: bool = True
    #: What the LOOKUP of the second try led to, 0 if nothing was found; None: it has not come.
    led_to: InodeNo | None = None
    #: Whether the open empties the file; otherwise it only writes to it.
    truncates: bool = True
    #: ``led_to`` is a draft that this thread may see, although others see an old version.
    joins: bool = False

    def at_open(self, ino: InodeNo, now_s: float) -> Try:
        """Return which try an OPEN of *ino* is now."""
        if self.led_to is None:
            return Try.REFUSED if self.ino == ino and now_s < self.until_s else Try.FIRST
        return Try.LOOKED if self.led_to == ino else Try.FIRST

    @property
    def at_lookup(self) -> Try:
        """Return which try a LOOKUP is now."""
        return Try.REFUSED if self.led_to is None else Try.LOOKED


class Refusals:
    """The refused opens by thread, the oldest first."""

    def __init__(self) -> None:
        self._by_thread: OrderedDict[int, Refusal] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether a LOOKUP may be a second try."""
        return bool(self._by_thread)

    def all(self) -> list[tuple[int, Refusal]]:
        """Return every thread with its refused request."""
        return list(self._by_thread.items())

    def recall(self, thread: int, refusal: Refusal) -> None:
        """Restore *refusal* of *thread*."""
        self._by_thread[thread] = refusal

    def of(self, thread: int) -> Refusal | None:
        """Return the refused request of *thread*, None if there is none."""
        return self._by_thread.get(thread)

    def note(
        self,
        thread: int,
        ino: InodeNo,
        names: tuple[Place, ...],
        now_s: float,
        *,
        reads: bool,
        truncates: bool = True,
    ) -> None:
        """Note that a request of *thread* is answered with ESTALE."""
        self._by_thread.pop(thread, None)
        until_s = now_s + REFUSAL.wait_s
        self._by_thread[thread] = Refusal(ino, until_s, names, reads, truncates=truncates)

    def looked(self, thread: int, led_to: InodeNo = NO_INODE, *, joins: bool = False) -> None:
        """Note that the LOOKUP of the second try of *thread* led to *led_to*.

        Once one LOOKUP *joins*, later ones that lead to the same file do, too.
        """
        before = self._by_thread.get(thread)
        if before is not None:
            joins = joins or (before.joins and before.led_to == led_to)
            self._by_thread[thread] = before._replace(led_to=led_to, joins=joins)

    def joins(self, thread: int, ino: InodeNo) -> bool:
        """Whether *thread* sees *ino* even if others see another version in its place."""
        before = self._by_thread.get(thread)
        return before is not None and before.joins and before.led_to == ino

    def forget(self, thread: int) -> Refusal | None:
        """Note that the second try of *thread* has ended; return its refused request, if any."""
        return self._by_thread.pop(thread, None)

    def tick(self, now_s: float) -> None:
        """Forget requests that were not tried again in time."""
        while self._by_thread and next(iter(self._by_thread.values())).until_s <= now_s:
            self._by_thread.popitem(last=False)
