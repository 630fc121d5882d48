"""Short-lived memory: which opens were refused with ESTALE, and which names changed hands.

After ESTALE the kernel tries again within the same open(2). It sends a LOOKUP for each part of the
path. Only the LOOKUP of the refused file's name is the second try: if a link was put in its place
meanwhile, it leads elsewhere, and what the thread looks up later belongs to another call.
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
    """Values that are valid for a moment. If there are too many, the oldest are forgotten."""

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
        """Return the value noted for *key* a moment ago; None if there is none."""
        noted = self._noted.get(key)
        return None if noted is None or noted[1] <= now_s else noted[0]

    def take(self, key: _Key, now_s: float) -> _Value | None:
        """Return what ``of`` returns, and forget it."""
        value = self.of(key, now_s)
        self._noted.pop(key, None)
        return value


class Refusal(NamedTuple):
    """A request that was answered ESTALE and is tried again: an OPEN of *ino*; 0 for a CREATE."""

    ino: InodeNo
    until_s: float
    #: Names that the thread may have used: its name, and the one that it had a moment ago.
    names: tuple[Place, ...]
    #: Whether it was opened for reading, too.
    reads: bool = True
    #: What the LOOKUP of the second try led to, 0 if nothing was found; None: it has not come.
    led_to: InodeNo | None = None
    #: Whether it empties the file, or only writes to it.
    truncates: bool = True
    #: ``led_to`` is a draft that it may see, although others see an old version.
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
        """Return every thread and what it was refused."""
        return list(self._by_thread.items())

    def recall(self, thread: int, refusal: Refusal) -> None:
        """Remember *refusal* of *thread* again."""
        self._by_thread[thread] = refusal

    def of(self, thread: int) -> Refusal | None:
        """Return what *thread* was refused, None if nothing."""
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
        """Note that *thread* is answered ESTALE."""
        self._by_thread.pop(thread, None)
        until_s = now_s + REFUSAL.wait_s
        self._by_thread[thread] = Refusal(ino, until_s, names, reads, truncates=truncates)

    def looked(self, thread: int, led_to: InodeNo = NO_INODE, *, joins: bool = False) -> None:
        """Note the LOOKUP of the second try of *thread*; its later LOOKUPs do not count.

        If it *joins*, a later one that leads to the same file does, too.
        """
        before = self._by_thread.get(thread)
        if before is not None:
            joins = joins or (before.joins and before.led_to == led_to)
            self._by_thread[thread] = before._replace(led_to=led_to, joins=joins)

    def joins(self, thread: int, ino: InodeNo) -> bool:
        """Whether *thread* is led to *ino*, whatever others see in its place."""
        before = self._by_thread.get(thread)
        return before is not None and before.joins and before.led_to == ino

    def forget(self, thread: int) -> Refusal | None:
        """Note that the second try of *thread* has ended; return what it was."""
        return self._by_thread.pop(thread, None)

    def tick(self, now_s: float) -> None:
        """Forget those that were not tried again."""
        while self._by_thread and next(iter(self._by_thread.values())).until_s <= now_s:
            self._by_thread.popitem(last=False)
