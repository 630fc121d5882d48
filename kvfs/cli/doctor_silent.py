"""What `kvfs doctor` reports of a mount whose server does not answer, and what helps."""

import shlex
from typing import Final

from kvfs.client.control_socket import ServerGone, peer_pid
from kvfs.client.liveness import has_ended, was_killed
from kvfs.core.errors import CommandError
from kvfs.core.mount_name import name_of, socket_path
from kvfs.doctor.finding import Finding, Report, Severity, Verdict
from kvfs.machine.mount_table import kvfs_at, resolve_mountpoint

#: States of proc_pid_stat(5): stopped by a signal, stopped by a debugger.
_STOPPED: Final = frozenset("Tt")


def report_of_silent(path: str, error: CommandError) -> Report | None:
    """Return a report about the kvfs mounted at *path*; asking its server ended with *error*.

    None if no kvfs is mounted. The time to look at the mount is bounded.
    """
    mountpoint = resolve_mountpoint(path)
    mount = kvfs_at(mountpoint)
    if mount is None:
        return None
    where, source = shlex.quote(mountpoint), shlex.quote(mount.source)
    server_pid = peer_pid(socket_path(name_of(mountpoint)))
    again = f"kvfs umount {where} && kvfs mount {source} {where}"
    kept = "with the same options; everything stored is still there"
    if server_pid > 0 and _state_of(server_pid) in _STOPPED:
        problem = f"the server, process {server_pid}, is stopped (SIGSTOP, a debugger): calls hang"
        fix = f"kill -CONT {server_pid}"
    elif isinstance(error, ServerGone) or was_killed(server_pid) or has_ended(mountpoint):
        problem, fix = "the server is dead: every call fails", f"{again}\n{kept}"
    else:
        problem = f"calls hang: {error}"
        fix = f"{f'kill -KILL {server_pid}; ' if server_pid > 0 else ''}{again}\n{kept}"
    finding = Finding(Severity.SERIOUS, problem, fix)
    return Report(mountpoint, (Verdict("server", (finding,), is_decided=True),))


def _state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
