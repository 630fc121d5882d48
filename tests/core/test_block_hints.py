"""What a directory of a tier is called by the hints socket, where that is, and what may come."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.bridges.block_hints import WISHES_MAX, HintedPlace, LaterWishes, place_of
from kvfs.bridges.envelope import BlockWish
from kvfs.core.hints import Do
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


def test_a_wish_is_new_once_for_each_message() -> None:
    wishes, keep, drop = LaterWishes(), BlockWish(Do.RETAIN, 80), BlockWish(Do.DEMOTE)
    assert wishes.remember("m", [("a", keep), ("b", drop)]) == [("a", keep), ("b", drop)]
    assert wishes.remember("m", [("a", keep), ("c", keep)]) == [("c", keep)]
    assert wishes.remember("n", [("a", drop)]) == [("a", drop)]
    assert [wishes.of(name) for name in "abcd"] == [drop, drop, keep, None]


def test_wishes_for_blocks_that_never_come_are_bounded() -> None:
    wishes, keep = LaterWishes(), BlockWish(Do.RETAIN, 80)
    wishes.remember("m", [("first", keep)])
    wishes.remember("m", [(f"{number}", keep) for number in range(WISHES_MAX)])
    assert wishes.of("first") is None
    assert wishes.of("0") == keep
