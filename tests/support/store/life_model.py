"""Simulated processes and the blocks they write: what the table says of every step."""

from kvfs.core.errors import KvfsError, NotFound
from kvfs.core.lifecycle import FINAL, HELD, UNFINISHED, Event, State, after, is_temporary
from kvfs.core.types import InodeNo
from kvfs.machine.processes import NOBODY, Maker, Processes
from tests.support.store.driven import Opened
from tests.support.store.store_model import TEARABLE


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

    def must_be_superseded(self, maker: Maker) -> bool:
        """Whether an O_TRUNC of *maker* must leave it to those who have it."""
        own = maker.is_one and maker in self.hands
        shared = self.writers > 0 and (own or self.appenders == self.writers)
        if shared and not is_temporary(self.name):
            return False
        if self.state in UNFINISHED:
            return self.writers > 0
        return bool(self.data) or self.writers + self.readers > 0

    def may_be_renamed(self, taker: Maker) -> bool:
        """Whether its writer would rename it still after *taker* took its name."""
        if self.state is State.LEASED:
            return is_temporary(self.name) or taker != self.maker
        return self.state in UNFINISHED

    # ---- what processes do to it ----

    def open_writer(self, maker: Maker, *, appends: bool) -> None:
        self.writers += 1
        self.note_hand(maker, appends=appends)
        if self.writers == 1:
            self.opener = maker
            self.opened_empty = not self.data
            self.adds = appends or self.opened_empty
            self.changed = self.renamed = self.torn = False
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
        if self.writers or not self.has_name:
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
        self.torn = self.renamed = False


def meant_by(
    who: Maker, block: Block, displaced: list[Block], fought_over: set[tuple[InodeNo, bytes]]
) -> tuple[type[KvfsError] | None, Block]:
    """Which block a rename of *block* by process *who* means, or what it fails with.

    *displaced* are drafts that lost their name, oldest first; *fought_over* names that writers
    took from each other less than a minute ago.
    """
    place = (block.parent, block.name)
    lost = [other for other in displaced if (other.parent, other.name) == place]
    if not lost or not block.is_unfinished:
        fought = place in fought_over and block.is_unfinished
        foreign = who.is_one and block.opener.is_one and block.opener != who
        return NotFound if fought and foreign else None, block
    finished = [other for other in reversed(lost) if not other.writers and not other.torn]
    own = [other for other in finished if other.opener == who]
    if own:
        return None, own[0]
    if block.opener == who and who.is_one:
        return None, block
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
