"""A block that is written while it is compared: what was read says nothing about it any more."""

import dataclasses
from collections.abc import Callable
from typing import Final

import pytest

from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.clients.stepping import until
from tests.support.store.driven import Driven
from tests.support.store.serving import Serving
from tests.support.store.stores import FILE, Host, allocate, get, put, write

pytestmark = pytest.mark.usefixtures("caplog")

OLD: Final = b"old bytes" * 1000
COUNT: Final = 5
NEW: Final = b"new bytes" * 1000
CRC: Final = b"user.kvfs.crc32c"


def turn_clock(store: Driven) -> list[float]:
    """Stop the clock of *store*; return what it says, in seconds, for the test to advance."""
    now_s = [store.now_s()]
    store.turn_clock(lambda: now_s[0])
    return now_s


def store_slab(store: Driven) -> InodeNo:
    """Store a block whose space was asked for first; its state stays while it is written."""
    opened, _ = store.create(ROOT_INODE, b"K", FILE, 0, 0)
    allocate(store, opened, len(OLD))
    write(store, opened, OLD)
    store.close(opened, writer=True)
    return opened.ino


def begin_rewriting(store: Driven, ino: InodeNo) -> Callable[[], None]:
    """Write other bytes over block *ino*, which stays open; return what closes it."""
    opened = store.open(ino, writer=True, truncate=False)
    if store.must_forget(opened):
        store.forget_durably(opened)
    write(store, opened, NEW)
    return lambda: store.close(opened, writer=True)


@pytest.mark.parametrize("slab", [False, True])
@pytest.mark.parametrize("until_then", ["written", "closed", "durable"])
def test_a_block_written_after_its_checksum_was_asked_for_is_not_damaged(
    running: Host, until_then: str, *, slab: bool
) -> None:
    ino = store_slab(running.store) if slab else put(running.store, ROOT_INODE, b"K", OLD)
    running.stop()
    store = running.start(settings=dataclasses.replace(running.settings, verify="open"))
    judged = store.begin_comparing(ino)
    close = begin_rewriting(store, ino)
    if until_then != "written":
        close()
    if until_then == "durable":
        store.sync()
    assert judged()
    assert store.lookup(ROOT_INODE, b"K") == ino
    if until_then == "written":
        close()
    assert get(store, ROOT_INODE, b"K") == NEW
    told = store.describe()["checksums"]
    assert (told["wrong"], told["quarantined_blocks"]) == (0, 0)


def test_one_that_was_given_its_former_mtime_is_not_damaged_either(running: Host) -> None:
    """As by ``cp -p`` over it."""
    ino = put(running.store, ROOT_INODE, b"K", OLD)
    running.stop()
    store = running.start(settings=dataclasses.replace(running.settings, verify="open"))
    before, judged = store.present(ino), store.begin_comparing(ino)
    begin_rewriting(store, ino)()
    store.change(ino, mtime_ns=before.mtime_ns)
    record = store.present(ino)
    assert (record.size_bytes, record.mtime_ns) == (before.size_bytes, before.mtime_ns)
    assert judged()
    assert get(store, ROOT_INODE, b"K") == NEW


def test_a_block_that_went_while_it_was_compared_is_no_damage(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"K", OLD)
    running.stop()
    store = running.start(settings=dataclasses.replace(running.settings, verify="open"))
    judged = store.begin_comparing(ino)
    reader = store.open(ino, writer=False, truncate=False)
    store.unlink(ROOT_INODE, b"K")
    running.extent(ino).write_bytes(NEW)
    assert judged()
    assert store.describe()["checksums"]["wrong"] == 0
    store.close(reader, writer=False)


@pytest.mark.parametrize("durable", [False, True])
def test_the_scrub_gives_no_block_the_checksum_of_earlier_bytes(
    running: Host, *, durable: bool
) -> None:
    running.stop()
    store = running.start(
        settings=dataclasses.replace(
            running.settings, verify="scrub", checksum_share=0, checksum_stop_s=0
        )
    )
    ino = put(store, ROOT_INODE, b"K", OLD)
    store.sync()

    def begun() -> bool:
        store.tick()
        return store.scrub_reads

    until(begun, "the scrub reads it")
    until(lambda: store.scrub_has_read, "it has read it")
    begin_rewriting(store, ino)()
    if durable:
        store.sync()
    store.tick()
    if durable:
        assert store.compare(ino) is not False
    else:
        assert store.identity(ino) is None, "only what is durable has one"
    assert get(store, ROOT_INODE, b"K") == NEW
    assert store.describe()["checksums"]["given"] == 0


def test_of_many_damaged_blocks_so_many_are_kept_for_a_look(running: Host) -> None:
    inos = [put(running.store, ROOT_INODE, b"%d" % number, OLD) for number in range(4)]
    running.stop()
    settings = dataclasses.replace(running.settings, verify="open", quarantine_files_max=2)
    store = running.start(settings=settings)
    for ino in inos:
        running.extent(ino).write_bytes(NEW)
        assert store.compare(ino) is False
    told = store.describe()["checksums"]
    assert (told["wrong"], told["quarantined_blocks"]) == (4, 2)


def test_the_scrub_rests_while_a_client_writes(running: Host) -> None:
    put(running.store, ROOT_INODE, b"K", OLD)
    running.stop()
    store = running.start(settings=dataclasses.replace(running.settings, verify="scrub"))
    opened, _ = store.create(ROOT_INODE, b"draft", FILE, 0, 0)
    now_s = turn_clock(store)
    for _ in range(5):
        now_s[0] += 2.0
        store.tick()
        assert not store.scrub_reads
    store.close(opened, writer=True)

    def begun() -> bool:
        now_s[0] += 2.0
        store.tick()
        return store.scrub_reads

    until(begun, "the scrub reads it")


def test_the_scrub_leaves_none_out_whose_identity_must_be_fetched(running: Host) -> None:
    for number in range(COUNT):
        put(running.store, ROOT_INODE, b"%d" % number, OLD)
    running.stop()
    serving = Serving(running, dataclasses.replace(running.settings, verify="scrub"))
    now_s = turn_clock(serving.store)

    def told() -> dict[str, int]:
        found: dict[str, int] = serving.store.describe()["checksums"]
        return found

    def is_done() -> bool:
        now_s[0] += 2.0
        return told()["rounds"] > 0

    serving.tick_until(is_done, "a round of the scrub")
    assert told()["right"] + told()["given"] == COUNT
