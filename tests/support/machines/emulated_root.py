"""A root file system of arm64 on a machine of another kind: its programs are run by qemu.

The kernel is told of qemu in a user namespace of its own (binfmt_misc has one for each from Linux
6.7 on), so that nothing is registered on the machine. No package of the root is configured.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support.clients.stepping import until

ARCH: Final = "arm64"
#: How ELF's header names it (e_machine).
ELF_MACHINE: Final = 183
#: As Debian's qemu-user-static registers it: an ELF file of 64 bits for machine 183.
_REGISTERED: Final = (
    r":arm64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
)
_ALL_IDS: Final = "0 0 4294967295\n"
_RUN: Final = """\
set -eu
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf '%s' "$1:$2:OCF" >/proc/sys/fs/binfmt_misc/register
mount -t proc proc "$3/proc"
mount --rbind /dev "$3/dev"
root=$3
shift 3
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 chroot "$root" "$@"
"""


class EmulatedRoot:
    """What *packages* of *suite* need, and the files of *package*, unpacked below *place*."""

    def __init__(self, place: Path, suite: str, packages: Sequence[str], package: Path) -> None:
        self._root = place / f"{suite}-{ARCH}"
        flags = ("--quiet", "--mode=root", "--variant=extract", f"--architectures={ARCH}")
        _run(
            *("mmdebstrap", *flags, "--skip=check/qemu", f"--include={','.join(packages)}"),
            *(suite, str(self._root)),
        )
        # As dpkg does it: a directory of the package goes where a link of that name leads.
        unpacked = 'dpkg-deb --fsys-tarfile "$1" | tar -x --keep-directory-symlink -C "$2"'
        _run("sh", "-euc", unpacked, "sh", str(package), str(self._root))
        for name in ("proc", "dev"):
            (self._root / name).mkdir(exist_ok=True)
        # Not installed: its package would register it for the whole machine.
        (place / "qemu").mkdir()
        _run("apt-get", "download", "-qq", "qemu-user-static", cwd=place / "qemu")
        (fetched,) = (place / "qemu").glob("*.deb")
        _run("dpkg-deb", "-x", str(fetched), str(place / "qemu"))
        self._qemu = place / "qemu" / "usr" / "bin" / "qemu-aarch64-static"

    def run(self, *command: str) -> str:
        """Run *command* in it, and return what it printed."""
        with _user_namespace() as pid:
            inside = ("nsenter", "--user", f"--target={pid}")
            own = ("unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
            words = (_REGISTERED, str(self._qemu), str(self._root))
            return _run(*inside, *own, "sh", "-c", _RUN, "sh", *words, *command)


@contextmanager
def _user_namespace() -> Iterator[int]:
    """Yield the process of a user namespace with the ids of this one."""
    holder = subprocess.Popen(["unshare", "--user", "sleep", "infinity"])
    try:
        own = os.readlink("/proc/self/ns/user")
        until(lambda: os.readlink(f"/proc/{holder.pid}/ns/user") != own, "a user namespace")
        for kind in ("uid", "gid"):
            Path(f"/proc/{holder.pid}/{kind}_map").write_text(_ALL_IDS)
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
