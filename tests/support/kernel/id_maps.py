"""Id-mapped mounts (mount_setattr(2)): clones of a mount that show other owners than it stores."""

import contextlib
import ctypes
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvfs.devices.detached import attach, clone_of_mount

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
#: A number that all architectures share (Linux 5.12), and linux/mount.h.
_MOUNT_SETATTR: Final = 442
_MOUNT_ATTR_IDMAP: Final = 0x100000
_AT_EMPTY_PATH: Final = 0x1000
#: The user namespace's users from 0 on are the machine's from this one on.
SHIFT: Final = 100_000
_COUNT: Final = 65536


@contextlib.contextmanager
def user_namespace() -> Iterator[int]:
    """Yield a descriptor of a user namespace that maps its root to ``SHIFT``."""
    command = ["unshare", "--user", "sh", "-c", "echo there; read -r _"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"there\n"
        for kind in ("uid", "gid"):
            Path(f"/proc/{child.pid}/{kind}_map").write_text(f"0 {SHIFT} {_COUNT}\n")
        fd = os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)
            child.communicate(b"\n")


def map_ids(root_fd: int, namespace_fd: int) -> int:
    """Map the ids of the detached mount *root_fd*; return the errno, 0 if it could be done."""
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, namespace_fd)
    done = _LIBC.syscall(_MOUNT_SETATTR, root_fd, b"", _AT_EMPTY_PATH, attributes, len(attributes))
    return ctypes.get_errno() if done else 0


def id_mapped(directory: Path, namespace_fd: int, place: Path | None = None) -> int:
    """Clone the mount of *directory*, map its ids and put it at *place*; return the errno or 0."""
    tree = clone_of_mount(str(directory))
    try:
        code = map_ids(tree, namespace_fd)
        if not code and place is not None:
            attach(tree, str(place))
    finally:
        os.close(tree)
    return code


@contextlib.contextmanager
def id_mapped_at(directory: Path, place: Path, namespace_fd: int) -> Iterator[Path]:
    """Yield *place*, new, where *directory* is mounted with the ids of the namespace mapped."""
    place.mkdir()
    code = id_mapped(directory, namespace_fd, place)
    assert not code, os.strerror(code)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)
