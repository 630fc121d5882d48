"""Checksums on a real mount: what rots on the device is a miss, and never served."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import crcmod.predefined
import pytest

from kvfs.core.errors import WrongBytes
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [pytest.mark.needs_fuse, pytest.mark.one_data_path]

BLOCK_BYTES = 300_000
#: The portable library is the oracle.
ORACLE = crcmod.predefined.mkCrcFun("crc-32c")


def store(mount: Mounted, name: str) -> bytes:
    data = os.urandom(BLOCK_BYTES)
    (mount.path / f"{name}.tmp").write_bytes(data)
    (mount.path / f"{name}.tmp").rename(mount.path / name)
    return data


def extent_of(mount: Mounted, name: str) -> Path:
    ino = (mount.path / name).stat().st_ino
    return Path(mount.source) / "extents" / f"{ino & 0xFF:02x}" / f"{ino:016x}"


def rot(extent: Path) -> None:
    """Change one byte behind everybody's back."""
    with extent.open("r+b") as file:
        file.seek(BLOCK_BYTES // 2)
        (byte,) = file.read(1)
        file.seek(BLOCK_BYTES // 2)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


@pytest.fixture
def served() -> Iterator[Mounted]:
    skip_without_mounts()
    flags = ("--set", "checksum_share=1", "--set", "verify=open")
    with blank_place() as place, small_mount(place, *flags) as mount:
        yield mount


def test_the_checksum_of_a_stored_block_is_an_attribute(served: Mounted) -> None:
    """[life-checksum] The CRC32C of its bytes, once they are durable."""
    data = store(served, "block")
    run_kvfs("sync", str(served.path))
    told = os.getxattr(served.path / "block", "user.kvfs.crc32c")
    assert told == b"%08x" % ORACLE(data)
    (served.path / "block").rename(served.path / "renamed")
    run_kvfs("sync", str(served.path))
    assert os.getxattr(served.path / "renamed", "user.kvfs.crc32c") == told
    with (served.path / "renamed").open("r+b") as file:
        file.write(b"other")
        with pytest.raises(OSError, match="No data"):
            os.getxattr(served.path / "renamed", "user.kvfs.crc32c")


def test_verify_drops_a_block_with_other_bytes_and_keeps_it_aside(served: Mounted) -> None:
    right = store(served, "right")
    store(served, "wrong")
    run_kvfs("sync", str(served.path))
    rot(extent_of(served, "wrong"))
    told = run_kvfs("verify", "--json", str(served.path), check=False)
    assert told.returncode == WrongBytes.exit_code
    found = json.loads(told.stdout)
    assert (found["blocks"], found["wrong"]) == (2, 1)
    assert not (served.path / "wrong").exists()
    assert (served.path / "right").read_bytes() == right
    until(lambda: served.status()["checksums"]["quarantined_blocks"] == 1, "it is kept aside")
    assert served.status()["checksums"]["wrong"] == 1
    again = json.loads(run_kvfs("verify", "--json", str(served.path)).stdout)
    assert (again["blocks"], again["wrong"]) == (1, 0)
    served.stop()
    assert "in quarantine: inode" in run_kvfs("fsck", served.source).stdout


def test_a_block_of_before_the_start_is_compared_at_its_first_open(served: Mounted) -> None:
    right, _ = store(served, "right"), store(served, "wrong")
    run_kvfs("sync", str(served.path))
    wrong = extent_of(served, "wrong")
    served.stop()
    rot(wrong)
    served.start()
    with pytest.raises(FileNotFoundError):
        (served.path / "wrong").read_bytes()
    assert (served.path / "right").read_bytes() == right
    assert (served.path / "right").read_bytes() == right
    status = served.status()["checksums"]
    assert (status["right"], status["wrong"]) == (1, 1)
