"""What a directory of a tier is called by the hints socket, and where that is."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.bridges.block_hints import HintedPlace, place_of
from tests.support.mounts.mounting import ROOT

MOUNTINFO = """\
1 0 254:0 / / rw - ext4 /dev/root rw
2 1 0:21 / /no/such/kv rw - fuse.kvfs /dev/nvme0n1 rw
3 1 0:21 /tenant /no/such/cache rw - fuse.kvfs /dev/nvme0n1 rw
4 1 0:22 /tenant /no/such/alone rw - fuse.kvfs /dev/nvme1n1 rw
"""


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount table of our own, in place of the kernel's."""
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    monkeypatch.setattr("kvfs.machine.mount_table._MOUNTINFO", str(tmp_path / "mountinfo"))


@pytest.mark.parametrize(
    ("directory", "name", "socket"),
    [
        ("/no/such/kv", "", "/run/kvfs/no-such-kv.hints"),
        ("/no/such/kv/vllm/", "/vllm", "/run/kvfs/no-such-kv.hints"),
        ("/no/such/cache/a/../b", "/tenant/b", "/run/kvfs/no-such-kv.hints"),
        ("/no/such/alone", "/tenant", "/run/kvfs/no-such-alone.hints"),
    ],
)
def test_a_directory_has_a_name_below_the_mountpoint(
    directory: str, name: str, socket: str
) -> None:
    assert place_of(directory) == HintedPlace(name, socket)
    assert place_of(directory, "/its/own") == HintedPlace(name, "/its/own")


def test_elsewhere_nobody_takes_hints(tmp_path: Path) -> None:
    assert place_of("/tmp") is None
    (tmp_path / "mountinfo").unlink()
    assert place_of("/no/such/kv") is None


def test_a_bridge_needs_nothing_beside_the_engine() -> None:
    """It is installed with `pip --no-deps`: the rest of kvfs's packages is not there."""
    program = "import kvfs.bridges.block_hints, kvfs.bridges.envelope"
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
