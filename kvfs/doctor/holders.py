"""What keeps a mount busy and is no plain process: NFS servers, and loop devices.

An NFS server also goes on serving a mount whose own server is dead, until it is told.
"""

import glob
from collections.abc import Iterator

from kvfs.client.nfs.ganesha import exports_below, ganeshas, restart_of
from kvfs.client.nfs.nfsd import taken_exports, way_out


def held_by_kernel(mountpoint: str) -> Iterator[str]:
    """Yield what holds *mountpoint*, and the commands that end it, for a reader."""
    if taken := taken_exports(mountpoint):
        yield f"the NFS server (nfsd, which is no process): {way_out(mountpoint, taken)}"
    for path in sorted(glob.glob("/sys/block/loop*/loop/backing_file")):
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            backing = file.read().removesuffix("\n")
        if backing.startswith(f"{mountpoint}/"):
            device = f"/dev/{path.split('/')[3]}"
            yield f"loop device {device}: `losetup --detach {device}` ends that"


def still_serving(mountpoint: str) -> Iterator[tuple[str, str]]:
    """Yield each server of *mountpoint*, and the command after which it serves what is there next.

    Both keep what they found at that path: nfsd until its caches are flushed (exportfs(8)), Ganesha
    for life. Nothing is looked at by path.
    """
    if taken_exports(mountpoint):
        yield "the NFS server (nfsd)", "exportfs -f"
    for server in ganeshas(mountpoint):
        if server.open_files or exports_below(server, mountpoint):
            yield f"NFS-Ganesha (process {server.pid})", restart_of(server)


def note_of_servers(mountpoint: str) -> str:
    """Return who still serves the dead mount at *mountpoint*, to stand behind a sentence; or ""."""
    return "".join(
        f"; {who} still serves the dead one: `{command}` ends that"
        for who, command in still_serving(mountpoint)
    )
