"""A real systemd that runs the shipped unit and nothing else, in namespaces of its own.

It is process 1 of a pid namespace and sees this machine's file systems by a private mount
namespace, so that all of it (services, mounts, the control socket) is gone when it is killed. Its
units are ours alone: nothing of the machine's own units starts here.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.mounts.mounting import ROOT

SYSTEMD: Final = "/lib/systemd/systemd"
UNIT: Final = ROOT / "systemd" / "kvfs@.service"
#: What a unit with default dependencies wants; here they do nothing.
_EMPTY_UNITS: Final = (
    *("sysinit.target", "basic.target", "shutdown.target", "local-fs.target"),
    *("multi-user.target", "umount.target", "system.slice", "try.target"),
    *("local-fs-pre.target", "remote-fs.target", "remote-fs-pre.target", "network.target"),
    *("network-online.target", "blockdev@.target"),
)
_EMPTY: Final = "[Unit]\nDefaultDependencies=no\n"
_BOOT_WAIT_S: Final = 60.0
_CALL_WAIT_S: Final = 90.0
#: systemd tells us of none of these; each look is a program of its own, or a system call.
_LOOK_S: Final = 0.05
_NEVER: Final = threading.Event()
_NAMESPACES: Final = ("--fork", "--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup")
_GENERATOR: Final = Path("/lib/systemd/system-generators/systemd-fstab-generator")
_CALLED: Final = {
    "kvfs": "from kvfs.cli.program import kvfs as main",
    "mount.kvfs": "from kvfs.cli.program import mount_kvfs as main",
    "umount.kvfs": "from kvfs.cli.program import umount_kvfs as main",
}
#: /etc/kvfs and an installed kvfs for the unit, everything that systemd writes in memory.
_BOOT: Final = """\
set -eu
# Copies of other tests' mounts would keep those busy.
findmnt --list --noheadings --output TARGET --types fuse,fuse.kvfs,xfs,ext4 |
    grep /kvfs-test- | grep --invert-match "^{place}" | sort --reverse |
    while read -r other; do umount --lazy "$other" || true; done
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs none /run
for path in etc usr/sbin; do
    mkdir -p /run/own/$path/upper /run/own/$path/work
    layers=upperdir=/run/own/$path/upper,workdir=/run/own/$path/work
    mount -t overlay -o lowerdir=/$path,$layers none /$path
done
mkdir -p /etc/kvfs
cp {place}/etc/* /etc/kvfs/
cp {place}/fstab /etc/fstab
cp {root}/logrotate/kvfs /etc/logrotate.d/kvfs || true
mount -t tmpfs none /var/log
mount -t tmpfs none /usr/local/bin
cp {place}/bin/kvfs /usr/local/bin/
for kind in kvfs fuse.kvfs; do
    cp {place}/bin/mount.kvfs /usr/sbin/mount.$kind
    cp {place}/bin/umount.kvfs /usr/sbin/umount.$kind
done
export container=kvfs-test SYSTEMD_GENERATOR_PATH={place}/generators
export SYSTEMD_UNIT_PATH={place}/units:/run/systemd/generator
exec {systemd} --system --unit=try.target --log-target=console --show-status=no
"""


class OwnSystemd:
    """It runs; ``systemctl`` and ``run`` act inside."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        """In the pid namespace of the tests."""

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run *command* in its namespaces, as the operator of its machine."""
        done = subprocess.run(
            self.inside(*command),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CALL_WAIT_S,
            check=False,
        )
        if check and done.returncode != 0:
            msg = f"{shlex.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
            raise AssertionError(msg)
        return done

    def inside(self, *command: str) -> list[str]:
        """Return the command line that runs *command* in its namespaces."""
        return ["nsenter", "-t", str(self.pid), "-m", "-p", "-u", "-i", "-n", "--", *command]

    def show(self, unit: str, name: str) -> str:
        """Return the property *name* of *unit*."""
        return self.run("systemctl", "show", unit, "--property", name, "--value").stdout.strip()

    def wait_for(self, unit: str, name: str, value: str) -> None:
        """Wait until the property *name* of *unit* is *value*. Raises AssertionError."""
        until_s = time.monotonic() + _BOOT_WAIT_S
        while (now := self.show(unit, name)) != value:
            if time.monotonic() > until_s:
                msg = f"{unit}: {name}={now}, not {value}"
                raise AssertionError(msg)
            _NEVER.wait(_LOOK_S)


@contextlib.contextmanager
def own_systemd(
    place: Path, settings: dict[str, str], *, fstab: str = "", units: dict[str, str] | None = None
) -> Iterator[OwnSystemd]:
    """Boot one whose /etc/kvfs has *settings*, texts by file name; *place* is empty, and its own.

    *fstab* is its /etc/fstab, *units* more texts by file name. mount(8) there has kvfs's helpers,
    and /var/log is empty. Raises AssertionError with what it printed when it does not come up.
    """
    _fill(place, settings, fstab, units or {})
    group = own_group()
    log = place / "systemd.log"
    private = ("--mount-proc", "--propagation", "private", "--kill-child=KILL")
    command = ["unshare", *_NAMESPACES, *private, "sh", str(place / "boot")]
    with log.open("wb") as output:
        shell = subprocess.Popen(
            # In its group before its cgroup namespace begins there; pid 1 dies with unshare.
            [*("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield OwnSystemd(_await_boot(shell, log))
    finally:
        shell.kill()
        shell.wait()
        remove_group(group)


def _fill(place: Path, settings: dict[str, str], fstab: str, units: dict[str, str]) -> None:
    for name in ("units", "etc", "generators", "bin"):
        (place / name).mkdir()
    for name, text in settings.items():
        (place / "etc" / name).write_text(text)
    for name, text in {**dict.fromkeys(_EMPTY_UNITS, _EMPTY), **units}.items():
        (place / "units" / name).parent.mkdir(exist_ok=True)
        (place / "units" / name).write_text(text)
    shutil.copy(UNIT, place / "units")
    (place / "fstab").write_text(fstab)
    if fstab:
        (place / "generators" / _GENERATOR.name).symlink_to(_GENERATOR)
    (place / "boot").write_text(_BOOT.format(place=place, root=ROOT, systemd=SYSTEMD))
    for name, imported in _CALLED.items():
        code = f"{imported}; raise SystemExit(main())"
        (place / "bin" / name).write_text(
            f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -P -c "{code}" "$@"\n'
        )
        (place / "bin" / name).chmod(0o755)


def _await_boot(shell: "subprocess.Popen[bytes]", log: Path) -> int:
    """Return the pid of its process 1 once it answers."""
    until_s = time.monotonic() + _BOOT_WAIT_S
    while time.monotonic() < until_s and shell.poll() is None:
        children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
        if children:
            booted = OwnSystemd(int(children[0]))
            answer = booted.run("systemctl", "is-system-running", check=False).stdout.strip()
            if answer in ("running", "degraded"):
                return booted.pid
        _NEVER.wait(_LOOK_S)
    msg = f"systemd did not come up:\n{log.read_text(errors='replace')}"
    raise AssertionError(msg)


def own_group() -> Path:
    """Make a control group for it, in the unified hierarchy wherever that is mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    root = next((line.split()[4] for line in lines if " - cgroup2 " in line), None)
    assert root is not None, "no cgroup2 is mounted; `mount -t cgroup2 none /sys/fs/cgroup` does it"
    group = Path(root) / f"kvfs-test-{os.getpid()}"
    group.mkdir()
    return group


def remove_group(group: Path) -> None:
    """Remove what ``own_group`` made, once its processes have ended."""
    until_s = time.monotonic() + _BOOT_WAIT_S
    while group.exists():
        for directory, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):  # a process of it ends just now
                os.rmdir(directory)
        assert time.monotonic() < until_s, f"{group} stays"
        _NEVER.wait(_LOOK_S)
