"""A store that serves requests: the test's thread is the event loop, and must not call the device.

``Serving`` asks as the mount does (mount/files/device_asks.py): what is not at hand is brought by a
thread, and the request is done again. A store that does not serve answers the same requests at
once, so that what both come to can be compared.
"""

import stat
import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeVar

from kvfs.core.errors import NoSpace, NotAtHand
from kvfs.core.settings import Settings
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.storage.device_thread import DeviceThread
from tests.support.clients.stepping import until
from tests.support.store.driven import Opened
from tests.support.store.fake_loop import FakeLoop
from tests.support.store.loop_guard import LoopGuard
from tests.support.store.stores import (
    FILE,
    Host,
    assert_exact,
    assert_no_strays,
    host,
    settle,
    tree,
)

R = TypeVar("R")
#: How often a request is done again, as in the mount.
_BRINGS_MAX: Final = 8


class Waiting:
    """A request that lacked something, which a thread brings."""

    def __init__(self, lack: NotAtHand, thread: DeviceThread) -> None:
        self.done = False
        self._error: Exception | None = None
        thread.submit(lack.begin(), self._end, failed=self._fail, at_once=True)

    def _end(self, follow: Callable[[], None]) -> None:
        try:
            follow()
        except Exception as error:
            self._error = error
        self.done = True

    def _fail(self, error: Exception) -> None:
        self._error, self.done = error, True

    def require(self) -> None:
        """Raise what bringing it raised."""
        if self._error is not None:
            raise self._error


class Outcome(NamedTuple):
    """What a store has come to: all but the numbers of inodes, times, and what is ready."""

    tree: dict[bytes, object]
    rows: dict[bytes, tuple[object, ...]]
    used_bytes: int
    pending_bytes: int
    open_bytes: int


class Serving:
    """A client of a running store, which serves requests unless told otherwise."""

    def __init__(
        self, running: Host, settings: Settings | None = None, *, serves: bool = True
    ) -> None:
        self.host = running
        self.serves = serves
        self.guard = LoopGuard()
        self.loop = FakeLoop()
        self.store = running.start(self.guard, settings)
        self._background = self.store.engine.pool.background
        if serves:
            self.store.engine.begin_serving(self.loop)
            self.guard.watch()

    # ---- waiting ----

    def bring(self, lack: NotAtHand) -> Waiting:
        """Have brought what a request lacks."""
        threads = self._background.of(lack.ino)
        return Waiting(lack, threads.device if lack.in_order else threads.asks)

    def wait_for(self, waiting: Waiting) -> None:
        """Return when what was lacking is there; raises what bringing it raised."""
        self.loop.run_until(lambda: waiting.done, "it is brought")
        waiting.require()

    def ask(self, call: Callable[[], R]) -> R:
        """Return what *call* does, done again when what it lacked was brought."""
        for _ in range(_BRINGS_MAX):
            try:
                return call()
            except NotAtHand as lack:
                lacking = lack
            self.wait_for(self.bring(lacking))
        raise lacking

    def in_thread(self, work: Callable[[], R]) -> R:
        """Return what *work* does, in a thread."""
        results: list[R] = []
        errors: list[Exception] = []

        def do() -> None:
            try:
                results.append(work())
            except Exception as error:
                errors.append(error)

        self._background.drives.all[0].transfers.submit(do)
        self.loop.run_until(lambda: bool(results or errors), "it is done")
        if errors:
            raise errors[0]
        return results[0]

    def in_order(self) -> None:
        """Return when the device's thread has done what it was given until now."""
        done: list[None] = []
        self._background.drives.all[0].device.submit(lambda: None, done.append, at_once=True)
        self.loop.run_until(lambda: bool(done), "the thread comes to it")

    def hold_device(self, until: threading.Event) -> None:
        """Let the device's thread wait *until* that is set."""
        self._background.drives.all[0].device.submit(until.wait, at_once=True)

    def until_settled(self, opened: Opened) -> None:
        """Return when times and length of *opened* are set. Raises OSError."""
        while opened.settling:
            self.in_order()
        opened.require_settled()

    def finish_jobs(self) -> None:
        """Do all jobs, and what the device has to do for them, but for those of low priority."""
        background = self._background
        while True:
            background.drain()
            self.in_order()
            leisure = len(background._leisure) + len(background._put_off)
            if background.backlog == leisure:
                return

    def tick(self) -> None:
        """Let a tick pass, and all that it has begun."""
        self.store.tick()
        self.finish_jobs()

    def tick_until(self, holds: Callable[[], bool], what: str) -> None:
        """Let ticks pass until *holds*."""

        def ticked() -> bool:
            self.tick()
            self.store.run_all()
            return holds()

        until(ticked, what)

    # ---- requests ----

    def look_up(self, name: bytes) -> InodeNo:
        """Return the inode of *name* in the root."""
        return self.store.lookup(ROOT_INODE, name)

    def create(self, name: bytes) -> Opened:
        """Create *name* in the root."""
        return self.ask(lambda: self.store.create(ROOT_INODE, name, FILE, 0, 0))[0]

    def write(self, opened: Opened, data: bytes, offset_bytes: int = 0) -> None:
        """Write as the daemon path does. Raises NoSpace."""
        store, space = self.store, self.store.engine.pool.space.of(opened.ino)
        growth_bytes = store.growth_bytes(opened, offset_bytes + len(data), len(data))
        try:
            if growth_bytes:
                self.ask(lambda: store.require_space(growth_bytes, opened.ino))
        except NoSpace:
            opened.spoil()
            raise
        fd = self.ask(lambda: store.extent_fd(opened))
        space.pledged_bytes += growth_bytes
        try:
            self.in_thread(lambda: self.guard.pwrite(fd, data, offset_bytes))
        finally:
            space.pledged_bytes -= growth_bytes
        store.note_allocated(opened, store.extent_bytes(fd))

    def close(self, opened: Opened, *, writer: bool = True, awaits_rename: bool = False) -> None:
        """Close a handle of *opened*."""
        self.store.close(opened, writer=writer, awaits_rename=awaits_rename)

    def put(self, name: bytes, data: bytes) -> InodeNo:
        """Store a block as a connector does, under another name at first; return its inode."""
        opened = self.create(name + b".tmp")
        try:
            self.write(opened, data)
        finally:
            self.close(opened, awaits_rename=True)
        self.rename(name + b".tmp", name)
        return opened.ino

    def get(self, name: bytes) -> bytes:
        """Load a block."""
        store, ino = self.store, self.look_up(name)
        size_bytes = store.present(ino).size_bytes
        opened = self.ask(lambda: store.open_to_read(ino))
        try:
            fd = self.ask(lambda: store.extent_fd(opened))
            return self.in_thread(lambda: self.guard.pread(fd, size_bytes + 1, 0))
        finally:
            self.close(opened, writer=False)

    def open_to_write(self, ino: InodeNo) -> Opened:
        """Open a block to overwrite it; return when its writer may begin."""
        store = self.store
        opened = self.ask(lambda: store.open(ino, writer=True, truncate=False))
        self.until_settled(opened)
        if store.must_forget(opened):
            self.in_thread(lambda: store.forget_durably(opened))
        return opened

    def change(self, ino: InodeNo, **wanted: int | None) -> None:
        """SETATTR of *wanted*; return when all of it is set."""
        self.ask(lambda: self.store.change(ino, **wanted))
        if ino in self.store.open_inos:
            self.until_settled(self.store.opened(ino))

    def rename(self, name: bytes, new_name: bytes) -> InodeNo | None:
        """Rename in the root; return the inode that lost its name."""
        return self.ask(lambda: self.store.rename(ROOT_INODE, name, ROOT_INODE, new_name))

    def unlink(self, name: bytes) -> None:
        """Remove *name* from the root."""
        self.ask(lambda: self.store.unlink(ROOT_INODE, name))

    # ---- figures of what is under way ----

    @property
    def coming_bytes(self) -> int:
        """What the device's thread is freeing."""
        return sum(drive.space.coming_bytes for drive in self.store.engine.pool.space.drives.all)

    @property
    def lingering(self) -> int:
        """How many extents without a name are in use."""
        drives = self.store.engine.pool.space.drives.all
        return sum(drive.unlink_queue.lingering for drive in drives)

    def ready_of(self, size_bytes: int) -> int:
        """Return how many extents with a reserve of *size_bytes* are ready."""
        return [held_bytes for _, held_bytes in self.store.ready()].count(size_bytes)

    def leave_numbers(self, count: int) -> None:
        """Let all inode numbers be used that are there, but for *count*."""
        numbers = self.store.engine.pool.numbers
        numbers._next = InodeNo(numbers._ranges[0].end - count)

    def let_ready_give_way(self) -> None:
        """Let ready extents give way to clients' data."""
        self.store.engine.pool.open.ready.give_way()

    # ---- the end ----

    def stop_serving(self) -> None:
        """Serve no more; nothing that may wait for the device was done on the loop till now."""
        self.finish_jobs()
        assert not self.guard.seen, self.guard.seen
        if self.serves:
            self.stop_serving_now()

    def stop_serving_now(self) -> None:
        """Serve no more, whatever the device's threads have to do."""
        self.guard.rest()
        self.store.engine.end_serving()

    def end(self) -> Outcome:
        """Serve no more, and settle; all accounts must be exact. Return what it has come to."""
        self.stop_serving()
        store = self.store
        settle(store)
        assert_exact(self.host)
        assert_no_strays(store)
        space = store.space
        return Outcome(
            tree(store),
            dict(self._rows(ROOT_INODE, b"")),
            space.used_bytes,
            space.pending_delete_bytes,
            space.deleted_open_bytes,
        )

    def _rows(self, top: InodeNo, path: bytes) -> Iterator[tuple[bytes, tuple[object, ...]]]:
        store = self.store
        for ino, name in store.children(top, InodeNo(0)):
            row, here = store.record(ino), path + b"/" + name
            said = None
            if stat.S_ISREG(row.mode):
                identity = store.identity(ino)
                said = identity and (identity.name, identity.mode, identity.size_bytes)
            xattrs = {xattr: store.xattr(ino, xattr) for xattr in store.xattr_names(ino)}
            yield here, (row.mode, row.size_bytes, row.allocated_bytes, row.state, xattrs, said)
            if stat.S_ISDIR(row.mode):
                yield from self._rows(ino, here)


def assert_as_without(scenario: Callable[[Serving], None]) -> None:
    """Do *scenario* with a store that serves and with one that does not; both come to the same."""
    outcomes = []
    for serves in (False, True):
        with host() as made:
            serving = Serving(made, serves=serves)
            scenario(serving)
            outcomes.append(serving.end())
    assert outcomes[0] == outcomes[1]
