"""What the tests of the engine share."""

from collections.abc import Iterator

import pytest

from tests.support.store.stores import Host, host


@pytest.fixture
def running() -> Iterator[Host]:
    """Yield a host whose store runs on a new pool in memory."""
    with host() as made:
        made.start()
        yield made
