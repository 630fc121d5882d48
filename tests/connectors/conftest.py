"""Where connectors run: their interpreter, a mount for each test class, a directory for each test.

KVFS_TEST_REFERENCE=DIR runs the same tests in DIR on a native file system, which tells a
connector's fault from kvfs's; KVFS_TEST_SOURCE chooses what lies under the mount, as in
tests/fuse/conftest.py.
"""

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.connectors.connector import Drivers, interpreter
from tests.connectors.skips import listed
from tests.fuse.conftest import SOURCE, pool_source
from tests.support.mounts.mounting import (
    Mounted,
    Reference,
    kernel_has_passthrough,
    why_no_mounts,
    workplace,
)

REFERENCE = os.environ.get("KVFS_TEST_REFERENCE")
LOOP_SIZE_BYTES = 2 << 30


@pytest.fixture(scope="session")
def connectors_python() -> Path:
    """The Python with the connectors in it; CI must have one, elsewhere the tests skip."""
    python = interpreter()
    if python is None:
        why = "no connectors here: sh tests/connectors/install.sh .venv-connectors"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    return python


@pytest.fixture(autouse=True)
def no_open_file_stays() -> None:
    """Takes the place of the check for all tests: driver processes stay, with their pipes."""


@pytest.fixture(scope="session")
def drivers(connectors_python: Path) -> Iterator[Drivers]:
    """Driver processes, kept from test to test."""
    drivers = Drivers(connectors_python)
    yield drivers
    drivers.close()


@pytest.fixture(scope="class")
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted | Reference]:
    """A fresh pool, mounted with the class's data path; or a native directory in its place."""
    if REFERENCE:
        yield Reference(Path(REFERENCE))
        return
    if (why := why_no_mounts()) is not None:
        pytest.skip(why)
    with (
        workplace("disk") as directory,
        pool_source(SOURCE, LOOP_SIZE_BYTES) as source,
        Mounted(source, directory / "kv", f"--data-path={request.cls.data_path}") as mounted,
    ):
        auto = "passthrough" if kernel_has_passthrough() else "daemon"
        wanted = auto if request.cls.data_path == "auto" else request.cls.data_path
        assert mounted.status()["data_path"] == wanted
        yield mounted


@pytest.fixture
def kv_dir(mount: Mounted | Reference) -> Iterator[Path]:
    """A fresh directory on the mount for one test; gone after it."""
    directory = Path(tempfile.mkdtemp(prefix="test-", dir=mount.path))
    yield directory
    shutil.rmtree(directory)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI nothing is skipped that docs/connectors/README.md does not list."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and item.originalname not in listed():
        report.outcome = "failed"
        report.longrepr = f"skipped, and not in docs/connectors/README.md's list: {report.longrepr}"
    return report
