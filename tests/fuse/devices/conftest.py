"""A drive that fails or falls silent on demand, blank, for a mount on it."""

from collections.abc import Iterator

import pytest

from tests.support.devices.failing_drive import FailingDrive, failing_drive
from tests.support.mounts.mounting import skip_without_mounts


@pytest.fixture
def drive() -> Iterator[FailingDrive]:
    skip_without_mounts()
    with failing_drive() as made:
        yield made
