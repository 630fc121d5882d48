"""Simulated processes and the blocks they write: what the table says of every step."""

from collections.abc import Iterable
from typing import Final

from kvfs.core.errors import KvfsError, NotFound
from kvfs.core.lifecycle import (
    FINAL,
    HELD,
    TABLE,
    UNFINISHED,
    Event,
    Seen,
    State,
    after,
    is_temporary,
)
from kvfs.core.rewriting import FORMER_NAME, Found
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.file_holders import Holders
from kvfs.machine.processes import NOBODY, SERVER, Maker, Processes
from tests.support.store.driven import Opened
from tests.support.store.store_model import TEARABLE

#: The kernel gives no process this number or a higher one (PID_MAX_LIMIT, include/linux/threads.h):
#: made up by a test, a lower one may be that of a process of this machine, which would be watched.
NO_PID: Final = 1 << 22


class Lives(Processes):
    """Processes that live and die as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.living: set[Maker] = set()
        self._untold: list[Maker] = []

    def lives(self, maker: Maker) -> bool:
        return maker in self.living

    def ended(self) -> list[Maker]:
        told, self._untold = self._untold, []
        return told

    def begin(self, maker: Maker) -> None:
        self.living.add(maker)

    def end(self, maker: Maker) -> None:
        self.living.remove(maker)
        self._untold.append(maker)


class Block:
    """A block: what it is by the table, who holds it, and its bytes.

    ``changed`` says whether bytes were written since its opening for writing, or its rename.
    """

    def __init__(self, ino: InodeNo, parent: InodeNo, name: bytes, maker: Maker) -> None:
        self.ino = ino
        self.parent = parent
        self.name = name
        self.data = bytearray()
        self.state = self.before = State.DRAFT
        #: Whom it belongs to, and who opened it for writing first.
        self.maker = self.opener = maker
        self.writers = 1
        self.readers = 0
        #: Who opened it for writing since it had no writer, and how many only append now.
        self.hands = {maker}
        self.appenders = 0
        self.has_name = True
        self.changed = self.adds = self.renamed = self.torn = False
        self.opened_empty = True
        #: Several processes opened it while it was empty, each to write it.
        self.met = False
        #: Others see a version before it, until it is whole.
        self.has_old = False
        #: When it was renamed last.
        self.renamed_s = float("-inf")

    def happens(self, event: Event) -> None:
        self.state = after(self.state, event)

    @property
    def is_unfinished(self) -> bool:
        return self.writers > 0 and self.state in TEARABLE

    def note_hand(self, maker: Maker, *, appends: bool) -> None:
        """*maker* has become a writer."""
        if self.writers == 1:
            self.hands, self.appenders = set(), 0
        self.hands.add(maker)
        self.appenders += appends

    def found(self, maker: Maker, now_s: float, *, hides: bool) -> Found:
        """Return what an O_TRUNC of *maker* finds; *hides*: its directory hides drafts."""
        own = maker.is_one and maker in self.hands
        shared = self.writers > 0 and (own or self.appenders == self.writers)
        if shared and not is_temporary(self.name):
            return Found.FREE
        is_open = self.writers > 0 or (self.state not in UNFINISHED and self.readers > 0)
        if not is_open and (self.state in UNFINISHED or not self.data):
            return Found.FREE
        # Its opener may have looked up its former name.
        lately = now_s < self.renamed_s + FORMER_NAME.wait_s
        if lately or hides or is_temporary(self.name) or self.state is State.RENAMED:
            return Found.TAKEN
        if not self.data:
            return Found.SHARED
        return Found.LOCKED if self.writers and self.met else Found.TAKEN

    def meets(self, maker: Maker) -> bool:
        """Whether another process than *maker* writes it."""
        return self.writers > 0 and self.opener != maker

    def part(self, having: set[Maker]) -> None:
        """One of two writers has closed it; *having* have it open still."""
        if self.met and self.writers == 1 and not self.data:
            self.hands &= having
            self.met = False

    def is_emptied_by_a_server(self, maker: Maker) -> bool:
        """Whether an O_TRUNC of *maker*, a file server, makes a draft of a block it writes."""
        alone = not self.hands - {SERVER}
        return maker == SERVER and alone and bool(self.data) and self.state not in UNFINISHED

    def may_be_renamed(self, taker: Maker) -> bool:
        """Whether its writer would rename it still after *taker* took its name."""
        if self.state is State.LEASED:
            return is_temporary(self.name) or taker != self.maker
        return self.state in UNFINISHED

    def stands_in(self, taker: Maker) -> bool:
        """Whether others see it once *taker* has taken its name, until the new one is whole."""
        if self.state is State.LEASED and taker != self.maker:
            return not is_temporary(self.name)
        return not is_temporary(self.name) and self.state not in UNFINISHED | {State.REWRITE}

    # ---- what processes do to it ----

    def open_writer(self, maker: Maker, *, appends: bool) -> None:
        self.writers += 1
        self.note_hand(maker, appends=appends)
        if self.writers == 1:
            self.opener = maker
            self.opened_empty = not self.data
            self.adds = appends or self.opened_empty
            self.changed = self.renamed = self.torn = self.met = False
        else:
            self.adds = self.adds and (appends or self.opened_empty)
        if not self.has_name or self.state in UNFINISHED:
            return
        if self.writers == 1:
            self.before = self.state
            self.happens(Event.REOPEN)
        elif self.state is State.RENAMED:
            self.before = State.PUBLISHED
            self.adds = False
            self.happens(Event.REOPEN)

    def flush(self, signal: int) -> None:
        """A descriptor of a writer is closed, by a process that dies of *signal* or lives (0)."""
        self.torn = self.torn or (signal != 0 and self.is_unfinished)

    def close_writer(self) -> None:
        self.writers -= 1
        if self.writers:
            return
        self.torn = self.torn or (self.met and bool(self.data))
        self.met = self.has_old = False
        if not self.has_name:
            return
        if self.torn and (self.changed or self.state in UNFINISHED):
            self.happens(Event.TEAR)
        if self.state is State.REWRITE and not self.changed:
            self.state = self.before
        elif self.state is State.REWRITE and self.adds and self.before in FINAL:
            self.happens(Event.EXTEND)
        else:
            self.happens(Event.CLOSE)
        if self.state is State.GONE:
            self.has_name = False
            return
        if self.renamed:
            self.happens(Event.RENAME)
        if self.state not in HELD:
            self.maker = NOBODY
        elif self.state != self.before or (self.changed and self.opener != NOBODY):
            self.maker = self.opener
        self.renamed = self.torn = False

    def rename(self, who: Maker) -> None:
        """Its name changes: its writer publishes it by that, another process does not."""
        own = self.state in UNFINISHED and who == self.opener and not self.torn
        if self.writers:
            self.renamed = True
            if not own:
                return
        self.happens(Event.RENAME)
        self.maker = NOBODY
        self.changed = False
        self.opened_empty = not self.data

    def write(self, data: bytes, offset_bytes: int) -> None:
        self.changed = True
        self.data.extend(bytes(max(0, offset_bytes + len(data) - len(self.data))))
        self.data[offset_bytes : offset_bytes + len(data)] = data

    def allocate(self) -> None:
        if not self.has_name:
            return
        before = self.state
        if self.state is State.REWRITE:
            self.adds = False
            if self.before is State.ORPHAN_SLAB or self.opened_empty:
                self.state = self.before
        self.happens(Event.ALLOCATE)
        if self.state != before and self.writers:
            self.maker = self.opener

    def truncate(self, size_bytes: int) -> None:
        if size_bytes > len(self.data):
            self.allocate()
        is_open = self.writers > 0
        if not is_open:
            self.open_writer(NOBODY, appends=False)
        else:
            self.adds = False
        self.changed = True
        del self.data[size_bytes:]
        self.data.extend(bytes(size_bytes - len(self.data)))
        if not is_open:
            self.close_writer()

    # ---- what happens to it by itself ----

    def lose_maker(self) -> None:
        """Its maker is gone, and nobody writes it."""
        if self.state is State.LEASED and is_temporary(self.name):
            self.state = State.ORPHAN
        else:
            self.happens(Event.MAKER_DIED)
        self.maker = NOBODY

    def lose_server(self) -> None:
        """The server was killed: so are all handles."""
        torn = self.state in UNFINISHED or (self.state in TEARABLE and self.changed)
        if torn:
            self.has_name = False
        elif self.state is State.REWRITE:
            self.state = State.REWRITTEN
        elif self.state is State.RENAMED:
            self.state = State.PUBLISHED
        self.writers = self.readers = 0
        self.torn = self.renamed = self.met = self.has_old = False
        self.renamed_s = float("-inf")


def meant_by(
    who: Maker, block: Block, displaced: list[Block], fought_over: set[tuple[InodeNo, bytes]]
) -> tuple[type[KvfsError] | None, Block]:
    """Which block a rename of *block* by process *who* means, or what it fails with.

    *displaced* are drafts that lost their name, oldest first; *fought_over* names that writers
    took from each other less than a minute ago.
    """
    place = (block.parent, block.name)
    lost = [other for other in displaced if (other.parent, other.name) == place]
    own_error = NotFound if place in fought_over and block.met else None
    if not lost or not block.is_unfinished:
        fought = place in fought_over and block.is_unfinished
        foreign = who.is_one and block.opener.is_one and block.opener != who
        return NotFound if fought and foreign else own_error, block
    finished = [other for other in reversed(lost) if not other.writers and not other.torn]
    own = [other for other in finished if other.opener == who]
    if own:
        return None, own[0]
    if block.opener == who and who.is_one:
        return own_error, block
    return (None, finished[0]) if finished else (NotFound, block)


class Handle:
    """What open(2) made: ``count`` descriptors and mappings share it."""

    def __init__(self, block: Block, opened: Opened, *, writer: bool, appends: bool) -> None:
        self.block = block
        self.opened = opened
        self.writer = writer
        self.appends = appends
        self.count = 1


class Process:
    """A process with its descriptors and mappings."""

    def __init__(self, maker: Maker) -> None:
        self.maker = maker
        self.descriptors: list[Handle] = []
        self.mappings: list[Handle] = []

    @property
    def tid(self) -> int:
        return self.maker.tgid


class Scene:
    """All processes and blocks; who of them is meant, and what each of them sees."""

    processes: list[Process]
    blocks: list[Block]

    def process(self, pick: int) -> Process:
        return self.processes[pick % len(self.processes)]

    def named(self) -> list[Block]:
        return [block for block in self.blocks if block.has_name]

    def at(self, parent: InodeNo, name: bytes) -> Block | None:
        found = [one for one in self.named() if (one.parent, one.name) == (parent, name)]
        assert len(found) < 2
        return found[0] if found else None

    def sees(self, process: Process, block: Block) -> bool:
        if TABLE[block.state].seen is not Seen.BY_POLICY:
            return True
        if block.parent == ROOT_INODE:
            return True
        # Those that cannot be told apart are many: only who renames a temporary name is meant.
        # A server is one all the same: it looks for what it made.
        told = process.maker != NOBODY or is_temporary(block.name)
        return process.maker == block.opener and told

    def seen_by(self, process: Process, pick: int) -> Block | None:
        found = [block for block in self.named() if self.sees(process, block)]
        return found[pick % len(found)] if found else None

    def handle(self, process: Process, pick: int) -> Handle | None:
        held = process.descriptors
        return held[pick % len(held)] if held else None

    def having(self, block: Block) -> set[Maker]:
        """Return which processes, of those that are told apart, have a descriptor of *block*."""
        return {
            process.maker
            for process in self.processes
            if process.maker.is_one and any(held.block is block for held in process.descriptors)
        }

    def holders(self, ino: InodeNo, tgids: Iterable[int]) -> Holders:
        """Return what /proc would show of *ino*; nobody locks a file here (test_lock_files.py)."""
        block = next(block for block in self.blocks if block.ino == ino)
        tgids_having = {maker.tgid for maker in self.having(block)}
        return Holders(frozenset(tgids_having.intersection(tgids)), locked=False)
