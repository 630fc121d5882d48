"""The tree under test: ``mounted`` (one mount per module and data path) and ``kv`` (a directory).

With KVFS_TEST_REFERENCE=DIR the same tests run in DIR on a native file system: what is no declared
difference must pass there too, which is how the tests themselves are checked.
KVFS_TEST_SOURCE=tmpfs|disk|xfs chooses what lies under the mount (default tmpfs).
"""

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.callers import Caller
from tests.support.mounting import (
    PASSTHROUGH_WORKS,
    Mounted,
    Reference,
    kernel_has_passthrough,
    loop_device,
    own_tmpfs,
    skip_without_mounts,
    workplace,
)
from tests.support.wires import Wires

REFERENCE = os.environ.get("KVFS_TEST_REFERENCE")
SOURCE = os.environ.get("KVFS_TEST_SOURCE", "tmpfs")
#: A test that takes longer hangs; its mount is aborted so that it fails instead.
TEST_WAIT_S = 280.0
LOOP_SIZE_BYTES = 4 << 30
NOBODY = 65534
OTHER = 65533


@contextlib.contextmanager
def pool_source(kind: str, size_bytes: int = LOOP_SIZE_BYTES) -> Iterator[str]:
    """Yield a blank source: a directory on a tmpfs or on disk, or a loop device for XFS."""
    if kind == "xfs":
        with loop_device(size_bytes) as device:
            yield device
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


@pytest.fixture(scope="module", params=["native"] if REFERENCE else ["daemon", "passthrough"])
def mounted(request: pytest.FixtureRequest) -> Iterator[Mounted | Reference]:
    """A mount of a fresh pool, on each data path; one for all tests of a module."""
    if REFERENCE:
        yield Reference(Path(REFERENCE))
        return
    skip_without_mounts()
    if request.param == "passthrough" and not PASSTHROUGH_WORKS:
        pytest.skip("the passthrough data path is not there yet")
    flags = [f"--data-path={request.param}"]
    with (
        workplace("disk") as directory,
        pool_source(SOURCE) as source,
        Mounted(source, directory / "kv", *flags) as mount,
    ):
        if request.param == "passthrough":
            require_passthrough(mount)
        yield mount
        mount.stop()
        if errors := mount.errors():
            pytest.fail("the server logged errors:\n" + "\n".join(errors), pytrace=False)


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


@pytest.fixture
def wires() -> Iterator[Wires]:
    """A fresh channel between two sockets."""
    with contextlib.closing(Wires()) as made:
        yield made
