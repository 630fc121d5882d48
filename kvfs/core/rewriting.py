"""What O_TRUNC does to a block that is open or final: one table (docs/dev/rewrites.md).

Pure. One open(2) is up to two tries: if an OPEN is answered with ESTALE, the kernel looks the name
up again, once, and sends another OPEN. Each row says how kvfs answers one of these requests.
Which opens were refused, and which names changed hands, is remembered for a second or so.
"""

from collections import OrderedDict
from enum import StrEnum
from typing import Final, Generic, NamedTuple, TypeVar

from kvfs.core.types import NO_INODE, InodeNo


class Try(StrEnum):
    """How far a thread's open(2) has got when a request of the thread arrives."""

    FIRST = "nothing was refused before"
    REFUSED = "ESTALE was the answer, and no LOOKUP has come since"
    LOOKED = "ESTALE was the answer, and the LOOKUP of the second try has come"
    UNKNOWN = "the thread is not known, so that no second try can be told from a first"


class Found(StrEnum):
    """What the inode or the name in a request turns out to be."""

    FREE = "a file that nobody loses bytes of: the caller's own, or empty and not open"
    SHARED = "an empty file that others have open, too"
    LOCKED = "a file with bytes that its writers lock, or share"
    TAKEN = "a file that is final, or that somebody else has open"
    APPENDED = "a draft that others append to, while readers are led to an old version"
    LOST = "the caller's fresh inode, whose name another writer took"
    UNLINKED = "an empty file that others have open, and that has no name any more"
    NAMELESS = "any other file that is open and has no name any more"
    NOTHING = "a file that is gone"
    ANOTHER = "a file that was not refused under this name, or that the caller may not change"
    ON_THE_WAY = "a directory or a link on the way to the name"


class Answer(StrEnum):
    """What is done."""

    EMPTY = "the file is opened, and emptied in place"
    SHARE = "the file is opened as it is: it is empty"
    RETRY = "ESTALE, and the kernel looks the name up again"
    STALE = "ESTALE, and the program hears it"
    REPLACE = "the name goes to a fresh inode, and leads there"
    SHOW = "the old version ends, and the name leads everybody to the draft"
    JOIN = "the LOOKUP leads to what is there, for this thread also where others see an old version"
    LEAD_BACK = "the LOOKUP leads to the caller's own fresh inode, for this thread alone"
    LEAD = "the LOOKUP leads to what is there"


_OWN: Final = {
    **dict.fromkeys((Found.FREE, Found.LOST, Found.LOCKED), Answer.EMPTY),
    Found.SHARED: Answer.SHARE,
}
_OTHERS: Final = (Found.TAKEN, Found.UNLINKED, Found.NAMELESS, Found.NOTHING)

#: The answer to an OPEN with O_TRUNC. A second try without a LOOKUP names the inode by its number
#: (/proc/PID/fd, a handle), so it cannot be led to another inode. An unknown thread has no second
#: try: its name is replaced at once, and the program, which gets ESTALE, must open again.
OPEN: Final[dict[Try, dict[Found, Answer]]] = {
    Try.FIRST: {**_OWN, **dict.fromkeys(_OTHERS, Answer.RETRY)},
    Try.REFUSED: {**_OWN, **dict.fromkeys(_OTHERS, Answer.EMPTY), Found.NOTHING: Answer.RETRY},
    # There is no third try: the next OPEN of this thread is the first of another open(2). Taken
    # for an OPEN by number, it would empty a block that has become final meanwhile.
    Try.LOOKED: {**_OWN, **dict.fromkeys(_OTHERS, Answer.STALE), Found.UNLINKED: Answer.SHARE},
    Try.UNKNOWN: {
        **_OWN,
        **dict.fromkeys(_OTHERS, Answer.STALE),
        Found.TAKEN: Answer.REPLACE,
        Found.UNLINKED: Answer.SHARE,
    },
}

_NO_NAME: Final = (Found.UNLINKED, Found.NAMELESS, Found.NOTHING)
_LEAD: Final[dict[Found, Answer]] = {found: Answer.LEAD for found in Found if found not in _NO_NAME}

#: The answer to a LOOKUP by a thread whose open was refused; for all others a LOOKUP finds the
#: block. In a second try the kernel looks twice: to revalidate the name it knew, then to find it.
LOOKUP: Final[dict[Try, dict[Found, Answer]]] = {
    Try.REFUSED: {
        **_LEAD,
        Found.SHARED: Answer.JOIN,
        Found.TAKEN: Answer.REPLACE,
        **dict.fromkeys((Found.LOCKED, Found.APPENDED), Answer.SHOW),
    },
    Try.LOOKED: {**_LEAD, Found.LOST: Answer.LEAD_BACK},
}


class Loser(StrEnum):
    """A file that loses its name to a fresh inode."""

    FRESH = "a fresh inode whose OPEN is to come"
    DRAFT = "a draft that is being written"
    TEMPORARY = "a leased file under a temporary name, or where only a rename publishes"
    ANOTHERS = "a leased block of another process"
    FINAL = "any other final block"
    REST = "a block that is rewritten in place, or a temporary name that its writer left"


class Keeps(NamedTuple):
    """For whom a file that lost its name is kept, beside those who have it open."""

    #: For its writer, which will rename it.
    for_rename: bool
    #: For readers, which are led to it until the new version is whole; not a temporary name.
    stands_in: bool


LOSES_NAME: Final = {
    Loser.FRESH: Keeps(for_rename=True, stands_in=False),
    Loser.DRAFT: Keeps(for_rename=True, stands_in=False),
    Loser.TEMPORARY: Keeps(for_rename=True, stands_in=False),
    Loser.ANOTHERS: Keeps(for_rename=True, stands_in=True),
    Loser.FINAL: Keeps(for_rename=False, stands_in=True),
    Loser.REST: Keeps(for_rename=False, stands_in=False),
}


class Kept(NamedTuple):
    """Something that a rewrite keeps for a while, with its limits in time and number."""

    what: str
    wait_s: float
    #: Most at a time; for one more the oldest goes. 0: time is the only limit.
    most: int = 0


#: The kernel's LOOKUP follows at once; a later one belongs to another call.
REFUSAL: Final = Kept("that an open(2) was answered ESTALE, for its second try", 1.0)
#: An open(2) that looked a name up sends its OPEN at once.
FORMER_NAME: Final = Kept("the name that a file had before its rename", 1.0, 256)
#: The kernel's second OPEN follows at once; if it does not, the opener has died.
AWAITED: Final = Kept("a fresh inode, for the OPEN of its second try", 5.0)
#: Kept because their writers will rename them.
DISPLACED: Final = Kept("a file whose name another writer took, for its writer's rename", 60.0, 64)
#: Kept because a rename of such a name may mean another writer's draft.
CONTENDED: Final = Kept("that writers took a name from each other", DISPLACED.wait_s, 1024)
EVERYTHING_KEPT: Final = (REFUSAL, FORMER_NAME, AWAITED, DISPLACED, CONTENDED)


#: A directory's inode and a name in it.
Place = tuple[InodeNo, bytes]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(Generic[_Key, _Value]):
    """Values that are valid for a short time. If there are too many, the oldest are forgotten."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._noted: OrderedDict[_Key, tuple[_Value, float]] = OrderedDict()

    def remember(self, key: _Key, value: _Value, now_s: float) -> None:
        """Keep *value* from now on."""
        self._noted[key] = (value, now_s + self._kept.wait_s)
        self._noted.move_to_end(key)
        if len(self._noted) > self._kept.most:
            self._noted.popitem(last=False)

    def of(self, key: _Key, now_s: float) -> _Value | None:
        """Return the value noted for *key*, if it is still valid, else None."""
        noted = self._noted.get(key)
        return None if noted is None or noted[1] <= now_s else noted[0]

    def pop(self, key: _Key, now_s: float) -> _Value | None:
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


class Refusals(OrderedDict[int, Refusal]):
    """The refused opens by thread, the oldest first; if there is any, a LOOKUP may be a second try.

    After ESTALE the kernel tries again within the same open(2). It sends a LOOKUP for each part of
    the path. Only the LOOKUP of the refused file's name is the second try. If a symlink has taken
    that name meanwhile, the path leads elsewhere, and later LOOKUPs of the thread belong to another
    call.
    """

    def remember(
        self,
        thread: int,
        ino: InodeNo,
        names: tuple[Place, ...],
        now_s: float,
        *,
        reads: bool,
        truncates: bool = True,
    ) -> None:
        """Remember that a request of *thread* is answered with ESTALE."""
        self.pop(thread, None)
        until_s = now_s + REFUSAL.wait_s
        self[thread] = Refusal(ino, until_s, names, reads, truncates=truncates)

    def looked(self, thread: int, led_to: InodeNo = NO_INODE, *, joins: bool = False) -> None:
        """Note that the LOOKUP of the second try of *thread* led to *led_to*.

        Once one LOOKUP *joins*, later ones that lead to the same file do, too.
        """
        before = self.get(thread)
        if before is not None:
            joins = joins or (before.joins and before.led_to == led_to)
            self[thread] = before._replace(led_to=led_to, joins=joins)

    def joins(self, thread: int, ino: InodeNo) -> bool:
        """Whether *thread* sees *ino* even if others see another version in its place."""
        before = self.get(thread)
        return before is not None and before.joins and before.led_to == ino

    def forget(self, thread: int) -> Refusal | None:
        """Note that the second try of *thread* has ended; return its refused request, if any."""
        return self.pop(thread, None)

    def forget_expired(self, now_s: float) -> None:
        """Forget requests that were not tried again in time."""
        while self and next(iter(self.values())).until_s <= now_s:
            self.popitem(last=False)
