"""RUN: whether the pool was stopped cleanly, and in which boot it ran last.

The index is not fsynced while the server runs. So it is trusted only after a clean stop, or in the
same boot, when the page cache still has all of it. What the RUNs of several drives say together is
in pool_run.py.
"""

import json
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvfs.core.errors import NO_SPACE, IndexDamaged
from kvfs.core.pool_layout import RUN, RUN_NEW
from kvfs.core.types import FIRST_INODE, INODE_END, NO_INODE, InodeNo
from kvfs.storage.inode_numbers import InodeNumbers
from kvfs.storage.replaced_file import replaced_file
from kvfs.storage.syscalls import Syscalls

_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_SIZE_MAX_BYTES: Final = 4096
_AGES_MAX_NS: Final = 1 << 62
_LOGGED_END: Final = 1 << 63
_NUMBER_END: Final = 1 << 62


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

    ``run``: which run wrote it, if the pool has several drives; else empty. ``number``: a later
    one has a higher number.

    ``stale``: this drive was away in a run before, and was not swept since.

    ``lost``: the drives that were away in this run, or have failed since it began.
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
    number: int = 0
    stale: bool = False
    lost: tuple[int, ...] = ()

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
    *superblock* is that of ``RunPlace`` (pool_run.py).
    """
    state = stated(pool_fd, syscalls, superblock)
    return state or RunState("", clean=never_ran(pool_fd, syscalls))


def stated(pool_fd: int, syscalls: Syscalls, superblock: str) -> RunState | None:
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
            number=_counted(state.get("number", 0)),
            stale=state.get("stale") is True,
            lost=tuple(map(_counted, state.get("lost", ()))),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return RunState("", clean=False)
    finally:
        syscalls.close(fd)


def _counted(found: object) -> int:
    """Return a number of a run or of a drive in RUN. Raises ValueError if it is impossible."""
    if not isinstance(found, int) or not 0 <= found < _NUMBER_END:
        raise ValueError(found)
    return found


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


def never_ran(pool_fd: int, syscalls: Syscalls) -> bool:
    """Whether no inode number was ever given out there. Raises OSError."""
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
    number: int = 0,
    stale: bool = False,
    lost: Sequence[int] = (),
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
        **({"run": run, "number": number} if run else {}),
        **({"stale": True} if stale else {}),
        **({"lost": sorted(lost)} if lost else {}),
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


def distrust(pool_fd: int, superblock: str, syscalls: Syscalls) -> None:
    """Leave in RUN nothing but which run it is of, if it says so. Raises OSError.

    In place, which needs no space and has no half-written state. A missing RUN means the same.
    """
    said = stated(pool_fd, syscalls, superblock)
    if said is None:
        return
    if said.run:
        run = {"run": said.run, "number": said.number, "stale": said.stale, "lost": said.lost}
        _overwrite(pool_fd, syscalls, json.dumps({"boot_id": "", "clean": False, **run}))
        return
    fd = syscalls.open(RUN, os.O_WRONLY | os.O_CLOEXEC, dir_fd=pool_fd)
    try:
        syscalls.ftruncate(fd, 0)
        syscalls.fsync(fd)
    finally:
        syscalls.close(fd)
