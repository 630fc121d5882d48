"""A mount of this machine that hangs holds up nobody else."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.core.errors import SourceBusy
from kvfs.devices import xfs_tools
from tests.support.devices.pools import refused
from tests.support.mounts.mounting import COMMAND_WAIT_S, ROOT, loop_device, workplace

#: In a mount namespace of its own, a FUSE mount that nobody serves; a pool is made beside it.
BESIDE_A_HUNG_MOUNT = """\
import sys
from kvfs.devices import format_source, open_source
from kvfs.machine.mount_table import unmount
from mount.fuse import kernel
mountpoint, image = sys.argv[1:]
fd = kernel.open_device()
kernel.mount(fd, mountpoint, "/never", read_only=False)
format_source(image, capacity_bytes=100 << 20, fill=lambda pool_fd: None)
with open_source(image) as device:
    print(device.fs_type)
print(unmount(mountpoint, lazy=True))
"""


@pytest.mark.needs_loop
@pytest.mark.needs_fuse
def test_a_mount_that_hangs_holds_up_neither_mkfs_nor_mount() -> None:
    with workplace() as place:
        (place / "kv").mkdir()
        program = [
            sys.executable,
            "-c",
            BESIDE_A_HUNG_MOUNT,
            str(place / "kv"),
            str(place / "image"),
        ]
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", *program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=COMMAND_WAIT_S,
            check=False,
        )
    assert done.stdout == "xfs\nNone\n", "it is still mounted for everybody else\n" + done.stderr


#: As above, run by a process that may make no namespace (a unit's RestrictNamespaces=yes does the
#: same): the program hangs in its look at the mount.
WITHOUT_A_NAMESPACE = """\
import subprocess, sys
from kvfs.machine.mount_table import unmount
from mount.fuse import kernel
mountpoint, image = sys.argv[1:]
fd = kernel.open_device()
kernel.mount(fd, mountpoint, "/never", read_only=False)
program = '''
import sys
from kvfs.devices.xfs_tools import run_tool
run_tool("mkfs.xfs", sys.argv[1], timeout_s=1.0)
'''
command = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", program, image]
done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
unmount(mountpoint, lazy=True)
print(done.stderr)
"""


@pytest.mark.needs_loop
@pytest.mark.needs_fuse
def test_a_program_that_cannot_go_apart_is_told_of_and_given_up() -> None:
    with workplace() as place, loop_device(400 << 20) as device:
        (place / "kv").mkdir()
        program = [sys.executable, "-c", WITHOUT_A_NAMESPACE, str(place / "kv"), device]
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", *program],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=COMMAND_WAIT_S,
            check=False,
        )
    told = "mkfs.xfs gets no mount namespace of its own (Operation not permitted)"
    assert told in done.stdout, done.stdout + done.stderr
    assert "mkfs.xfs did not finish in 1 s; does a mount on this machine hang" in done.stdout


def test_a_journal_that_gives_no_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hangs").write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    (tmp_path / "hangs").chmod(0o755)
    monkeypatch.setattr(xfs_tools, "find_tool", lambda _: str(tmp_path / "hangs"))
    monkeypatch.setattr(xfs_tools, "_ANSWER_WAIT_S", 0.1)
    with refused(SourceBusy, "kv.img: no answer from xfs_logprint in 0.1 s"):
        xfs_tools.journal_is_dirty("/dev/none", "kv.img")
