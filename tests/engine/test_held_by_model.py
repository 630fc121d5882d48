"""What each program and model holds: as the names of files and folders tell it, to the byte."""

from collections import Counter
from typing import Final

import pytest

from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.pool.figures.held_by_model import holder_of, model_of_folder
from tests.support.store.driven import Driven
from tests.support.store.stores import DIRECTORY, Host, assert_exact, put, settle

HASH: Final = b"0123456789abcdef" * 4
LMCACHE: Final = b"llama@8@0@1234abcd@bfloat16.pt"
SGLANG: Final = HASH + b"_llama_0_2.bin"
VLLM: Final = b"org_llama_0123456789ab_r0"
SIZE: Final = 5000


@pytest.mark.parametrize(
    ("name", "folder", "holder"),
    [
        (LMCACHE, b"", "lmcache llama"),
        (SGLANG, b"", "sglang llama"),
        (b"1234.bin", model_of_folder(VLLM), "vllm org_llama_0123456789ab"),
        (LMCACHE, model_of_folder(VLLM), "lmcache llama"),
        (b"1234.bin", b"", ""),
        (b"1234.bin", model_of_folder(b"org_llama_0123456789ab"), ""),
        (b"1234.bin", model_of_folder(b"org_llama_0123456789AB_r0"), ""),
        (b"1234.bin", model_of_folder(b"_0123456789ab_r0"), ""),
    ],
)
def test_program_and_model_that_names_tell(name: bytes, folder: bytes, holder: str) -> None:
    assert holder_of(name, folder) == holder


def folders(store: Driven, parent: InodeNo, *names: bytes) -> InodeNo:
    """Make directories one below the other; return the lowest."""
    for name in names:
        parent, _ = store.make_node(parent, name, DIRECTORY, 0, 0)
    return parent


def blocks(store: Driven) -> dict[str, int]:
    return {holder: row["blocks"] for holder, row in store.held_by().items()}


def stored(store: Driven, parent: InodeNo, name: bytes) -> InodeNo:
    ino = put(store, parent, name + b".tmp", b"x" * SIZE)
    store.rename(parent, name + b".tmp", parent, name)
    return ino


def store_some(store: Driven) -> InodeNo:
    """Store two blocks for each program, and one of nobody's; return vLLM's folder."""
    for name in (LMCACHE, SGLANG):
        for number in range(2):
            stored(store, ROOT_INODE, name.replace(b"1234", b"123%d" % number))
    folder = folders(store, ROOT_INODE, b"vllm", VLLM)
    lowest = folders(store, folder, b"123", b"45_g0")
    for number in range(2):
        stored(store, lowest, b"%d.bin" % number)
    stored(store, ROOT_INODE, b"block")
    settle(store)
    return folder


SOME: Final = {
    "lmcache llama": 2,
    "sglang llama": 2,
    "vllm org_llama_0123456789ab": 2,
    "/unknown": 1,
}


def test_what_is_stored_counts_for_its_holder(running: Host) -> None:
    store = running.store
    store_some(store)
    assert blocks(store) == SOME
    held_bytes = {row["bytes"] for holder, row in store.held_by().items() if holder != "/unknown"}
    assert held_bytes == {2 * 8192}
    assert_exact(running)


def test_what_goes_no_longer_counts(running: Host) -> None:
    store = running.store
    store_some(store)
    store.unlink(ROOT_INODE, LMCACHE.replace(b"1234", b"1230"))
    store.rename(ROOT_INODE, LMCACHE.replace(b"1234", b"1231"), ROOT_INODE, b"other")
    assert blocks(store) == {key: SOME[key] for key in list(SOME)[1:]} | {"/unknown": 2}
    assert_exact(running)


@pytest.mark.usefixtures("caplog")
def test_a_restart_and_a_kill_find_the_same(running: Host) -> None:
    store_some(running.store)
    before = running.store.held_by()
    running.stop()
    running.start()
    settle(running.store)
    assert running.store.held_by() == before
    running.kill()
    running.start()
    settle(running.store)
    assert running.store.held_by() == before
    assert_exact(running)


def test_what_changes_during_the_scan_counts_once(running: Host) -> None:
    store_some(running.store)
    running.stop()
    running.start()
    store = running.store
    assert not store.scanned
    stored(store, ROOT_INODE, b"fresh@8@0@1234abcd@bfloat16.pt")
    store.unlink(ROOT_INODE, SGLANG.replace(b"1234", b"1230"))
    store.unlink(ROOT_INODE, SGLANG.replace(b"1234", b"1231"))
    settle(store)
    assert store.scanned
    assert Counter(blocks(store)) == Counter(SOME) - Counter({"sglang llama": 2}) + Counter(
        {"lmcache fresh": 1}
    )
    assert_exact(running)


def test_a_folder_that_is_moved_takes_its_blocks_along(running: Host) -> None:
    store = running.store
    store_some(store)
    vllm = store.lookup(ROOT_INODE, b"vllm")
    store.rename(vllm, VLLM, vllm, b"aside")
    settle(store)
    assert blocks(store) == {key: SOME[key] for key in list(SOME)[:2]} | {"/unknown": 3}
    store.rename(vllm, b"aside", vllm, b"another_0123456789ab_r1")
    settle(store)
    assert blocks(store)["vllm another_0123456789ab"] == 2
    assert_exact(running)


def test_models_beyond_the_limit_share_a_row(running: Host) -> None:
    store = running.store
    for number in range(70):
        stored(store, ROOT_INODE, b"model-%d@8@0@1234abcd@bfloat16.pt" % number)
    assert len(store.held_by()) == 65
    assert blocks(store)["/others"] == 6
    for number in range(70):
        store.unlink(ROOT_INODE, b"model-%d@8@0@1234abcd@bfloat16.pt" % number)
    assert store.held_by() == {}
    assert_exact(running)
