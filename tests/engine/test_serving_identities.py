"""Identities while a store serves: none outlives what it says, and no goal overtakes one."""

from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.clients.stepping import until
from tests.support.store.driven import Opened
from tests.support.store.serving import Serving
from tests.support.store.stores import DIRECTORY

BLOCK = b"block" * 4000


def make_durable(client: Serving) -> None:
    goal = client.ask(client.store.goal)
    client.tick_until(lambda: client.store.reached(goal), "all is durable")


def identity_of(client: Serving, ino: InodeNo) -> object:
    return client.in_thread(lambda: client.store.identity(ino))


def open_to_write(client: Serving, ino: InodeNo) -> Opened:
    """Open a block to overwrite it, without waiting for what the device has to do for it."""
    return client.ask(lambda: client.store.open(ino, writer=True, truncate=False))


# ---- identities ----


def test_an_identity_is_withdrawn_before_a_writer_may_begin(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    make_durable(client)
    assert identity_of(client, ino) is not None
    with client.guard.held("removexattr"):
        opened = open_to_write(client, ino)
        assert client.store.was_identified(ino)
        assert opened.settling
    client.until_settled(opened)
    assert client.store.must_forget(opened)
    assert identity_of(client, ino) is None
    client.in_thread(lambda: client.store.forget_durably(opened))
    assert not client.store.must_forget(opened)
    assert not client.store.was_identified(ino)
    client.write(opened, b"new")
    client.close(opened)
    make_durable(client)
    assert identity_of(client, ino) is not None
    client.end()


def test_a_name_that_is_written_late_brings_no_identity_back(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    make_durable(client)
    with client.guard.held("setxattr"):
        client.rename(b"K", b"L")
        client.store.hurry()
        opened = open_to_write(client, ino)
    client.until_settled(opened)
    assert client.store.must_forget(opened)
    assert identity_of(client, ino) is None
    client.close(opened)
    client.end()


def test_a_block_that_is_written_while_it_is_made_durable_gets_no_identity(
    client: Serving,
) -> None:
    ino = client.put(b"K", BLOCK)
    client.finish_jobs()
    goal = client.ask(client.store.goal)
    with client.guard.held("setxattr"):

        def ticked() -> bool:
            client.store.tick()
            client.store.run_all()
            client.loop.run()
            client.store.reached(goal)
            return client.guard.waits

        until(ticked, "its identity is being written")
        opened = open_to_write(client, ino)
        assert client.store.was_identified(ino)
    client.until_settled(opened)
    assert client.store.must_forget(opened)
    assert identity_of(client, ino) is None
    client.close(opened)
    client.end()


def test_a_block_that_goes_while_its_identity_is_written_leaves_nothing(client: Serving) -> None:
    ino = client.put(b"K", BLOCK)
    make_durable(client)
    with client.guard.held("setxattr"):
        client.rename(b"K", b"L")
        client.store.hurry()
        client.unlink(b"L")
        client.store.erase_removed()
    client.finish_jobs()
    assert not client.host.extent(ino).exists()
    client.end()


# ---- goals ----


def test_what_a_goal_names_is_durable_when_it_is_reached(client: Serving) -> None:
    store = client.store
    blocks = [client.put(b"%d" % number, BLOCK) for number in range(40)]
    node, _ = store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0)
    store.set_xattr(blocks[0], b"user.a", b"1")
    make_durable(client)
    assert all(identity_of(client, ino) is not None for ino in blocks)
    assert node in client.in_thread(lambda: set(store.node_inos()))
    assert store.listed() == 0
    client.end()


def test_no_goal_is_reached_while_an_identity_waits(client: Serving) -> None:
    store = client.store
    ino = client.put(b"K", BLOCK)
    make_durable(client)
    with client.guard.held("setxattr"):
        client.rename(b"K", b"L")
        goal = store.goal()
        for _ in range(20):
            store.tick()
            store.run_all()
            client.loop.run()
            assert not store.reached(goal)
    client.tick_until(lambda: store.reached(goal), "the name is durable")
    identity = identity_of(client, ino)
    assert getattr(identity, "name", None) == b"L"
    client.end()
