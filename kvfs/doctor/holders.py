"""What keeps a mount busy besides ordinary processes: NFS servers and loop devices.

An NFS server also goes on serving a mount whose kvfs server is dead, until a command ends that.
"""

import glob
from collections.abc import Iterator

from kvfs.client.nfs.ganesha import exports_below, ganeshas, restart_of
from kvfs.client.nfs.nfsd import taken_exports, way_out


def held_by_kernel(mountpoint: str) -> Iterator[str]:
    """Yield a clause for each holder of *mountpoint*, with the command that ends it."""
    if taken := taken_exports(mountpoint):
        yield f"the NFS server (nfsd, which is no process): {way_out(mountpoint, taken)}"
    for path in sorted(glob.glob("/sys/block/loop*/loop/backing_file")):
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            backing = file.read().removesuffix("\n")
        if backing.startswith(f"{mountpoint}/"):
            device = f"/dev/{path.split('/')[3]}"
            yield f"loop device {device}: `losetup --detach {device}` ends that"


def still_serving(mountpoint: str) -> Iterator[tuple[str, str]]:
    """Yield each NFS server of *mountpoint*, and the command that has it open the path anew.

    Both keep the file system they found there: nfsd until its caches are flushed (exportfs(8)),
    Ganesha until it ends. The path itself, which may hang, is not looked at.
    """
    if taken_exports(mountpoint):
        yield "the NFS server (nfsd)", "exportfs -f"
    for server in ganeshas(mountpoint):
        if server.open_files or exports_below(server, mountpoint):
            yield f"NFS-Ganesha (process {server.pid})", restart_of(server)


def note_of_servers(mountpoint: str) -> str:
    """Return clauses that say who still serves the dead mount at *mountpoint*; or "" if none do."""
    return "".join(
        f"; {who} still serves the dead one: `{command}` ends that"
        for who, command in still_serving(mountpoint)
    )
