"""What is known about a block while it is written, and what its last close does to it.

Pure. The states are in lifecycle.py; here are the flags that decide which event the last close is.
Each method is one thing that happens to an open block, and nothing else sets a flag.
docs/dev/block-life.md draws both tables.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from kvfs.core.lifecycle import FINAL, UNFINISHED, Event, State, after


class Left(StrEnum):
    """What the last writer leaves behind."""

    NOTHING = "nothing was written"
    ADDED = "bytes were added to a final block, and none changed"
    BYTES = "bytes were written"
    DEATH = "a writer died and nothing was written"
    HALF = "a writer died in the middle, or writes on behind a server that has ended"

    # Looked up in each close: Enum's own __hash__ runs Python code.
    __hash__ = str.__hash__


_CLOSE: Final = dict.fromkeys(Left, Event.CLOSE)
_DRAFT: Final = {**_CLOSE, Left.DEATH: Event.TEAR, Left.HALF: Event.TEAR}

#: Which event the last close is. None: no event, the block returns to the state before its opening.
#: A state that is not listed stays: its open failed at once, or the index has the close already.
LAST_CLOSE: Final[dict[State, dict[Left, Event | None]]] = {
    State.DRAFT: {**_DRAFT},
    State.SLAB_DRAFT: {**_DRAFT},
    State.RENAMED: {**_CLOSE, Left.HALF: Event.TEAR},
    State.REWRITE: {
        **dict.fromkeys((Left.NOTHING, Left.DEATH)),
        Left.ADDED: Event.EXTEND,
        Left.BYTES: Event.CLOSE,
        Left.HALF: Event.TEAR,
    },
    State.SLAB: {**_CLOSE},
}


def _becomes(state: State, event: Event | None) -> State | None:
    if event is Event.TEAR:
        return after(after(state, event), Event.CLOSE)
    return None if event is None else after(state, event)


#: LAST_CLOSE with the state that the event leads to; looked up in each close.
_BECOMES: Final = {
    state: {left: _becomes(state, event) for left, event in row.items()}
    for state, row in LAST_CLOSE.items()
}


_NOTHING_NOTED: Final[Mapping[str, bool]] = MappingProxyType({})


class Writing:
    """The flags of a block that is open."""

    #: Whether a writer's death would leave the bytes torn: a draft, or a block in rewrite.
    unfinished = False
    #: A writer was killed before the block was whole: its name is removed at the last close.
    torn = False
    #: Its mount has ended, but a client can go on writing: it is torn, even if nothing was written.
    outlives = False
    #: It took more space than was free, and nothing could be evicted: its closes return an error.
    overrun = False
    #: Whether every writer since it was reopened only adds bytes: it appends, or found it empty.
    appended_only = True
    #: More than one writer opened it since it was closed last.
    joined = False
    #: Renamed while it was written: the last close carries it out.
    renamed = False
    #: A file server emptied it: other programs do not find it until it is whole.
    emptied = False
    #: Several processes opened it while it was empty, each to write it (findings.py).
    met = False
    #: A lock of one of its writers was seen.
    locked = False
    #: What the block was before it was opened for writing.
    before = State.DRAFT

    def create(self) -> None:
        """The block was created as a draft, open for writing."""
        self.unfinished = True

    def begin(self, state: State, *, appends: bool) -> None:
        """Its first writer opened it in *state*; one that *appends* changes no existing byte."""
        self.unfinished = state in UNFINISHED
        self.torn = self.renamed = self.emptied = self.met = self.locked = self.joined = False
        self.appended_only = appends
        self.before = State.PUBLISHED if state is State.RENAMED else state

    def join(self, *, appends: bool) -> None:
        """One more writer opened it."""
        self.joined = True
        self.appended_only = self.appended_only and appends

    def join_renamed(self) -> None:
        """One more writer opened it after its rename, which had made it PUBLISHED."""
        self.appended_only = False
        self.before = State.PUBLISHED

    def recall(
        self, state: State, before: State | None = None, noted: Mapping[str, bool] = _NOTHING_NOTED
    ) -> None:
        """The last server had it open for writing, in *state*, and noted *before* and *noted*."""
        self.unfinished = state in UNFINISHED or state in (State.REWRITE, State.RENAMED)
        if before is not None:
            self.before = before
        elif state not in UNFINISHED:
            self.before = State.PUBLISHED if state is State.RENAMED else state
        self.torn = noted.get("torn", False)
        self.overrun = noted.get("overrun", False)
        self.renamed = noted.get("renamed", False)
        self.emptied = noted.get("emptied", False)
        self.appended_only = noted.get("appended_only", False)
        self.met = noted.get("met", False)
        self.locked = noted.get("locked", False)

    def meet(self) -> None:
        """Several processes opened it while it was empty, each to write it."""
        self.met = True

    def part(self) -> None:
        """All but one of the processes that met have closed it, and it is still empty."""
        self.met = False

    @property
    def mixes(self) -> bool:
        """Whether its bytes may be a mixture, written by several processes without a lock."""
        return self.met and not self.locked

    def see_lock(self) -> None:
        """One of its writers locks it, so its writers take turns."""
        self.locked = True

    def rewrite(self) -> None:
        """It was final, and its bytes may change from now on."""
        self.unfinished = True

    def empty(self) -> None:
        """A file server truncated a whole block to 0: it is a draft again."""
        self.unfinished = self.emptied = True
        self.torn = self.renamed = False
        self.before = State.DRAFT

    def resize(self) -> None:
        """It was truncated, or space was allocated ahead, while it was being rewritten."""
        self.appended_only = False

    def allocate(self, state: State) -> None:
        """Space was allocated ahead of its bytes; it is in *state* now."""
        self.unfinished = state is State.SLAB_DRAFT

    def spoil(self) -> None:
        """A write was refused, or the server stops: it will not be whole."""
        self.torn = self.torn or self.unfinished

    def refuse(self) -> None:
        """The open of its last writer was refused: it is whole only if others wrote it."""
        if not self.joined:
            self.spoil()

    def tear(self) -> None:
        """A writer was killed while writing, or its close does not prove that it finished."""
        self.torn = True

    def outrun(self) -> None:
        """It took more space than was free, and nothing could be evicted."""
        self.overrun = self.torn = True

    def outlive(self) -> None:
        """The server stops, and a client goes on writing."""
        self.outlives = True

    @property
    def is_plain_draft(self) -> bool:
        """Whether it was created as a draft, and nothing but writing has happened to it."""
        special = self.torn or self.outlives or self.overrun or self.renamed
        return self.unfinished and not (special or self.emptied or self.met)

    def move(self) -> None:
        """It was renamed while it was being written."""
        self.renamed = True

    def end(self, *, whole: bool) -> None:
        """Its last writer has closed; *whole*: it has a name, and the index has its final state."""
        self.unfinished = self.emptied = self.met = False
        if whole:
            self.torn = self.renamed = False

    def last_close(self, state: State, *, written: bool) -> State:
        """Return the state after the last close of a block in *state*, *written* or only opened."""
        row = _BECOMES.get(state)
        becomes = state if row is None else row[self._left(state, written=written)]
        if becomes is None:
            becomes = self.before
        if self.renamed and becomes is not State.GONE:
            return after(becomes, Event.RENAME)
        return becomes

    def _left(self, state: State, *, written: bool) -> Left:
        if self.torn:
            return Left.HALF if written or self.outlives else Left.DEATH
        if not written:
            return Left.NOTHING
        if state is State.REWRITE and self.appended_only and self.before in FINAL:
            return Left.ADDED
        return Left.BYTES
