"""The compiled reader against the one in Python: the same messages, answers, rows and counts.

Each script of messages, stores, rewrites and removals runs twice, with one reader and then with the
other. After each step all that a request may change is looked at.
"""

import contextlib
import os
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis.strategies import integers, lists, sampled_from, tuples

from kvfs.core.errors import KvfsError, NotFound
from kvfs.core.types import ROOT_INODE, HandleNo, InodeNo
from mount.fuse.channel import COMPILED, ReaderChoice, Requester, choose_reader
from mount.fuse.compiled_reader import CompiledReader
from mount.fuse.wire import GETXATTR_IN, OPEN_IN, Opcode
from tests.support.store.readers_desk import KERNEL_THREAD, Desk
from tests.support.store.readers_door import Door
from tests.support.store.stores import host

NAMES: Final = [b"one", b"two", b"three"]
#: Two ids for three names: what is parked is lost at times.
IDS_MAX: Final = 2
#: A program's thread that nobody has looked up yet, one of no number, and a file server's.
TIDS: Final = [0, 0, os.getpid(), KERNEL_THREAD]
FLAGS: Final = [os.O_RDONLY] * 4 + [os.O_DIRECT, os.O_RDWR, os.O_RDWR | os.O_TRUNC]
#: A name's number, or that of a handle among those that were given out, or more than there are.
WHICH: Final = integers(0, 7)
Step = tuple[str, Any, Any]
#: struct fuse_getattr_in: flags, dummy, fh.
GETATTR_IN: Final = bytes(16)

STEPS: Final = lists(
    tuples(sampled_from(["open"] * 2), WHICH, tuples(sampled_from(FLAGS), sampled_from(TIDS)))
    | tuples(sampled_from(["close"] * 2), WHICH, sampled_from([0, 0, 0, 0, 1]))
    | tuples(sampled_from(["getattr"]), WHICH, sampled_from([False, False, True]))
    | tuples(sampled_from(["store", "unlink", "forget", "chmod", "use"]), WHICH, sampled_from([0]))
    | tuples(sampled_from(["burst", "evict", "give_up"]), sampled_from([0]), sampled_from([0]))
    | tuples(sampled_from(["getxattr"]), WHICH, sampled_from([b"security.x", b"user.x"]))
    | tuples(sampled_from(["short"]), WHICH, sampled_from([Opcode.OPEN, Opcode.RELEASE])),
    max_size=40,
)
LOADS: Final[list[Step]] = [
    ("open", 0, (os.O_RDONLY, 0)),
    ("close", 0, 0),
    ("open", 0, (os.O_RDONLY, 0)),
    ("burst", 0, 0),
    ("open", 0, (os.O_RDONLY, 0)),
    ("close", 1, 0),
    ("close", 2, 0),
]
BY_SERVERS: Final[list[Step]] = [
    ("open", 0, (os.O_RDONLY, KERNEL_THREAD)),
    ("close", 0, 0),
    ("open", 0, (os.O_RDONLY, KERNEL_THREAD)),
    ("open", 0, (os.O_RDONLY, 0)),
    ("open", 0, (os.O_RDONLY, 0)),
    ("close", 2, 0),
    ("close", 1, 0),
    ("close", 3, 0),
]
OPEN: Final[Any] = (os.O_RDONLY, 0)
LAST_OF_PROGRAMS: Final[list[Step]] = [
    ("open", 0, OPEN),
    ("open", 0, (os.O_RDONLY, KERNEL_THREAD)),
    ("close", 0, 0),
    ("open", 0, OPEN),
    ("close", 1, 0),
]
MORE_THAN_IDS: Final[list[Step]] = [
    ("store", 2, 0),
    *(("open", which, OPEN) for which in range(3)),
    *(("close", which, 0) for which in (1, 2, 0)),
    *(("open", which, OPEN) for which in range(3)),
]
CHANGED: Final[list[Step]] = [
    ("open", 0, OPEN),
    ("open", 0, OPEN),
    ("chmod", 0, 0),
    ("open", 0, OPEN),
    ("forget", 0, 0),
    ("open", 0, OPEN),
    ("use", 0, 0),
    *(("close", which, 0) for which in range(4)),
    ("open", 0, OPEN),
]
LOOKS: Final[list[Step]] = [
    ("getattr", 0, True),
    ("getattr", 0, False),
    ("store", 2, 0),
    ("getattr", 0, True),
    ("getattr", 2, False),
    ("chmod", 0, 0),
    ("getattr", 0, False),
    ("forget", 0, 0),
    ("getattr", 0, False),
    ("getattr", 0, False),
    ("open", 0, OPEN),
    ("getattr", 0, False),
    ("unlink", 0, 0),
    ("getattr", 7, False),
    ("close", 0, 0),
    ("getattr", 1, False),
    ("unlink", 1, 0),
    ("getattr", 7, False),
]


class World:
    """One reader before files of its own; what it leaves to others is done as the channel does."""

    def __init__(self, desk: Desk, door: Door) -> None:
        self.desk, self.door = desk, door
        self.begun_stamp = desk.store.heat_clock
        self.unique = self.stored = self.bursts = 0
        self.handles: list[tuple[HandleNo, InodeNo]] = []
        self.used: list[object] = []
        #: The inode that was looked up last.
        self.last = ROOT_INODE
        self.others = desk.in_channel()

    def do(self, step: Step) -> object:
        """Do one step; return what came of it where no reader has answered."""
        what, which, how = step
        self.unique += 2
        self.door.reader.begin_turn()
        if what == "close":
            return self.close(which, wrong=how)
        if what in {"burst", "evict", "give_up"}:
            return self.change(what)
        if what == "getattr" and (how or which == 7):
            return self.getattr(ROOT_INODE if how else self.last)
        name = NAMES[which % len(NAMES)]
        try:
            ino = self.desk.store.lookup(ROOT_INODE, name)
        except NotFound:
            return self.desk.put(name, b"%d" % self.unique) if what == "store" else None
        self.last = ino
        if what == "open":
            return self.open(ino, *how)
        if what == "getattr":
            return self.getattr(ino)
        if what == "getxattr":
            return self.door.ask(Opcode.GETXATTR, self.unique, ino, GETXATTR_IN.pack(0, 0) + how)
        if what == "short":
            return self.door.ask(how, self.unique, ino, b"1234567")
        if what == "store":
            return self.desk.put(name, b"%d" % self.unique)
        if what == "forget":
            return self.desk.store.forget_parsed()
        if what == "chmod":
            return self.desk.store.change(ino, mode=0o600 + self.unique % 64).mode
        if what == "use":
            return self.use(ino)
        return self.desk.unlink(name)

    def getattr(self, ino: InodeNo) -> None:
        """Ask for attributes; whatever a reader answers is what the channel would."""
        before = len(self.door.replies)
        if self.door.ask(Opcode.GETATTR, self.unique, ino, GETATTR_IN):
            return
        told = self.door.replies.pop()
        assert len(self.door.replies) == before
        assert told == self.others[Opcode.GETATTR](self.unique, ino, memoryview(GETATTR_IN))
        for counts in (self.door.requests, self.door.answered):
            counts[Opcode.GETATTR] -= 1

    def use(self, ino: InodeNo) -> object:
        """Use the extent of a block that is open in this process, as lseek(2) does."""
        store = self.desk.store
        if ino not in store.open_inos:
            return None
        return store.extent_fd(store.opened(ino)) >= 0

    def change(self, what: str) -> object:
        """Let time go by, or take something away."""
        if what == "burst":
            self.bursts += 1
            return self.desk.store.tick_heat(1e9 * self.bursts)
        if what == "evict":
            return self.desk.store.evict(1)
        return self.desk.files.readers.give_up_one()

    def open(self, ino: InodeNo, flags: int, tid: int) -> object:
        """Ask to open a block."""
        before = len(self.door.replies)
        if self.door.ask(Opcode.OPEN, self.unique, ino, OPEN_IN.pack(flags, 0), tid):
            self.desk.request.present = Requester(0, 0, tid, self.unique)
            try:
                fh, grant = self.desk.files.open(ino, flags)
            except (KvfsError, OSError) as error:
                return repr(error)
            self.handles.append((fh, ino))
            return fh, grant
        (told,) = self.door.replies[before:]
        self.handles.append((HandleNo(int.from_bytes(told[16:24], "little")), ino))
        return None

    def close(self, which: int, *, wrong: bool) -> object:
        """Ask to close a handle, perhaps one that is closed, or of another inode."""
        if not self.handles:
            return None
        fh, ino = self.handles[which % len(self.handles)]
        asked = InodeNo(ino + 1) if wrong else ino
        if not self.door.release(self.unique, asked, fh):
            return None
        self.desk.request.present = Requester(0, 0, 0, self.unique)
        try:
            return self.desk.files.release(fh)
        except (KvfsError, OSError) as error:
            return repr(error)

    def seen(self) -> dict[str, object]:
        """Return all that a request may have changed."""
        store, door, files = self.desk.store, self.door, self.desk.files
        opened = [store.opened(ino) for ino in sorted(store.open_inos)]
        memory = os.pread(self.desk.fd, 4096 + 96 * 64, 4096)
        known = sorted(store.heat())
        return {
            "replies": list(door.replies),
            "counted": (list(door.requests), list(door.answered)),
            "rows": [memory[at : at + 40] for at in range(0, len(memory), 96)],
            "handles": len(files.handles),
            "open": [(o.ino, o.readers, o.writers, o.served_readers) for o in opened],
            "parked": [(ino, one.readers) for ino, one in store.parked.items()],
            "heat": [
                (ino, row.rank, row.touched - self.begun_stamp, row.touches)
                for ino, row in sorted(store.heat().items())
            ],
            "clock": store.heat_clock - self.begun_stamp,
            "loads": list(store.waiting_loads()),
            "tallies": [store.tally_of(ino, store.present(ino)).shown() for ino in known],
            "used": list(self.used),
        }


def trace(script: list[Step], choice: ReaderChoice) -> list[tuple[object, ...]]:
    """Return what is seen after each step of *script*."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        machine = stack.enter_context(host())
        desk = stack.enter_context(contextlib.closing(Desk(machine, patch, ids_max=IDS_MAX)))
        door = stack.enter_context(contextlib.closing(Door(desk, choice)))
        world = World(desk, door)
        desk.store.sample_all(patch)
        desk.store.note_calls(patch, "use", world.used.append)
        for name in NAMES[:2]:
            desk.put(name)
        seen = [(step, world.do(step), world.seen()) for step in script]
        if isinstance(door.reader, CompiledReader):
            seen_here.append(door.reader.native)
        return seen


#: How many requests the compiled reader answered without any code in Python, a script each.
seen_here: Final[list[int]] = []


@given(script=STEPS)
@example(script=LOADS)
@example(script=BY_SERVERS)
@example(script=LAST_OF_PROGRAMS)
@example(script=MORE_THAN_IDS)
@example(script=CHANGED)
@example(script=LOOKS)
@settings(max_examples=40)
def test_both_readers_do_the_same(script: list[Step]) -> None:
    expected = trace(script, choose_reader(compiled=False))
    for had, got in zip(expected, trace(script, choose_reader(compiled=True)), strict=True):
        assert got == had


def test_opens_and_closes_of_known_readers_need_no_python() -> None:
    """Or the compiled reader asks the other code, right but for nothing."""
    seen_here.clear()
    choice = choose_reader(compiled=True)
    assert choice.name == COMPILED
    trace(LOADS, choice)
    assert seen_here == [5]


def test_attributes_in_the_cache_need_no_python() -> None:
    seen_here.clear()
    trace(LOOKS, choose_reader(compiled=True))
    assert seen_here == [9]


def test_attributes_in_doubt_are_compared_first() -> None:
    """After a power loss the index may be wrong about an inode that nobody has asked for yet."""
    with pytest.MonkeyPatch.context() as patch, host() as machine:
        desk = Desk(machine, patch)
        door = Door(desk, choose_reader(compiled=True))
        with contextlib.closing(desk), contextlib.closing(door):
            ino = desk.put(b"block")
            assert not door.ask(Opcode.GETATTR, 2, ino, GETATTR_IN)
            desk.store.put_in_doubt(patch)
            assert door.ask(Opcode.GETATTR, 4, ino, GETATTR_IN)
