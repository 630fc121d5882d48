"""What is mounted where, as the kernel lists it in /proc/self/mountinfo (proc(5)).

It reads that list and never the paths, because stat(2) on a mount whose server hangs would hang,
too.

A new mount namespace, such as that of a container, gets a copy of every mount
(mount_namespaces(7)). If it is private, an umount outside does not remove its copy: the server goes
on serving it, and the pool stays in use.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from kvfs.core.shown_names import printable
from kvfs.core.source_list import sources_of
from kvfs.machine.process_ends import process_ids
from kvfs.storage.syscalls import LIBC, raise_errno

FS_TYPE: Final = "fuse.kvfs"
#: What the server of a mount reads requests from (fuse(4)).
FUSE_DEVICE: Final = "/dev/fuse"
_MOUNTINFO: Final = "/proc/self/mountinfo"
#: Most symlinks followed, as by the kernel in one path (path_resolution(7)).
_LINKS_MAX: Final = 40
_ESCAPED: Final = re.compile(rb"\\([0-7]{3})")
#: umount(2).
_MNT_FORCE: Final = 1
MNT_DETACH: Final = 2


class Mount(NamedTuple):
    """One line of the mount table."""

    mountpoint: str
    fs_type: str
    source: str
    device: str
    """``major:minor``, which is st_dev of all files on it."""
    options: tuple[str, ...]
    """Of the mount, then of its file system."""
    root: str = "/"
    """The directory of the file system that is seen at the mountpoint, if it is a bind mount."""


def mounts(pid: int = 0) -> list[Mount]:
    """Return all mounts, the topmost of one mountpoint last; as process *pid* sees them, if not 0.

    Raises OSError if that process has ended or may not be looked at.
    """
    with open(f"/proc/{pid}/mountinfo" if pid else _MOUNTINFO, "rb") as file:
        return _stacked([_parse(line) for line in file])


def mount_at(mountpoint: str) -> Mount | None:
    """Return the topmost mount whose mountpoint is exactly the path *mountpoint*."""
    found = [mount for mount in mounts() if mount.mountpoint == mountpoint]
    return found[-1] if found else None


def mount_of(path: str) -> Mount | None:
    """Return the mount in which the absolute path *path* lies, by name, without looking there."""
    found = None
    for mount in mounts():
        above = mount.mountpoint.rstrip("/")
        is_above = path == mount.mountpoint or path.startswith(f"{above}/")
        if is_above and (found is None or len(mount.mountpoint) >= len(found.mountpoint)):
            found = mount
    return found


def kvfs_at(mountpoint: str) -> Mount | None:
    """Return the topmost mount at *mountpoint* if a kvfs serves it."""
    mount = mount_at(mountpoint)
    return mount if mount is not None and mount.fs_type == FS_TYPE else None


def where_mounted(source: str) -> str:
    """Return "at MOUNTPOINT" for the pool in *source*; "" if no mount of it can be seen here."""
    is_meant = _is_of(source)
    for mount in mounts():
        if mount.fs_type == FS_TYPE and is_meant(mount):
            return f"at {mount.mountpoint}"
    return ""


def resolve_mountpoint(path: str) -> str:
    """Return *path* absolute and without symlinks, except those inside a kvfs mount.

    Never looks into a kvfs mount, because its server may hang.
    """
    fs_types = {mount.mountpoint: mount.fs_type for mount in mounts()}
    resolved, waiting, links = "/", os.path.abspath(path).split("/"), 0
    while waiting:
        name = waiting.pop(0)
        resolved = os.path.normpath(os.path.join(resolved, name))
        if fs_types.get(resolved) == FS_TYPE:
            return os.path.normpath(os.path.join(resolved, *waiting))
        try:
            target = os.readlink(resolved)
        except OSError:  # not a symlink
            continue
        links += 1
        if links > _LINKS_MAX:
            break
        resolved = os.path.join(os.path.dirname(resolved), target)
        waiting = [*resolved.split("/"), *waiting]
        resolved = "/"
    return os.path.normpath(os.path.join(resolved, *waiting))


def unmount(mountpoint: str, *, lazy: bool, force: bool = False) -> None:
    """Unmount *mountpoint* (umount2(2)); *lazy* detaches it even while it is in use.

    *force* first ends all requests that wait for the server, even if the rest fails. Raises
    OSError.
    """
    flags = (MNT_DETACH if lazy else 0) | (_MNT_FORCE if force else 0)
    if LIBC.umount2(os.fsencode(mountpoint), flags) != 0:
        raise_errno("umount")


class _Line(NamedTuple):
    """A mount with its number, and that of the mount below it."""

    number: int
    below: int
    mount: Mount


def _stacked(lines: list[_Line]) -> list[Mount]:
    """Return the mounts, each after the one below it at the same mountpoint.

    The kernel lists them as they were made, and one may have been put beneath an older one
    (MOVE_MOUNT_BENEATH).
    """
    by_number = {line.number: line for line in lines}
    placed: dict[int, Mount] = {}
    for line in lines:
        stack: list[_Line] = []
        above: _Line | None = line
        while above is not None and above.number not in placed and above not in stack:
            stack.append(above)
            below = by_number.get(above.below)
            at_one_point = below is not None and below.mount.mountpoint == above.mount.mountpoint
            above = below if at_one_point else None
        placed.update((one.number, one.mount) for one in reversed(stack))
    return list(placed.values())


def _parse(line: bytes) -> _Line:
    fields = line.split()
    tail = fields.index(b"-", 6)  # optional fields come before it, in any number
    options = [*_text(fields[5]).split(","), *_text(fields[tail + 3]).split(",")]
    mount = Mount(
        _text(fields[4]),
        _text(fields[tail + 1]),
        _text(fields[tail + 2]),
        fields[2].decode(),
        tuple(options),
        _text(fields[3]),
    )
    return _Line(int(fields[0]), int(fields[1]), mount)


def _text(field: bytes) -> str:
    """Undo the kernel's octal escapes of blanks and backslashes."""
    return os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), field))


_SHOWN_MAX: Final = 3


class Elsewhere(NamedTuple):
    """A mount in another namespace, and one process of that namespace."""

    mount: Mount
    pid: int
    command: str
    namespace: str
    """``mnt:[4026532000]``, as lsns(8) shows the number."""

    @property
    def where(self) -> str:
        """Where it is, as a part of a sentence."""
        process = f"process {self.pid} ({printable(self.command)}, {self.namespace})"
        return f"at {self.mount.mountpoint} in the mount namespace of {process}"

    @property
    def way_out(self) -> str:
        """The command that unmounts it."""
        return f"nsenter -t {self.pid} -m umount {self.mount.mountpoint}"


def elsewhere(is_meant: Callable[[Mount], bool]) -> Iterator[Elsewhere]:
    """Yield one kvfs mount of each other namespace for which *is_meant* is true.

    Reads only links and tables in /proc, never a path. It cannot see a namespace without processes,
    or whose processes may not be looked at.
    """
    with contextlib.suppress(OSError):
        seen = {_namespace("self")}
        for pid in process_ids():
            with contextlib.suppress(OSError):  # it ended, or may not be looked at
                namespace = _namespace(str(pid))
                if namespace in seen:
                    continue
                seen.add(namespace)
                for mount in mounts(pid):
                    if mount.fs_type == FS_TYPE and is_meant(mount):
                        yield Elsewhere(mount, pid, _command(pid), namespace)
                        break


def note_of(is_meant: Callable[[Mount], bool]) -> str:
    """Return where else it is mounted and how to unmount it there, to end a sentence; or ""."""
    places = _places(is_meant)
    return f": it is mounted {places}" if places else ""


def where_in_use(source: str) -> str:
    """Return what ``where_mounted`` returns for *source*, but search all mount namespaces."""
    if here := where_mounted(source):
        return here
    return _places(_is_of(source))


def _is_of(source: str) -> Callable[[Mount], bool]:
    """Return what tells whether a mount is of the pool in *source*, if only one of its drives."""
    wanted = set(map(os.path.realpath, sources_of(source)))
    return lambda mount: not wanted.isdisjoint(map(os.path.realpath, sources_of(mount.source)))


def _places(is_meant: Callable[[Mount], bool]) -> str:
    found = list(islice(elsewhere(is_meant), _SHOWN_MAX))
    if not found:
        return ""
    commands = "; ".join(one.way_out for one in found)
    return f"{', '.join(one.where for one in found)}; `{commands}` unmounts it"


def _namespace(pid: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/mnt")


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="backslashreplace") as file:
        return file.read().strip()
