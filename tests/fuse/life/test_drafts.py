"""Drafts: who sees them, what ends them and what does not."""

import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path

import pytest

from tests.support.clients.callers import Caller
from tests.support.clients.stamped import seed_of, stamped, state
from tests.support.clients.stepping import Stepping, until
from tests.support.clients.writers import SIZE
from tests.support.kernel.calls import (
    RENAME_EXCHANGE,
    opened,
    read_file,
    refused,
    renameat2,
    tolerated,
    write_file,
)
from tests.support.mounts.mounting import Mounted

pytestmark = pytest.mark.usefixtures("kvfs_only")
CREATE = os.O_WRONLY | os.O_CREAT
#: No call may hang so long; the machine's own load is not the mount's.
HANG_S = 1.0
WRITER = "tests.support.clients.writers"


@pytest.mark.parametrize("name", ["duplicates", "forks", "programs", "shell", "execs"])
def test_nothing_but_the_last_close_publishes(kv: Path, name: str) -> None:
    """[life-published] Duplicates, forks, programs and redirections of a writer end nothing."""
    with Stepping(WRITER, name, kv / "block") as writer:
        said = (writer.at() or "").split()
        assert said[0] == "half"
        assert state(kv / "block") == "draft"
        if name == "programs":
            assert float(said[1]) < HANG_S, "a program started with an open draft was held up"
        writer.to("written")
        assert state(kv / "block") == "draft"
        writer.to("closed")
        assert state(kv / "block") == "leased"
        assert read_file(kv / "block") == stamped("block", SIZE)
        writer.end()
    until(lambda: state(kv / "block") == "published", "the lease ends with its process", 10)


def test_a_program_that_closes_by_exec_publishes(kv: Path) -> None:
    """[life-published] O_CLOEXEC: execve closes, the bytes are whole, the process lives on."""
    with Stepping(WRITER, "execs_closing", kv / "block") as writer:
        assert writer.at() == "written"
        assert state(kv / "block") == "draft"
        writer.to("closed")
        assert state(kv / "block") == "leased"
        assert read_file(kv / "block") == stamped("block", SIZE)


def test_a_mapping_writes_after_the_last_close(kv: Path) -> None:
    """[life-published] The mapping holds the file open: a draft until it is unmapped."""
    with Stepping(WRITER, "maps_and_closes", kv / "block") as writer:
        assert writer.at() == "unwritten"
        assert state(kv / "block") == "draft"
        writer.to("written")
        assert state(kv / "block") == "draft"
        writer.to("unmapped")
        assert state(kv / "block") == "leased"
        assert read_file(kv / "block") == stamped("block", SIZE)


def test_a_mapping_without_any_descriptor_writes_on(kv: Path, mounted: Mounted) -> None:
    """[life-published] The kernel maps the extent itself on passthrough, and the file is closed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    with opened(kv / "block", os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, mmap.PAGESIZE)
        flags = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
        address = libc.mmap(None, mmap.PAGESIZE, *flags, fd, 0)
    try:
        if mounted.status()["data_path"] == "passthrough":
            until(lambda: state(kv / "block") == "slab", "closed", 10)
        else:
            assert state(kv / "block") == "slab_draft"
        ctypes.memset(address, ord("b"), mmap.PAGESIZE)
    finally:
        assert libc.munmap(address, mmap.PAGESIZE) == 0
    until(lambda: state(kv / "block") == "slab", "unmapped", 10)
    assert read_file(kv / "block") == b"b" * mmap.PAGESIZE


def test_close_and_rename_in_one_breath(kv: Path) -> None:
    """[life-published] The RELEASE may come behind the RENAME: never an absent or short block."""
    for number in range(100):
        temporary, final = kv / f"{number}.tmp", kv / str(number)
        write_file(temporary, stamped(str(number), SIZE // 4))
        os.rename(temporary, final)
        assert state(final) == "published"
        assert os.stat(final).st_size == SIZE // 4
        assert read_file(final) == stamped(str(number), SIZE // 4)


def test_a_duplicate_elsewhere_holds_the_release_back(kv: Path) -> None:
    """[life-published] Renamed and closed while a child still has the descriptor: final, whole."""
    with Stepping(WRITER, "renames_while_a_child_holds", kv / "block") as writer:
        assert writer.at() == "renamed"
        assert state(kv / "block") in ("renamed", "published")
        assert read_file(kv / "block") == stamped("block", SIZE)
        writer.to("released")
        assert state(kv / "block") == "published"
        assert read_file(kv / "block") == stamped("block", SIZE)


def test_another_process_renames_an_open_draft(kv: Path) -> None:
    """[life-published] It moves the name; the draft is its writer's until that is done."""
    with Stepping(WRITER, "duplicates", kv / "block.tmp") as writer:
        assert writer.at() == "half"
        os.rename(kv / "block.tmp", kv / "block")
        assert state(kv / "block") == "draft"
        writer.to("written")
        writer.to("closed")
        assert state(kv / "block") in ("leased", "published")
        assert read_file(kv / "block") == stamped("block", SIZE)


def test_a_rename_before_the_close_takes_what_comes_after(kv: Path) -> None:
    """[life-published] llm-d renames first: what is written before the close is there too."""
    with opened(kv / "block.tmp", CREATE) as fd:
        os.write(fd, b"first ")
        os.rename(kv / "block.tmp", kv / "block")
        assert state(kv / "block") == "published"
        os.write(fd, b"second")
        assert read_file(kv / "block") == b"first second"
    assert state(kv / "block") == "published"
    assert read_file(kv / "block") == b"first second"


def test_two_nodes_write_one_temporary_name(kv: Path) -> None:
    """[life-rewrite] One after the other finishes: each renames a whole block, or gets ENOENT."""
    flags = CREATE | os.O_TRUNC
    for size in (SIZE // 4, 3 * SIZE):
        with Caller() as one, Caller() as two:
            first = one.os("open", str(kv / "K.tmp"), flags, 0o644)
            one.os("write", first, stamped("K", size, 1)[: size // 2])
            second = two.os("open", str(kv / "K.tmp"), flags, 0o644)
            two.os("write", second, stamped("K", size, 2)[: size // 2])
            one.os("write", first, stamped("K", size, 1)[size // 2 :])
            one.os("close", first)
            one.os("rename", str(kv / "K.tmp"), str(kv / "K"))
            assert seed_of(read_file(kv / "K"), "K", size) == 1
            two.os("write", second, stamped("K", size, 2)[size // 2 :])
            two.os("close", second)
            assert seed_of(read_file(kv / "K"), "K", size) == 1
            try:
                two.os("rename", str(kv / "K.tmp"), str(kv / "K"))
            except FileNotFoundError:
                assert seed_of(read_file(kv / "K"), "K", size) == 1
            else:
                assert seed_of(read_file(kv / "K"), "K", size) == 2
        assert os.listdir(kv) == ["K"]
        os.unlink(kv / "K")


def test_many_nodes_race_for_one_temporary_name(kv: Path) -> None:
    """[life-rewrite] Four processes, many rounds: what is there under the final name is whole."""
    rounds = 25
    final = str(kv / "K")

    def store(node: int, renamed: list[int]) -> None:
        with Caller() as caller:
            for number in range(rounds):
                data = stamped("K", SIZE // 4, node * rounds + number)
                # Another node may be quicker time and again: a store that failed, no more.
                with tolerated(errno.ENOENT, errno.ESTALE):
                    fd = caller.os("open", final + ".tmp", CREATE | os.O_TRUNC, 0o644)
                    for at in range(0, len(data), SIZE // 16):
                        caller.os("write", fd, data[at : at + SIZE // 16])
                    caller.os("close", fd)
                    caller.os("rename", final + ".tmp", final)
                    renamed[node] += 1

    renamed = [0] * 4
    nodes = [threading.Thread(target=store, args=(node, renamed)) for node in range(4)]
    for node in nodes:
        node.start()
    seen: set[int] = set()
    while any(node.is_alive() for node in nodes):
        if os.path.exists(final):
            seen.add(seed_of(read_file(final), "K", SIZE // 4))
    for node in nodes:
        node.join()
    seen.add(seed_of(read_file(final), "K", SIZE // 4))
    assert len(seen) > 1, "the reader saw one version only"
    assert sum(renamed) >= rounds, f"renames that succeeded, by node: {renamed}"


def test_exclusive_create_of_a_draft(kv: Path) -> None:
    """[create-exclusive] A draft is there: O_EXCL fails, for its writer and for others."""
    with opened(kv / "block", CREATE | os.O_EXCL), Caller() as elsewhere:
        with refused(errno.EEXIST):
            os.open(kv / "block", CREATE | os.O_EXCL)
        with refused(errno.EEXIST):
            elsewhere.try_open(str(kv / "block"), CREATE | os.O_EXCL)
        assert state(kv / "block") == "draft"


@pytest.fixture
def private(kv: Path) -> Path:
    """A directory whose drafts are their owners'."""
    os.mkdir(kv / "private")
    os.setxattr(kv / "private", "user.kvfs.drafts", b"owner")
    return kv / "private"


def test_a_draft_of_its_owner_is_hidden(private: Path) -> None:
    """[life-drafts-owner] Another process cannot look it up, open it or list it; its writer can."""
    block = str(private / "block")
    with Caller() as writer:
        fd = writer.os("open", block, CREATE | os.O_EXCL, 0o644)
        writer.os("write", fd, stamped("block", SIZE))
        for _ in range(3):
            assert not os.path.exists(block)
            with refused(errno.ENOENT):
                os.open(block, os.O_RDONLY)
            assert os.listdir(private) == []
            assert writer.os("listdir", str(private)) == ["block"]
            assert writer.os("access", block, os.F_OK)
            assert writer.os("stat", block).st_size == SIZE
        writer.os("close", fd)
        assert os.listdir(private) == ["block"]
        assert read_file(block) == stamped("block", SIZE)
        assert state(block) == "leased"


def test_another_process_asked_before_the_writers_rename(private: Path) -> None:
    """[life-drafts-owner] A "no" about a hidden draft is not remembered: the rename works."""
    for number in range(20):
        temporary, final = str(private / f"{number}.tmp"), str(private / str(number))
        assert not os.path.exists(temporary)
        assert not os.path.exists(final)
        with Caller() as writer:
            fd = writer.os("open", temporary, CREATE | os.O_EXCL, 0o644)
            assert not os.path.exists(temporary)
            writer.os("write", fd, b"bytes")
            assert not os.path.exists(temporary)
            writer.os("close", fd)
            writer.os("rename", temporary, final)
        assert read_file(final) == b"bytes"


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC])
def test_a_stranger_does_not_create_a_hidden_draft(private: Path, flags: int) -> None:
    """[life-drafts-owner] O_CREAT neither opens it nor takes its name, whatever it asks for."""
    os.chmod(private, 0o777)
    block = str(private / "block")
    with Caller(1000, 1000) as writer, Caller(1001, 1001) as stranger, Caller(1000, 1000) as own:
        fd = writer.os("open", block, CREATE | os.O_EXCL, 0o600)
        writer.os("write", fd, b"secret")
        with refused(errno.EACCES):
            stranger.os("open", block, flags | os.O_CREAT, 0o644)
        if not flags & os.O_TRUNC:
            with refused(errno.EACCES):
                own.os("open", block, flags | os.O_CREAT, 0o644)
        writer.os("close", fd)
        assert writer.os("stat", block).st_size == 6
        assert read_file(block) == b"secret"


def test_another_process_of_the_owner_takes_a_hidden_draft_over(private: Path) -> None:
    """[life-drafts-owner] O_TRUNC by who may write it: the name is his, with a draft of his own."""
    os.chmod(private, 0o777)
    block = str(private / "block")
    with Caller(1000, 1000) as first, Caller(1000, 1000) as second:
        one = first.os("open", block, CREATE | os.O_TRUNC, 0o600)
        first.os("write", one, b"first")
        two = second.os("open", block, CREATE | os.O_TRUNC, 0o600)
        second.os("write", two, b"second")
        first.os("close", one)
        second.os("close", two)
        assert read_file(block) == b"second"


def test_the_policy_is_inherited_and_ends(private: Path) -> None:
    """[life-drafts-owner] Deeper directories inherit it until one says otherwise."""
    os.makedirs(private / "a" / "b")
    with Caller() as writer:
        fd = writer.os("open", str(private / "a/b/block"), CREATE, 0o644)
        assert os.getxattr(private / "a" / "b", "user.kvfs.drafts") == b"owner"
        assert not os.path.exists(private / "a/b/block")
        os.setxattr(private / "a", "user.kvfs.drafts", b"all")
        assert os.path.exists(private / "a/b/block")
        writer.os("close", fd)


def test_the_policy_hides_drafts_that_all_have_seen(kv: Path) -> None:
    """[life-drafts-owner] The kernel kept such a name for an hour; it is told, a moment later."""
    with Caller() as writer:
        fd = writer.os("open", str(kv / "block"), CREATE, 0o644)
        assert os.path.exists(kv / "block")
        os.setxattr(kv, "user.kvfs.drafts", b"owner")
        tries, pause = iter(range(1000)), threading.Event()
        while os.path.exists(kv / "block"):
            next(tries)
            pause.wait(0.01)
        assert writer.os("access", str(kv / "block"), os.F_OK)
        writer.os("close", fd)
        assert os.path.exists(kv / "block")


def forgotten(path: Path) -> None:
    """Wait until *path* is not there for this process: the kernel is told, a moment later."""
    until(lambda: not os.path.exists(path), f"{path.name} is hidden", 10)


@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE], ids=["moved", "exchanged"])
def test_a_directory_takes_its_drafts_to_another_policy(
    kv: Path, private: Path, flags: int
) -> None:
    """[life-drafts-owner] What all have seen is hidden where a moved directory has come to be."""
    os.makedirs(kv / "public" / "deep")
    if flags:
        os.mkdir(private / "public")
    with Caller() as writer:
        fd = writer.os("open", str(kv / "public/deep/block"), CREATE, 0o644)
        assert os.path.exists(kv / "public/deep/block")
        renameat2(kv / "public", private / "public", flags)
        forgotten(private / "public/deep/block")
        assert writer.os("access", str(private / "public/deep/block"), os.F_OK)
        renameat2(private / "public", kv / "public", flags)
        assert os.path.exists(kv / "public/deep/block")
        writer.os("close", fd)


def test_another_process_moves_a_draft_to_another_policy(kv: Path, private: Path) -> None:
    """[life-drafts-owner] It is a draft still, and all had seen it: now its writer alone does."""
    with Caller() as writer:
        fd = writer.os("open", str(kv / "block"), CREATE, 0o644)
        assert os.path.exists(kv / "block")
        os.rename(kv / "block", private / "block")
        forgotten(private / "block")
        assert writer.os("access", str(private / "block"), os.F_OK)
        writer.os("close", fd)
        assert os.path.exists(private / "block")


def test_the_state_is_told_and_not_listed(kv: Path) -> None:
    """[life-state] By name only; nobody sets it; directories have none."""
    write_file(kv / "block", b"bytes")
    assert os.listxattr(kv / "block") == []
    assert state(kv / "block") == "leased"
    for value in (b"published", b""):
        with refused(errno.EPERM):
            os.setxattr(kv / "block", "user.kvfs.state", value)
    with opened(kv / "block", os.O_RDONLY) as fd:
        os.unlink(kv / "block")
        assert os.getxattr(fd, "user.kvfs.state") == b"gone"
