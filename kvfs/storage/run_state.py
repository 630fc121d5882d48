"""RUN: whether the pool was stopped cleanly, and in which boot it ran last.

The index is not fsynced while the server runs. So it is trusted only after a clean stop, or in the
same boot, when the page cache still has all of it.

In a pool of several drives each has a RUN, which says of which run it is. One that is of another
run was away while the others were served, or the other way round: then nothing is trusted. So any
drive may be missing, and none is believed that was.
"""

import functools
import json
import logging
import os
import secrets
from collections.abc import Callable, Collection, Container, Sequence
from typing import Final, NamedTuple

from kvfs.core.errors import NO_SPACE, IndexDamaged
from kvfs.core.pool_layout import RUN, RUN_NEW
from kvfs.core.types import FIRST_INODE, INODE_END, NO_INODE, DriveNo, InodeNo
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.replaced_file import replaced_file
from kvfs.storage.syscalls import Syscalls

_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_SIZE_MAX_BYTES: Final = 4096
_AGES_MAX_NS: Final = 1 << 62
_LOGGED_END: Final = 1 << 63
_RUN_BYTES: Final = 8
_log: Final = logging.getLogger(__name__)


class RunPlace(NamedTuple):
    """A drive that has a RUN: its directory.

    ``superblock`` identifies the file system that a directory is on now (devices/directory.py); it
    is empty if the file system's log was checked instead.
    """

    drive: DriveNo
    pool_fd: int
    superblock: str


class RunState(NamedTuple):
    """What the last server wrote into RUN; a pool that never ran is clean.

    ``moved``: RUN comes from another directory, so this is a copy, and the original may be in use.

    ``copied``: it is moved, so a server may have changed files while they were copied; or the file
    system was mounted again since, and may have been cut off before.

    ``strays``: it stopped cleanly, but there may be files without an inode, or outdated identities,
    because the device failed or a sweep was not finished.

    ``logged``: the batch of the index's log that leads to the index as it was at a clean stop; 0:
    none does (pool/durable/index_log.py).

    ``index_dir``: the directory of the index in memory; empty if it is in the pool, or if only its
    log is there, as after a clean stop.

    ``age_base_ns``: the base of the age clock in that boot (age_clock.py); None: unknown.

    ``doubtful_below``: blocks with a lower inode number existed when the device may have lost bytes
    that it had confirmed, and not all have been compared with their checksums since; 0: none.

    ``run``: which run wrote it, if the pool has several drives; else empty.

    ``stale``: this drive was away in a run before, and was not swept since.
    """

    boot_id: str
    clean: bool
    strays: bool = False
    copied: bool = False
    moved: bool = False
    doubtful_below: InodeNo = NO_INODE
    age_base_ns: int | None = None
    logged: int = 0
    index_dir: str = ""
    run: str = ""
    stale: bool = False

    @property
    def of_this_boot(self) -> bool:
        """Whether the last server ran in this boot."""
        return self.boot_id == present_boot_id()

    @property
    def present_age_base_ns(self) -> int | None:
        """The base of the age clock in this boot; None before the boot's first server."""
        return self.age_base_ns if self.of_this_boot else None

    @property
    def trusted(self) -> bool:
        """Whether the index has all that was committed to it."""
        return self.clean or (self.of_this_boot and not self.copied)


def present_boot_id() -> str:
    """Return the kernel's id of this boot (proc_sys_kernel(5))."""
    with open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()


def read_run_state(pool_fd: int, syscalls: Syscalls, superblock: str = "") -> RunState:
    """Return what RUN says. An unreadable file counts as not clean and of an unknown boot.

    So does a missing one if inode numbers were ever given out, since the pool ran then.
    *superblock* is that of ``RunPlace``.
    """
    state = _stated(pool_fd, syscalls, superblock)
    return state or RunState("", clean=_never_ran(pool_fd, syscalls))


def read_pool_run(places: Sequence[RunPlace], syscalls: Syscalls) -> RunState:
    """Return what the RUNs of a pool's drives say together. Raises OSError.

    A clean stop writes them when all is on the drives, so one that says so is right for its run.
    """
    if not places[1:]:
        return read_run_state(places[0].pool_fd, syscalls, places[0].superblock)
    found = _all_stated(places, syscalls)
    said = [state for state in found if state is not None]
    if not said:
        return RunState("", clean=all(_never_ran(place.pool_fd, syscalls) for place in places))
    runs = {state.run for state in said}
    #: The version before wrote one RUN, which says nothing of its run, on the first drive.
    is_one = len(runs) == 1 and (runs == {""} or len(said) == len(found))
    is_clean = is_one and any(state.clean for state in said)
    stale = _stale_among(places, found)
    there = [
        state
        for place, state in zip(places, found, strict=True)
        if state is not None and place.drive not in stale
    ]
    best = max(there, key=lambda state: (state.clean == is_clean, state.of_this_boot))
    moved = any(state.moved for state in said)
    return best._replace(
        clean=is_clean,
        copied=not is_one or any(state.copied for state in said),
        moved=moved,
        doubtful_below=max(state.doubtful_below for state in said),
        logged=best.logged if is_clean and not moved else 0,
        index_dir="" if moved else best.index_dir,
    )


def stale_drives(places: Sequence[RunPlace], syscalls: Syscalls) -> frozenset[DriveNo]:
    """Return the drives that were away while the others were served. Raises OSError."""
    return _stale_among(places, _all_stated(places, syscalls)) if places[1:] else frozenset()


def _all_stated(places: Sequence[RunPlace], syscalls: Syscalls) -> list[RunState | None]:
    return [_stated(place.pool_fd, syscalls, place.superblock) for place in places]


def _stale_among(
    places: Sequence[RunPlace], found: Sequence[RunState | None]
) -> frozenset[DriveNo]:
    """Return the drives of *places*, with the RUNs *found*, that were away.

    Those are of another run than the first drive, without which nothing is served, or say that they
    were not swept since. One without a RUN has not run yet.
    """
    if found[0] is None:
        return frozenset()
    run = found[0].run
    return frozenset(
        place.drive
        for place, state in zip(places[1:], found[1:], strict=True)
        if state is not None and (state.stale or state.run != run)
    )


def _stated(pool_fd: int, syscalls: Syscalls, superblock: str) -> RunState | None:
    """Return what RUN says; None if there is none."""
    try:
        fd = syscalls.open(RUN, os.O_RDONLY | os.O_CLOEXEC, dir_fd=pool_fd)
    except FileNotFoundError:
        return None
    try:
        state = json.loads(syscalls.read(fd, _SIZE_MAX_BYTES))
        boot_id, clean = str(state["boot_id"]), state["clean"] is True
        moved = state.get("directory", here := syscalls.fstat(pool_fd).st_ino) != here
        doubtful_below = InodeNo(int(state.get("doubtful_below", 0)))
        if not NO_INODE <= doubtful_below <= INODE_END:
            raise ValueError(f"inode {doubtful_below}")
        return RunState(
            boot_id,
            clean=clean,
            strays=state.get("strays") is True,
            copied=moved or state.get("superblock", "") != superblock,
            moved=moved,
            doubtful_below=doubtful_below,
            age_base_ns=_age_base_ns(state),
            logged=_logged(state) if clean and not moved else 0,
            index_dir="" if moved else _index_dir(state),
            run=str(state.get("run", "")),
            stale=state.get("stale") is True,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return RunState("", clean=False)
    finally:
        syscalls.close(fd)


def _age_base_ns(state: dict[str, object]) -> int | None:
    """Return the base of the age clock in RUN; None if it is missing or impossible."""
    found = state.get("age_base_ns")
    return found if isinstance(found, int) and abs(found) < _AGES_MAX_NS else None


def _logged(state: dict[str, object]) -> int:
    """Return the number of a batch in RUN; 0 if it is missing or impossible."""
    found = state.get("logged")
    return found if isinstance(found, int) and 0 <= found < _LOGGED_END else 0


def _index_dir(state: dict[str, object]) -> str:
    """Return the directory that RUN names; empty if it names none."""
    found = state.get("index")
    return found if isinstance(found, str) and found.startswith("/") and "\0" not in found else ""


def run_stamp(pool_fd: int, syscalls: Syscalls) -> int:
    """Return a 64-bit number that changes whenever a server writes RUN; 1 if there is no RUN.

    Each start writes RUN, which gives it another inode or ctime. Never 0. Raises OSError.
    """
    try:
        fd = syscalls.open(RUN, os.O_RDONLY | os.O_CLOEXEC, dir_fd=pool_fd)
    except FileNotFoundError:
        return 1
    try:
        status = syscalls.fstat(fd)
    finally:
        syscalls.close(fd)
    return status.st_ctime_ns ^ status.st_ino


def _never_ran(pool_fd: int, syscalls: Syscalls) -> bool:
    try:
        numbers = InodeNumbers((pool_fd,), syscalls, read_only=True)
    except IndexDamaged:
        return False
    numbers.close()
    return numbers.first == FIRST_INODE


def write_run_state(
    pool_fd: int,
    syscalls: Syscalls,
    *,
    clean: bool,
    strays: bool = False,
    superblock: str = "",
    doubtful_below: InodeNo = NO_INODE,
    age_base_ns: int | None = None,
    logged: int = 0,
    index_dir: str = "",
    run: str = "",
    stale: bool = False,
) -> None:
    """Replace RUN durably; in place if there is no space for a second one. Raises OSError."""
    state = {
        "boot_id": present_boot_id(),
        "clean": clean,
        "strays": strays,
        "pid": os.getpid(),
        "directory": syscalls.fstat(pool_fd).st_ino,
        "superblock": superblock,
        "doubtful_below": doubtful_below,
        "age_base_ns": age_base_ns,
        "logged": logged,
        "index": index_dir,
        **({"run": run} if run else {}),
        **({"stale": True} if stale else {}),
    }
    text = json.dumps(state)
    try:
        with replaced_file(pool_fd, syscalls, RUN, RUN_NEW, durable=True) as fd:
            syscalls.write(fd, text.encode())
        syscalls.fsync(pool_fd)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        try:
            _overwrite(pool_fd, syscalls, text)
        except FileNotFoundError:  # a pool that was never mounted has no RUN
            raise error from None


def _overwrite(pool_fd: int, syscalls: Syscalls, text: str) -> None:
    """Overwrite RUN with *text* in place, because the device may be full.

    The pool must be able to start even then, to free space. A sector is never half written.
    """
    fd = syscalls.open(RUN, os.O_RDWR | os.O_CLOEXEC, dir_fd=pool_fd)
    try:
        # Padded to the old length: what is left of a longer text would not be JSON.
        size_bytes = max(len(text), syscalls.fstat(fd).st_size)
        syscalls.pwrite(fd, text.ljust(size_bytes).encode(), 0)
        syscalls.fsync(fd)
    finally:
        syscalls.close(fd)


def new_run(places: Collection[RunPlace]) -> str:
    """Return what a run calls itself on *places*; nothing in a pool of one drive."""
    return secrets.token_hex(_RUN_BYTES) if len(places) > 1 else ""


def on_each(
    places: Sequence[RunPlace], do: Callable[[RunPlace], None], *, all_of_them: bool
) -> None:
    """Call *do* for each of *places*, whatever it raises.

    Raises an OSError that it raised if *all_of_them* must go well, or if none did.
    """
    errors: list[OSError] = []
    for place in places:
        try:
            do(place)
        except OSError as error:
            errors.append(error)
            _log.warning("drive %d: RUN is as it was: %s", place.drive, error)
    if errors and (all_of_them or len(errors) == len(places)):
        raise errors[0]


class PoolRun:
    """One run of a pool, from its start to its stop. Until a clean stop RUN says not clean."""

    def __init__(
        self,
        places: Sequence[RunPlace],
        syscalls: Syscalls,
        end: InodeNo,
        index_dir: str,
        lost: Container[DriveNo] = (),
    ) -> None:
        """Read how the last run ended; all inodes have numbers below *end*. Raises OSError.

        *places* have a RUN, but for those *lost*, which have failed since. *index_dir* is that of
        the index in memory, empty if it is in the pool. If the index is not trusted, any of the
        pool's blocks may have lost bytes.
        """
        self._all_places = places
        self._lost = lost
        self._syscalls = syscalls
        self._index_dir = index_dir
        self._former = former = read_pool_run(places, syscalls)
        #: The drives that were away in the last run: no file there is believed that the index does
        #: not know. They stay so until they were swept (``believe``).
        self.stale = stale_drives(places, syscalls)
        self._run = new_run(places)
        self.stamp = run_stamp(places[0].pool_fd, syscalls)
        #: Whether the pool ran last in this boot; makers from another boot are dead.
        self.same_boot = former.of_this_boot
        #: See ``RunState.doubtful_below``.
        self.doubtful_below = former.doubtful_below if former.trusted else end
        #: The base of the age clock, if the last run was in this boot.
        self.age_base_ns = former.present_age_base_ns

    @property
    def _places(self) -> list[RunPlace]:
        return [place for place in self._all_places if place.drive not in self._lost]

    def believe(self, age_base_ns: int) -> None:
        """Write RUN on the stale drives, which have been swept: they are as the others now.

        Raises OSError.
        """
        stale, self.stale = self.stale, frozenset()
        places = [place for place in self._places if place.drive in stale]
        if places:
            self._write(places, age_base_ns, clean=False)

    def begin(self, age_base_ns: int, *, follows: bool) -> None:
        """Write RUN: the pool runs. Raises OSError.

        A server that *follows* the one that wrote RUN, and has its tables, leaves a RUN that says
        the same. The last one made it durable before it served, and a drive that answers nothing
        now would keep this one from serving.
        """
        if follows:
            self._run = self._former.run
        present = RunState(
            present_boot_id(),
            clean=False,
            doubtful_below=self.doubtful_below,
            age_base_ns=age_base_ns,
            index_dir=self._index_dir,
            run=self._run,
        )
        if not follows or self._former != present:
            # On all of them: one that still said clean would be believed, were it alone some day.
            self.write(age_base_ns, clean=False)

    def write(
        self, age_base_ns: int, *, clean: bool, strays: bool = False, logged: int = 0
    ) -> None:
        """Write RUN: whether the run stopped cleanly, and left *strays*. Raises OSError.

        *age_base_ns* is the base of the age clock in this boot, *logged* the batch that leads to
        the index as it is.
        """
        self._write(self._places, age_base_ns, clean=clean, strays=strays, logged=logged)
        self.stamp = run_stamp(self._places[0].pool_fd, self._syscalls)

    def _write(
        self,
        places: Sequence[RunPlace],
        age_base_ns: int,
        *,
        clean: bool,
        strays: bool = False,
        logged: int = 0,
    ) -> None:
        def write(place: RunPlace) -> None:
            write_run_state(
                place.pool_fd,
                self._syscalls,
                clean=clean,
                strays=strays,
                superblock=place.superblock,
                doubtful_below=self.doubtful_below,
                age_base_ns=age_base_ns,
                logged=logged,
                index_dir="" if clean else self._index_dir,
                run=self._run,
                stale=place.drive in self.stale,
            )

        on_each(places, write, all_of_them=not clean)

    def distrust(self) -> None:
        """Make sure that the next start does not trust the index. Raises OSError."""
        distrust_index(self._places, self._syscalls)


def distrust_index(places: Sequence[RunPlace], syscalls: Syscalls) -> None:
    """Make sure that the next start does not trust the index, unless the pool was stopped cleanly.

    For when the page cache cannot be trusted: a sync failed, or the file system was cut off.
    Empties RUN in place, which needs no space and has no half-written state. Raises OSError.
    """
    if not read_pool_run(places, syscalls).clean:
        stale = stale_drives(places, syscalls)  # an empty RUN would not say so any more
        there = [place for place in places if place.drive not in stale]
        on_each(there, functools.partial(_empty, syscalls), all_of_them=True)


def _empty(syscalls: Syscalls, place: RunPlace) -> None:
    try:
        fd = syscalls.open(RUN, os.O_WRONLY | os.O_CLOEXEC, dir_fd=place.pool_fd)
    except FileNotFoundError:
        return  # a missing RUN means the same
    try:
        syscalls.ftruncate(fd, 0)
        syscalls.fsync(fd)
    finally:
        syscalls.close(fd)
