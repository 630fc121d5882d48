"""The drop-in of docs/nfs.md, with a real systemd and a real NFS-Ganesha: the order of restarts."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvfs.machine.mountpoint_guard import unguard
from tests.support.clients.stepping import until
from tests.support.machines.own_systemd import OwnSystemd, own_systemd
from tests.support.mounts.mounting import ROOT, skip_without_mounts, workplace
from tests.support.nfs.ganesha import why_no_ganesha

pytestmark = pytest.mark.needs_fuse

SERVER: Final = "nfs-ganesha.service"
MOUNT: Final = "kvfs@kv.service"
SETTINGS: Final = (
    'source = "{place}/pool"\nmountpoint = "{place}/kv"\nlog_file = "{place}/kv.log"\n'
)
#: As Debian's unit starts it, without what it registers at; NFSv4 alone needs no rpcbind.
UNIT: Final = """\
[Unit]
DefaultDependencies=no
[Service]
ExecStart=ganesha.nfsd -F -f {place}/ganesha.conf -L {place}/ganesha.log -p {place}/pid
"""
CONFIG: Final = """\
NFS_CORE_PARAM {{ Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }}
NFSv4 {{ Graceless = true; RecoveryRoot = {place}/state; }}
EXPORT {{
    Export_Id = 7; Path = {place}/kv; Pseudo = /kv; Access_Type = RW; Protocols = 4;
    FSAL {{ Name = VFS; }}
}}
"""


def drop_in() -> str:
    """Return the file that the page shows."""
    text = (ROOT / "docs" / "nfs.md").read_text()
    found = re.search(r"(?:^    [\[\w].*\n)*^    BindsTo=.*\n(?:^    .*\n)*", text, re.MULTILINE)
    assert found is not None
    return re.sub(r"^    ", "", found[0], flags=re.MULTILINE)


class Pair(NamedTuple):
    """A mount and its server, as units."""

    systemd: OwnSystemd
    place: Path

    def pid(self, unit: str) -> str:
        return self.systemd.show(unit, "MainPID")

    def both_run_again(self, before: dict[str, str]) -> None:
        """Wait until both are others than *before*, the server started last."""
        for unit, pid in before.items():
            until(lambda unit=unit, pid=pid: self.pid(unit) not in (pid, "0"), f"a new {unit}")
            self.systemd.wait_for(unit, "ActiveState", "active")
        started = {
            unit: int(self.systemd.show(unit, "ActiveEnterTimestampMonotonic")) for unit in before
        }
        assert started[MOUNT] < started[SERVER]

    def holds(self) -> bool:
        """Whether the server has the mount open that is there now, and no other."""
        links = self.systemd.run("sh", "-c", f"readlink /proc/{self.pid(SERVER)}/fd/*").stdout
        return f"{self.place}/kv" in links.splitlines()

    def pids(self) -> dict[str, str]:
        return {unit: self.pid(unit) for unit in (MOUNT, SERVER)}


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both run."""
    skip_without_mounts()
    assert (why := why_no_ganesha()) is None, why
    with workplace() as top, workplace("disk") as place, contextlib.ExitStack() as stack:
        for name in ("pool", "kv", "state"):
            (place / name).mkdir()
        # The unit mounts with --guard, and the flag outlives it.
        stack.callback(unguard, str(place / "kv"))
        (place / "ganesha.conf").write_text(CONFIG.format(place=place))
        with own_systemd(top, {"kv.toml": SETTINGS.format(place=place)}) as systemd:
            units = top / "units"
            (units / SERVER).write_text(UNIT.format(place=place))
            (units / f"{SERVER}.d").mkdir()
            (units / f"{SERVER}.d" / "kvfs.conf").write_text(drop_in())
            assert f"WantedBy={MOUNT}" in drop_in()  # what `systemctl reenable` makes of that
            (units / f"{MOUNT}.wants").mkdir()
            (units / f"{MOUNT}.wants" / SERVER).symlink_to(units / SERVER)
            systemd.run("systemctl", "daemon-reload")
            systemd.run("systemctl", "start", MOUNT)
            pair = Pair(systemd, place)
            pair.both_run_again({MOUNT: "0", SERVER: "0"})
            until(pair.holds, "Ganesha holds the mount")
            yield pair


def test_a_restart_stops_the_server_first(pair: Pair) -> None:
    """So that the mount is not in use, and its end is clean."""
    before = pair.pids()
    pair.systemd.run("systemctl", "restart", MOUNT)
    pair.both_run_again(before)
    log = (pair.place / "kv.log").read_text()
    assert f"stopped: {pair.place}/kv is unmounted" in log
    assert "busy" not in log
    until(pair.holds, "Ganesha holds the new mount")


def test_a_crash_restarts_the_server_as_well(pair: Pair) -> None:
    before = pair.pids()
    pair.systemd.run("kill", "-KILL", before[MOUNT])
    pair.both_run_again(before)
    until(pair.holds, "Ganesha holds the new mount")


def test_without_the_mount_there_is_no_server(pair: Pair) -> None:
    pair.systemd.run("systemctl", "stop", MOUNT)
    pair.systemd.wait_for(SERVER, "ActiveState", "inactive")
    assert "is unmounted" in (pair.place / "kv.log").read_text()
