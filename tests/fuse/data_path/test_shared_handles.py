"""One handle for all readers of a whole block: what it serves, and what ends it. No kernel here."""

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.core.errors import BadHandle, DeadInode
from kvfs.core.types import ROOT_INODE
from kvfs.machine.processes import Maker
from mount.fuse import kernel
from mount.requests.data import Transfers
from tests.support.store.readers_desk import IDS_MAX, KERNEL_THREAD, NEW, Desk
from tests.support.store.stores import FILE, host

ALIVE: Final = Maker(os.getpid(), 1)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with host() as machine, contextlib.closing(Desk(machine, monkeypatch)) as made:
        yield made


def test_readers_of_a_whole_block_share_a_handle_and_the_next_one_gets_it_too(desk: Desk) -> None:
    ino = desk.put(b"one")
    first = desk.load(ino)
    assert ino not in desk.store.open_inos
    assert len(desk.handles) == 0
    told = [desk.files.open(ino, os.O_RDONLY) for _ in range(3)]
    assert told == [first] * 3
    assert desk.store.opened(ino).readers == len(desk.handles) == 3
    for fh, _ in told:
        desk.files.release(fh)
    assert ino not in desk.store.open_inos
    with pytest.raises(BadHandle):
        desk.files.release(first[0])
    assert desk.path.describe() == {"backing_ids_open": 0, "backing_ids_cached": 1}


def test_a_record_that_was_read_again_is_the_same(desk: Desk) -> None:
    """More blocks are read in turn than the index keeps parsed."""
    ino = desk.put(b"one")
    first = desk.load(ino)
    desk.store.forget_parsed()
    assert desk.load(ino) == first


def test_every_open_is_a_touch(desk: Desk) -> None:
    ino, other = desk.put(b"one"), desk.put(b"two")
    for _ in range(3):
        desk.load(other)
        before = desk.store.touched(ino)
        desk.load(ino)
        assert desk.store.touched(ino) > max(before, desk.store.touched(other))


@pytest.mark.parametrize("served", [False, True])
def test_other_flags_have_a_handle_of_their_own(desk: Desk, *, served: bool) -> None:
    """The row tells a successor what the client opened."""
    ino = desk.put(b"one")
    with desk.by_server() if served else contextlib.nullcontext():
        buffered, grant = desk.files.open(ino, os.O_RDONLY)
        direct, same = desk.files.open(ino, os.O_RDONLY | os.O_DIRECT)
        again, _ = desk.files.open(ino, os.O_RDONLY)
    assert buffered != direct
    assert again not in (buffered, direct), "the last one's flags are shared"
    assert grant.backing_id == same.backing_id
    assert len(desk.ids.live) == 1
    for fh in (buffered, direct, again):
        desk.files.release(fh)
        if fh != again:
            with pytest.raises(BadHandle):
                desk.files.release(fh)
    with pytest.raises(BadHandle):
        desk.files.release(again)  # it is kept for the next one, and nobody has it
    assert len(desk.handles) == 0
    assert desk.path.describe()["backing_ids_open"] == 0


def test_a_removed_block_has_no_handle_left(desk: Desk) -> None:
    ino = desk.put(b"one")
    told = desk.load(ino)
    desk.unlink(b"one")
    assert not desk.ids.live, "an id pins the extent's space"
    fh, _ = desk.files.open(ino, os.O_RDONLY)  # its LOOKUP came before the removal
    assert fh != told[0]
    desk.files.release(fh)
    desk.store.erase_removed()
    desk.store.drain()
    with pytest.raises(DeadInode):
        desk.files.open(ino, os.O_RDONLY)
    assert not desk.ids.live


@pytest.mark.parametrize("read", [False, True])
def test_a_temporary_name_that_is_written_anew_leaves_no_id(desk: Desk, read: bool) -> None:
    """Nobody reads what lost it: an id would pin its space, which nothing counts any more."""
    fh, _, lost, _ = desk.files.create(ROOT_INODE, b"same.tmp", FILE, NEW, 0, 0)
    os.pwrite(desk.store.extent_fd(desk.handles.get(fh).opened), b"bytes", 0)
    desk.files.release(fh)
    if read:
        desk.load(lost)
    (kept,) = desk.ids.live
    with pytest.raises(DeadInode):
        desk.files.open(lost, os.O_WRONLY | os.O_TRUNC)
    fresh = desk.store.lookup(ROOT_INODE, b"same.tmp")
    assert fresh != lost
    assert kept not in desk.ids.live
    desk.load(fresh)  # who looks before the OPEN comes, which never does
    desk.store.end_second_tries()
    assert not desk.ids.live


def test_who_reads_a_removed_block_keeps_it_to_the_end(desk: Desk) -> None:
    ino = desk.put(b"one", b"old")
    (first, _), (second, _) = (desk.files.open(ino, os.O_RDONLY) for _ in range(2))
    desk.put(b"one", b"new")
    desk.files.release(first)
    assert desk.host.extent(ino).read_bytes() == b"old"
    assert ino in desk.store.open_inos
    desk.files.release(second)
    assert ino not in desk.store.open_inos
    assert len(desk.handles) == 0
    assert desk.path.describe()["backing_ids_open"] == 0


def test_a_rewritten_block_is_opened_anew(desk: Desk) -> None:
    """Its record is another one, and while it is written nobody shares anything."""
    ino = desk.put(b"one")
    before, grant = desk.load(ino)
    writer, _ = desk.files.open(ino, os.O_RDWR)
    during, same = desk.files.open(ino, os.O_RDONLY)
    assert before != during
    assert grant.backing_id == same.backing_id
    os.pwrite(desk.store.extent_fd(desk.handles.get(writer).opened), b"x" * 9000, 0)
    desk.files.flush(writer, os.getpid())
    desk.files.release(writer)
    desk.files.release(during)
    after, _ = desk.load(ino)
    assert after not in (before, during)
    assert desk.store.record(ino).size_bytes == 9000
    assert len(desk.ids.live) == 1


@pytest.mark.parametrize("served", [False, True])
def test_one_that_was_rewritten_while_it_is_read_is_opened_anew(
    desk: Desk, *, served: bool
) -> None:
    """Its handle is as good as before; what the open found out about the block is not."""
    ino = desk.put(b"one")
    who = desk.by_server if served else contextlib.nullcontext
    with who():
        first, _ = desk.files.open(ino, os.O_RDONLY)
        assert desk.files.open(ino, os.O_RDONLY)[0] == first
    desk.files.release(first)
    writer, _ = desk.files.open(ino, os.O_RDWR)
    os.pwrite(desk.store.extent_fd(desk.handles.get(writer).opened), b"x" * 9000, 0)
    desk.files.flush(writer, os.getpid())
    desk.files.release(writer)
    with who():
        again, _ = desk.files.open(ino, os.O_RDONLY)
    assert again != first
    for fh in (first, again):
        desk.files.release(fh)
    assert ino not in desk.store.open_inos
    assert len(desk.handles) == 0
    assert len(desk.ids.live) <= 1


def test_handles_of_more_blocks_than_may_be_kept_are_not_shared_for_ever(desk: Desk) -> None:
    inos = [desk.put(b"%d" % number) for number in range(IDS_MAX + 1)]
    told = [desk.files.open(ino, os.O_RDONLY)[0] for ino in inos]
    last, oldest = (desk.files.open(ino, os.O_RDONLY)[0] for ino in (inos[-1], inos[0]))
    assert last == told[-1]
    assert oldest != told[0]
    for fh in (*told, last, oldest):
        desk.files.release(fh)
    assert len(desk.handles) == 0


def test_a_reader_that_closes_while_it_is_rewritten_leaves_it_to_its_writer(desk: Desk) -> None:
    """Nobody else opened it meanwhile, so the handle is shared still."""
    ino = desk.put(b"one")
    reader, _ = desk.files.open(ino, os.O_RDONLY)
    writer, _ = desk.files.open(ino, os.O_RDWR)
    desk.files.release(reader)
    assert ino not in desk.store.parked
    assert desk.store.opened(ino).writers == 1
    os.pwrite(desk.store.extent_fd(desk.handles.get(writer).opened), b"x" * 9000, 0)
    desk.files.flush(writer, os.getpid())
    desk.files.release(writer)
    assert ino not in desk.store.open_inos
    desk.load(ino)
    assert len(desk.ids.live) == 1


def test_a_writer_finds_what_readers_left_parked(desk: Desk) -> None:
    """One entry for an inode, one id: also when kvfs itself opens it, to truncate it."""
    ino = desk.put(b"one")
    desk.load(ino)
    parked = desk.store.parked[ino]
    desk.store.truncate(ino, 2)
    assert ino not in desk.store.parked
    assert parked.readers == parked.writers == 0
    fh, _ = desk.files.open(ino, os.O_RDONLY)
    assert desk.store.opened(ino).allocated_bytes == desk.host.allocated_bytes(ino)
    desk.files.release(fh)
    assert len(desk.ids.live) == 1


def test_a_lease_by_time_starts_anew_with_each_open(desk: Desk) -> None:
    """Its maker cannot be watched, so its readers keep it: they take the whole way."""
    now_s = [100.0]
    desk.store.turn_clock(lambda: now_s[0])
    fh, _, ino, _ = desk.files.create(ROOT_INODE, b"in place", FILE, NEW, 0, 0)
    desk.files.flush(fh, KERNEL_THREAD)
    desk.files.release(fh)
    for _ in range(2):
        now_s[0] += 50.0
        desk.load(ino)
        assert desk.store.timed_leases[ino] == now_s[0]


def test_a_lease_by_life_is_shared(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's local disk stores in place, and loads while it lives."""
    desk.store.let_all_live(monkeypatch)
    desk.files.requester = lambda: ALIVE
    fh, _, ino, _ = desk.files.create(ROOT_INODE, b"in place", FILE, NEW, 0, 0)
    desk.files.flush(fh, os.getpid())
    desk.files.release(fh)
    assert desk.load(ino) == desk.load(ino)


def test_file_servers_share_a_handle_of_their_own(desk: Desk) -> None:
    """Their opens count apart: they hold no eviction up."""
    ino = desk.put(b"one")
    own, _ = desk.files.open(ino, os.O_RDONLY)
    with desk.by_server():
        first, second = (desk.files.open(ino, os.O_RDONLY)[0] for _ in range(2))
    assert first == second != own
    opened = desk.store.opened(ino)
    assert (opened.readers, opened.served_readers, opened.served_passing) == (3, 2, 2)
    desk.files.release(own)
    assert opened.only_served
    for fh in (first, second):
        desk.files.release(fh)
    assert (opened.served_readers, opened.served_passing, opened.passing_bytes) == (0, 0, 0)
    assert ino not in desk.store.open_inos
    with desk.by_server():
        assert desk.load(ino)[0] == first
    assert len(desk.handles) == 0
    assert desk.path.describe() == {"backing_ids_open": 0, "backing_ids_cached": 1}


def test_a_server_opens_no_more_than_its_part_again(desk: Desk) -> None:
    """[life-server] What was open on passthrough before is beyond it by now, whoever read it."""
    served, local = desk.put(b"one"), desk.put(b"two")
    with desk.by_server():
        desk.load(served)
    desk.load(local)
    desk.store.configure(file_server_passthrough_max=0.0)
    for ino in (served, local):
        with desk.by_server():
            fh, grant = desk.files.open(ino, os.O_RDONLY)
        assert not grant.backing_id
        desk.files.release(fh)
        assert ino not in desk.store.open_inos
        assert desk.load(ino)[1].backing_id


def test_what_a_server_may_still_write_has_handles_that_are_not_shared(desk: Desk) -> None:
    """[life-server] Each open looks whether it did."""
    with desk.by_server():
        fh, _, ino, _ = desk.files.create(ROOT_INODE, b"one.tmp", FILE, NEW, 0, 0)
        os.pwrite(desk.store.extent_fd(desk.handles.get(fh).opened), b"bytes", 0)
        who = desk.files.requester()
        desk.store.rename(ROOT_INODE, b"one.tmp", ROOT_INODE, b"one", replace=True, who=who)
        one, other = (desk.files.open(ino, os.O_RDONLY)[0] for _ in range(2))
        assert one != other
        for reader in (one, other, fh):
            desk.files.release(reader)
        assert desk.load(ino) == desk.load(ino)
    assert len(desk.handles) == 0


def test_a_close_beside_a_quiet_writer_goes_the_whole_way(desk: Desk) -> None:
    """[life-server] It looks whether that one wrote, and may wait for the device to tell."""
    ino = desk.put(b"one")
    with desk.by_server():
        one, other = (desk.files.open(ino, os.O_RDONLY)[0] for _ in range(2))
        assert one == other
        writer, _ = desk.files.open(ino, os.O_RDWR)
        for _ in range(2):
            desk.store.pass_looks(1.0)
        opened = desk.store.opened(ino)
        assert (opened.writers, opened.quiet_writers) == (0, 1)
        assert not desk.files.readers.leave(ino, one, 0)
        for fh in (one, other, writer):
            desk.files.release(fh)
    assert ino not in desk.store.open_inos
    assert len(desk.handles) == 0


def test_another_writer_ends_what_the_kernel_keeps_for_a_server(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[stat] A process may store through a mapping, which a server does not."""
    told: list[int] = []
    monkeypatch.setattr(kernel, "notify_inval_inode", lambda _, ino: told.append(ino))
    ino = desk.put(b"one")
    with desk.by_server():
        served, _ = desk.files.open(ino, os.O_RDWR)
    assert told == [ino]
    first, second = (desk.files.open(ino, os.O_RDWR)[0] for _ in range(2))
    assert told == [ino] * 2
    for fh in (first, second, served):
        desk.files.flush(fh, os.getpid())
        desk.files.release(fh)


def test_a_removed_block_has_no_handle_for_servers(desk: Desk) -> None:
    ino = desk.put(b"one")
    with desk.by_server():
        fh, _ = desk.load(ino)
        desk.unlink(b"one")
        assert not desk.ids.live, "an id pins the extent's space"
        with pytest.raises(BadHandle):
            desk.files.release(fh)


async def test_an_extent_that_was_read_here_is_closed_with_its_last_reader(desk: Desk) -> None:
    ino = desk.put(b"one")
    fh, _ = desk.files.open(ino, os.O_RDONLY)
    assert await Transfers(desk.files).read(fh, 0, 100) == b"bytes"
    opened = desk.handles.get(fh).opened
    assert opened.fd >= 0
    desk.files.release(fh)
    assert opened.fd < 0
    assert ino not in desk.store.parked
    desk.load(ino)
    assert len(desk.ids.live) == 1


def test_no_more_are_kept_than_there_may_be_ids(desk: Desk) -> None:
    inos = [desk.put(b"%d" % number) for number in range(3 * IDS_MAX)]
    first = desk.load(inos[0])
    for ino in inos[1:]:
        desk.load(ino)
    assert len(desk.ids.live) <= IDS_MAX
    assert len(desk.store.parked) <= IDS_MAX
    assert desk.load(inos[0]) != first
    assert len(desk.handles._open) <= IDS_MAX


def test_while_more_are_open_than_may_be_kept_each_close_gives_an_id_back(desk: Desk) -> None:
    inos = [desk.put(b"%d" % number) for number in range(IDS_MAX + 3)]
    told = [desk.files.open(ino, os.O_RDONLY) for ino in inos]
    for left in range(len(told) - 1, -1, -1):
        desk.files.release(told.pop()[0])
        figures = desk.path.describe()
        assert figures["backing_ids_open"] == left
        assert sum(figures.values()) == max(left, IDS_MAX)


def test_an_id_that_is_not_to_be_had_opens_nothing(desk: Desk) -> None:
    ino = desk.put(b"one")
    desk.load(ino)
    while desk.files.readers.give_up_one():
        pass
    desk.path.forget(ino)
    assert not desk.ids.live
    desk.ids.fail_with = errno.ENOMEM
    with pytest.raises(OSError, match="no id"):
        desk.files.open(ino, os.O_RDONLY)
    assert ino not in desk.store.open_inos
    assert len(desk.handles) == 0
    desk.ids.fail_with = 0
    desk.load(ino)


def test_beside_a_quiet_writer_no_handle_is_shared(desk: Desk) -> None:
    """[life-server] Each open looks whether that one wrote again."""
    ino = desk.put(b"one")
    with desk.by_server():
        writer, _ = desk.files.open(ino, os.O_RDWR)
    for _ in range(2):
        desk.store.pass_looks(1.0)
    opened = desk.store.opened(ino)
    assert (opened.writers, opened.quiet_writers) == (0, 1)
    one, other = (desk.files.open(ino, os.O_RDONLY)[0] for _ in range(2))
    assert one != other
    for fh in (one, other):
        desk.files.release(fh)
    with desk.by_server():
        desk.files.release(writer)
