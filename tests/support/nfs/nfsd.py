"""The kernel's own NFS server, in a guest that has it to itself: NFSv3 and v4 over TCP.

``with Nfsd() as server: server.export(mount)`` serves *mount* as ``kvfs export --write`` has it.
``stop`` and ``start`` are an operator's, with the mount's kvfs stopped in between or not.
"""

import json
import subprocess
from pathlib import Path
from typing import Final, Self

from tests.support.clients.stepping import until
from tests.support.mounts.mounting import run_kvfs

#: Where its clients come from (``nfs_host.NfsHost``).
CLIENTS: Final = "10.77.0.0/16"
THREADS: Final = 8
_PROC: Final = Path("/proc/fs/nfsd")
_STATE: Final = Path("/var/lib/nfs")
#: The least that nfsd takes (fs/nfsd/nfsctl.c); by default 90 s, which a restart would wait for.
_LEASE_S: Final = 10


def sh(*command: str, wait_s: float = 120.0) -> str:
    """Run *command* and return what it printed. Raises AssertionError when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=wait_s, check=False)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


class Nfsd:
    """It serves from entry to leaving, but for what a test does to it."""

    def __init__(self) -> None:
        self._helpers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self._end_helpers()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
            sh("exportfs", "-ua")
        finally:
            self._end_helpers()

    def _begin(self) -> None:
        sh("modprobe", "nfsd")
        for name in ("sm", "sm.bak", "v4recovery", "nfsdcld", "rpc_pipefs"):
            (_STATE / name).mkdir(parents=True, exist_ok=True)
        for name in ("etab", "rmtab", "state"):
            (_STATE / name).touch()
        sh("mount", "-t", "rpc_pipefs", "rpc_pipefs", str(_STATE / "rpc_pipefs"))
        sh("mount", "-t", "nfsd", "nfsd", str(_PROC))
        self._help("rpcbind", "-f", "-w")
        until(Path("/run/rpcbind.sock").exists, "rpcbind's socket")
        self._help("nfsdcld", "-F", "-p", str(_STATE / "rpc_pipefs"), "-s", str(_STATE / "nfsdcld"))
        self._help("rpc.mountd", "-F")
        for name in ("nfsv4leasetime", "nfsv4gracetime"):
            (_PROC / name).write_text(str(_LEASE_S))
        self.start()

    def _end_helpers(self) -> None:
        for helper in self._helpers:
            helper.terminate()
            helper.wait(60)
        self._helpers.clear()
        for path in (_PROC, _STATE / "rpc_pipefs"):
            subprocess.run(["umount", path], check=False)

    def export(self, mount: Path) -> str:
        """Export *mount* as kvfs says, and return the line that does it."""
        command = ("export", str(mount), "--client", CLIENTS, "--server", "nfsd", "--write")
        plan = json.loads(run_kvfs(*command, "--json").stdout)
        for command_line in plan["next"]:
            sh(*command_line.split())
        return str(plan["text"])

    def start(self) -> None:
        """Let its threads serve."""
        sh("exportfs", "-ra")
        sh("rpc.nfsd", str(THREADS))
        assert self.threads() == THREADS

    def stop(self) -> None:
        """End all of its threads: it closes what it has open, and lets go of the mount."""
        sh("rpc.nfsd", "0")
        until(lambda: self.threads() == 0, "the end of nfsd's threads")
        sh("exportfs", "-f")

    def threads(self) -> int:
        """Return how many serve."""
        return int((_PROC / "threads").read_text())

    def delegations(self) -> int:
        """Return how many files it has delegated to clients of NFSv4."""
        states = [path.read_text() for path in _PROC.glob("clients/*/states")]
        return sum(text.count("type: deleg") for text in states)

    def _help(self, *command: str) -> None:
        """Start a program that nfsd wants beside it; what it says goes to the console."""
        self._helpers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
