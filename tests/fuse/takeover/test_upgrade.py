"""``kvfs upgrade``: a server of another version takes the place of one that serves, or does not."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs import __version__
from kvfs.core.errors import NotMounted, ServeFailed
from tests.support.mounts.changed_version import Tree
from tests.support.mounts.mounting import (
    COMMAND_WAIT_S,
    Mounted,
    kernel_has_passthrough,
    own_tmpfs,
    run_kvfs,
)
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [
    pytest.mark.needs_fuse,
    pytest.mark.real_exec,
    pytest.mark.skipif(not kernel_has_passthrough(), reason="the kernel sends nothing again"),
]

#: It says what is wrong where the new server imports it.
CRASHES: Final = "raise RuntimeError('a mistake in the new version')"


@pytest.fixture
def mounted() -> Iterator[Mounted]:
    with blank_place() as place, small_mount(place) as mount:
        yield mount


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_another_version_follows_and_the_first_one_again(mounted: Mounted, tree: Tree) -> None:
    """[taken-over] What is open stays open, in the middle of a write; a lock stays."""
    (mounted.path / "kept").write_bytes(b"kept")
    with (mounted.path / "draft").open("xb", buffering=0) as draft:
        draft.write(b"one ")
        done = tree.kvfs("upgrade", str(mounted.path))
        assert done.stdout.startswith(f"version 9.8.7 follows {__version__}: process "), done.stderr
        draft.write(b"two ")
        assert (mounted.path / "kept").read_bytes() == b"kept"
        told = json.loads(run_kvfs("upgrade", str(mounted.path), "--json").stdout)
        assert (told["version"], told["version_before"]) == (__version__, "9.8.7")
        draft.write(b"three")
    (mounted.path / "draft").rename(mounted.path / "block")
    assert (mounted.path / "block").read_bytes() == b"one two three"
    server = mounted.server_pid
    mounted.adopt()
    assert mounted.server_pid == told["server_pid"] != server
    status = mounted.status()
    assert (status["upgrades"], status["restarts"]) == (2, 0)
    assert 0 < status["longest_pause_s"] < COMMAND_WAIT_S


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        (
            "kvfs/cli/serve.py",
            "import faulthandler",
            CRASHES,
            "of the new version no server can be had: it ended",
        ),
        ("mount/serve.py", "import contextlib", CRASHES, "a mistake in the new version"),
        (
            "mount/files/handles.py",
            "HANDLES_VERSION: Final = 1",
            "HANDLES_VERSION: Final = 2",
            "the table of open files is 1, and the new version has 2",
        ),
    ],
)
def test_a_version_that_cannot_follow_changes_nothing(
    mounted: Mounted, tree: Tree, path: str, old: str, new: str, said: str
) -> None:
    tree.change(path, old, new)
    done = tree.kvfs("upgrade", str(mounted.path))
    assert done.returncode == ServeFailed.exit_code
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    status = mounted.status()
    assert (status["server_pid"], status["version"]) == (mounted.server_pid, __version__)
    assert f"no upgrade: {said[:20]}" in mounted.log_file.read_text() or said in (
        mounted.log_file.read_text()
    )


def test_one_that_does_not_know_the_list_of_drives_changes_nothing(tree: Tree) -> None:
    """It would take the first drive for all, and the blocks of others for lost."""
    tree.change("mount/control/supervision.py", '{"list of drives": 1}', "{}")
    with (
        blank_place() as place,
        own_tmpfs() as one,
        own_tmpfs() as other,
        Mounted(f"{one},{other}", place / "kv", "--capacity=256M") as mount,
    ):
        done = tree.kvfs("upgrade", str(mount.path))
        assert done.returncode == ServeFailed.exit_code
        assert "the list of drives is 1, and the new version has None" in done.stderr
        assert mount.status()["server_pid"] == mount.server_pid


def test_one_that_fails_once_it_has_begun_gives_the_mount_back(
    mounted: Mounted, tree: Tree
) -> None:
    tree.change(
        "mount/serve.py",
        "    with contextlib.ExitStack",
        "    os._exit(9)\n    with contextlib.ExitStack",
    )
    with (mounted.path / "draft").open("xb", buffering=0) as draft:
        done = tree.kvfs("upgrade", str(mounted.path))
        assert done.returncode == ServeFailed.exit_code
        assert f"the new server failed, and version {__version__} serves" in done.stderr
        draft.write(b"goes on")
    assert (mounted.path / "draft").read_bytes() == b"goes on"
    mounted.adopt()
    assert mounted.status()["upgrades"] == 0
    assert "the version before serves again" in mounted.log_file.read_text()


def test_a_mount_without_a_supervisor_cannot_be_upgraded(mounted: Mounted) -> None:
    os.kill(mounted.supervisor_pid, 9)
    done = run_kvfs("upgrade", str(mounted.path), check=False)
    assert done.returncode == ServeFailed.exit_code
    assert "there is no supervisor any more" in done.stderr


def test_where_nothing_is_mounted_nothing_is_upgraded(tmp_path: Path) -> None:
    done = run_kvfs("upgrade", str(tmp_path), check=False)
    assert done.returncode == NotMounted.exit_code
