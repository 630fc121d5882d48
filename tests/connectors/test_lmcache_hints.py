"""LMCache's adapters by kvfs's plug-in: what the configuration says of a salt reaches kvfs."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.connectors.connector import Connector, ConnectorFailed, Drivers
from tests.connectors.contract import MIB
from tests.connectors.test_vllm_hints import CAPACITY_BYTES, small
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import ROOT, Mounted

__all__ = ["small"]

pytestmark = pytest.mark.connectors

DRIVER: Final = ("lmcache_l2",)
KEPT, ONCE, FLOOD = list(range(6)), list(range(10, 16)), list(range(100, 250))
assert len(FLOOD) * MIB > 3 * CAPACITY_BYTES


def spec(kind: str, **more: object) -> dict[str, Any]:
    """The page's, with its place named as the driver wants it, and with another adapter."""
    page = (ROOT / "docs" / "hints.md").read_text()
    (shown,) = re.findall(r'^    (\{"type": "plugin".*?\}\}\})$', page, re.DOTALL | re.MULTILINE)
    read: dict[str, Any] = json.loads(shown)
    settings = {**read["adapter_params"], "base_path": "KV_DIR", "type": kind, **more}
    if kind == "fs":
        del settings["num_workers"]
    return {**read, "adapter_params": settings}


@pytest.fixture
def adapter(drivers: Drivers) -> Iterator[Connector]:
    """A process for an adapter."""
    adapter = drivers.take(*DRIVER)
    yield adapter
    drivers.give_back(adapter, *DRIVER)


def opens(adapter: Connector, small: Mounted, told: dict[str, Any]) -> str:
    """Open it on the small pool; its class."""
    kv_dir = small.path / "lmcache"
    kv_dir.mkdir()
    arguments = {"kv_dir": str(kv_dir), "size_bytes": MIB, "slots": 8, "spec": told}
    return str(adapter.call("open", **arguments))


@pytest.mark.parametrize(
    ("kind", "cls"), [("fs_native", "NativeConnectorL2Adapter"), ("fs", "FSL2Adapter")]
)
def test_a_flood_leaves_what_a_salt_is_worth(
    adapter: Connector, small: Mounted, kind: str, cls: str
) -> None:
    assert opens(adapter, small, spec(kind)) == cls
    for salt, keys in (("agents-7", KEPT), ("batch", ONCE)):
        adapter.call("use_salt", salt=salt)
        assert adapter.call("store", keys=keys, version=1)["ok"]
    until(lambda: small.status()["hints"]["taken"] == len(KEPT + ONCE), "the hints are taken")
    adapter.call("use_salt", salt="")
    for first in range(0, len(FLOOD), 8):
        assert adapter.call("store", keys=FLOOD[first : first + 8], version=1)["ok"]
    adapter.call("use_salt", salt="batch")
    assert adapter.call("lookup", keys=ONCE) == []
    adapter.call("use_salt", salt="agents-7")
    assert adapter.call("lookup", keys=KEPT) == KEPT
    done = adapter.call("load", keys=KEPT, version=1)
    assert done == {"loaded": KEPT, "intact": KEPT}
    until(lambda: small.status()["hints"]["taken"] == len(KEPT + ONCE + KEPT), "hinted anew")
    assert small.status()["hints"]["unknown"] == 0


def test_what_is_no_hint_is_said_at_the_start(adapter: Connector, small: Mounted) -> None:
    with pytest.raises(ConnectorFailed, match="session"):
        opens(adapter, small, spec("fs", hints={"a": "priority=3,session=s"}))
