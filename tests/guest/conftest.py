"""What runs in a guest (tests/support/machines/vm.py): a pool on its drive, nfsd, and two hosts.

``tests/system/test_nfsd.py`` boots it; a plain run of pytest passes this folder by.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.mounts.mounting import Mounted, run_kvfs
from tests.support.nfs.host import NfsHost
from tests.support.nfs.nfsd import Nfsd, sh

OUT: Final = Path("/out")
DRIVE: Final = Path("/drive")
#: Below it is what is exported.
PLACE: Final = Path("/srv")
_RESULTS: Final[dict[str, dict[str, Any]]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how each test ended; what fails before or after it is its own."""
    before = _RESULTS.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
    before["seconds"] = round(before["seconds"] + report.duration, 1)
    if report.outcome != "passed":
        before["outcome"] = report.outcome
        before["why"] = str(report.longrepr)
    # At once, for the guest may hang in the next.
    (OUT / "result.json").write_text(json.dumps(_RESULTS, indent=1))


class Rack:
    """All of it runs; what a test stops it starts again itself."""

    def __init__(self, mounted: Mounted, server: Nfsd, hosts: list[NfsHost]) -> None:
        self.mounted = mounted
        self.server = server
        self.hosts = hosts

    @property
    def path(self) -> Path:
        """The mount, as local processes see it."""
        return self.mounted.path

    def mount(self, host: int, version: str, more: str = "") -> Path:
        """Mount the pool on a client host."""
        return self.hosts[host].mount(self.path, version, more)

    @contextlib.contextmanager
    def another_pool(self, name: str) -> Iterator[Mounted]:
        """Mount another pool and export it from the same server."""
        (DRIVE / name).mkdir()
        log = ("--log-file", str(OUT / f"kvfs-{name}.log"))
        with Mounted(DRIVE / name, PLACE / name, *log, "--capacity=256MiB") as mounted:
            self.server.export(mounted.path)
            try:
                yield mounted
            finally:
                self.server.stop()
                run_kvfs("export", str(mounted.path), "--remove")
                mounted.close()
                self.server.start()

    def restart_mount(self) -> None:
        """Mount again what was killed, with the server stopped around it."""
        self.server.stop()
        self.mounted.start()
        self.server.start()


@contextlib.contextmanager
def rack(name: str, *flags: str, source: str = "") -> Iterator[Rack]:
    """Mount a new pool on the guest's drive, or the one on *source*, and export it to two hosts.

    Logs go to /out.
    """
    log = OUT / f"kvfs-{name}.log"
    sh("modprobe", "fuse")
    if not source:
        (DRIVE / name).mkdir()
    with contextlib.ExitStack() as stack:
        mounted = Mounted(source or DRIVE / name, PLACE / name, "--log-file", str(log), *flags)
        mounted.log_file = log
        PLACE.mkdir(exist_ok=True)
        stack.enter_context(mounted)
        server = stack.enter_context(Nfsd())
        print(server.export(mounted.path), flush=True)
        hosts = [stack.enter_context(NfsHost(number)) for number in (1, 2)]
        yield Rack(mounted, server, hosts)


@pytest.fixture(scope="session")
def drive() -> Path:
    """The guest's drive, with an XFS on it."""
    sh("mkfs.xfs", "-q", "/dev/vda")
    DRIVE.mkdir(exist_ok=True)
    sh("mount", "/dev/vda", str(DRIVE))
    return DRIVE


@pytest.fixture(params=["3", "4.2"], ids=["v3", "v4.2"], scope="module")
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def name(request: pytest.FixtureRequest, version: str) -> str:
    """A name that no other test uses."""
    return f"{request.node.originalname.removeprefix('test_')}-{version}"
