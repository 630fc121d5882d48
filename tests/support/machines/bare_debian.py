"""A bare Debian 12: made from its packages, with its own systemd, and its own apt.

It sees nothing of this machine but what is put into ``/srv`` and the packages that it may install,
which lie in it as a repository: it has no network. It boots in QEMU with a kernel of its own, or,
in a minute, as process 1 of namespaces of its own on this kernel. There it does steps as an
operator would type them, across reboots, until it is off.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.machines.kernels import Kernel
from tests.support.machines.own_systemd import own_group, remove_group
from tests.support.machines.vm import accelerator, packed
from tests.support.mounts.mounting import ROOT, loop_device

_BASE: Final = "systemd-sysv,udev,kmod,dbus,ca-certificates"
_IMAGE: Final = "4G"
_DRIVE_BYTES: Final = 1 << 30
_FIRST_MODULES: Final = ("virtio_pci", "virtio_blk", "ext4")
_INIT: Final = """\
#!/bin/busybox sh
mkdir -p /proc /dev /new
mount -t proc proc /proc
mount -t devtmpfs dev /dev
for module in /modules/*; do insmod "$module"; done
mount -t ext4 -o rw /dev/vda /new
umount /proc
mount --move /dev /new/dev
exec switch_root /new /sbin/init
"""
#: Each step is a file; the number of the last one begun outlives a reboot.
_DRIVER: Final = """\
#!/bin/sh
cd /srv
systemctl is-system-running --wait >/dev/null 2>&1
last=$(cat /proof/last 2>/dev/null || echo 0)
while :; do
    last=$((last + 1))
    [ -e "/proof/steps/$last" ] || break
    echo "$last" >/proof/last
    sync
    echo "PROOF $last begins at $(cut -d' ' -f1 /proc/uptime)"
    sh -e "/proof/steps/$last" </dev/null 2>&1
    code=$?
    grep -q 'systemctl reboot' "/proof/steps/$last" && sleep infinity
    echo "PROOF $last ends with $code"
    [ "$code" = 0 ] || break
done
systemctl --no-pager --failed
systemctl poweroff
"""
_UNIT: Final = """\
[Unit]
After=multi-user.target
[Service]
ExecStart=sh /proof/driver
Environment=DEBIAN_FRONTEND=noninteractive HOME=/root TERM=dumb COLUMNS=120
StandardOutput={output}
StandardError=inherit
[Install]
WantedBy=default.target
"""


_NAMESPACES: Final = ("--fork", "--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup")
_BOOT: Final = """\
set -eu
cd {root}
mount --bind . .
cd {root}
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 none sys/fs/cgroup
mount -t tmpfs -o mode=755 none dev
mount -t tmpfs none run
mount -t tmpfs none tmp
mkdir dev/shm dev/pts tmp/old
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
for node in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0 fuse:10:229; do
    IFS=: read -r name major minor <<END
$node
END
    mknod -m 666 dev/$name c $major $minor
done
mknod -m 660 dev/nvme0n1 b 7 {number}
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
pivot_root . tmp/old
umount -l /tmp/old
exec env -i container=kvfs-proof PATH=/usr/sbin:/usr/bin /sbin/init --log-target=console
"""


class Step(NamedTuple):
    """What one step did."""

    text: str
    code: int | None
    """None if it never came to its end, as a reboot does."""
    said: str


class BareDebian:
    """One machine: its root file system is an image, and /dev/nvme0n1 is its other drive."""

    def __init__(self, place: Path, kernel: Kernel, files: Sequence[Path], install: str) -> None:
        """Make it below *place*: *files* lie in its /srv, and apt there can install *install*."""
        self._place, self._kernel = place, kernel
        self._root = place / "root"
        place.mkdir()
        _sh("mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", f"--include={_BASE}",
            "bookworm", str(self._root))  # fmt: skip
        for file in files:
            shutil.copy(file, self._root / "srv")
        self._fill_repository(install)
        shutil.copytree(
            kernel.place / "lib" / "modules" / kernel.release,
            self._root / "lib" / "modules" / kernel.release,
            symlinks=True,
            ignore=shutil.ignore_patterns("gpu", "sound", "media", "wireless", "iio", "staging"),
        )
        _sh("depmod", "-b", str(self._root), kernel.release)
        (self._root / "etc" / "hostname").write_text("bare\n")
        (self._root / "etc" / "fstab").write_text("")

    def _fill_repository(self, install: str) -> None:
        """Fetch what apt would, with this machine's network, and make a repository of it."""
        apt = f"apt-get update -qq && apt-get install -qq -y --download-only {install}"
        for name in ("resolv.conf", "hosts"):
            shutil.copy(f"/etc/{name}", self._root / "etc" / name)
        _sh("chroot", str(self._root), "sh", "-c", f"cd /srv && {apt}")
        repository = self._root / "repository"
        repository.mkdir()
        for archive in (self._root / "var" / "cache" / "apt" / "archives").glob("*.deb"):
            archive.rename(repository / archive.name)
        listed = _sh("dpkg-scanpackages", "--multiversion", ".", cwd=repository)
        (repository / "Packages").write_text(listed)
        sources = self._root / "etc" / "apt"
        (sources / "sources.list").write_text("deb [trusted=yes] file:/repository ./\n")

    def run_in_qemu(self, steps: Sequence[str], wait_s: float) -> list[Step]:
        """Let it do *steps* until one fails, or *wait_s* is over."""
        self._give(steps, "file:/dev/ttyS0")
        # A getty hangs the line up when it begins (vhangup(2)), and the output is lost.
        _sh("systemctl", "--root", str(self._root), "mask", "serial-getty@ttyS0.service")
        (self._root / "etc" / "fstab").write_text("/dev/vda / ext4 defaults 0 1\n")
        image, drive = self._place / "image", self._place / "drive"
        _sh("mkfs.ext4", "-q", "-d", str(self._root), str(image), _IMAGE)
        with drive.open("wb") as file:
            file.truncate(_DRIVE_BYTES)
        console = self._place / "console.log"
        with console.open("wb") as output:
            ran = subprocess.Popen(
                self._qemu(image, drive), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                ran.wait(wait_s)
            except subprocess.TimeoutExpired:
                ran.kill()
                ran.wait()
        return _steps(steps, console.read_text(errors="replace"))

    def run_in_namespaces(self, steps: Sequence[str], wait_s: float) -> list[Step]:
        """Let it do *steps* until one fails, or *wait_s* is over. A reboot starts it anew."""
        self._give(steps, "append:/proof/log")
        until_s = time.monotonic() + wait_s
        with loop_device(_DRIVE_BYTES) as drive:
            ended = -signal.SIGHUP
            while ended == -signal.SIGHUP:  # reboot_pid_ns() of the kernel; power off is SIGINT
                ended = self._boot_here(drive, until_s - time.monotonic())
        # What a step that failed has left guarded could not be removed.
        subprocess.run(["chattr", "-R", "-f", "-i", self._root / "kv"], check=False)
        return _steps(steps, (self._root / "proof" / "log").read_text(errors="replace"))

    def _boot_here(self, drive: str, wait_s: float) -> int:
        number = os.minor(os.stat(drive).st_rdev)
        boot = self._place / "boot"
        boot.write_text(_BOOT.format(root=self._root, number=number))
        group = own_group()
        shell = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        command = ["unshare", *_NAMESPACES, "--propagation", "private", "--kill-child=KILL"]
        with (self._place / "console.log").open("ab") as output:
            ran = subprocess.Popen(
                ["sh", "-c", shell, "sh", *command, "sh", str(boot)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            try:
                return ran.wait(max(1.0, wait_s))
            except subprocess.TimeoutExpired:
                ran.kill()
                return ran.wait()
            finally:
                remove_group(group)

    def _give(self, steps: Sequence[str], output: str) -> None:
        """Have *steps* done at its start, and what they say go to *output* of systemd.exec(5)."""
        proof = self._root / "proof"
        (proof / "steps").mkdir(parents=True)
        for number, text in enumerate(steps, 1):
            (proof / "steps" / str(number)).write_text(f"{text}\n")
        (proof / "driver").write_text(_DRIVER)
        unit = self._root / "etc" / "systemd" / "system" / "proof.service"
        unit.write_text(_UNIT.format(output=output))
        _sh("systemctl", "--root", str(self._root), "enable", "proof.service")

    def _qemu(self, image: Path, drive: Path) -> list[str]:
        initramfs = packed(
            self._kernel, self._place, _INIT, self._kernel.modules_for(*_FIRST_MODULES)
        )
        line = "console=ttyS0 root=/dev/vda mitigations=off nokaslr quiet systemd.show_status=no"
        return [
            *("qemu-system-x86_64", "-nodefaults", "-display", "none", "-serial", "stdio"),
            *("-accel", accelerator(), "-cpu", "max,la57=off", "-smp", "2", "-m", "2G"),
            *("-kernel", str(self._kernel.image), "-initrd", str(initramfs), "-append", line),
            *("-drive", f"file={image},if=virtio,format=raw,cache=unsafe"),
            *("-drive", f"file={drive},if=none,id=flash,format=raw,cache=unsafe"),
            *("-device", "nvme,drive=flash,serial=kvfs", "-device", "virtio-rng-pci"),
        ]


def _steps(texts: Sequence[str], console: str) -> list[Step]:
    found = []
    for number, text in enumerate(texts, 1):
        begun = re.search(rf"PROOF {number} begins[^\n]*\n", console)
        if begun is None:
            break
        ended = re.search(rf"PROOF {number} ends with (\d+)", console)
        following = ended or re.search(rf"PROOF {number + 1} begins", console)
        said = console[begun.end() : following.start() if following else len(console)]
        found.append(Step(text, int(ended[1]) if ended else None, said.replace("\r", "")))
    return found


def _sh(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
