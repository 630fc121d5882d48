"""Names of blocks in a support bundle: replaced wherever they stand, the same by the same."""

import re

import pytest

from kvfs.core.shown_names import HiddenNames, names_in

HASH = "2f6c1a90" * 8
BLOCK = f"meta-llama-SEP-Llama-3.1-8B@0x02000002@0a@{HASH}.data"
STATUS = {
    "cache": {"directories": {"tenant-a": {}}, "models": {"Llama-3.1-8B": {}}, "hits": 1},
    "largest_unevictable": {"directory": "secret/project", "bytes": 1},
    "held_by": {"vllm org_gemma_0123456789ab": {"blocks": 1, "bytes": 1}, "/unknown": {}},
}


@pytest.fixture
def hidden() -> HiddenNames:
    return HiddenNames(b"k" * 32, {"/kv", "/mnt/kv", ""}, names_in(STATUS))


@pytest.mark.parametrize(
    "text",
    [
        f"torn: {BLOCK} (inode 0x1f)",
        f"WARNING open /kv/tenant/{HASH}.bin: Input/output error",
        f'{{"directory": "lmcache/{BLOCK}"}}',
        f"b'{BLOCK}' in inode 0x10",
        'b"tenant b/it\'s" in inode 0x10',
        '[policies."/tenant-b"]',
        "path=/mnt/kv/tenant-b/x.tmp,rw",
        'the directory "tenant-a" of model Llama-3.1-8B has a hit rate of 3 %',
        '"directory": "secret/project"',
        '"held_by": {"vllm org_gemma_0123456789ab": {"blocks": 1}}',
    ],
)
def test_no_name_is_left(hidden: HiddenNames, text: str) -> None:
    told = hidden.in_text(text)
    for name in ("tenant", "llama", "Llama", HASH, "it's", "secret", "project", "gemma"):
        assert name not in told
    assert re.search(r"name-[0-9a-f]{10}", told)


@pytest.mark.parametrize(
    "text",
    [
        "/dev/nvme0n1 /kv fuse.kvfs rw,nosuid 0 0",
        "Nov 24 23:00:01 host systemd[1]: Started kvfs@kv.service",
        "uuid 7b5e043c-7f21-4382-93f8-5e819daac540, 16384 backing ids",
    ],
)
def test_what_is_no_name_stays(hidden: HiddenNames, text: str) -> None:
    assert hidden.in_text(text) == text


def test_the_same_name_can_be_compared_and_not_guessed(hidden: HiddenNames) -> None:
    assert hidden.path(BLOCK) == hidden.path(BLOCK) != hidden.path(f"x{BLOCK}")
    assert hidden.path(BLOCK).endswith(".data")
    assert hidden.in_text(hidden.in_text(f"/kv/{BLOCK}")) == hidden.in_text(f"/kv/{BLOCK}")
    assert HiddenNames(b"other" * 6, ()).path(BLOCK) != hidden.path(BLOCK)
