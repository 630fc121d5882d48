"""Who in the kernel keeps a mount busy without a process: its NFS server, and loop devices."""

import glob
import shlex
from collections.abc import Iterator
from typing import Final

from kvfs.doctor.etab import parse_exports
from kvfs.doctor.facts import Export

#: What exportfs(8) has told the kernel's NFS server, with every option.
ETAB: Final = "/var/lib/nfs/etab"
#: What the kernel has taken of it (nfsd(7)); the second file needs no mount of its own.
_TAKEN: Final = ("/proc/fs/nfsd/exports", "/proc/net/rpc/nfsd.export/content")
#: nfsd(7): an NFSv4 client's open files outlive the export.
_UNLOCK: Final = "/proc/fs/nfsd/unlock_filesystem"


def held_by_kernel(mountpoint: str) -> Iterator[str]:
    """Yield who holds *mountpoint*, and the commands that end it, for a reader."""
    taken = [export for path in _TAKEN for export in _exports_in(path, mountpoint)]
    if taken:
        # The kernel shows clients as it resolved them; exportfs wants them as they were told.
        told = dict.fromkeys(_exports_in(ETAB, mountpoint) or taken)
        ends = " && ".join(
            dict.fromkeys(f"exportfs -u {shlex.quote(f'{one.client}:{one.path}')}" for one in told)
        )
        where = shlex.quote(mountpoint)
        yield (
            f"the NFS server (nfsd, which is no process): `{ends}` ends that, and "
            f"`echo {where} > {_UNLOCK}` for files that clients have open"
        )
    for path in sorted(glob.glob("/sys/block/loop*/loop/backing_file")):
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            backing = file.read().removesuffix("\n")
        if backing.startswith(f"{mountpoint}/"):
            device = f"/dev/{path.split('/')[3]}"
            yield f"loop device {device}: `losetup --detach {device}` ends that"


def _exports_in(path: str, mountpoint: str) -> tuple[Export, ...]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return parse_exports(file.read(), mountpoint)
    except OSError:
        return ()
