"""Carries out the hints of the hints socket, in small steps: requests are answered between two.

Who may write a block may hint it: the client must have the right to write the file, and to search
all directories above it.

Blocks that a hint asks for ahead of their use are read into the page cache, in the order in which
they were asked for. A thread of its own reads one extent after the other, so what clients load has
the device to itself but for one read. What the pages displace is the kernel's choice, as with any
read.
"""

import contextlib
import functools
import glob
import os
import stat
from collections import deque
from collections.abc import Iterator
from typing import Final

from kvfs.core.errors import Damaged, KvfsError, PathMissing
from kvfs.core.hints import BLOCKS_MAX, Do, HintBatch, HintClient, TakenHints, ToldHint
from kvfs.core.inode_rules import rights_of
from kvfs.core.lifecycle import SETTLED
from kvfs.core.types import ROOT_INODE, SECOND_NS, InodeNo, InodeRecord
from kvfs.engine.names.named import STEP, Named, files_below, find, named
from kvfs.engine.names.namespace import Namespace
from kvfs.pool.pool_parts import RuleParts
from kvfs.pool.rules.paths import reaches
from kvfs.storage.age_clock import AgeClock
from kvfs.storage.background import Aside
from kvfs.storage.extents import Extents
from kvfs.storage.heat_columns import ALWAYS_S, Told
from kvfs.storage.index import Index
from kvfs.storage.syscalls import Syscalls

#: Blocks that wait to be read; more are not.
FETCHES_MAX: Final = 4096
_AT_ONCE_BYTES: Final = 1 << 20


class FetchAhead:
    """The blocks of one pool that wait to be read."""

    def __init__(self, rules: RuleParts, extents: Extents, syscalls: Syscalls) -> None:
        """Close it before *extents*."""
        self._heat = rules.heat
        self._counts = rules.hints.counts
        self._extents = extents
        self._syscalls = syscalls
        self._waiting: deque[InodeNo] = deque()
        self._reader: Aside[int] = Aside("kvfs-fetch")
        self._buffer = memoryview(bytearray(_AT_ONCE_BYTES))

    def add(self, ino: InodeNo) -> bool:
        """Have block *ino* read; False if too many wait. It counts as used."""
        if len(self._waiting) >= FETCHES_MAX:
            return False
        self._heat.touch(ino)
        self._waiting.append(ino)
        self._go_on()
        return True

    def run_due(self) -> None:
        """Count what was read, and go on."""
        read = self._reader.pop_result()
        if read is not None:
            self._counts.fetched += read
        self._go_on()

    def close(self) -> None:
        """Stop after the read under way."""
        self._waiting.clear()
        self._reader.join()

    def _go_on(self) -> None:
        if self._waiting and not self._reader.busy:
            self._reader.start(self._read_all)

    def _read_all(self) -> int:
        """Read what waits, in the thread; return how many blocks were read."""
        read = 0
        with contextlib.suppress(IndexError):  # all are read
            while True:
                read += self._read(self._waiting.popleft())
        return read

    def _read(self, ino: InodeNo) -> bool:
        """Read block *ino*, and return whether that went well: it may be gone by now."""
        calls = self._syscalls
        try:
            fd = self._extents.open(ino, os.O_RDONLY)
        except (Damaged, OSError):
            return False
        try:
            at_bytes = 0
            while read_bytes := calls.preadv(fd, [self._buffer], at_bytes):
                at_bytes += read_bytes
        except OSError:
            return False
        finally:
            calls.close(fd)
        return True


#: Names looked up in one step, some 10 us each.
_NAMES_A_STEP: Final = 64
_WRITE: Final = 0o2
_SEARCH: Final = 0o1


class TakeHints:
    """Takes the hints for the blocks of one pool."""

    def __init__(
        self,
        index: Index,
        rules: RuleParts,
        age_clock: AgeClock,
        namespace: Namespace,
        fetch: FetchAhead,
    ) -> None:
        self._index = index
        self._hints = rules.hints
        self._ranks = rules.ranks
        self._age_clock = age_clock
        self._namespace = namespace
        self._fetch = fetch

    def carry_out(self, batch: HintBatch, client: HintClient, done: TakenHints) -> Iterator[None]:
        """Do what *batch* of *client* says, a step for each item; *done* says what was done."""
        done.clipped += batch.clipped
        done.unknown += batch.unknown
        searched: dict[InodeNo, bool] = {ROOT_INODE: True}
        left, steps = BLOCKS_MAX, 0
        for hint in batch.hints:
            for ino in self._named(hint, done):
                steps = 0 if ino == STEP else steps + 1
                if ino != STEP and left:
                    left -= 1
                    self._take_one(hint, ino, client, searched, done)
                elif ino != STEP:
                    done.clipped += 1
                    break
                if steps % _NAMES_A_STEP == 0:
                    yield
        counts = self._hints.counts
        counts.taken += done.taken
        counts.clipped += done.clipped
        counts.unknown += done.unknown
        counts.refused += done.refused

    def _named(self, hint: ToldHint, done: TakenHints) -> Iterator[InodeNo]:
        """Yield the files that *hint* is about, and STEP at the end of a step."""
        index, namespace = self._index, self._namespace
        for number, name in enumerate(hint.names, 1):
            try:
                yield find(index, namespace, name)
            except (PathMissing, UnicodeError):
                done.unknown += 1
            if number % _NAMES_A_STEP == 0:
                yield STEP
        for prefix in hint.prefixes:
            found = 0
            try:
                for top in named(index, namespace, Named(("",), f"{glob.escape(prefix)}*")):
                    found += top != STEP
                    yield from (STEP,) if top == STEP else files_below(index, top)
            except KvfsError:
                found = 0
            done.unknown += not found
        for session in hint.sessions:
            tops = self._hints.of_session(session)
            done.unknown += not tops
            for top in tops:
                yield from files_below(index, top)
            yield STEP

    def _take_one(
        self,
        hint: ToldHint,
        ino: InodeNo,
        client: HintClient,
        searched: dict[InodeNo, bool],
        done: TakenHints,
    ) -> None:
        """Do what *hint* says for file *ino*."""
        record = self._index.inode_or_miss(ino)
        if record is None or not stat.S_ISREG(record.mode) or record.state not in SETTLED:
            done.unknown += 1
            return
        may_search = functools.partial(_may, client, right=_SEARCH)
        is_reached = reaches(self._index, record.parent, may_search, searched)
        if not (is_reached and _may(client, record, _WRITE)):
            done.refused += 1
            return
        if hint.do is Do.FETCH:
            is_taken = self._fetch.add(ino)
            done.clipped += not is_taken
        else:
            is_taken = self._tell(hint, ino, record)
            done.unknown += not is_taken
        done.taken += is_taken

    def _tell(self, hint: ToldHint, ino: InodeNo, record: InodeRecord) -> bool:
        ranks = self._ranks
        if hint.do is Do.RELEASE:
            return ranks.tell(ino, record, Told.NOTHING)
        until_s = ALWAYS_S
        if hint.duration_s is not None:
            until_s = self._age_clock.now_ns() // SECOND_NS + max(1, round(hint.duration_s))
        if hint.do is Do.DEMOTE:
            return ranks.tell(ino, record, Told.DEMOTE, until_s=until_s)
        return ranks.tell(ino, record, Told.RETAIN, priority=hint.priority, until_s=until_s)


def _may(client: HintClient, record: InodeRecord, right: int) -> bool:
    """Whether *client* has *right* (a bit of the others' part of a mode) on what has *record*."""
    return client.uid == 0 or bool(rights_of(record, client.uid, client.gids) & right)
