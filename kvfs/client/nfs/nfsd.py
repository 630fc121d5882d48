"""The kernel's NFS server on this machine: whether it runs, and what it exports."""

import glob
import os
import re
import shlex
from collections.abc import Iterator
from typing import Final

from kvfs.client.nfs.exports import Export, parse_exports

EXPORTS: Final = "/etc/exports"
EXPORTS_DIRECTORY: Final = "/etc/exports.d"
#: The exports that exportfs(8) gave to the kernel's NFS server, with every option.
ETAB: Final = "/var/lib/nfs/etab"
#: The exports that the kernel uses now (nfsd(7)); the second file needs no mount of its own.
_TAKEN: Final = ("/proc/fs/nfsd/exports", "/proc/net/rpc/nfsd.export/content")
#: Closes what NFSv4 clients keep open after the export has ended (nfsd(7)).
UNLOCK: Final = "/proc/fs/nfsd/unlock_filesystem"
#: Its figures, if the module is loaded; ``th THREADS ...`` (fs/nfsd/stats.c).
_FIGURES: Final = "/proc/net/rpc/nfsd"
_CONTINUED: Final = re.compile(r"\\\n")


def nfsd_runs() -> bool:
    """Whether the kernel's NFS server has threads."""
    return any(
        fields[0] == "th" and fields[1] != "0"
        for fields in map(str.split, _text(_FIGURES).splitlines())
        if len(fields) > 1
    )


def told_exports(mountpoint: str) -> tuple[Export, ...]:
    """Return the exports of *mountpoint*, and of what lies below it, as exportfs(8) lists them.

    Empty if the kernel's NFS server is not installed. Raises OSError.
    """
    try:
        with open(ETAB, encoding="utf-8", errors="surrogateescape") as file:
            return parse_exports(file.read(), mountpoint)
    except FileNotFoundError:
        return ()


def taken_exports(mountpoint: str) -> tuple[Export, ...]:
    """Return the exports of *mountpoint*, and of what lies below it, that the kernel uses."""
    return tuple(one for path in _TAKEN for one in parse_exports(_text(path), mountpoint))


def way_out(mountpoint: str, taken: tuple[Export, ...]) -> str:
    """Return, as text, the commands that make the NFS server let go of *mountpoint*."""
    # The kernel shows clients by resolved address; exportfs needs them as they were given.
    told = dict.fromkeys(parse_exports(_text(ETAB), mountpoint) or taken)
    ends = " && ".join(
        dict.fromkeys(f"exportfs -u {shlex.quote(f'{one.client}:{one.path}')}" for one in told)
    )
    return (
        f"`{ends}` ends that, and `echo {shlex.quote(mountpoint)} > {UNLOCK}` for files that "
        "clients have open"
    )


def exported_by(mountpoint: str, but: str) -> Iterator[str]:
    """Yield the files of exports(5), except the file *but*, that export *mountpoint* itself."""
    wanted = os.fsencode(mountpoint)
    for path in (EXPORTS, *sorted(glob.glob(f"{EXPORTS_DIRECTORY}/*.exports"))):
        hidden = os.path.basename(path).startswith(".")
        if path != but and not hidden and wanted in _paths_in(_text(path)):
            yield path


def _paths_in(text: str) -> Iterator[bytes]:
    """Yield the paths that an exports file exports."""
    for line in _CONTINUED.sub(" ", text).splitlines():
        found = re.match(r'\s*(?:"([^"]*)"|([^\s"#]+))', line)
        if found is not None:
            raw = os.fsencode(found[1] if found[1] is not None else found[2])
            yield re.sub(rb"\\([0-7]{3})", lambda one: bytes([int(one[1], 8)]), raw).rstrip(b"/")


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
