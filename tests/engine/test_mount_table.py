"""Which mount a path lies on, and what the kernel says of it."""

import os
from pathlib import Path

import pytest

from kvfs.bench import comparison
from kvfs.machine.mount_table import (
    Elsewhere,
    Mount,
    kvfs_at,
    mount_at,
    mount_of,
    mounts,
    note_of,
    resolve_mountpoint,
)

MOUNTINFO = """\
1 0 254:0 / / rw,noatime shared:1 - ext4 /dev/root rw
2 1 0:20 / /kv rw - tmpfs tmpfs rw
3 1 0:21 / /kv rw,nosuid - fuse.kvfs /dev/nvme0n1 rw,user_id=0
4 1 0:22 / /with\\040blank rw - xfs /dev/loop0 rw
5 1 0:23 / /k rw - xfs /dev/loop1 rw
"""
KV = Mount("/kv", "fuse.kvfs", "/dev/nvme0n1", "0:21", ("rw", "nosuid", "rw", "user_id=0"))


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mount table of our own, in place of the kernel's."""
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTINFO)
    monkeypatch.setattr("kvfs.machine.mount_table._MOUNTINFO", str(path))
    return path


@pytest.mark.parametrize(
    ("path", "mountpoint", "fs_type"),
    [
        ("/kv", "/kv", "fuse.kvfs"),
        ("/kv/model/a", "/kv", "fuse.kvfs"),
        ("/kvx", "/", "ext4"),
        ("/with blank/a", "/with blank", "xfs"),
        ("/", "/", "ext4"),
    ],
)
def test_the_deepest_and_latest_mount_counts(path: str, mountpoint: str, fs_type: str) -> None:
    found = mount_of(path)
    assert found is not None
    assert (found.mountpoint, found.fs_type) == (mountpoint, fs_type)


def test_of_mounts_on_one_point_the_topmost_is_told_whole() -> None:
    assert mount_at("/kv") == KV
    assert mount_at("/kv/model") is None
    assert mount_at("/with blank") == Mount("/with blank", "xfs", "/dev/loop0", "0:22", ("rw",) * 2)


def test_a_mount_that_was_put_beneath_another_is_below_it(table: Path) -> None:
    """The kernel lists it later, because it is younger (MOVE_MOUNT_BENEATH)."""
    rows = MOUNTINFO.replace("3 1 0:21", "3 9 0:21")
    table.write_text(f"{rows}9 2 0:29 / /kv rw - fuse.kvfs /younger rw\n")
    assert [mount.device for mount in mounts() if mount.mountpoint == "/kv"] == [
        "0:20",
        "0:29",
        "0:21",
    ]
    assert mount_at("/kv") == KV


def test_without_any_line_there_is_no_mount(table: Path) -> None:
    table.write_text("")
    assert mount_of("/kv") is None
    on = comparison._mount_of("/kv")
    assert (on.mountpoint, on.fs_type) == ("/", "unknown"), "a benchmark can run there all the same"


def test_a_mount_is_a_kvfs_if_the_topmost_there_is() -> None:
    assert kvfs_at("/kv") == KV
    assert kvfs_at("/k") is None
    assert kvfs_at("/nowhere") is None


@pytest.mark.parametrize("target", ["/kv", "near", "../there/near"])
def test_links_are_followed_up_to_a_kvfs_and_not_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    readlink = os.readlink

    def outside(path: str) -> str:
        assert not path.startswith("/kv"), "its server may hang"
        return readlink(path)

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "link").symlink_to(target)
    (tmp_path / "there" / "near").symlink_to("/kv")
    monkeypatch.setattr("os.readlink", outside)
    assert resolve_mountpoint(f"{tmp_path}/there/link/model/a") == "/kv/model/a"
    assert resolve_mountpoint(f"{tmp_path}/there/link") == "/kv"


def test_links_that_lead_nowhere_have_an_end(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    assert resolve_mountpoint(f"{tmp_path}/one/kv").startswith(str(tmp_path))
    assert resolve_mountpoint(f"{tmp_path}/none/../kv") == f"{tmp_path}/kv"


def test_so_many_links_are_followed_as_the_kernel_follows(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number}").symlink_to(f"{number + 1}")
    (tmp_path / "50").mkdir()
    assert resolve_mountpoint(f"{tmp_path}/10/kv") == f"{tmp_path}/50/kv"
    assert resolve_mountpoint(f"{tmp_path}/9/kv") == f"{tmp_path}/49/kv"


def test_of_mounts_in_many_namespaces_some_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Elsewhere(KV, 100 + number, "bash", "mnt:[4]") for number in range(9)]
    monkeypatch.setattr("kvfs.machine.mount_table.elsewhere", lambda _: iter(found))
    told = note_of(lambda _: True)
    assert "process 102 " in told
    assert told.count("nsenter") == 3
