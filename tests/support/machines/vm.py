"""A machine with another kernel: Debian's, in QEMU, with this machine's /usr and this tree in it.

``boot(kernel("6.12"), out, "-m", "pytest", ...)`` runs one command of this tree's Python there and
returns when the machine is off. The guest sees this machine's /usr and /etc and the tree at their
own paths, writes to memory, has no network but what it makes in itself, and an empty drive
/dev/vda. What it leaves in /out is in *out*: ``result.json`` is its answer.
"""

import json
import lzma
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.machines.kernels import Kernel
from tests.support.mounts.mounting import ROOT

PROGRAMS: Final = ("qemu-system-x86_64", "busybox", "cpio", "depmod", "ip")
#: Arguments of pytest in a guest: the options of pyproject.toml pass its folder by, and end what
#: takes too long elsewhere.
PYTEST_INSIDE: Final = (
    *("-o", "addopts=--import-mode=importlib --strict-markers", "-p", "no:cacheprovider"),
    *("-o", "timeout=0", "-o", "faulthandler_timeout=1700"),
    *("-v", "--no-header", "--color=no", "--tb=short"),
)
#: Emulation is some ten times slower than a machine, also than a busy one.
_SLOWER: Final = 10
#: What the guest needs to see its drive and this machine's files; the rest is loaded from there.
_FIRST_MODULES: Final = ("virtio_pci", "virtio_blk", "9pnet_virtio", "9p", "overlay")
_DRIVE_BYTES: Final = 8 << 30
_MEMORY: Final = "4G"
#: Emulated, 5-level tables cost much.
_PROCESSOR: Final = "max,la57=off"
#: A panic ends it, since it may not start again.
_KERNEL_LINE: Final = "console=ttyS0 panic=-1 loglevel=5 mitigations=off nokaslr"
_LAST_LINES: Final = 60
#: What vm_init.sh calls before it sees this machine's programs.
_APPLETS: Final = [
    "sh",
    "mount",
    "insmod",
    "umount",
    "mkdir",
    "ln",
    "rm",
    "cp",
    "touch",
    "switch_root",
]
#: As the kernel calls it, with what it wants loaded.
_MODPROBE: Final = '#!/bin/sh\nexec /usr/sbin/modprobe -d {place} "$@"\n'


class Ran(NamedTuple):
    """What a guest did."""

    status: int | None
    """Exit status of its command; None when it never came to its end."""
    result: Any
    """What it wrote to /out/result.json, or None."""
    console: Path
    """All that its kernel and its command printed."""
    wall_s: float

    def last_lines(self) -> str:
        """Return the end of its console."""
        return _last_lines(self.console)


def why_no_vm() -> str | None:
    """Return why this machine cannot run a guest, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"needs {' and '.join(missing)}" if missing else None


def boot(
    kernel: Kernel,
    out: Path,
    *arguments: str,
    wait_s: float,
    shares: Sequence[Path] = (),
    drives: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
) -> Ran:
    """Run Python with *arguments* in a guest that has *modules*, in the tree's folder.

    *out* is an empty directory; *shares* are directories outside the tree that the guest sees as
    well, read-only; *drives* are images of more drives, /dev/vdb on, and stay as they are. Raises
    AssertionError when the guest is not off after *wait_s*.
    """
    began_s = time.monotonic()
    console = out / "console.log"
    paths = [ROOT, *shares] if kernel.place.is_relative_to(ROOT) else [ROOT, kernel.place, *shares]
    tags = {f"share{number}": path for number, path in enumerate(paths)}
    (out / "shares").write_text("".join(f"{tag} {path}\n" for tag, path in tags.items()))
    own = {"HOME": "/root", "MODPROBE_OPTIONS": f"-d {kernel.place}"}
    named = {**own, "KVFS_TEST_SLOWER": f"{_SLOWER}", **(environment or {})}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in named.items()]
    lines += [f"/usr/sbin/modprobe -a {shlex.join(modules)}"] * bool(modules)
    command = shlex.join([sys.executable, *arguments])
    (out / "command").write_text("\n".join([*lines, f"cd {ROOT}", f"exec {command}", ""]))
    with tempfile.TemporaryDirectory(prefix="kvfs-vm-") as made, console.open("wb") as output:
        shown = {"usr": Path("/usr"), "etc": Path("/etc"), **tags}
        try:
            subprocess.run(
                list(_qemu(kernel, Path(made), shown, drives, out)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=wait_s,
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise AssertionError(f"after {wait_s} s:\n{_last_lines(console)}") from None
        except subprocess.CalledProcessError as error:
            msg = f"QEMU ended with {error.returncode}:\n{_last_lines(console)}"
            raise AssertionError(msg) from None
    status, result = out / "status", out / "result.json"
    return Ran(
        int(status.read_text()) if status.exists() else None,
        json.loads(result.read_text()) if result.exists() else None,
        console,
        time.monotonic() - began_s,
    )


def _qemu(
    kernel: Kernel, place: Path, shown: Mapping[str, Path], drives: Sequence[Path], out: Path
) -> Iterator[str]:
    """Yield the words of the command line; what the guest starts from is made in *place*."""
    drive = place / "drive"
    with drive.open("wb") as file:
        file.truncate(_DRIVE_BYTES)
    yield from ("qemu-system-x86_64", "-nodefaults", "-no-reboot", "-display", "none")
    yield from ("-accel", accelerator(), "-cpu", _PROCESSOR, "-smp", "2", "-m", _MEMORY)
    yield from ("-kernel", str(kernel.image), "-initrd", str(_initramfs(kernel, place)))
    yield from ("-append", _KERNEL_LINE, "-serial", "stdio", "-device", "virtio-rng-pci")
    yield from ("-drive", f"file={drive},if=virtio,format=raw,cache=unsafe,discard=unmap")
    for image in drives:
        yield from ("-drive", f"file={image},if=virtio,format=raw,snapshot=on")
    local = "local,security_model=none,multidevs=remap"
    for tag, path in shown.items():
        yield from ("-virtfs", f"{local},path={path},mount_tag={tag},readonly=on")
    yield from ("-virtfs", f"{local},path={out},mount_tag=out")


def accelerator() -> str:
    """Return how QEMU runs a guest: on the processor if that has what it takes, else emulated."""
    flags = Path("/proc/cpuinfo").read_text().split()
    usable = {"vmx", "svm"} & set(flags) and os.access("/dev/kvm", os.R_OK | os.W_OK)
    return "kvm" if usable else "tcg,thread=multi"


def _initramfs(kernel: Kernel, place: Path) -> Path:
    """Make the file system from which the guest starts: busybox, modules, and vm_init.sh."""
    init = (ROOT / "tests" / "support" / "machines" / "vm_init.sh").read_text()
    modules = kernel.modules_for(*_FIRST_MODULES)
    return packed(kernel, place, init, modules)


def packed(kernel: Kernel, place: Path, init: str, modules: Sequence[Path]) -> Path:
    """Pack busybox, *modules* in their order and the program *init* for a start of *kernel*."""
    tree = place / "initramfs"
    for name in ("bin", "modules"):
        (tree / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, tree / "bin")
    for applet in _APPLETS:
        (tree / "bin" / applet).symlink_to("busybox")
    (tree / "init").write_text(init)
    (tree / "modprobe").write_text(_MODPROBE.format(place=kernel.place))
    for name in ("init", "modprobe"):
        (tree / name).chmod(0o755)
    for number, path in enumerate(modules):
        data, name = path.read_bytes(), path.name
        if name.endswith(".xz"):
            data, name = lzma.decompress(data), name.removesuffix(".xz")
        (tree / "modules" / f"{number:02}-{name}").write_bytes(data)
    made = place / "initramfs.cpio"
    names = "\n".join(str(path.relative_to(tree)) for path in tree.rglob("*"))
    with made.open("wb") as output:
        cpio = ("cpio", "--quiet", "-o", "-H", "newc")
        subprocess.run(cpio, input=names.encode(), stdout=output, cwd=tree, check=True)
    return made


def _last_lines(console: Path) -> str:
    return "\n".join(console.read_text(errors="replace").splitlines()[-_LAST_LINES:])
