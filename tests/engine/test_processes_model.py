"""Several processes and their blocks, in any order of steps: after each the table holds."""

import contextlib
import os
import time
from collections import Counter
from typing import Final
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvfs.core.directory_policy import DRAFTS
from kvfs.core.errors import DeadInode
from kvfs.core.lifecycle import HELD, UNFINISHED, State, label
from kvfs.core.rewriting import DISPLACED, FORMER_NAME, Found
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.machine.process_ends import Fate
from kvfs.machine.processes import NOBODY, SERVER, Maker
from tests.support.store.driven import Driven
from tests.support.store.driven_faults import reading_here, stand_in
from tests.support.store.life_model import (
    NO_PID,
    Block,
    Handle,
    Lives,
    Process,
    Scene,
    meant_by,
)
from tests.support.store.stores import (
    DIRECTORY,
    FILE,
    allocate,
    assert_exact,
    get,
    host,
    settle,
    write,
)

PICKS: Final = st.integers(0, 1 << 20)
NAMES: Final = st.sampled_from([b"K", b"L", b"K.tmp", b"K_77.tmp"])
OFFSETS: Final = st.sampled_from([0, 0, 1, 4096, 9000])
DATA: Final = st.sampled_from([b"x", b"y" * 4096, b"z" * 9001])
SIZES: Final = st.sampled_from([0, 1, 4096, 5000, 50_000])
#: A process nobody knows.
STRANGER: Final = Maker(7, 7)
SIGKILL: Final = 9


class ProcessesMachine(Scene, RuleBasedStateMachine):
    """Every process sees and does what a process could do on a mount."""

    @initialize()
    def begin(self) -> None:
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(reading_here())
        self.host = self.stack.enter_context(host())
        #: By thread: how it ends.
        self.dying: dict[int, Fate] = {}
        self.stack.enter_context(
            mock.patch(
                "kvfs.machine.processes.Processes.fate_of",
                lambda _, tid: self.dying.get(tid, Fate.LIVES),
            )
        )
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        stand_in(patch, "a lock is looked for", self.holders)
        self.lives = Lives()
        self.blocks: list[Block] = []
        #: Drafts that lost their name to another writer, oldest first.
        self.displaced: list[Block] = []
        #: Names that writers took from each other, less than a minute ago.
        self.fought_over: set[tuple[InodeNo, bytes]] = set()
        self.born = 0
        #: The time, which stands still but for ``let_a_second_pass``.
        self.clock_s = self.began_s = time.monotonic()
        self.start()
        owner = self.store.make_node(ROOT_INODE, b"owner", DIRECTORY, 0, 0)[0]
        self.store.set_xattr(owner, DRAFTS, b"owner")
        self.directories = [ROOT_INODE, owner]
        self.processes = [Process(SERVER)]
        for _ in range(2):
            self.fork(0, inherits=False)
        # Else there is seldom one to open: a draft of one, and two that another has closed.
        self.create(2, False, b"L", None)
        for name in (b"K", b"K.tmp"):
            self.create(1, False, name, b"y" * 4096)

    def start(self) -> None:
        self.host.start()
        self.store.turn_clock(lambda: self.clock_s)
        self.store.watch_processes(self.lives)

    def teardown(self) -> None:
        self.stack.close()

    @property
    def store(self) -> Driven:
        return self.host.store

    # ---- opening and closing ----

    @rule(who=PICKS, where=st.booleans(), name=NAMES, data=st.none() | DATA)
    def create(self, who: int, where: bool, name: bytes, data: bytes | None) -> None:
        """O_EXCL; with *data* a whole store: written and closed."""
        process, parent = self.process(who), self.directories[where]
        if self.at(parent, name) is not None:
            return
        opened, _ = self.store.create(parent, name, FILE, 0, 0, process.maker)
        block = Block(opened.ino, parent, name, process.maker)
        self.blocks.append(block)
        handle = Handle(block, opened, writer=True, appends=False)
        process.descriptors.append(handle)
        if data is not None:
            self.write_to(handle, data, 0)
            self.close_descriptor(process, handle)

    @rule(who=PICKS, what=PICKS, how=st.sampled_from(["r", "r+", "a", "w", "w"]))
    def reopen(self, who: int, what: int, how: str) -> None:
        process = self.process(who)
        block = self.seen_by(process, what)
        if block is None:
            return
        writer, appends, meets = how != "r", how == "a", False
        if how == "w":
            hides = block.parent != ROOT_INODE
            found = block.found(process.maker, self.clock_s, hides=hides)
            if found is Found.TAKEN:
                block = self.supersede(process, block)
            elif block.is_emptied_by_a_server(process.maker):
                return  # test_emptying.py
            meets = found is Found.SHARED and block.meets(process.maker)
        elif writer:
            meets = block.has_old and block.meets(process.maker)
        opened = self.store.open(
            block.ino, writer=writer, truncate=how == "w", appends=appends, maker=process.maker
        )
        if not writer:
            block.readers += 1
        elif not (block.state is State.DRAFT and not block.writers):
            block.open_writer(process.maker, appends=appends)
        else:
            block.writers = 1
            block.note_hand(process.maker, appends=appends)
        if how == "w" and block.data:
            block.truncate(0)
        if meets:
            block.met = True
            self.fought_over.add((block.parent, block.name))
        process.descriptors.append(Handle(block, opened, writer=writer, appends=appends))

    def supersede(self, process: Process, block: Block) -> Block:
        """O_TRUNC of what somebody has: the name gets a fresh inode, which is opened next."""
        with pytest.raises(DeadInode):
            self.store.open(block.ino, writer=True, truncate=True, maker=process.maker)
        if block.may_be_renamed(process.maker):
            self.displaced.append(block)
            self.fought_over.add((block.parent, block.name))
        block.has_name = False
        ino = self.store.lookup(block.parent, block.name)
        fresh = Block(ino, block.parent, block.name, process.maker)
        fresh.writers = 0
        fresh.has_old = block.has_old or block.stands_in(process.maker)
        self.blocks.append(fresh)
        return fresh

    @rule(who=PICKS, what=PICKS)
    def dup(self, who: int, what: int) -> None:
        process = self.process(who)
        if (handle := self.handle(process, what)) is not None:
            handle.count += 1
            process.descriptors.append(handle)

    @rule(who=PICKS, what=PICKS)
    def close(self, who: int, what: int) -> None:
        process = self.process(who)
        if (handle := self.handle(process, what)) is not None:
            self.close_descriptor(process, handle)

    def close_descriptor(self, process: Process, handle: Handle) -> None:
        """FLUSH; then RELEASE if it was the last."""
        process.descriptors.remove(handle)
        if handle.writer:
            self.store.flush(handle.opened, process.tid)
            handle.block.flush(self.dying.get(process.tid, Fate.LIVES) is Fate.KILLED)
        self.drop(handle)

    def drop(self, handle: Handle) -> None:
        handle.count -= 1
        if handle.count:
            return
        appends = handle.writer and handle.appends
        self.store.close(handle.opened, writer=handle.writer, appends=appends)
        if handle.writer:
            handle.block.appenders -= appends
            handle.block.close_writer()
            handle.block.part(self.having(handle.block))
        else:
            handle.block.readers -= 1

    @rule(who=PICKS, what=PICKS)
    def mmap(self, who: int, what: int) -> None:
        """A mapping holds the open file, without a descriptor."""
        process = self.process(who)
        if (handle := self.handle(process, what)) is not None:
            handle.count += 1
            process.mappings.append(handle)

    @rule(who=PICKS)
    def munmap(self, who: int) -> None:
        process = self.process(who)
        if process.mappings:
            self.drop(process.mappings.pop())

    # ---- processes ----

    @precondition(lambda self: len(self.processes) < 5)
    @rule(who=PICKS, inherits=st.booleans())
    def fork(self, who: int, inherits: bool) -> None:
        self.born += 1
        child = Process(Maker(NO_PID + self.born, self.born))
        self.lives.begin(child.maker)
        if inherits:
            parent = self.process(who)
            child.descriptors, child.mappings = list(parent.descriptors), list(parent.mappings)
            for handle in child.descriptors + child.mappings:
                handle.count += 1
        self.processes.append(child)

    @precondition(lambda self: len(self.processes) > 2)
    @rule(who=PICKS, signal=st.sampled_from([0, SIGKILL]))
    def end_process(self, who: int, signal: int) -> None:
        """The kernel takes the memory first, then the descriptors, then tells the pidfd."""
        process = self.processes[1 + who % (len(self.processes) - 1)]
        self.dying[process.tid] = Fate.KILLED if signal else Fate.EXITED
        while process.mappings:
            self.drop(process.mappings.pop(0))
        while process.descriptors:
            self.close_descriptor(process, process.descriptors[0])
        self.processes.remove(process)
        self.lives.end(process.maker)

    # ---- bytes ----

    @rule(who=PICKS, what=PICKS, data=DATA, offset_bytes=OFFSETS)
    def write(self, who: int, what: int, data: bytes, offset_bytes: int) -> None:
        handle = self.handle(self.process(who), what)
        if handle is not None and handle.writer:
            self.write_to(handle, data, offset_bytes)

    @rule(who=PICKS, what=PICKS, data=DATA)
    def write_through_a_mapping(self, who: int, what: int, data: bytes) -> None:
        """Also after close(2), and never behind the end."""
        mappings = self.process(who).mappings
        handle = mappings[what % len(mappings)] if mappings else None
        if handle is not None and handle.writer and not handle.appends:
            data = data[: len(handle.block.data)]
            if data:
                self.write_to(handle, data, 0)

    def write_to(self, handle: Handle, data: bytes, offset_bytes: int) -> None:
        block = handle.block
        at = len(block.data) if handle.appends else offset_bytes
        write(self.store, handle.opened, data, at)
        block.write(data, at)

    @rule(who=PICKS, what=PICKS)
    def read(self, who: int, what: int) -> None:
        handle = self.handle(self.process(who), what)
        if handle is not None:
            fd = self.store.extent_fd(handle.opened)
            data = handle.block.data
            assert os.pread(fd, len(data) + 1, 0) == data

    @rule(who=PICKS, what=PICKS, size_bytes=SIZES)
    def truncate(self, who: int, what: int, size_bytes: int) -> None:
        block = self.seen_by(self.process(who), what)
        if block is not None and not (block.state is State.DRAFT and not block.writers):
            self.store.truncate(block.ino, size_bytes)
            block.truncate(size_bytes)

    @rule(who=PICKS, what=PICKS, size_bytes=SIZES.filter(bool))
    def fallocate(self, who: int, what: int, size_bytes: int) -> None:
        handle = self.handle(self.process(who), what)
        if handle is None or not handle.writer:
            return
        block = handle.block
        if block.state not in UNFINISHED and size_bytes <= len(block.data):
            return  # whether that counts as written is up to the clock: no byte changes
        allocate(self.store, handle.opened, size_bytes)
        block.allocate()
        if size_bytes > len(block.data):
            block.changed = True
            block.data.extend(bytes(size_bytes - len(block.data)))

    # ---- names ----

    @rule(who=PICKS, what=PICKS, where=st.booleans(), name=NAMES)
    def rename(self, who: int, what: int, where: bool, name: bytes) -> None:
        """To a final name, to a temporary one, also to one that another process writes."""
        process, target = self.process(who), self.directories[where]
        block = self.seen_by(process, what)
        if block is None or (block.parent, block.name) == (target, name):
            return
        error, meant = meant_by(process.maker, block, self.displaced, self.fought_over)
        who = process.maker
        if error is not None:
            with pytest.raises(error):
                self.store.rename(block.parent, block.name, target, name, replace=True, who=who)
            return
        self.store.rename(block.parent, block.name, target, name, replace=True, who=who)
        replaced = self.at(target, name)
        if replaced is not None:
            replaced.has_name = False
        if meant is block:
            block.rename(process.maker)
            block.renamed_s = self.clock_s
        else:
            self.displaced.remove(meant)
            meant.has_name, meant.state, meant.maker = True, State.PUBLISHED, NOBODY
        meant.parent, meant.name = target, name

    @rule(who=PICKS, what=PICKS)
    def unlink(self, who: int, what: int) -> None:
        block = self.seen_by(self.process(who), what)
        if block is not None:
            assert self.store.unlink(block.parent, block.name) == block.ino
            block.has_name = False

    # ---- time ----

    @rule()
    def tick(self) -> None:
        """What belonged to processes that are gone becomes everybody's."""
        self.store.tick()
        for block in self.named():
            gone = block.maker.is_one and block.maker not in self.lives.living
            if gone and block.state in HELD and not block.writers:
                block.lose_maker()
            block.has_old = block.has_old and block.state in UNFINISHED

    @rule()
    def let_a_second_pass(self) -> None:
        """What is remembered of a rename is forgotten; what writers took from each other is not."""
        if self.clock_s < self.began_s + DISPLACED.wait_s / 2:
            self.clock_s += FORMER_NAME.wait_s

    @rule()
    def kill_the_server(self) -> None:
        """Leases outlive it; handles do not (another issue makes them)."""
        self.host.kill()
        self.start()
        for process in self.processes:
            process.descriptors.clear()
            process.mappings.clear()
        for block in self.named():
            block.lose_server()
        self.displaced.clear()
        self.fought_over.clear()
        settle(self.store)
        self.tick()

    # ---- what must hold ----

    @invariant()
    def states_are_the_tables(self) -> None:
        for block in self.named():
            assert self.store.lookup(block.parent, block.name) == block.ino
            record = self.store.record(block.ino)
            assert State(record.state) is block.state, block.name
            if block.state in HELD:
                assert (record.maker_tgid, record.maker_birth) == block.maker
            is_kept = block.state in HELD | {State.ORPHAN_SLAB, State.ORPHAN}
            known = self.store.lease_state(block.ino)
            assert block.writers or known is (block.state if is_kept else None)
            shown = b"torn" if block.torn and block.writers else label(block.state).encode()
            assert self.store.xattr(block.ino, b"user.kvfs.state") == shown
        listed = {
            name
            for parent in self.directories
            for _, name in self.store.children(parent, InodeNo(0))
        }
        assert listed == {block.name for block in self.named()} | {b"owner"}

    @invariant()
    def status_counts_each_block_once(self) -> None:
        totals = self.store.describe()["states"]
        nameless = {"preallocated", label(State.GONE)}
        found = {name: row["blocks"] for name, row in totals.items() if name not in nameless}
        expected = Counter(label(block.state) for block in self.named())
        assert {name: count for name, count in found.items() if count} == dict(expected)

    @invariant()
    def drafts_are_seen_by_policy(self) -> None:
        for block in self.named():
            record = self.store.record(block.ino)
            for process in [*self.processes, Process(STRANGER)]:
                hidden = self.store.hidden(block.ino, record, process.maker)
                assert hidden != self.sees(process, block)

    @invariant()
    def bytes_are_those_written(self) -> None:
        for block in self.named():
            if block.state not in UNFINISHED or block.writers:
                assert get(self.store, block.parent, block.name) == block.data
                assert self.store.present(block.ino).size_bytes == len(block.data)

    @invariant()
    def space_is_exact(self) -> None:
        assert_exact(self.host)


TestProcesses = pytest.mark.usefixtures("caplog")(ProcessesMachine.TestCase)
TestProcesses.settings = settings(max_examples=15, stateful_step_count=60)


class LongProcessesMachine(ProcessesMachine):
    """The same, for as long as `make proof` has time."""


TestLong = pytest.mark.proof(pytest.mark.usefixtures("caplog")(LongProcessesMachine.TestCase))
TestLong.settings = settings(max_examples=400, stateful_step_count=60)
