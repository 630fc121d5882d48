"""Limits of the server process: memory, the OOM killer, open files and who may use how many.

A limit that the machine refuses to set does not stop the mount, but gives a line for the log.

The server's descriptors are divided: for its own use, and for files that clients open. What the
server needs is reserved. So a client that opens all it can does not keep the server from its work,
such as answering `kvfs status` or finding out how a process ended. The limit is read at each call,
because prlimit(2) can change that of a running process.
"""

import ctypes
import gc
import os
import resource
from typing import Final

from kvfs.core.account import Accounts, Entitlement, Entitlements, TenantId, Tenants, ranges_in
from kvfs.core.entitlements import entitled
from kvfs.core.errors import ToolMissing
from kvfs.core.settings import OPEN_FILES_MIN, Settings
from kvfs.storage.syscalls import LIBC

#: linux/prctl.h. Memory allocation of this thread, and of threads that it starts later, never waits
#: until dirty pages of our own mount are written, which would wait for us.
_PR_SET_IO_FLUSHER: Final = 57
#: PROC_PID_INIT_INO of linux/proc_ns.h.
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
#: Allocations between two runs of the garbage collector. Handlers make short-lived tuples, and a
#: run after every 700 of them (Python's default) costs more than it finds.
_COLLECT_EVERY: Final = 50_000


def adopt(settings: Settings) -> list[str]:
    """Set the limits. Call it on the main thread, before other threads start.

    Returns one line for each limit that the machine refused.
    """
    refusals = [
        _set_io_flusher(),
        _set_oom_score(settings.oom_score_adj),
        _set_open_files(settings.open_files_max),
    ]
    return [refusal for refusal in refusals if refusal]


def require_open_files(wanted: int) -> None:
    """Ask for *wanted* open files. Raises ToolMissing if the limit is below what a pool needs.

    All directories of extents and identities stay open, and control connections are added to that.
    """
    _set_open_files(wanted)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most < OPEN_FILES_MIN:
        raise ToolMissing(
            f"only {most} files may be open at a time, and {OPEN_FILES_MIN} are needed; "
            f"`ulimit -Hn {OPEN_FILES_MIN}` or LimitNOFILE= of its unit raises it"
        )


def require_file_size() -> None:
    """Remove the limit on the size of a file. Raises ToolMissing if that is not allowed.

    The server writes and allocates files of whatever size its clients want.
    """
    unlimited = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if (soft, hard) == (unlimited, unlimited):
        return
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    except (ValueError, OSError):
        if hard == unlimited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, hard))
            return
        raise ToolMissing(
            f"files are limited to {hard} bytes, and a pool needs larger ones; "
            "`ulimit -Hf unlimited` or LimitFSIZE=infinity of its unit lifts that"
        ) from None


def _require_own_proc() -> None:
    """Raise ToolMissing if /proc is that of another pid namespace.

    The numbers in requests would then be those of other processes there, of root's perhaps.
    """
    try:
        with open("/proc/self/status", "rb") as file:
            numbers = file.read().partition(b"\nNSpid:")[2].partition(b"\n")[0].split()
    except OSError:
        numbers = []
    if numbers != [b"%d" % os.getpid()]:
        raise ToolMissing(
            "idmapped_mounts needs the /proc of its own pid namespace (unshare --mount-proc)"
        )


def what_it_cannot_see(settings: Settings) -> str:
    """Return a line for the operator if clients outside our pid namespace cannot be seen.

    Empty if this is the machine's first pid namespace, or if their closes are trusted. A request of
    a process outside carries the number 0 (fs/fuse/dev.c). Raises ToolMissing if /proc would name
    the wrong users where requests name none.
    """
    if settings.idmapped_mounts:
        _require_own_proc()
    if settings.foreign_closes == "trusted":
        return ""
    try:
        if os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE:
            return ""
    except OSError:
        pass  # unknown: it may not see all
    return (
        "runs in its own pid namespace: files that a process outside closes in place are not kept, "
        "only those it renames; share the host's (hostPID), or set foreign_closes"
    )


def settle_memory() -> None:
    """Exclude all that exists after the start from garbage collection. Call it once serving."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, 20, 50)


def _set_io_flusher() -> str:
    if LIBC.prctl(_PR_SET_IO_FLUSHER, *(ctypes.c_ulong(value) for value in (1, 0, 0, 0))) == 0:
        return ""
    return f"PR_SET_IO_FLUSHER: {os.strerror(ctypes.get_errno())}"


def _set_oom_score(score: int) -> str:
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(score))
    except OSError as error:
        return f"oom_score_adj {score}: {error.strerror}"
    return ""


def _set_open_files(wanted: int) -> str:
    """Raise RLIMIT_NOFILE to *wanted*, or as far as the machine allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
        except (ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return f"open files: {wanted} refused, using {hard}"
        return ""
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return ""


#: 256 directories of extents and 256 of identities stay open (storage/fan_out.py).
_DIRECTORIES: Final = 2 * 256
#: Index, sockets, the reserve of machine/processes.py, /dev/fuse, 16 clients each of control socket
#: and events, scrapes; and what is open for the length of one call.
_OTHERS: Final = 128
#: Shares of the limit: for watched processes, as much again for threads that are looked at, and for
#: ready extents. A server with few descriptors has few of these.
_WATCHED: Final = 1 / 16
_READY: Final = 1 / 8


def open_files_limit() -> int:
    """Return how many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def watched_max() -> int:
    """Return how many processes may be watched; each costs two descriptors, one for a thread."""
    return int(open_files_limit() * _WATCHED)


def accounts_of(settings: Settings) -> tuple[Accounts, list[str]]:
    """Return the accounts of all tenants, by the settings ``subuid_file`` and ``tenants``.

    Users are looked up in /etc/passwd alone: a directory service could keep a start waiting. Also a
    line for each user who is not there.
    """
    tenants = Tenants(ranges_in(_text_of(settings.subuid_file), _users()))
    found, remarks = entitled_users(settings, tenants)
    return Accounts(tenants, Entitlements(found, settings.tenant_idle_s)), remarks


def entitled_users(
    settings: Settings, tenants: Tenants
) -> tuple[dict[TenantId, Entitlement], list[str]]:
    """Return what the setting ``tenants`` says of users; a line for each who is not there."""
    return entitled(settings.tenants, _users(), tenants)


def _users() -> dict[str, int]:
    """Return the uids of /etc/passwd, by name."""
    rows = [line.split(":") for line in _text_of("/etc/passwd").splitlines()]
    return {row[0]: int(row[2]) for row in rows if len(row) > 2 and row[2].isdecimal()}


def _text_of(path: str) -> str:
    """Return the text of *path*; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def ready_max(wanted: int) -> int:
    """Return how many of *wanted* ready extents there may be; each is an open file."""
    return min(wanted, int(open_files_limit() * _READY))


def clients_max(ready_extents: int) -> int:
    """Return how many descriptors may serve files that clients have open, all together.

    *ready_extents*: the setting ``ready_extents_max``.
    """
    most = open_files_limit()  # once: every open of a file asks
    ready = min(ready_extents, int(most * _READY))
    return max(0, most - _DIRECTORIES - _OTHERS - 2 * int(most * _WATCHED) - ready)
