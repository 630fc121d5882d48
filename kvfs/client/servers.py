"""The running servers, found by their control sockets."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final, NamedTuple

from kvfs.client.control_socket import (
    HungUp,
    ServerGone,
    ask,
    locked_directory,
    peer_pid,
    remove_stale,
    socket_paths,
)
from kvfs.client.late_answer import mount_behind
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
from kvfs.core.shown_names import printable
from kvfs.machine.mount_table import FS_TYPE, Mount, kvfs_at, mounts, note_of, resolve_mountpoint

#: A server answers within milliseconds. One that takes longer than this hangs.
_ANSWER_WAIT_S: Final = 5.0
#: A server takes over within a second, and on a busy machine within a few.
_TAKEOVER_WAIT_S: Final = 5.0
_LOOK_S: Final = 0.05
#: A new server removes the socket of the last one and makes its own: in between there is none.
_NO_SOCKET_WAIT_S: Final = 0.5
#: Servers that are asked at the same time.
_ASKED_MAX: Final = 32
#: The most that is shown of why the last server died.
_WHY_MAX_CHARACTERS: Final = 500


class NextServerDue(ServeFailed):
    """A server has died, and another one is about to take over the mount."""

    exit_code: ClassVar[int] = ServeFailed.exit_code


class ServerAnswer(NamedTuple):
    """The status of one server, or why there is none."""

    path: str
    status: dict[str, Any]
    error: CommandError | None


def answers(first: str = "") -> Iterator[ServerAnswer]:
    """Yield the answer of each server; the socket *first* is asked first, all others at once.

    So several servers that hang delay the caller no longer than one does.
    """
    paths = socket_paths()
    if first in paths:
        yield _answer_at(first)
        paths.remove(first)
    if len(paths) < 2:
        yield from map(_answer_at, paths)
        return
    with ThreadPoolExecutor(_ASKED_MAX) as asking:
        yield from asking.map(_answer_at, paths)


def _answer_at(path: str) -> ServerAnswer:
    try:
        try:
            status = ask(path, "status", timeout_s=_ANSWER_WAIT_S)
        except HungUp:  # it was killed just now: ask its successor
            status = ask(path, "status", timeout_s=_ANSWER_WAIT_S)
    except CommandError as error:
        return ServerAnswer(path, {}, _gone(path) if was_killed(peer_pid(path)) else error)
    return ServerAnswer(path, status, None)


def _gone(path: str) -> ServerGone:
    return ServerGone(f"the server of {path} was killed")


def answers_and_dead() -> list[ServerAnswer]:
    """Return the answer of each server, and an error for each dead mount without a socket.

    Waits up to 5 s for servers that are about to take over.
    """
    until_s = time.monotonic() + _TAKEOVER_WAIT_S
    found = list(answers())
    while any(map(_is_gone, found)) and (left := _left_alone(found)):
        if time.monotonic() >= until_s:
            found = [_corrected(answer, left) for answer in found]
            break
        time.sleep(_LOOK_S)
        found = list(answers())
    spoken_for = {mountpoint_behind(answer.path) for answer in found}
    spoken_for.update(answer.status.get("mountpoint", "") for answer in found)
    # If not, a hanging server whose mount is unknown may serve a mount that has no socket.
    is_told = all(answer.error is None or mountpoint_behind(answer.path) for answer in found)
    there = _kvfs_mounts()
    # By device, because a bind mount shows the same file system again.
    devices = {mount.device for mount in there if mount.mountpoint in spoken_for}
    for mount in there:
        if mount.device not in devices:
            error = _without_socket(mount.mountpoint)
            if is_told or isinstance(error, ServerGone):
                found.append(ServerAnswer(socket_path(name_of(mount.mountpoint)), {}, error))
        devices.add(mount.device)
    return found


def _is_gone(answer: ServerAnswer) -> bool:
    return isinstance(answer.error, ServerGone)


def _left_alone(found: Sequence[ServerAnswer]) -> list[str]:
    """Return the mounts without a server for which another one may come."""
    served = {answer.status.get("mountpoint", "") for answer in found}
    hanging = {mountpoint_behind(answer.path) for answer in found if not _is_gone(answer)}
    there = {mount.mountpoint for mount in _kvfs_mounts()} - served - hanging
    return [mountpoint for mountpoint in sorted(there) if not has_ended(mountpoint)]


def _corrected(answer: ServerAnswer, alive: Sequence[str]) -> ServerAnswer:
    """Return *answer*; if it calls a mount dead that is *alive*, with another error."""
    mountpoint = mountpoint_behind(answer.path)
    if not _is_gone(answer) or (mountpoint and mountpoint not in alive):
        return answer
    return answer._replace(error=_due(mountpoint or answer.path))


def _without_socket(mountpoint: str) -> CommandError:
    if has_ended(mountpoint):
        return ServerGone(_dead(mountpoint))
    return ServeFailed(
        f"no response from the server of {mountpoint}: no control socket in {RUN_DIRECTORY}"
    )


def _one_has_died() -> bool:
    """Whether a dead server left a socket behind whose name does not tell the mount."""
    unknown = (path for path in socket_paths() if not mountpoint_behind(path))
    return any((pid := peer_pid(path)) == 0 or was_killed(pid) for path in unknown)


def _due(mountpoint: str) -> NextServerDue:
    return NextServerDue(
        f"the server of {mountpoint} has died, and the next one does not serve yet; calls wait for "
        "it, and its log says what it does"
    )


def _kvfs_mounts() -> list[Mount]:
    return [mount for mount in mounts() if mount.fs_type == FS_TYPE]


def answer_of(mountpoint: str) -> ServerAnswer | None:
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
    """Return the status of the mount at *path*. Raises NotMounted, or the server's error.

    If a server is about to take over, waits for it for up to 5 s.
    """
    mountpoint = resolve_mountpoint(path)
    since_s, has_died = time.monotonic(), False
    while (answer := answer_of(mountpoint)) is None or _is_gone(answer):
        has_died = has_died or answer is not None or _one_has_died()
        if kvfs_at(mountpoint) is None or has_ended(mountpoint):
            break
        if time.monotonic() >= since_s + (_TAKEOVER_WAIT_S if has_died else _NO_SOCKET_WAIT_S):
            if has_died:
                raise _due(mountpoint)
            break
        time.sleep(_LOOK_S)
    if kvfs_at(mountpoint) is None:
        note = not_here(mountpoint) or f"no kvfs is mounted at {mountpoint}{_stale_note(answer)}"
        raise NotMounted(note)
    if answer is not None and _is_gone(answer):
        raise NotMounted(_dead(mountpoint))
    if answer is None:
        raise _without_socket(mountpoint)
    if answer.error is not None:
        raise answer.error
    return answer.status


def not_here(mountpoint: str) -> str:
    """Return a line if a kvfs is mounted at *mountpoint* in other mount namespaces, or ""."""
    note = note_of(lambda mount: mount.mountpoint == mountpoint)
    return f"no kvfs is mounted at {mountpoint} here{note}" if note else ""


def mountpoint_behind(path: str) -> str:
    """Return the mountpoint of the server with the socket *path*, by its name; "" if unknown."""
    mount = mount_behind(path)
    return "" if mount is None else mount.mountpoint


def complaint(answer: ServerAnswer) -> str:
    """Return why there is no status and, if the server is dead, what to do."""
    if not _is_gone(answer):
        return str(answer.error)
    mountpoint = mountpoint_behind(answer.path)
    return _dead(mountpoint) if mountpoint else f"{answer.error}; `rm {answer.path}` removes it"


def _dead(mountpoint: str) -> str:
    why = ""
    with contextlib.suppress(OSError, ValueError), open(dead_path(mountpoint)) as file:
        said = file.read(_WHY_MAX_CHARACTERS)
        why = f": {printable(said)}"
    return f"the server of {mountpoint} is dead{why}; `kvfs umount {mountpoint}` clears the mount"


def _stale_note(answer: ServerAnswer | None) -> str:
    if answer is None or not _is_gone(answer):
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
    return 0 if _is_gone(answer) else peer_pid(answer.path)


def remove_dead_sockets() -> None:
    """Remove the sockets that dead servers left behind.

    A socket stays if its mount is there: another server may take that over. It stays if the kernel
    holds up its server: only the socket tells that calls on the mount wait in vain, so that ``kvfs
    umount`` can end them.
    """
    with contextlib.suppress(OSError), locked_directory(RUN_DIRECTORY):
        for suffix in (SOCKET_SUFFIX, METRICS_SUFFIX, EVENTS_SUFFIX):
            for path in socket_paths(suffix=suffix):
                if mountpoint_behind(path.removesuffix(suffix) + SOCKET_SUFFIX):
                    continue
                with contextlib.suppress(SourceBusy, OSError):
                    remove_stale(path, of_held_up=False)
