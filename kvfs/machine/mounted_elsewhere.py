"""Mounts in other mount namespaces: a copy of a mount outlives ours.

Whoever makes a namespace of his own gets a copy of every mount (mount_namespaces(7)); a private one
hears of no umount. The server serves it on, and its pool stays in use.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from kvfs.core.printable import printable
from kvfs.machine.mount_table import FS_TYPE, Mount, mounts, where_mounted

_SHOWN_MAX: Final = 3


class Elsewhere(NamedTuple):
    """A mount in another namespace, and one of the processes that are there."""

    mount: Mount
    pid: int
    command: str
    namespace: str
    """``mnt:[4026532000]``, as lsns(8) shows the number."""

    @property
    def where(self) -> str:
        """As a part of a sentence: where it is."""
        process = f"process {self.pid} ({printable(self.command)}, {self.namespace})"
        return f"at {self.mount.mountpoint} in the mount namespace of {process}"

    @property
    def way_out(self) -> str:
        """The command that takes it away."""
        return f"nsenter -t {self.pid} -m umount {self.mount.mountpoint}"


def elsewhere(is_meant: Callable[[Mount], bool]) -> Iterator[Elsewhere]:
    """Yield a kvfs mount of each other namespace that is one of those which are meant.

    Only links and tables in /proc are read, never a path. A namespace that no process is in, or
    none that may be looked at, is not seen.
    """
    with contextlib.suppress(OSError):
        seen = {_namespace("self")}
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):  # it ended, or is not ours to look at
                namespace = _namespace(str(pid))
                if namespace in seen:
                    continue
                seen.add(namespace)
                for mount in mounts(pid):
                    if mount.fs_type == FS_TYPE and is_meant(mount):
                        yield Elsewhere(mount, pid, _command(pid), namespace)
                        break


def note_of(is_meant: Callable[[Mount], bool]) -> str:
    """Return where else it is mounted and what ends that, to stand behind a sentence; or ""."""
    places = _places(is_meant)
    return f": it is mounted {places}" if places else ""


def where_in_use(source: str) -> str:
    """Return where the pool in *source* is mounted, as where_mounted, in other namespaces too."""
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
