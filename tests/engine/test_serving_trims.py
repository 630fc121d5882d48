"""Reserves that are not used: freed by the device's thread after the close, and counted exactly."""

from collections.abc import Callable

import pytest

from kvfs.core.types import InodeNo, round_up
from tests.support.store.driven import Opened
from tests.support.store.serving import Serving, assert_as_without
from tests.support.store.stores import assert_exact

BLOCK = b"block" * 4000
RESERVE_BYTES = round_up(len(BLOCK))


def taken_bytes(client: Serving) -> int:
    """Return what is taken, but for what is ready."""
    space = client.store.space
    return space.taken_bytes - space.ready_bytes


def draft_with_reserve(client: Serving) -> Opened:
    client.put(b"before", BLOCK)
    opened = client.create(b"K")
    assert opened.allocated_bytes == RESERVE_BYTES
    return opened


def close_a_short_draft(client: Serving) -> None:
    opened = draft_with_reserve(client)
    client.write(opened, b"short")
    client.close(opened)
    client.finish_jobs()
    assert client.store.record(opened.ino).allocated_bytes == 4096


def close_a_sparse_draft(client: Serving) -> None:
    opened = draft_with_reserve(client)
    client.write(opened, b"tail", 9000)
    client.close(opened)
    client.finish_jobs()
    assert_exact(client.host)
    assert client.get(b"K") == bytes(9000) + b"tail"


def close_a_sparse_draft_without_reserve(client: Serving) -> None:
    opened = client.create(b"K")
    client.write(opened, b"tail", 90_000)
    client.close(opened)
    client.finish_jobs()
    assert client.store.record(opened.ino).allocated_bytes == 4096


def rename_a_short_draft(client: Serving) -> None:
    client.put(b"before", BLOCK)
    assert client.store.record(client.put(b"K", b"short")).allocated_bytes == 4096


@pytest.mark.parametrize(
    "scenario",
    [
        close_a_short_draft,
        close_a_sparse_draft,
        close_a_sparse_draft_without_reserve,
        rename_a_short_draft,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_what_a_block_holds_in_the_end_is_recorded(scenario: Callable[[Serving], None]) -> None:
    assert_as_without(scenario)


def test_a_reserve_that_is_being_freed_is_counted_as_coming(client: Serving) -> None:
    opened = draft_with_reserve(client)
    client.write(opened, b"short")
    before = taken_bytes(client)
    with client.guard.held("fallocate"):
        client.close(opened)
        assert client.store.record(opened.ino).allocated_bytes == 4096
        assert client.coming_bytes == RESERVE_BYTES - 4096
        assert taken_bytes(client) == before
    client.finish_jobs()
    assert client.coming_bytes == 0
    assert taken_bytes(client) == before - RESERVE_BYTES + 4096
    assert_exact(client.host)
    client.end()


def short_draft_whose_trim_fails(client: Serving) -> InodeNo:
    opened = draft_with_reserve(client)
    client.write(opened, b"short")
    with client.guard.failing("fallocate"):
        client.close(opened)
        client.in_order()
    return opened.ino


@pytest.mark.usefixtures("caplog")
def test_a_reserve_that_cannot_be_freed_is_recorded_as_held(client: Serving) -> None:
    ino = short_draft_whose_trim_fails(client)
    assert client.store.record(ino).allocated_bytes == RESERVE_BYTES
    assert client.coming_bytes == 0
    assert_exact(client.host)
    client.put(b"K", b"new")
    client.end()


@pytest.mark.usefixtures("caplog")
def test_a_reserve_that_cannot_be_freed_while_its_block_is_written_again(client: Serving) -> None:
    opened = draft_with_reserve(client)
    client.write(opened, b"short")
    with client.guard.failing("fallocate"):
        with client.guard.held("fallocate"):
            client.close(opened)
            again = client.ask(lambda: client.store.open(opened.ino, writer=True, truncate=False))
        client.until_settled(again)
    assert again.allocated_bytes == RESERVE_BYTES
    client.write(again, b"again")
    client.close(again)
    client.finish_jobs()
    assert_exact(client.host)
    client.end()


def test_a_block_that_goes_while_its_reserve_is_freed_leaves_nothing(client: Serving) -> None:
    opened = draft_with_reserve(client)
    client.write(opened, b"short")
    with client.guard.held("fallocate"):
        client.close(opened)
        client.unlink(b"K")
        client.store.erase_removed()
    client.finish_jobs()
    assert_exact(client.host)
    client.end()
