"""What docs/containers.md says: clients and servers in namespaces, and whose control group pays.

A rootless container is a user, mount and pid namespace (unshare(1)); a limit of memory is a control
group of version 1 or 2, whichever the machine has.
"""

import contextlib
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.errors import NotRoot
from tests.fuse.conftest import require_passthrough
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import Mounted, run_kvfs, workplace
from tests.support.rules.documented import of

pytestmark = pytest.mark.needs_fuse

NOBODY: Final = 65534
MIB: Final = 1 << 20
BLOCK_BYTES: Final = 48 * MIB
#: What a program's own pages may come to beside those of a block.
BESIDE_BYTES: Final = 4 * MIB


@pytest.fixture(params=["daemon", "passthrough"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount whose server is on the host."""
    flags = (f"--data-path={request.param}", "--capacity=256M")
    # On a disk: what lies on a tmpfs cannot be dropped from memory.
    with workplace("disk") as place, Mounted(place / "pool", place / "kv", *flags) as mount:
        if request.param == "passthrough":
            require_passthrough(mount)
        mount.path.chmod(0o777)
        yield mount


class Group:
    """A control group for memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run *command* in it."""
        into = f'echo $$ >{self.folder}/cgroup.procs && exec "$@"'
        return subprocess.run(
            ["sh", "-c", into, "sh", *command], check=True, capture_output=True, text=True
        )

    def figure(self, *names: str) -> int:
        """Return the bytes that memory.stat has under the first of *names* that is there."""
        lines = (self.folder / "memory.stat").read_text().splitlines()
        figures = dict(line.split() for line in lines)
        return int(next(figures[name] for name in names if name in figures))

    @property
    def cached_bytes(self) -> int:
        """Pages of files, in memory or on drives."""
        return self.figure("cache", "file")


def controller() -> Path | None:
    """Return the folder in which groups with a limit of memory can be made; None: nowhere here."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, (kind, _, options) = Path(line.split()[4]), line.split(" - ")[1].split()
        if kind == "cgroup" and "memory" in options.split(","):
            return place
        if kind == "cgroup2" and "memory" in (place / "cgroup.subtree_control").read_text().split():
            return place
    return None


@pytest.fixture
def group() -> Iterator[Group]:
    """A group of memory of the test's own."""
    place = controller()
    if place is None:
        pytest.skip("no control group for memory can be made")
    with own_group(place) as one:
        yield one


@contextlib.contextmanager
def own_group(place: Path) -> Iterator[Group]:
    """Yield a group below *place*, and remove it."""
    folder = place / f"kvfs-test-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield Group(folder)
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(), "all of its processes have ended")
        folder.rmdir()


def test_a_rootless_container_stores_as_the_page_shows(mounted: Mounted) -> None:
    (said,) = of("docs/containers.md", "unshare ")
    subprocess.run(
        ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "sh", "-c",
         said.replace("/kv/", f"{mounted.path}/")],
        check=True,
    )  # fmt: skip
    block = mounted.path / "block"
    assert block.read_text() == "bytes\n"
    assert block.stat().st_uid == NOBODY
    assert os.getxattr(block, "user.kvfs.state") == b"published"


def test_a_close_in_a_containers_pid_namespace_publishes(mounted: Mounted) -> None:
    """The server is in a pid namespace above it, and sees who closes."""
    script = f"echo bytes >{mounted.path}/block"
    container = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c")
    subprocess.run([*container, script], check=True)
    block = mounted.path / "block"
    until(lambda: os.getxattr(block, "user.kvfs.state") == b"published", "its maker has ended")
    assert block.read_text() == "bytes\n"
    assert mounted.status()["unverified_blocks"] == 0


def test_a_server_in_a_user_namespace_is_refused_in_one_line() -> None:
    with workplace() as place:
        done = run_kvfs(
            "mount", f"{place}/pool", f"{place}/kv", check=False,
            prefix=("unshare", "--user", "--map-root-user"),
        )  # fmt: skip
    assert done.returncode == NotRoot.exit_code
    assert re.fullmatch(r"kvfs: .*use no user namespace.*\n", done.stderr)


def test_the_clients_group_pays_for_its_blocks(group: Group, mounted: Mounted) -> None:
    before_bytes = group.cached_bytes
    group.run(*copy(mounted, "block"))
    assert group.cached_bytes - before_bytes == pytest.approx(BLOCK_BYTES, abs=BESIDE_BYTES)


def test_a_limit_of_a_client_costs_no_store(group: Group, mounted: Mounted) -> None:
    limit_bytes = BLOCK_BYTES // 2
    v1, v2 = group.folder / "memory.limit_in_bytes", group.folder / "memory.max"
    (v1 if v1.exists() else v2).write_text(str(limit_bytes))
    for name in ("one", "two"):
        group.run(*copy(mounted, name))
        assert (mounted.path / name).stat().st_size == BLOCK_BYTES
    assert group.cached_bytes <= limit_bytes
    assert mounted.status()["restarts"] == 0


def copy(mounted: Mounted, name: str) -> list[str]:
    """Return the command that stores the block *name*."""
    return [
        "dd", "if=/dev/zero", f"of={mounted.path}/{name}", "bs=1M", f"count={BLOCK_BYTES // MIB}",
    ]  # fmt: skip


@pytest.mark.parametrize(("path", "pays"), [("passthrough", False), ("daemon", True)])
def test_a_servers_group_pays_on_the_daemon_path_and_for_the_index(
    group: Group, path: str, pays: bool
) -> None:
    with workplace("disk") as place:
        into = ("sh", "-c", f'echo $$ >{group.folder}/cgroup.procs && exec "$@"', "sh")
        flags = (f"--data-path={path}", "--capacity=256M")
        with Mounted(place / "pool", place / "kv", *flags, prefix=into) as mount:
            if path == "passthrough":
                require_passthrough(mount)
            assert group.figure("shmem") >= 16 * MIB, "the index"
            before_bytes = group.cached_bytes
            subprocess.run(copy(mount, "block"), check=True, capture_output=True)
            paid_bytes = group.cached_bytes - before_bytes
    assert paid_bytes == pytest.approx(BLOCK_BYTES if pays else 0, abs=BESIDE_BYTES)
