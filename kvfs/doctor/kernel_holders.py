"""Who in the kernel keeps a mount busy without a process: its NFS server, and loop devices."""

import glob
import re
import shlex
from collections.abc import Iterator
from typing import Final

from kvfs.doctor.facts import Export

#: A line of the NFS server's table of exports: ``PATH<TAB>CLIENT(OPTION,...)``.
_LINE: Final = re.compile(r"(?P<path>\S+)\s+(?P<client>[^\s(]+)\((?P<options>[^)]*)\)")
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
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


def parse_exports(text: str, mountpoint: str) -> tuple[Export, ...]:
    """Return the exports of *mountpoint* and of what lies below it."""
    everything = list(_exports(text))
    paths_of: dict[str, set[str]] = {}
    for export in everything:
        if fsid := fsid_of(export):
            paths_of.setdefault(fsid, set()).add(export.path)
    return tuple(
        export._replace(
            same_fsid=tuple(sorted(paths_of.get(fsid_of(export), set()) - {export.path}))
        )
        for export in everything
        if export.path == mountpoint or export.path.startswith(f"{mountpoint}/")
    )


def fsid_of(export: Export) -> str:
    """Return the fsid= of *export*, "" if it has none."""
    return next((one for one in sorted(export.options) if one.startswith("fsid=")), "")


def _exports(text: str) -> Iterator[Export]:
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is not None:
            octal = match["path"].encode(errors="surrogateescape").decode("latin-1")
            raw = _ESCAPED.sub(lambda escape: chr(int(escape[1], 8)), octal).encode("latin-1")
            path = raw.decode(errors="surrogateescape")
            yield Export(path, match["client"], frozenset(match["options"].split(",")))
