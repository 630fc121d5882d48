"""What is cold is brought, and times and lengths are set in order, while a store serves."""

import errno
import os

import pytest

from kvfs.core.errors import Damaged, NotAtHand, NotFound
from kvfs.core.lifecycle import State
from kvfs.core.types import InodeNo
from tests.support.store.driven import Opened
from tests.support.store.serving import Serving
from tests.support.store.stores import assert_exact

BLOCK = b"block" * 4000
THEN_NS = 10**18


def open_to_write(client: Serving, ino: InodeNo) -> Opened:
    """Open a block to overwrite it, without waiting for what the device has to do for it."""
    return client.ask(lambda: client.store.open(ino, writer=True, truncate=False))


# ---- what is cold ----


def test_what_the_kernel_has_not_in_memory_is_brought_once(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    client.guard.chill()
    assert client.get(b"K") == BLOCK
    client.close(client.open_to_write(ino))
    client.guard.chill()
    client.change(ino, size_bytes=5000)
    client.guard.chill()
    client.close(client.open_to_write(ino))
    assert client.get(b"K") == BLOCK[:5000]
    client.end()


def test_several_may_wait_for_one_cold_extent(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    client.guard.chill()
    waiting = []
    with client.guard.held("open"):
        for _ in range(3):
            opened = client.store.open_to_read(ino)
            with pytest.raises(NotAtHand) as lack:
                client.store.extent_fd(opened)
            waiting.append((opened, client.bring(lack.value)))
    for opened, each in waiting:
        client.wait_for(each)
        client.store.extent_fd(opened)
    for opened, _ in waiting:
        client.close(opened, writer=False)
    client.tick()
    client.tick()  # what was kept open for them is let go
    client.end()


def load_in_vain(client: Serving, ino: InodeNo) -> None:
    opened = client.store.open_to_read(ino)
    try:
        with pytest.raises(Damaged):
            client.ask(lambda: client.store.extent_fd(opened))
    finally:
        client.close(opened, writer=False)


def test_a_block_whose_extent_is_known_to_be_missing_is_a_miss(
    client: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    client.host.extent(ino).unlink()
    with client.guard.failing("open_cached", error_no=errno.ENOENT):
        load_in_vain(client, ino)
    with pytest.raises(NotFound):
        client.look_up(b"K")
    assert "lost" in caplog.text
    client.end()


def test_a_block_is_loaded_where_seccomp_refuses_openat2(client: Serving) -> None:
    """By the descriptor that a thread has opened; each open takes one."""
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    client.guard.openat2_refused = True
    for _ in range(2):
        opened = client.store.open_to_read(ino)
        fd = client.ask(lambda opened=opened: client.store.extent_fd(opened))
        assert os.pread(fd, len(BLOCK), 0) == BLOCK
        client.close(opened, writer=False)
        client.finish_jobs()
    assert not client.guard.seen
    client.end()


FETCH_RAISES = (
    "ExtentsAtHand._fetch raises Damaged to the request, which is not done again: "
    "Blocks.extent_fd does not dismiss the block"
)


@pytest.mark.usefixtures("caplog")
def test_a_cold_block_whose_extent_is_missing_is_a_miss(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    client.host.extent(ino).unlink()
    client.guard.chill()
    load_in_vain(client, ino)
    with pytest.raises(NotFound):
        client.look_up(b"K")


@pytest.mark.usefixtures("caplog")
def test_a_cold_block_whose_extent_is_broken_is_a_miss(client: Serving) -> None:
    """The kernel keeps nothing of it in memory: otherwise it would fail at each load."""
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    with client.guard.failing("open", error_no=errno.EUCLEAN):
        for _ in range(3):
            client.guard.chill()
            load_in_vain(client, ino)
            if ino not in client.store.records():
                break
    with pytest.raises(NotFound):
        client.look_up(b"K")


# ---- times ----


def test_until_times_are_set_a_block_has_those_of_its_record(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    client.change(ino, mtime_ns=THEN_NS)
    with client.guard.held("utime"):
        opened = open_to_write(client, ino)
        assert opened.settling
        assert client.store.present(ino).mtime_ns == THEN_NS
    client.until_settled(opened)
    assert client.store.present(ino).mtime_ns == THEN_NS
    client.close(opened)
    assert client.store.record(ino).mtime_ns == THEN_NS
    client.end()


def test_a_writer_that_closes_before_its_times_are_set_has_written_nothing(
    client: Serving,
) -> None:
    ino = client.put(b"K", BLOCK)
    client.change(ino, mtime_ns=THEN_NS)
    with client.guard.held("utime"):
        client.close(open_to_write(client, ino))
    client.finish_jobs()
    record = client.store.record(ino)
    assert (record.mtime_ns, record.size_bytes) == (THEN_NS, len(BLOCK))
    assert_exact(client.host)
    client.end()


def test_times_that_cannot_be_set_refuse_the_open(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    with client.guard.failing("utime"):
        opened = open_to_write(client, ino)
        with pytest.raises(OSError, match="Input/output error"):
            client.until_settled(opened)
    client.close(opened)
    assert client.get(b"K") == BLOCK
    client.end()


def test_a_writer_that_closes_while_another_sets_times_has_written(client: Serving) -> None:
    opened = client.create(b"K")
    client.write(opened, BLOCK)
    with client.guard.held("utime"):
        client.store.change(opened.ino, atime_ns=THEN_NS)
        client.close(opened)
    client.finish_jobs()
    assert client.get(b"K") == BLOCK


def test_a_length_and_times_of_a_closed_block_may_be_set_at_once(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    with client.guard.held("ftruncate"):
        client.ask(lambda: client.store.change(ino, size_bytes=5000))
        client.ask(lambda: client.store.change(ino, atime_ns=THEN_NS))
    client.finish_jobs()
    assert client.get(b"K") == BLOCK[:5000]


def test_times_that_are_set_just_before_a_rename_stay(client: Serving) -> None:
    opened = client.create(b"K.tmp")
    client.write(opened, BLOCK)
    with client.guard.held("utime"):
        client.store.change(opened.ino, mtime_ns=THEN_NS)
        client.close(opened, awaits_rename=True)
        client.rename(b"K.tmp", b"K")
    client.finish_jobs()
    assert client.store.record(opened.ino).mtime_ns == THEN_NS


# ---- lengths ----


def test_two_lengths_of_a_closed_block_are_set_in_order(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    with client.guard.held("ftruncate"):
        for size_bytes in (5000, 3000, 4000):
            client.ask(lambda length=size_bytes: client.store.change(ino, size_bytes=length))
    client.finish_jobs()
    assert client.get(b"K") == BLOCK[:3000] + bytes(1000)
    client.end()


def test_a_length_is_set_before_a_block_that_is_closed_meanwhile_is_published(
    client: Serving,
) -> None:
    opened = client.create(b"K")
    client.write(opened, BLOCK)
    with client.guard.held("ftruncate"):
        client.store.change(opened.ino, size_bytes=5000)
        client.close(opened)
        assert opened.ino in client.store.open_inos
    client.finish_jobs()
    assert client.store.record(opened.ino).size_bytes == 5000
    assert opened.ino not in client.store.open_inos
    client.end()


def test_a_length_that_cannot_be_set_is_told(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    with client.guard.failing("ftruncate"):
        client.ask(lambda: client.store.change(ino, size_bytes=5000))
        opened = client.store.opened(ino)
        with pytest.raises(OSError, match="Input/output error"):
            client.until_settled(opened)
    client.finish_jobs()
    assert client.get(b"K") == BLOCK
    client.end()


@pytest.mark.usefixtures("caplog")
def test_a_length_that_cannot_be_set_at_the_end_of_serving_ends_too(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    with client.guard.failing("ftruncate"):
        client.ask(lambda: client.store.change(ino, size_bytes=5000))
        client.stop_serving_now()
    assert ino not in client.store.open_inos


def test_a_length_is_set_before_a_block_that_is_renamed_meanwhile_is_published(
    client: Serving,
) -> None:
    opened = client.create(b"K.tmp")
    client.write(opened, BLOCK)
    with client.guard.held("ftruncate"):
        client.store.change(opened.ino, size_bytes=5000)
        client.close(opened, awaits_rename=True)
        client.rename(b"K.tmp", b"K")
    client.finish_jobs()
    assert client.get(b"K") == BLOCK[:5000]
    assert client.store.record(opened.ino).state == State.PUBLISHED
    client.end()


def test_a_cold_block_is_as_it_was_until_its_length_can_be_set(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    client.guard.chill()
    before = client.store.record(ino)
    with pytest.raises(NotAtHand):
        client.store.truncate(ino, 90_000)
    assert client.store.record(ino) == before
