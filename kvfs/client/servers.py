"""The running servers, found by their control sockets."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kvfs.client.control_socket import (
    ServerGone,
    ask,
    locked_directory,
    peer_pid,
    remove_stale,
    socket_paths,
)
from kvfs.client.liveness import has_ended, was_killed
from kvfs.core.errors import CommandError, NotMounted, ServeFailed, SourceBusy
from kvfs.core.mount_name import (
    EVENTS_SUFFIX,
    METRICS_SUFFIX,
    RUN_DIRECTORY,
    SOCKET_SUFFIX,
    dead_path,
    name_of,
    socket_path,
)
from kvfs.core.printable import printable
from kvfs.machine.mount_table import FS_TYPE, Mount, kvfs_at, mounts, resolve_mountpoint
from kvfs.machine.mounted_elsewhere import note_of

#: A server answers within milliseconds. One that takes longer than this hangs.
_ANSWER_WAIT_S: Final = 5.0
#: Of what the last server died of.
_WHY_MAX_CHARACTERS: Final = 500


class Answer(NamedTuple):
    """The status of one server, or why there is none."""

    path: str
    status: dict[str, Any]
    error: CommandError | None


def answers(first: str = "") -> Iterator[Answer]:
    """Yield the answer of each server; the socket *first* is asked first."""
    for path in sorted(socket_paths(), key=lambda path: path != first):
        try:
            yield Answer(path, ask(path, "status", timeout_s=_ANSWER_WAIT_S), None)
        except CommandError as error:
            yield Answer(path, {}, _gone(path) if was_killed(peer_pid(path)) else error)


def _gone(path: str) -> ServerGone:
    return ServerGone(f"the server of {path} was killed")


def answers_and_dead() -> list[Answer]:
    """Return the answer of each server, and an error for each dead mount without a socket.

    The socket of a dead server is removed by the next umount of any kvfs (remove_dead_sockets).
    """
    found = list(answers())
    spoken_for = {mountpoint_behind(answer.path) for answer in found}
    spoken_for.update(answer.status.get("mountpoint", "") for answer in found)
    there = _kvfs_mounts()
    # By device, because a bind mount shows the same file system again.
    devices = {mount.device for mount in there if mount.mountpoint in spoken_for}
    for mount in there:
        if mount.device not in devices and has_ended(mount.mountpoint):
            error = ServerGone(_dead(mount.mountpoint))
            found.append(Answer(socket_path(name_of(mount.mountpoint)), {}, error))
        devices.add(mount.device)
    return found


def _kvfs_mounts() -> list[Mount]:
    return [mount for mount in mounts() if mount.fs_type == FS_TYPE]


def answer_of(mountpoint: str) -> Answer | None:
    """Return the answer of the server at the resolved path *mountpoint*; None if there is none.

    A server whose name was not made from the mountpoint is found by its status.
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
    """Return the status of the mount at *path*. Raises NotMounted, or the server's error."""
    mountpoint = resolve_mountpoint(path)
    answer = answer_of(mountpoint)
    if kvfs_at(mountpoint) is None:
        note = not_here(mountpoint) or f"no kvfs is mounted at {mountpoint}{_stale_note(answer)}"
        raise NotMounted(note)
    if is_dead(mountpoint, answer):
        raise NotMounted(_dead(mountpoint))
    if answer is None:
        raise ServeFailed(
            f"no response from the server of {mountpoint}: no control socket in {RUN_DIRECTORY}"
        )
    if answer.error is not None:
        raise answer.error
    return answer.status


def not_here(mountpoint: str) -> str:
    """Return a line if a kvfs is mounted at *mountpoint* in other mount namespaces, or ""."""
    note = note_of(lambda mount: mount.mountpoint == mountpoint)
    return f"no kvfs is mounted at {mountpoint} here{note}" if note else ""


def is_dead(mountpoint: str, answer: Answer | None) -> bool:
    """Whether the kvfs mounted at *mountpoint*, which gave *answer*, has lost its server."""
    return has_ended(mountpoint) if answer is None else isinstance(answer.error, ServerGone)


def mountpoint_behind(path: str) -> str:
    """Return the mountpoint of the server with the socket *path*, by its name; "" if unknown."""
    for mount in _kvfs_mounts():
        if socket_path(name_of(mount.mountpoint)) == path:
            return mount.mountpoint
    return ""


def complaint(answer: Answer) -> str:
    """Return why there is no status and, if the server is dead, what to do."""
    if not isinstance(answer.error, ServerGone):
        return str(answer.error)
    mountpoint = mountpoint_behind(answer.path)
    return _dead(mountpoint) if mountpoint else f"{answer.error}; `rm {answer.path}` removes it"


def _dead(mountpoint: str) -> str:
    why = ""
    with contextlib.suppress(OSError, ValueError), open(dead_path(mountpoint)) as file:
        why = f": {printable(file.read(_WHY_MAX_CHARACTERS))}"
    return f"the server of {mountpoint} is dead{why}; `kvfs umount {mountpoint}` clears the mount"


def _stale_note(answer: Answer | None) -> str:
    if answer is None or not isinstance(answer.error, ServerGone):
        return ""
    return f" ({answer.error})"


def server_of(mountpoint: str) -> int:
    """Return the process id of the server of *mountpoint*; 0 if there is none.

    A server that is too busy to answer is known by the owner of its socket.
    """
    # The kernel knows who listens, even if that process is too busy to answer.
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
    """Remove the sockets that dead servers left behind.

    Not of one that the kernel holds up: only its socket tells that the calls on its mount wait for
    nothing, so that ``kvfs umount`` there ends them.
    """
    with contextlib.suppress(OSError), locked_directory(RUN_DIRECTORY):
        for suffix in (SOCKET_SUFFIX, METRICS_SUFFIX, EVENTS_SUFFIX):
            for path in socket_paths(suffix=suffix):
                with contextlib.suppress(SourceBusy, OSError):
                    remove_stale(path, of_held_up=False)
