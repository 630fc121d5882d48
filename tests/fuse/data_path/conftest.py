"""What tests of waits for a drive share."""

from collections.abc import Iterator

import pytest

from tests.support.devices.asking_desk import Desk


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.stop()
