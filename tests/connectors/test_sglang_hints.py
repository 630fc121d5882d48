"""Hints of requests in SGLang reach kvfs by kvfs's storage, which is SGLang's own (``file``)."""

import json
import re
from collections.abc import Iterator
from typing import Final

import pytest

from tests.connectors.connector import Connector, Drivers
from tests.connectors.contract import MIB
from tests.connectors.test_vllm_hints import CAPACITY_BYTES, ENVELOPE, small
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import ROOT, Mounted

__all__ = ["small"]

pytestmark = pytest.mark.connectors

DRIVER: Final = ("sglang_hints",)
PAGE_BYTES: Final = MIB
SYSTEM: Final = list(range(16))
"""The pages of the system prompt, of 64 tokens: what the envelope retains."""
REST: Final = list(range(16, 20))
FLOOD: Final = list(range(100, 100 + 3 * CAPACITY_BYTES // PAGE_BYTES))


@pytest.fixture
def storage(drivers: Drivers, small: Mounted) -> Iterator[Connector]:
    """The storage by the page's configuration, but for its place."""
    page = (ROOT / "docs" / "hints.md").read_text()
    (shown,) = re.findall(r"extra-config \\\n +'(\{.*?\})'", page, re.DOTALL)
    storage = drivers.take(*DRIVER)
    kv_dir = str(small.path / "sglang")
    names = storage.call("open", extra_config=shown, kv_dir=kv_dir, size_bytes=PAGE_BYTES)
    assert names == ["KvfsHiCacheFile", "HiCacheFile"]
    yield storage
    drivers.give_back(storage, *DRIVER)


@pytest.mark.parametrize("hinted", [True, False])
def test_a_flood_leaves_what_the_envelope_retains(
    storage: Connector, small: Mounted, hinted: bool
) -> None:
    """The pages of the system prompt are hits, the rest are not; without hints none is."""
    hints = ENVELOPE if hinted else None
    assert storage.call("look", before=[], keys=SYSTEM + REST, hints=hints) == 0
    assert storage.call("store", keys=SYSTEM + REST)
    if hinted:
        until(lambda: small.status()["hints"]["taken"] == len(SYSTEM + REST), "taken")
    for first in range(0, len(FLOOD), 8):
        keys = FLOOD[first : first + 8]
        assert storage.call("look", before=[], keys=keys, hints=None) == 0
        assert storage.call("store", keys=keys)
    kept = len(SYSTEM) if hinted else 0
    assert storage.call("look", before=[], keys=SYSTEM + REST, hints=None) == kept
    assert storage.call("look", before=[], keys=REST, hints=None) == 0
    done = storage.call("load", keys=SYSTEM, version=1)
    assert done == {"loaded": SYSTEM[:kept], "intact": SYSTEM[:kept]}


def test_pages_that_are_there_are_hinted_once_for_each_message(
    storage: Connector, small: Mounted
) -> None:
    """Also those before the ones that it looks for. None goes first before it is loaded."""
    assert storage.call("store", keys=SYSTEM + REST)
    keys = SYSTEM + REST
    hits = storage.call("look", before=SYSTEM, keys=REST, hints=ENVELOPE)
    assert hits == len(REST)
    until(lambda: small.status()["hints"]["taken"] == len(SYSTEM), "those that are retained")
    storage.call("load", keys=REST, version=1)
    until(lambda: small.status()["hints"]["taken"] == len(keys), "and the others, once loaded")
    again = {**ENVELOPE, "message_id": "m-2"}
    storage.call("look", before=SYSTEM, keys=REST, hints=again)
    until(lambda: small.status()["hints"]["taken"] == len(keys + SYSTEM), "once more")
    names = [path.name for path in (small.path / "sglang").iterdir()]
    wanted = [int(name[:16], 16) for name in sorted(names)[:3]]
    fetch = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0"}
    action = {**fetch, "payload": {"block_hashes": wanted}}
    storage.call("look", before=[], keys=keys, hints={**ENVELOPE, "actions": [action]})
    until(lambda: small.status()["hints"]["fetched"] == 3, "three are fetched")
    assert storage.call("hints")["unknown"] == 0


def test_without_a_server_of_hints_all_is_served(storage: Connector, small: Mounted) -> None:
    page = {"module_path": "kvfs.bridges.sglang_backend", "class_name": "KvfsHiCacheFile"}
    extra = json.dumps({**page, "hints_socket": str(small.path / "no.hints")})
    kv_dir = str(small.path / "other")
    storage.call("open", extra_config=extra, kv_dir=kv_dir, size_bytes=PAGE_BYTES)
    unknown = {**ENVELOPE, "protocol_version": "9"}
    for hints in (ENVELOPE, unknown, {"x": 1}):
        storage.call("look", before=[], keys=REST, hints=hints)
    assert storage.call("store", keys=REST)
    assert storage.call("look", before=[], keys=REST, hints=ENVELOPE) == len(REST)
    counted = storage.call("hints")
    assert (counted["sent"], counted["unknown"]) == (0, 4)
