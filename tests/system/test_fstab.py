"""mount(8), umount(8), fstab(5) and logrotate(8) with kvfs's helpers, under a real systemd."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.cli.mount_helper import FAILED, MISUSED
from kvfs.machine.mountpoint_guard import unguard
from tests.support.devices.loop import loop_device
from tests.support.devices.pools import DRIVE_BYTES
from tests.support.machines.own_systemd import OwnSystemd, own_systemd
from tests.support.mounts.mounting import skip_without_mounts, workplace

CAPACITY: Final = "64MiB"
#: One as an operator writes it: for mount(8), for systemd, for the file system and for nobody.
FSTAB: Final = """\
{place}/a {place}/kv kvfs nofail,_netdev,noatime,x-systemd.mount-timeout=90,capacity={size} 0 0
{place}/b {place}/guarded fuse.kvfs noauto,guard,mode=0711,capacity={size} 0 0
"""


class Machine:
    """Its systemd runs; paths are below the folder of the tests."""

    def __init__(self, systemd: OwnSystemd, place: Path) -> None:
        self.systemd = systemd
        self.place = place
        self.kv = place / "kv"
        # As systemd-escape --path has it.
        self.unit = str(self.kv).strip("/").replace("-", "\\x2d").replace("/", "-") + ".mount"

    def sh(self, script: str) -> str:
        return self.systemd.run("sh", "-euc", f"cd {self.place}; {script}").stdout

    def code_of(self, script: str) -> tuple[int, str]:
        done = self.systemd.run("sh", "-c", f"cd {self.place}; {script}", check=False)
        return done.returncode, done.stderr

    def status(self, mountpoint: Path) -> dict[str, Any]:
        told = json.loads(self.sh(f"kvfs status {mountpoint} --json"))
        assert isinstance(told, dict)
        return told

    def is_mounted(self, mountpoint: Path) -> bool:
        return f" {mountpoint} fuse.kvfs " in self.sh("cat /proc/mounts")


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    skip_without_mounts()
    # systemd takes what lies in /dev for a device, and waits for it.
    with workplace("disk") as place:
        for name in ("systemd", "a", "b", "c", "kv", "guarded", "other"):
            (place / name).mkdir()
        fstab = FSTAB.format(place=place, size=CAPACITY)
        try:
            with own_systemd(place / "systemd", {"unused.toml": ""}, fstab=fstab) as systemd:
                yield Machine(systemd, place)
        finally:  # what is guarded cannot be removed
            for name in ("kv", "guarded", "other"):
                unguard(str(place / name))


def test_mount_and_umount_by_hand(machine: Machine) -> None:
    """What an operator types first. umount(8) waits: the next mount finds the source free."""
    options = f"capacity={CAPACITY},ro,noatime,nosuid,x-systemd.automount,log_level=debug"
    machine.sh(f"mount -t kvfs c other -o capacity={CAPACITY}; echo kept > other/block.tmp")
    machine.sh("mv other/block.tmp other/block; umount other")
    machine.sh(f"mount -t kvfs c other -o {options}")
    assert "ro" in machine.sh(f"findmnt -n -o OPTIONS {machine.place}/other").split(",")
    assert machine.sh("cat other/block") == "kept\n"
    assert machine.status(machine.place / "other")["capacity_bytes"] == 64 << 20
    machine.sh("umount other; mount -t fuse.kvfs c other; umount other")
    assert not machine.is_mounted(machine.place / "other")


@pytest.mark.needs_loop
def test_a_pool_by_its_uuid(machine: Machine) -> None:
    """mount(8) looks for the device of ``UUID=`` itself, and leaves ``kvfs#`` to kvfs."""
    with loop_device(DRIVE_BYTES) as drive:
        uuid = json.loads(machine.sh(f"kvfs mkfs {drive.path} --json"))["uuid"]
        for source in (f"UUID={uuid}", f"kvfs#{uuid}"):
            machine.sh(f"mount -t kvfs {source} other")
            assert machine.sh(f"findmnt -n -o SOURCE {machine.place}/other").strip() == drive.path
            machine.sh("umount other")
        machine.sh(f"kvfs destroy UUID={uuid} --yes")
        code, said = machine.code_of(f"mount -t kvfs kvfs#{uuid} other")
        assert (code, "no device here has this UUID" in said) == (FAILED, True)


def test_a_mount_in_use_is_detached_when_asked(machine: Machine) -> None:
    machine.sh(f"mount -t kvfs c other -o capacity={CAPACITY}")
    code, said = machine.code_of("exec 3< other; umount other")
    assert code == FAILED
    assert "busy" in said
    machine.sh("umount -l other; mount -t kvfs c other; umount -f other")


def test_what_cannot_be_mounted_is_said_with_mounts_own_code(machine: Machine) -> None:
    code, said = machine.code_of("mount -t kvfs c other -o capacitiy=5G")
    assert code == MISUSED
    assert "capacitiy is no option of a kvfs mount" in said
    code, said = machine.code_of("mount -t kvfs missing other")
    assert code == FAILED
    assert "missing: No such file or directory" in said
    assert machine.code_of("mount -t kvfs c other -o remount,ro")[0] == MISUSED
    assert machine.code_of("mount -s -t kvfs c other -o capacitiy=5G && umount other")[0] == 0


def test_fstab_is_mounted_by_systemd_and_unmounted(machine: Machine) -> None:
    machine.systemd.run("systemctl", "start", "remote-fs.target")  # _netdev puts it there
    machine.systemd.wait_for(machine.unit, "ActiveState", "active")
    assert machine.is_mounted(machine.kv)
    assert machine.status(machine.kv)["capacity_bytes"] == 64 << 20
    machine.sh("echo stored > kv/tmp; mv kv/tmp kv/block")
    machine.systemd.run("systemctl", "stop", machine.unit)
    assert not machine.is_mounted(machine.kv)
    machine.systemd.run("systemctl", "restart", machine.unit)
    machine.systemd.run("systemctl", "restart", machine.unit)
    assert machine.sh("cat kv/block") == "stored\n"
    machine.sh("umount kv")
    machine.systemd.wait_for(machine.unit, "ActiveState", "inactive")


def test_a_guarded_mountpoint_takes_nothing_while_it_is_bare(machine: Machine) -> None:
    """By its line in fstab: the second mount, and a plain one, still work."""
    machine.sh("mount guarded")
    assert oct((machine.place / "guarded").stat().st_mode) != "0o40711"  # of the bare directory
    assert machine.sh("stat -c %a guarded") == "711\n"
    machine.sh("echo stored > guarded/tmp; mv guarded/tmp guarded/block; umount guarded")
    with pytest.raises(OSError, match="not permitted") as refused:
        (machine.place / "guarded" / "block").write_bytes(b"")
    assert refused.value.errno == errno.EPERM
    machine.sh("mount guarded; cat guarded/block; echo more > guarded/tmp; rm guarded/tmp")
    machine.sh("kvfs umount --unguard guarded; touch guarded/x; rm guarded/x")
    code, said = machine.code_of("kvfs umount --unguard guarded")
    assert code == 11
    assert "nothing is mounted" in said


def test_what_cannot_be_guarded_is_served_and_said(machine: Machine) -> None:
    machine.sh("touch other/left")
    code, said = machine.code_of(f"mount -t kvfs c other -o guard,capacity={CAPACITY}")
    assert code == 0
    assert "other is not guarded: it is not empty" in said
    machine.sh("umount other; rm other/left")
    # ramfs has no such flag.
    machine.sh("mkdir ram; mount -t ramfs none ram; mkdir ram/kv")
    code, said = machine.code_of("mount -t kvfs c ram/kv -o guard")
    assert code == 0
    assert "ram/kv is not guarded: its file system has no immutable flag" in said
    machine.sh("umount ram/kv; umount ram")


def test_logrotate_takes_the_log_and_the_server_goes_on_in_a_new_one(machine: Machine) -> None:
    log = "/var/log/kvfs/kv.log"
    machine.sh(f"mkdir -p /var/log/kvfs; mount -t kvfs c other -o log_file={log}")
    pid = machine.status(machine.place / "other")["server_pid"]
    machine.sh("logrotate --force --state /run/logrotate.state /etc/logrotate.d/kvfs")
    assert "serving" in machine.sh(f"cat {log}.1")
    assert machine.sh(f"stat -c '%a %U' {log}") == "640 root\n"
    machine.sh(f"kill -HUP {pid}")
    machine.sh("umount other")
    now = machine.sh(f"cat {log}")
    assert "settings reloaded" in now
    assert "serving" not in now
