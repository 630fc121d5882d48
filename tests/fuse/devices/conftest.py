"""Drives for mounts: blank ones, one that fails or falls silent on demand, and mounts of three."""

import contextlib
from collections.abc import Iterator

import pytest

from kvfs.core.source_list import listed
from tests.fuse.conftest import fail_if_any, require_passthrough
from tests.support.devices.failing_drive import FailingDrive, failing_drive
from tests.support.mounts.drives import blank_drives
from tests.support.mounts.mounting import Mounted, skip_without_mounts, workplace


@pytest.fixture
def drive() -> Iterator[FailingDrive]:
    skip_without_mounts()
    with failing_drive() as made:
        yield made


def skip_without_server(data_path: str) -> None:
    """Skip where nothing can be mounted, and on the *data_path* that has no server."""
    skip_without_mounts()
    if data_path == "native":
        pytest.skip("a declared difference: there is no server")


@contextlib.contextmanager
def mounted_drives(data_path: str, capacity_bytes: int, *expected: str) -> Iterator[Mounted]:
    """Yield a mount of a new pool on three drives; in the end its log holds no error.

    But for those that the test brings about, with one of the texts *expected*.
    """
    skip_without_server(data_path)
    flags = (f"--data-path={data_path}", f"--capacity={capacity_bytes}")
    with (
        workplace("disk") as place,
        blank_drives() as drives,
        Mounted(listed(drives), place / "kv", *flags) as made,
    ):
        if data_path == "passthrough":
            require_passthrough(made)
        yield made
        made.stop()
        words = ("starting it again", *expected)
        fail_if_any([line for line in made.errors() if not any(word in line for word in words)])
