"""An /etc of a test's own: what is written there is written for its namespace only.

In the mount namespace of ``own_network``, over the machine's /etc; with an empty /var/lib/nfs,
where exportfs(8) keeps its table, and the control sockets of the servers that run outside.
"""

import os
import subprocess
from typing import Final

from tests.support.machines.own_network import Network
from tests.support.mounts.mounting import run_kvfs

_SCRIPT: Final = """
set -e
mkdir "$1" "$1/upper" "$1/work"
mount -t overlay -o "lowerdir=/etc,upperdir=$1/upper,workdir=$1/work" kvfs-test /etc
mount -t tmpfs kvfs-test /var/lib/nfs
ln -s "/proc/$2/root"/run/kvfs /run/kvfs
"""


class OwnEtc:
    """Commands run in it; ``read`` says what they wrote."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.run("sh", "-c", _SCRIPT, "sh", str(network.place / "etc"), str(os.getpid()))

    def run(self, *command: str) -> str:
        """Run *command* in it, and return what it printed. Raises AssertionError if it fails."""
        done = subprocess.run(
            self._network.inside(*command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def kvfs(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run a kvfs command in it."""
        return run_kvfs(*arguments, prefix=self._network.inside(), check=check)

    def read(self, path: str) -> str:
        """Return what its file *path* holds."""
        return self._network.shown(path).read_text()
