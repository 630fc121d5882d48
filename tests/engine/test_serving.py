"""A store that serves requests: its loop never waits for the device, and all comes out the same."""

import os
from collections.abc import Callable

import pytest

from kvfs.core.errors import DeadInode, NotFound
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.store.serving import Serving, assert_as_without
from tests.support.store.stores import DIRECTORY, FIFO, SYMLINK, host

BLOCK = b"block" * 4000


def test_the_guard_sees_what_the_loop_asks_of_the_device() -> None:
    with host() as made:
        client = Serving(made)
        ino = client.put(b"K", BLOCK)
        os.close(client.store.open_extent(ino, os.O_RDONLY))
        assert [seen.split(":")[0] for seen in client.guard.seen] == ["open"]
        client.guard.seen.clear()
        client.in_thread(lambda: os.close(client.store.open_extent(ino, os.O_RDONLY)))
        client.end()


# ---- scenarios, each of which comes to the same with and without a loop ----


def store_and_load(client: Serving) -> None:
    for number in range(8):
        client.put(b"%d" % number, b"%d" % number * 5000)
    for number in range(8):
        assert client.get(b"%d" % number) == b"%d" % number * 5000
    client.tick()


def store_without_a_rename(client: Serving) -> None:
    opened = client.create(b"K")
    client.write(opened, BLOCK)
    client.write(opened, BLOCK, len(BLOCK))
    client.close(opened)
    assert client.get(b"K") == BLOCK * 2


def store_nothing(client: Serving) -> None:
    client.close(client.create(b"K"))
    assert client.get(b"K") == b""


def give_up_a_draft(client: Serving) -> None:
    opened = client.create(b"K.tmp")
    client.write(opened, BLOCK)
    opened.spoil()
    client.close(opened)
    assert client.store.children(ROOT_INODE, InodeNo(0)) == []


def overwrite(client: Serving) -> None:
    opened = client.open_to_write(client.put(b"K", BLOCK))
    client.write(opened, b"new")
    client.close(opened)
    assert client.get(b"K") == b"new" + BLOCK[3:]


def open_to_write_and_write_nothing(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    before = client.store.record(ino)
    client.close(client.open_to_write(ino))
    client.finish_jobs()
    assert client.store.record(ino)._replace(sequence=before.sequence) == before


def append(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    opened = client.ask(lambda: client.store.open(ino, writer=True, truncate=False, appends=True))
    client.until_settled(opened)
    client.write(opened, b"more", len(BLOCK))
    client.store.close(opened, writer=True, appends=True)
    assert client.get(b"K") == BLOCK + b"more"


def truncate_alone(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    client.change(ino, size_bytes=5000)
    assert client.store.present(ino).size_bytes == 5000
    client.change(ino, size_bytes=9000)
    assert client.get(b"K") == BLOCK[:5000] + bytes(4000)


def truncate_to_nothing(client: Serving) -> None:
    client.change(client.put(b"K", BLOCK), size_bytes=0)
    assert client.get(b"K") == b""


def truncate_beside_a_writer(client: Serving) -> None:
    opened = client.create(b"K")
    client.write(opened, BLOCK)
    client.change(opened.ino, size_bytes=5000)
    assert client.store.present(opened.ino).size_bytes == 5000
    client.write(opened, b"more", 5000)
    client.change(opened.ino, size_bytes=9000)
    client.close(opened)
    assert client.get(b"K") == BLOCK[:5000] + b"more" + bytes(3996)


def truncate_while_the_writer_closes(client: Serving) -> None:
    """What is published has the length that was set, not the one before."""
    opened = client.create(b"K")
    client.write(opened, BLOCK)
    client.store.change(opened.ino, size_bytes=5000)
    client.close(opened)
    client.finish_jobs()
    assert client.get(b"K") == BLOCK[:5000]


def set_times_while_open(client: Serving) -> None:
    opened = client.create(b"K")
    client.write(opened, BLOCK)
    client.change(opened.ino, atime_ns=10**18, mtime_ns=10**18 + 10**9)
    present = client.store.present(opened.ino)
    assert (present.mtime_ns, os.fstat(opened.fd).st_atime_ns) == (10**18 + 10**9, 10**18)
    client.close(opened)
    record = client.store.record(opened.ino)
    assert (record.atime_ns, record.mtime_ns) == (10**18, 10**18 + 10**9)


def set_times_of_a_closed_block(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    client.change(ino, atime_ns=10**18, mtime_ns=10**18 + 10**9)
    assert client.store.record(ino).mtime_ns == 10**18 + 10**9
    opened = client.open_to_write(ino)
    status = os.fstat(opened.fd)
    assert (status.st_atime_ns, status.st_mtime_ns) == (10**18, 10**18 + 10**9)
    client.close(opened)
    assert client.store.record(ino).mtime_ns == 10**18 + 10**9


def change_modes(client: Serving) -> None:
    block = client.put(b"K", BLOCK)
    node, _ = client.store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    client.finish_jobs()
    client.change(block, mode=0o640, uid=5)
    client.change(node, mode=0o700)
    client.tick()
    assert client.store.record(block).mode & 0o777 == 0o640


def set_attributes(client: Serving) -> None:
    store, ino = client.store, client.put(b"K", BLOCK)
    node, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    for each in (ino, node):
        client.ask(lambda each=each: store.set_xattr(each, b"user.a", b"1"))
        client.ask(lambda each=each: store.set_xattr(each, b"user.large", b"x" * 3000))
        client.finish_jobs()
        client.ask(lambda each=each: store.remove_xattr(each, b"user.a"))
    client.tick()
    assert store.xattr_names(ino) == [b"user.large"]


def ask_for_the_checksum(client: Serving) -> None:
    store, ino = client.store, client.put(b"K", BLOCK)
    goal = client.ask(store.goal)
    client.tick_until(lambda: store.reached(goal), "it is durable")
    assert len(client.ask(lambda: store.xattr(ino, b"user.kvfs.crc32c"))) == 8


def make_and_remove_nodes(client: Serving) -> None:
    store = client.store
    client.tick()  # a range of inode numbers is there
    node, _ = client.ask(lambda: store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0))
    for kind, name, target in ((SYMLINK, b"link", b"K"), (FIFO, b"fifo", b"")):
        client.ask(
            lambda kind=kind, name=name, target=target: store.make_node(
                node, name, kind, 0, 0, target
            )
        )
    client.ask(lambda: store.make_node(node, b"gone", DIRECTORY, 0, 0))
    client.finish_jobs()
    client.ask(lambda: store.rmdir(node, b"gone"))
    client.ask(lambda: store.unlink(node, b"fifo"))
    client.ask(lambda: store.rename(node, b"link", ROOT_INODE, b"moved"))
    client.tick()


def rename_over(client: Serving) -> None:
    old = client.put(b"K", BLOCK)
    client.finish_jobs()
    client.put(b"K", b"new" * 3000)
    client.rename(b"K", b"L")
    client.tick()
    assert client.get(b"L") == b"new" * 3000
    with pytest.raises(NotFound):
        client.look_up(b"K")
    assert old != client.look_up(b"L")


def exchange(client: Serving) -> None:
    client.put(b"K", BLOCK)
    client.put(b"L", b"other")
    client.ask(lambda: client.store.exchange(ROOT_INODE, b"K", ROOT_INODE, b"L"))
    client.tick()
    assert client.get(b"L") == BLOCK


def remove(client: Serving) -> None:
    client.put(b"K", BLOCK)
    client.put(b"L", BLOCK)
    client.finish_jobs()
    client.unlink(b"K")
    client.store.erase_removed()
    client.tick()
    client.unlink(b"L")


def remove_what_is_read(client: Serving) -> None:
    store, ino = client.store, client.put(b"K", BLOCK)
    reader = client.ask(lambda: store.open_to_read(ino))
    client.unlink(b"K")
    fd = client.ask(lambda: store.extent_fd(reader))
    assert client.in_thread(lambda: os.pread(fd, 100_000, 0)) == BLOCK
    client.close(reader, writer=False)
    client.tick()


def rewrite_by_truncating(client: Serving) -> None:
    store, ino = client.store, client.put(b"K", BLOCK)
    client.finish_jobs()
    with pytest.raises(DeadInode):
        client.ask(lambda: store.open(ino, writer=True, truncate=True))
    fresh = client.look_up(b"K")
    assert fresh != ino
    opened = client.ask(lambda: store.open(fresh, writer=True, truncate=True))
    client.until_settled(opened)
    client.write(opened, b"new" * 3000)
    client.close(opened)
    client.tick()
    assert client.get(b"K") == b"new" * 3000


SCENARIOS = [
    store_and_load,
    store_without_a_rename,
    store_nothing,
    give_up_a_draft,
    overwrite,
    open_to_write_and_write_nothing,
    append,
    truncate_alone,
    truncate_to_nothing,
    truncate_beside_a_writer,
    truncate_while_the_writer_closes,
    set_times_while_open,
    set_times_of_a_closed_block,
    change_modes,
    set_attributes,
    ask_for_the_checksum,
    make_and_remove_nodes,
    rename_over,
    exchange,
    remove,
    remove_what_is_read,
    rewrite_by_truncating,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_it_comes_out_the_same_and_the_loop_never_waits(
    scenario: Callable[[Serving], None],
) -> None:
    assert_as_without(scenario)


def test_a_directory_may_be_the_first_that_is_made() -> None:
    def make_one(client: Serving) -> None:
        client.ask(lambda: client.store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0))

    assert_as_without(make_one)
