"""The tree under test: ``mounted`` (one mount per data path) and ``kv`` (a directory).

Modules share the mounts, since to mount and unmount takes a second. A module whose tests need a
pool with nothing else in it has ``own_mounted`` instead, and a module that finds an error in the
log of the shared one, or leaves names on it, fails and ends it.

With KVFS_TEST_REFERENCE=DIR the same tests run in DIR on a native file system: what is no declared
difference must pass there too, which is how the tests themselves are checked.
KVFS_TEST_SOURCE=tmpfs|disk|xfs|three|encrypted chooses what lies under the mount (default tmpfs;
three: three drives).
"""

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.callers import Caller
from tests.support.clients.stepping import SLOWER
from tests.support.kernel.wires import Wires
from tests.support.mounts.left_behind import loops_under, mounts_under
from tests.support.mounts.mounting import (
    PASSTHROUGH_WORKS,
    Mounted,
    Reference,
    kernel_has_passthrough,
    loop_device,
    own_tmpfs,
    run_kvfs,
    skip_without_mounts,
    workplace,
)

REFERENCE = os.environ.get("KVFS_TEST_REFERENCE")
SOURCE = os.environ.get("KVFS_TEST_SOURCE", "tmpfs")
#: A test that takes longer hangs; its mount is aborted so that it fails instead.
TEST_WAIT_S = 280.0 * SLOWER
EVERYWHERE = ("/",)
LOOP_SIZE_BYTES = 4 << 30
NOBODY = 65534
OTHER = 65533


@contextlib.contextmanager
def pool_source(kind: str, size_bytes: int = LOOP_SIZE_BYTES) -> Iterator[str]:
    """Yield a source: a directory on a tmpfs or on disk, or a loop device for XFS.

    All are blank, but for several drives, and for an encrypted one: these have an empty pool, whose
    key the kernel has.
    """
    if kind == "xfs":
        with loop_device(size_bytes) as device:
            yield device
    elif kind == "three":  # half of it together: all lies in memory
        with contextlib.ExitStack() as stack:
            drives = [stack.enter_context(loop_device(size_bytes // 6)) for _ in range(3)]
            run_kvfs("mkfs", *drives)
            yield drives[0]
    elif kind == "encrypted":
        # No discard passes dm-crypt: what was written once stays in memory.
        with loop_device(size_bytes // 4) as device:
            run_kvfs("mkfs", device, "--encrypt=ephemeral")
            try:
                yield device
            finally:
                run_kvfs("destroy", device, "--yes")
    elif kind == "tmpfs":
        with own_tmpfs() as directory:
            yield str(directory)
    else:
        with workplace(kind) as directory:
            (directory / "pool").mkdir()
            yield str(directory / "pool")


def require_passthrough(mounted: Mounted) -> None:
    """Skip when this mount has no passthrough; fail where CI runs on a kernel that has it."""
    status = mounted.status()
    if status["data_path"] == "passthrough":
        return
    why = f"data path is {status['data_path']}: {status.get('data_path_reason', 'no reason')}"
    if os.environ.get("CI") == "true" and kernel_has_passthrough():
        pytest.fail(why)
    pytest.skip(why)


PATHS = ["native"] if REFERENCE else ["daemon", "passthrough"]


@contextlib.contextmanager
def fresh_mount(path: str) -> Iterator[Mounted]:
    """Mount a fresh pool on the data path *path*; in the end its log must hold no error."""
    skip_without_mounts()
    if path == "passthrough" and not PASSTHROUGH_WORKS:
        pytest.skip("the passthrough data path is not there yet")
    with (
        workplace("disk") as directory,
        pool_source(SOURCE) as source,
        Mounted(source, directory / "kv", f"--data-path={path}") as mount,
    ):
        if path == "passthrough":
            require_passthrough(mount)
        yield mount
        mount.stop()
        fail_if_any(mount.errors())


def fail_if_any(errors: list[str]) -> None:
    """Fail with what a server logged as errors."""
    if errors:
        pytest.fail("the server logged errors:\n" + "\n".join(errors), pytrace=False)


class SharedMounts:
    """One mount per data path, made when it is first asked for."""

    def __init__(self, kept: set[str]) -> None:
        """*kept* is told which mounts and loop devices stay."""
        self._kept = kept
        self._made: dict[str, tuple[Mounted, contextlib.ExitStack]] = {}

    def get(self, path: str) -> Mounted:
        """Return the mount on the data path *path*."""
        if path not in self._made:
            before = mounts_under(EVERYWHERE) | loops_under(EVERYWHERE)
            with contextlib.ExitStack() as stack:
                mount = stack.enter_context(fresh_mount(path))
                self._made[path] = (mount, stack.pop_all())
            after = mounts_under(EVERYWHERE) | loops_under(EVERYWHERE)
            self._kept |= after - before
        return self._made[path][0]

    def end(self, path: str) -> None:
        """Unmount the one on *path*; who asks next gets another."""
        self._made.pop(path)[1].close()

    def close(self) -> None:
        """Unmount all."""
        for path in list(self._made):
            self.end(path)


@pytest.fixture(scope="session")
def shared_mounts(kept_mounts: set[str]) -> Iterator[SharedMounts]:
    """The mounts that modules share."""
    with contextlib.closing(SharedMounts(kept_mounts)) as shared:
        yield shared


@pytest.fixture(scope="module", params=PATHS)
def mounted(
    request: pytest.FixtureRequest, shared_mounts: SharedMounts
) -> Iterator[Mounted | Reference]:
    """A mount on each data path, one after the other, with no names on it."""
    if REFERENCE:
        yield Reference(Path(REFERENCE))
        return
    mount = shared_mounts.get(request.param)
    known = len(mount.errors())
    yield mount
    errors = mount.errors()[known:]
    try:
        if errors or os.listdir(mount.path):
            shared_mounts.end(request.param)
    finally:  # a server that has failed is why the rest did, too
        fail_if_any(errors)


@pytest.fixture(scope="module", params=PATHS)
def own_mounted(request: pytest.FixtureRequest) -> Iterator[Mounted | Reference]:
    """A mount that the module shares with no other."""
    if REFERENCE:
        yield Reference(Path(REFERENCE))
        return
    with fresh_mount(request.param) as mount:
        yield mount


@pytest.fixture
def kv(mounted: Mounted | Reference) -> Iterator[Path]:
    """A fresh directory in the mounted tree, open to other uids; gone after the test."""
    watchdog = threading.Timer(TEST_WAIT_S, mounted.abort)
    watchdog.daemon = True
    watchdog.start()
    directory = Path(tempfile.mkdtemp(prefix="test-", dir=mounted.path))
    directory.chmod(0o755)
    try:
        yield directory
        # An alias goes when its linker has ended, also between its listing and its unlink.
        while directory.exists():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(directory)
    finally:
        watchdog.cancel()


@pytest.fixture
def kvfs_only() -> None:
    """Marks a declared difference: the test would not hold on a native file system."""
    if REFERENCE:
        pytest.skip("a declared difference from native file systems")


@pytest.fixture
def mount(mounted: Mounted | Reference) -> Mounted:
    """The mount itself, for tests that ask the server; skips on a native file system."""
    if isinstance(mounted, Reference):
        pytest.skip("there is no server on a native file system")
    return mounted


@pytest.fixture(scope="module")
def nobody() -> Iterator[Caller]:
    """A process of a uid without any privilege, umask 022."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with Caller(NOBODY, NOBODY) as caller:
        yield caller


@pytest.fixture(scope="module")
def other() -> Iterator[Caller]:
    """A process of a second such uid."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with Caller(OTHER, OTHER) as caller:
        yield caller


@pytest.fixture(params=[False, True], ids=["python", "compiled"])
def wires(request: pytest.FixtureRequest) -> Iterator[Wires]:
    """A fresh channel between two sockets."""
    with contextlib.closing(Wires(compiled=request.param)) as made:
        yield made
