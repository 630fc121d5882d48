"""A directory of many names, listed by clients of nfsd.

The pool was filled outside (``tests/system/test_nfsd.py``) and is the second drive of the guest:
emulated, each name would cost some 20 ms.
"""

import json
import os
from collections.abc import Iterator
from typing import Final

import pytest

from tests.guest.conftest import Rack, rack
from tests.support.kernel.calls import read_file

FILLED: Final = "/dev/vdb"


@pytest.fixture(scope="module")
def served() -> Iterator[Rack]:
    with rack("names", source=FILLED) as made:
        yield made
        assert made.mounted.errors() == []


def test_all_names_are_listed(served: Rack, version: str) -> None:
    """By two hosts; the first name and the last can be read."""
    wanted = json.loads(read_file(served.path / "wanted"))
    for host in (0, 1):
        root = served.mount(host, version)
        found = os.listdir(root / "names")
        assert len(found) == wanted["count"]
        assert set(found) == {f"{number:06}" for number in range(wanted["count"])}
        for name in (min(found), max(found)):
            assert read_file(root / "names" / name) == b""
