"""Copies of a mount in the mount namespaces of others: containers, and tests beside this one."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def copy_of_all_mounts(*program: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process that has copies of all mounts and hears of no umount, as a container may."""
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", *(program or ("cat",))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"there\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == b"there\n"
        yield holder
        holder.stdin.close()


def detach_copies(*mountpoints: Path) -> None:
    """Unmount what other mount namespaces have of these mounts: it keeps server and source busy."""
    seen = {os.readlink("/proc/self/ns/mnt")}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            namespace = os.readlink(process / "ns/mnt")
            if namespace in seen:
                continue
            seen.add(namespace)
            mounted = (process / "mountinfo").read_text()
            for mountpoint in mountpoints:
                if f" {mountpoint} " in mounted:
                    inside = ["nsenter", "-t", process.name, "-m"]
                    command = [*inside, "umount", "--lazy", str(mountpoint)]
                    subprocess.run(command, check=True)
