"""The running servers, found by their control sockets."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kvfs.control_client import ServerGone, ask, peer_pid, socket_paths
from kvfs.control_files import locked_directory, remove_stale
from kvfs.errors import CommandError, NotMounted, SourceBusy
from kvfs.mount_table import FS_TYPE, kvfs_at, mounts, resolve_mountpoint
from kvfs.pool_name import RUN_DIRECTORY, name_of, socket_path

#: A server answers within milliseconds; what takes longer hangs.
_ANSWER_WAIT_S: Final = 5.0


class Answer(NamedTuple):
    """One server's status, or why there is none."""

    path: str
    status: dict[str, Any]
    error: CommandError | None


def answers(first: str = "") -> Iterator[Answer]:
    """Yield the status of each server; the socket at the path *first* is asked first."""
    for path in sorted(socket_paths(), key=lambda path: path != first):
        try:
            yield Answer(path, ask(path, "status", timeout_s=_ANSWER_WAIT_S), None)
        except CommandError as error:
            yield Answer(path, {}, error)


def answer_of(mountpoint: str) -> Answer | None:
    """Return the answer of the server at the resolved path *mountpoint*, if there is one.

    A server that has another name than the mountpoint's is found by its status.
    """
    expected = socket_path(name_of(mountpoint))
    failed = None
    for answer in answers(expected):
        if answer.status.get("mountpoint") == mountpoint:
            return answer
        if answer.path == expected and answer.error is not None:
            failed = answer
    return failed


def status_of(path: str) -> dict[str, Any]:
    """Return what the server of the mount at *path* says; raises NotMounted and what it answers."""
    mountpoint = resolve_mountpoint(path)
    answer = answer_of(mountpoint)
    if kvfs_at(mountpoint) is None:
        raise NotMounted(f"no kvfs is mounted at {mountpoint}{_stale_note(answer)}")
    if answer is None or isinstance(answer.error, ServerGone):
        raise NotMounted(_dead(mountpoint))
    if answer.error is not None:
        raise answer.error
    return answer.status


def mountpoint_behind(path: str) -> str:
    """Return where the server of the socket *path* has mounted, by its name; "" if not known."""
    for mount in mounts():
        if mount.fs_type == FS_TYPE and socket_path(name_of(mount.mountpoint)) == path:
            return mount.mountpoint
    return ""


def complaint(answer: Answer) -> str:
    """Return why there is no status, and what to do about a server that is dead."""
    if not isinstance(answer.error, ServerGone):
        return str(answer.error)
    mountpoint = mountpoint_behind(answer.path)
    return _dead(mountpoint) if mountpoint else f"{answer.error}; `rm {answer.path}` removes it"


def _dead(mountpoint: str) -> str:
    return f"the server of {mountpoint} is dead; `kvfs umount {mountpoint}` clears the mount"


def _stale_note(answer: Answer | None) -> str:
    if answer is None or not isinstance(answer.error, ServerGone):
        return ""
    return f" ({answer.error})"


def server_of(mountpoint: str) -> int:
    """Return the process id of the server of *mountpoint*, 0 when there is none.

    A server too busy to answer is known by the owner of its socket.
    """
    # The kernel knows who listens, also when he is too busy to say it himself.
    listening = peer_pid(socket_path(name_of(mountpoint)))
    if listening > 0:
        return listening
    answer = answer_of(mountpoint)
    if answer is None:
        return 0
    if answer.error is None:
        return int(answer.status.get("server_pid", 0))
    return 0 if isinstance(answer.error, ServerGone) else peer_pid(answer.path)


def remove_dead_sockets() -> None:
    """Remove the sockets that dead servers left behind."""
    with contextlib.suppress(OSError), locked_directory(RUN_DIRECTORY):
        for path in socket_paths():
            with contextlib.suppress(SourceBusy, OSError):
                remove_stale(path)
