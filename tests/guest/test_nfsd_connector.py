"""SGLang's HiCacheFile, as its wheel has it, on two client hosts of one tier behind nfsd.

``tests/connectors`` installs it and drives it; a page that one host has stored the other one loads.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.connectors.connector import Connector, interpreter
from tests.guest.conftest import Rack, rack
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import run_kvfs

MIB: Final = 1 << 20
PAGE_BYTES: Final = 1 * MIB
KEYS: Final = list(range(8))
MORE: Final = list(range(100, 108))
#: Emulated, the import of torch alone takes minutes.
ANSWER_WAIT_S: Final = 900.0
#: Some lease times of the server (nfsd.py).
BACK_WAIT_S: Final = 120.0


@pytest.fixture(scope="module")
def served(drive: Path) -> Iterator[Rack]:
    with rack("connector", "--capacity=512MiB") as made:
        yield made
        assert made.mounted.errors() == []


@pytest.fixture(scope="module")
def sglangs() -> Iterator[list[Connector]]:
    """Two processes with SGLang's class, which begin at the same time."""
    python = interpreter()
    assert python is not None, "no connectors here: sh tests/connectors/install.sh .venv-connectors"
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(2):
            connector = Connector(python, "sglang_file", wait_s=ANSWER_WAIT_S)
            stack.callback(connector.kill)
            made.append(connector)
        yield made


def found_by(sglang: Connector, keys: list[int]) -> list[int]:
    """Return the pages of *keys* that it says are there."""
    found = sglang.call("lookup", keys=keys)
    assert isinstance(found, list)
    return found


def test_sglang_on_two_hosts(served: Rack, version: str, sglangs: list[Connector]) -> None:
    """Hits across them, each with the right bytes; what is evicted is a miss for both.

    On v4.2 not at once: what nfsd delegated to a host is a hit there until it is given back, which
    is when the host has not used it for a lease time.
    """
    roots = [served.mount(host, version) / f"kv-{version}" for host in (0, 1)]
    roots[0].mkdir()
    one, two = sglangs
    until(roots[1].exists, "the directory at the other host")
    for sglang, root in zip(sglangs, roots, strict=True):
        sglang.send("open", kv_dir=str(root), size_bytes=PAGE_BYTES)
    print("SGLang", [sglang.answer() for sglang in sglangs])
    for by, other, keys in ((one, two, KEYS), (two, one, MORE)):
        assert by.call("store", keys=keys, version=1)["ok"]
        until(
            lambda other=other, keys=keys: found_by(other, keys) == keys,  # type: ignore[misc]
            "hits at the other host",
        )
        for sglang in (other, by):
            loaded = sglang.call("load", keys=keys, version=1)
            assert loaded == {"loaded": keys, "intact": keys}
    assert two.call("prefix", keys=[*KEYS, 999]) == len(KEYS)
    run_kvfs("evict", str(served.path / f"kv-{version}"))
    until(lambda: served.server.delegations() == 0, "all is given back", BACK_WAIT_S)
    for sglang in sglangs:
        until(lambda sglang=sglang: found_by(sglang, KEYS + MORE) == [], "misses")  # type: ignore[misc]
        assert sglang.call("load", keys=KEYS, version=1)["loaded"] == []
    assert two.call("store", keys=KEYS, version=2)["ok"]
    until(lambda: found_by(one, KEYS) == KEYS, "hits again")
    assert one.call("load", keys=KEYS, version=2) == {"loaded": KEYS, "intact": KEYS}
    for sglang in sglangs:
        sglang.call("close")
