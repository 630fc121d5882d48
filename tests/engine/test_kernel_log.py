"""Which lines of the kernel's log are about the device, and what they tell."""

import os
import socket
from pathlib import Path

import pytest

from kvfs.machine import kernel_log
from kvfs.machine.kernel_log import DeviceErrors, KernelLog, device_names, errors_in
from tests.support.mounts.mounting import loop_device, mounted_at

READ, WRITE, NOTHING = DeviceErrors(reads=True), DeviceErrors(writes=True), DeviceErrors()
BOTH = DeviceErrors(reads=True, writes=True)
HEAD = b"3,1,1,-;"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"I/O error, dev loop0, sector 9 op 0x0:(READ) flags 0x0 phys_seg 1", READ),
        (b"critical medium error, dev sda, sector 9 op 0x0:(READ) flags 0x80700", READ),
        (b"I/O error, dev loop0, sector 9 op 0x1:(WRITE) flags 0x9800", WRITE),
        (b"I/O error, dev loop0, sector 0 op 0x2:(FLUSH) flags 0x800", WRITE),
        (b"operation not supported error, dev loop0, sector 9 op 0x9:(WRITE_ZEROES)", NOTHING),
        (b"I/O error, dev loop0, sector 9 op 0x3:(DISCARD) flags 0x0", NOTHING),
        (b"loop0: writeback error on inode 199, offset 4096, sector 204880", WRITE),
        (b'XFS (loop0): metadata I/O error in "xfs_imap_to_bp" at daddr 0x180', BOTH),
        (b"XFS (loop0): Ending clean mount", NOTHING),
    ],
)
def test_a_line_tells_what_failed(line: bytes, found: DeviceErrors) -> None:
    assert errors_in(HEAD + line) == found


@pytest.mark.needs_loop
def test_only_lines_about_the_device_count(tmp_path: Path) -> None:
    """A line that the kernel takes from us is as good as one of its own (/dev/kmsg)."""
    with (
        loop_device(400 << 20, format_xfs=True) as path,
        mounted_at(tmp_path / "xfs", path) as xfs,
    ):
        name = os.path.basename(path)
        assert device_names(os.stat(path).st_rdev) == {name}
        fd = os.open(xfs, os.O_RDONLY)
        log = KernelLog(fd)
        try:
            for other in (f"dev {name}7, op 0x0:(READ)", f"dev x{name}, op 0x0:(READ)"):
                Path("/dev/kmsg").write_text(f"<6>kvfs-test: I/O error, {other}\n")
            assert log.errors() == NOTHING
            Path("/dev/kmsg").write_text(f"<6>kvfs-test: I/O error, dev {name}, op 0x0:(READ)\n")
            assert log.errors() == READ
            assert log.errors() == NOTHING
        finally:
            log.close()
            os.close(fd)


def test_a_file_system_in_memory_has_no_device() -> None:
    assert device_names(os.stat("/dev/shm").st_dev) == set()


def test_a_device_that_lies_on_itself_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel makes one; what is in /sys may still be anything, in a container."""
    (tmp_path / "7:0" / "slaves").mkdir(parents=True)
    (tmp_path / "7:0" / "slaves" / "again").symlink_to(tmp_path / "7:0")
    monkeypatch.setattr(kernel_log, "_DEVICE", f"{tmp_path}/{{major}}:{{minor}}")
    assert device_names(os.makedev(7, 0)) == {"7:0"}


def test_a_flood_of_lines_is_read_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = os.stat(tmp_path).st_dev
    (tmp_path / f"{os.major(device)}:{os.minor(device)}").mkdir()
    (name,) = os.listdir(tmp_path)
    monkeypatch.setattr(kernel_log, "_DEVICE", f"{tmp_path}/{{major}}:{{minor}}")
    monkeypatch.setattr(kernel_log, "_RECORDS_MAX", 4)
    fd = os.open(tmp_path, os.O_RDONLY)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        log = KernelLog(fd)
        os.close(fd)
        log.close()
        log._fd = ours.fileno()
        for number in range(8):
            error = b"I/O error, " if number == 6 else b""
            theirs.send(HEAD + error + b"dev %s, op 0x0:(READ)" % name.encode())
        assert [log.errors() for _ in range(3)] == [NOTHING, READ, NOTHING]
