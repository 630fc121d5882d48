"""What is remembered for a moment of opens that were refused, and of names that changed hands.

The kernel tries an open that was answered ESTALE again within the same open(2), and sends a LOOKUP
for each part of the path. Only the one that asks for the name of what was refused is the second
try: a link that was put in its place meanwhile leads elsewhere, and what the thread looks up later
is another call's.
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
    """Values that are good for a moment; too many, and the oldest are forgotten."""

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
        """Return what was noted of *key* a moment ago, None if nothing."""
        noted = self._noted.get(key)
        return None if noted is None or noted[1] <= now_s else noted[0]

    def take(self, key: _Key, now_s: float) -> _Value | None:
        """Return what ``of`` does, for the last time."""
        value = self.of(key, now_s)
        self._noted.pop(key, None)
        return value


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

    def at_open(self, ino: InodeNo, now_s: float) -> Try:
        """Return which try an OPEN of *ino* now is."""
        if self.led_to is None:
            return Try.REFUSED if self.ino == ino and now_s < self.until_s else Try.FIRST
        return Try.LOOKED if self.led_to == ino else Try.FIRST

    @property
    def at_lookup(self) -> Try:
        """Which try a LOOKUP now is."""
        return Try.REFUSED if self.led_to is None else Try.LOOKED


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

    def note(
        self, thread: int, ino: InodeNo, names: tuple[Place, ...], now_s: float, *, reads: bool
    ) -> None:
        """*thread* is answered ESTALE."""
        self._by_thread.pop(thread, None)
        self._by_thread[thread] = Refusal(ino, now_s + REFUSAL.wait_s, names, reads)

    def looked(self, thread: int, led_to: InodeNo = NO_INODE) -> None:
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
