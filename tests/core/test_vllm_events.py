"""Events as vLLM's: which names tell a block, and the bytes. vLLM's own code reads them in
tests/connectors/test_vllm_hints.py.
"""

import struct

import pytest

from kvfs.bridges.vllm_events import KnownBlock, batch_of_event, block_of

HASH = "0123456789abcdef" * 3 + "fedcba9876543210"
PATH = f"/vllm/model_0a1b_r0/012/34_g3/{HASH}.bin"


def test_a_name_of_vllms_tier_tells_hash_and_group() -> None:
    assert block_of(PATH) == KnownBlock(0xFEDCBA9876543210, 3)


@pytest.mark.parametrize(
    "path",
    [
        "/vllm/model_0a1b_r0/config.json",
        PATH.replace("_r0/", "_r1/"),
        PATH.replace("/012/", "/112/"),
        PATH.replace(".bin", ".bin.tmp"),
        PATH.replace("fed", "fe"),
        f"/sglang/{HASH}_model_0_1.bin",
        "/vllm/\udcff",
    ],
)
def test_other_names_tell_none(path: str) -> None:
    assert block_of(path) is None
    assert batch_of_event({"event": "stored", "time": 1.0, "path": path, "bytes": 1}) is None


def test_the_bytes_are_msgpack() -> None:
    removed = batch_of_event({"event": "evicted", "time": 2.5, "path": PATH, "bytes": 1})
    assert removed == (
        b"\x92\xcb" + struct.pack(">d", 2.5) + b"\x91\x85"
        b"\xacblock_hashes\x91\xcf\xfe\xdc\xba\x98\x76\x54\x32\x10"
        b"\xa4type\xacBlockRemoved\xa6medium\xa7STORAGE\xa9group_idx\x03\xa8locality\xa5LOCAL"
    )


@pytest.mark.parametrize("kind", ["hello", "quiet", "missing", "new"])
def test_events_of_no_block_say_nothing(kind: str) -> None:
    assert batch_of_event({"event": kind, "path": PATH, "time": 1.0}) is None
