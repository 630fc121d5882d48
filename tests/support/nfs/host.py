"""A host that mounts exports of this one: a network of its own, with its kernel's NFS client.

Its cable (a veth pair) can be pulled out, and it is another client to the server than any other
host. Its mounts are seen here, so that a test uses them with plain system calls.
"""

import subprocess
import tempfile
from pathlib import Path
from typing import Final, Self

from tests.support.nfs.nfsd import sh

#: Hard, since an emulated server may take longer than any bound; no statd and lockd for v3.
OPTIONS: Final = "proto=tcp,nconnect=2,acdirmin=1,acdirmax=1,acregmin=1,acregmax=1"


class NfsHost:
    """One of at most 250, told apart by *number*; leaving it takes away its mounts."""

    def __init__(self, number: int) -> None:
        self.name = f"host{number}"
        self.server = f"10.77.{number}.1"
        """The exporting host's address, as this one has it."""
        self._address = f"10.77.{number}.2"
        self._cable = f"cable{number}"
        self._mounts: list[Path] = []

    def __enter__(self) -> Self:
        inside = ("ip", "-n", self.name)
        sh("modprobe", "nfs")
        sh("ip", "netns", "add", self.name)
        sh("ip", "link", "add", self._cable, "type", "veth", "peer", "eth0", "netns", self.name)
        sh("ip", "address", "add", f"{self.server}/24", "dev", self._cable)
        sh("ip", "link", "set", self._cable, "up")
        sh(*inside, "address", "add", f"{self._address}/24", "dev", "eth0")
        sh(*inside, "link", "set", "eth0", "up")
        sh(*inside, "link", "set", "lo", "up")
        # NFSv4 tells clients apart by their host's name and this (Documentation/admin-guide/nfs).
        identifier = "/sys/fs/nfs/net/nfs_client/identifier"
        sh("ip", "netns", "exec", self.name, "sh", "-c", f"echo {self.name} >{identifier}")
        return self

    def __exit__(self, *_: object) -> None:
        self.plug()
        for path in self._mounts:
            subprocess.run(["umount", "-f", "-l", path], check=False)
        sh("ip", "netns", "delete", self.name)

    def mount(self, export: Path, version: str, more: str = "") -> Path:
        """Mount *export* of the server and return where; *more* are options of nfs(5)."""
        path = Path(tempfile.mkdtemp(prefix=f"{self.name}-v{version}-", dir="/mnt"))
        no_locks = ",nolock" if version == "3" else ""
        options = f"vers={version},{OPTIONS}{no_locks}{more and ','}{more}"
        enter = ("nsenter", f"--net=/run/netns/{self.name}")
        sh(*enter, "mount", "-t", "nfs", "-o", options, f"{self.server}:{export}", str(path))
        self._mounts.append(path)
        return path

    def umount(self, path: Path, *flags: str) -> None:
        """Unmount what ``mount`` returned."""
        sh("umount", *flags, str(path))
        self._mounts.remove(path)

    def unplug(self) -> None:
        """Pull its cable: nothing that it sends arrives any more."""
        sh("ip", "link", "set", self._cable, "down")

    def plug(self) -> None:
        """Put the cable back."""
        sh("ip", "link", "set", self._cable, "up")
