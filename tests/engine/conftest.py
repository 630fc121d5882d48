"""What the tests of the engine share."""

from collections.abc import Iterator

import pytest

from tests.support.store.serving import Serving
from tests.support.store.stores import Host, host


@pytest.fixture
def running() -> Iterator[Host]:
    """Yield a host whose store runs on a new pool in memory."""
    with host() as made:
        made.start()
        yield made


@pytest.fixture
def in_pool() -> Iterator[Host]:
    """Yield a host whose store runs on a new pool, with its index in the pool."""
    with host(index_place="pool") as made:
        made.start()
        yield made


@pytest.fixture
def client() -> Iterator[Serving]:
    """Yield a client of a store that serves, with a loop of the test's."""
    with host() as made:
        serving = Serving(made)
        serving.tick()  # a range of inode numbers is there
        serving.tick()
        yield serving
