"""A real NFS-Ganesha (FSAL VFS) in a network of its own, as Debian ships it, with its own rpcbind.

``with Ganesha(network, logs, Export("/pool", mounted.path)) as server`` serves when it is entered.
``stop``, ``kill`` and ``start`` are what a test does to it; leaving it ends it, whatever its state.
Settings of ganesha-config(8) other than its defaults: no grace period, since no client here gets
anything back after a restart, and nothing but NFS.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final, NamedTuple, Self

from tests.support.clients.stepping import until
from tests.support.machines.own_network import Network
from tests.support.mounts.mounting import ROOT

PROGRAMS: Final = ("ganesha.nfsd", "rpcbind")
#: What it logs once clients may come.
_READY: Final = "NFS SERVER INITIALIZED"
#: Its start reads the configuration and makes threads; its end waits for them.
_START_WAIT_S: Final = 60.0
_END_WAIT_S: Final = 90.0
_LAST_LINES: Final = 40
#: With these, of docs/nfs.md, it keeps the memory of its messages.
KEEPS_MEMORY: Final = dict(
    re.findall(r"(MALLOC_\w+_)=(\d+)", (ROOT / "docs" / "nfs.md").read_text())
)
_CORE: Final = """\
NFS_CORE_PARAM {{
    Protocols = 3, 4;
    mount_path_pseudo = true;
    Enable_NLM = false;
    Enable_RQUOTA = false;
    Enable_UDP = false;
}}
NFSv4 {{
    Graceless = true;
    RecoveryRoot = {state};
}}
"""
_EXPORT: Final = """\
EXPORT {{
    Export_Id = {number};
    Path = {path};
    Pseudo = {name};
    Access_Type = RW;
    Squash = No_Root_Squash;
    Protocols = 3, 4;
    Transports = TCP;
    SecType = sys;
    {more}
    FSAL {{ Name = VFS; }}
}}
"""


class Export(NamedTuple):
    """What a server exports: clients mount *name*, an absolute path, and get *path*."""

    name: str
    path: Path
    more: str = ""
    """Further settings of its EXPORT block (ganesha-export-config(8))."""


def why_no_ganesha() -> str | None:
    """Return why this machine cannot run one, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs {' and '.join(missing)}" if missing else None


class Ganesha:
    """One server; what it logs is in ``log``, which outlives it."""

    def __init__(
        self,
        network: Network,
        logs: Path,
        *exports: Export,
        settings: str = "",
        level: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Make one that is not started.

        *settings* are blocks of ganesha-config(8) beside the exports, such as MDCACHE; *level*
        is how much it logs, NIV_EVENT unless told; *environment*: variables of its own.
        """
        self.exports = exports
        self.settings = settings
        self.log = logs / "ganesha.log"
        self._network = network
        self._level = level or "NIV_EVENT"
        self._environment = environment
        self._configuration = logs / "ganesha.conf"
        self._state = network.place / "ganesha"
        self._output: IO[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._rpcbind: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._state.mkdir()
            self._output = (self.log.parent / "output.log").open("ab")
            self._start_rpcbind()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print(f"{self.log} ends:\n{self.last_lines()}")
        self.close()

    @property
    def pid(self) -> int:
        """Of the server that runs, here and in its namespaces."""
        assert self._server is not None
        return self._server.pid

    def start(self) -> None:
        """Start it; returns when it serves. Raises AssertionError with what it logged."""
        assert self._output is not None
        assert self._server is None
        blocks = [
            _EXPORT.format(number=number, name=export.name, path=export.path, more=export.more)
            for number, export in enumerate(self.exports, 1)
        ]
        self._configuration.write_text(
            "".join([_CORE.format(state=self._state), self.settings, "\n", *blocks])
        )
        logged = self.log.stat().st_size if self.log.exists() else 0
        files = ("-f", str(self._configuration), "-L", str(self.log))
        more = ("-N", self._level, "-p", str(self._state / "pid"))
        self._server = server = self._network.start(
            *("ganesha.nfsd", "-F", *files, *more),
            output=self._output,
            environment=self._environment,
        )

        def is_ready() -> bool:
            assert server.poll() is None, f"Ganesha ended at its start:\n{self.last_lines()}"
            return self.log.exists() and _READY in self.log.read_text(errors="replace")[logged:]

        until(is_ready, f"{_READY} in {self.log}", _START_WAIT_S)

    def stop(self) -> None:
        """End it the clean way (SIGTERM). Raises AssertionError when it does not end."""
        assert self._server is not None
        self._server.terminate()
        try:
            self._server.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired as error:
            msg = f"Ganesha goes on after SIGTERM:\n{self.last_lines()}"
            raise AssertionError(msg) from error
        self._server = None

    def kill(self) -> None:
        """End it by SIGKILL."""
        assert self._server is not None
        self._server.kill()
        self._server.wait(_END_WAIT_S)
        self._server = None

    def suspend(self) -> None:
        """Stop its threads where they are (SIGSTOP); ``resume`` lets them go on."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a suspended one go on."""
        os.kill(self.pid, signal.SIGCONT)

    def open_paths(self) -> list[str]:
        """Return what its descriptors lead to, as its mount namespace names it."""
        found = []
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.append(os.readlink(f"/proc/{self.pid}/fd/{name}"))
        return found

    def last_lines(self) -> str:
        """Return the end of its log."""
        if not self.log.exists():
            return (self.log.parent / "output.log").read_text(errors="replace")
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])

    def close(self) -> None:
        """End it and its rpcbind at once."""
        for process in (self._server, self._rpcbind):
            if process is not None:
                process.kill()
                process.wait()
        self._server = self._rpcbind = None
        if self._output is not None:
            self._output.close()

    def _start_rpcbind(self) -> None:
        """NFSv3 and its MOUNT protocol are found by it; Ganesha does not start without."""
        assert self._output is not None
        self._rpcbind = process = self._network.start("rpcbind", "-f", output=self._output)
        socket = self._network.shown("/run/rpcbind.sock")

        def is_ready() -> bool:
            assert process.poll() is None, self.last_lines()
            return socket.exists()

        until(is_ready, "rpcbind's socket", _START_WAIT_S)
