"""Each connector's way to store a block: what a second process sees at every step of it.

The calls are in tests/support/clients/connector_patterns.py; here stands what kvfs makes of them.
"""

import os
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.support.clients.connector_patterns import HEADER, KEY_BYTES, PATTERNS, SIZE
from tests.support.clients.stamped import stamped, state
from tests.support.clients.stepping import Stepping, until
from tests.support.kernel.calls import read_file

#: No file under that name.
ABSENT: Final = "absent"


class Expected(NamedTuple):
    """What is where at each step (path -> state), and after the connector's process has ended."""

    steps: dict[str, dict[str, str]]
    end: dict[str, str]
    content: dict[str, bytes]


def _renamed(temporary: str, final: str, data: bytes, *, closes: bool = True) -> Expected:
    """Return what a temporary file and a rename must look like."""
    steps = {
        "half": {temporary: "draft", final: ABSENT},
        "renamed": {temporary: ABSENT, final: "published"},
    }
    if closes:
        steps["closed"] = {temporary: "leased", final: ABSENT}
    return Expected(steps, {final: "published"}, {final: data})


def _in_place(name: str, data: bytes) -> Expected:
    """Return what writing under the final name must look like."""
    return Expected(
        {"written": {name: "draft"}, "closed": {name: "leased"}},
        {name: "published"},
        {name: data},
    )


def _slab(name: str, data: bytes, at: int, *, while_open: str = "slab_draft") -> Expected:
    """Return what a file allocated ahead must look like; *data* lies at offset *at*."""
    content = bytes(at) + data + bytes(4 * SIZE - at - len(data))
    return Expected(
        {"half": {name: while_open}, "made": {name: "slab"}, "closed": {name: "slab"}},
        {name: "orphan_slab"},
        {name: content},
    )


_BUCKET: Final = (bytes(KEY_BYTES) + stamped("K", SIZE)) * 8
EXPECTED: Final[dict[str, Expected]] = {
    "lmcache_local_disk": Expected(
        {
            "written": {"K.pt": "draft"},
            "closed": {"K.pt": "leased"},
            # The version before, until this one is closed.
            "written again": {"K.pt": "leased"},
            "closed again": {"K.pt": "leased"},
        },
        {"K.pt": "published"},
        {"K.pt": stamped("K.pt", SIZE, 1)},
    ),
    "lmcache_local_disk_direct": Expected(
        {
            "written": {"K.pt": "draft"},
            "closed": {"K.pt": "leased"},
            "written again": {"K.pt": "rewrite"},
            "closed again": {"K.pt": "slab"},
        },
        {"K.pt": "orphan_slab"},
        {"K.pt": stamped("K.pt", SIZE, 1)},
    ),
    "lmcache_fs": _renamed("K.tmp", "K.data", stamped("K.data", SIZE)),
    "lmcache_fs_direct": _renamed("K.tmp", "K.data", stamped("K.data", SIZE)),
    "lmcache_l2_fs": _renamed(".tmp/K.data", "K.data", stamped("K.data", SIZE), closes=False),
    "lmcache_gds": Expected(
        {
            "half": {"12/34/K.tmp1234abcd": "rewrite", "12/34/K.data": ABSENT},
            "renamed": {"12/34/K.data": "published", "12/34/K.metadata": "published"},
        },
        {"12/34/K.data": "published"},
        {
            "12/34/K.data": stamped("K.data", HEADER + SIZE),
            "12/34/K.metadata": stamped("K.data", HEADER),
        },
    ),
    "nixl_static_pool": Expected(
        {"half": {"obj_0_12ab.bin": "draft", "obj_1_12ab.bin": "draft"}},
        {"obj_0_12ab.bin": "published"},
        {name: stamped(name, SIZE) for name in ("obj_0_12ab.bin", "obj_1_12ab.bin")},
    ),
    "nixl_dynamic": _in_place("K", stamped("K", SIZE)),
    "vllm_fs_tier": _renamed("abc/K.bin_42.tmp", "abc/K.bin", stamped("K.bin", SIZE)),
    "vllm_simple_disk": Expected(
        {"half": {"disk.rank_0": "slab_draft"}, "unlinked": {"disk.rank_0": ABSENT}},
        {"disk.rank_0": ABSENT},
        {},
    ),
    "llm_d": Expected(
        {
            "half": {"K.bin_77.tmp": "draft", "K.bin": ABSENT},
            "renamed": {"K.bin_77.tmp": ABSENT, "K.bin": "published"},
            "closed": {"K.bin": "published"},
        },
        {"K.bin": "published"},
        {"K.bin": stamped("K.bin", SIZE)},
    ),
    "sglang_file": _renamed(".0123abcd.tmp", "K.bin", stamped("K.bin", SIZE)),
    "sglang_nixl": Expected(
        {
            "half": {"ab/K_k": "leased", "ab/K_v": "draft"},
            "closed": {"ab/K_k": "leased", "ab/K_v": "leased"},
        },
        {"ab/K_k": "published", "ab/K_v": "published"},
        {f"ab/{name}": stamped(name, SIZE) for name in ("K_k", "K_v")},
    ),
    "kvbm": Expected({"unlinked": {"slab": ABSENT}}, {"slab": ABSENT}, {}),
    "mooncake_bucket": _in_place("1.bucket", _BUCKET),
    "mooncake_file_per_key": _in_place("file_per_key_dir/a/b/K", stamped("K", SIZE + 68)),
    "mooncake_offset_allocator": _slab("kv_cache.data", stamped("K", SIZE), SIZE),
    "flexkv": _slab("flexkv_ssd_cache_0_0.bin", stamped("K", SIZE), 2 * SIZE, while_open="slab"),
    "ucm": Expected(
        {"one shard": {"K.tmp": "leased", "K": ABSENT}, "renamed": {"K": "published"}},
        {"K": "published"},
        {"K": stamped("K", SIZE)},
    ),
    "ucm_nfs": Expected(
        {"made": {"temp/K.dat": "slab"}, "renamed": {"temp/K.dat": ABSENT, "K.dat": "published"}},
        {"K.dat": "published"},
        {"K.dat": stamped("K.dat", SIZE)},
    ),
}


def seen(path: Path) -> str:
    """Return the state of what a second process finds at *path*."""
    return state(path) if os.path.exists(path) else ABSENT


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(kv: Path, name: str, kvfs_only: None) -> None:
    """[life-published] [life-slab] Every step shows what the table says; all bytes are there."""
    expected = EXPECTED[name]
    with Stepping("tests.support.clients.connector_patterns", name, kv) as connector:
        while (step := connector.at()) is not None:
            wanted = expected.steps.get(step, {})
            assert {path: seen(kv / path) for path in wanted} == wanted, step
            if step == "end":
                break
            connector.go()
        connector.end()
    until(
        lambda: {path: seen(kv / path) for path in expected.end} == expected.end,
        f"{expected.end} after the end; now { {path: seen(kv / path) for path in expected.end} }",
        10,
    )
    for path, data in expected.content.items():
        assert read_file(kv / path) == data, path
