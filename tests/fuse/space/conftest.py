"""Two users of one pool, for tests of what one may take from the other."""

from collections.abc import Iterator

import pytest

from tests.support.clients.callers import Caller
from tests.support.mounts.bounded_pool import HONEST, HOSTILE


@pytest.fixture
def hostile() -> Iterator[Caller]:
    with Caller(HOSTILE, HOSTILE) as caller:
        yield caller


@pytest.fixture
def honest() -> Iterator[Caller]:
    with Caller(HONEST, HONEST) as caller:
        yield caller
