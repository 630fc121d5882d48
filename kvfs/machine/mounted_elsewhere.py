"""Copies of a mount in other mount namespaces, such as those of containers.

A new mount namespace gets a copy of every mount (mount_namespaces(7)). If it is private, an umount
outside does not remove its copy: the server goes on serving it, and the pool stays in use.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from kvfs.core.printable import printable
from kvfs.machine.mount_table import FS_TYPE, Mount, mounts, where_mounted
from kvfs.machine.process_ends import process_ids

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
    resolved = os.path.realpath(source)
    return _places(lambda mount: os.path.realpath(mount.source) == resolved)


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
