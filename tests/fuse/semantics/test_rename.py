"""Renaming, in all its forms."""

import contextlib
import itertools
import os
import threading
from errno import EBUSY, EEXIST, EINVAL, EISDIR, ENOENT, ENOTDIR, ENOTEMPTY, EXDEV
from pathlib import Path

import pytest

from tests.support.kernel.calls import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    list_directory,
    opened,
    read_file,
    refused,
    renameat2,
    write_file,
)
from tests.support.mounts.mounting import MEMORY_DIRECTORY, Mounted, Reference


def make(path: Path, kind: str, content: bytes = b"") -> None:
    """Make a file, an empty directory, a full one, a symlink or a FIFO."""
    if kind == "file":
        write_file(path, content)
    elif kind == "symlink":
        os.symlink("target", path)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
        if kind == "full":
            write_file(path / "inside", b"")


def test_a_rename_keeps_the_file(kv: Path) -> None:
    """[rename] Number, content, mode, owner, mtime and attributes; within and across."""
    (kv / "d").mkdir()
    write_file(kv / "file", b"content")
    os.chmod(kv / "file", 0o640)
    os.utime(kv / "file", ns=(11, 22))
    os.setxattr(kv / "file", "user.a", b"1")
    before = os.stat(kv / "file")
    os.rename(kv / "file", kv / "other")
    os.rename(kv / "other", kv / "d" / "moved")
    after = os.stat(kv / "d" / "moved")
    for field in ("st_ino", "st_mode", "st_uid", "st_gid", "st_size", "st_mtime_ns", "st_nlink"):
        assert getattr(after, field) == getattr(before, field), field
    assert read_file(kv / "d" / "moved") == b"content"
    assert os.getxattr(kv / "d" / "moved", "user.a") == b"1"
    assert os.listdir(kv) == ["d"]


def test_a_tree_moves_whole(kv: Path) -> None:
    """[rename] A directory carries what is below, and its ".." follows."""
    (kv / "a" / "b" / "c").mkdir(parents=True)
    (kv / "x").mkdir()
    write_file(kv / "a" / "b" / "c" / "file", b"deep")
    with opened(kv / "a" / "b" / "c", os.O_RDONLY | os.O_DIRECTORY) as inside:
        os.rename(kv / "a" / "b", kv / "x" / "moved")
        assert os.stat("file", dir_fd=inside).st_size == 4
        assert os.stat("../..", dir_fd=inside).st_ino == os.stat(kv / "x").st_ino
    assert read_file(kv / "x" / "moved" / "c" / "file") == b"deep"
    rows = {row.name: row.ino for row in list_directory(kv / "x" / "moved")}
    assert rows[b".."] == os.stat(kv / "x").st_ino
    assert os.listdir(kv / "a") == []


def test_an_open_file_is_renamed(kv: Path) -> None:
    """[rename] The writer goes on under the new name, as every connector does it."""
    with opened(kv / "tmp", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"first")
        os.rename(kv / "tmp", kv / "final")
        os.write(fd, b" second")
        assert os.fstat(fd).st_nlink == 1
    assert read_file(kv / "final") == b"first second"


def test_refused_renames(kv: Path, mounted: Mounted | Reference) -> None:
    """[rename] Each with its reason, and nothing changes."""
    (kv / "d" / "sub").mkdir(parents=True)
    write_file(kv / "file", b"content")
    table = [
        (ENOENT, "absent", "new"),
        (ENOENT, "file", "absent/new"),
        (ENOTDIR, "file", "file/new"),
        (ENOTDIR, "file/below", "new"),
        (ENOTDIR, "file", "new/"),
        (EINVAL, "d", "d/sub/inside"),
        (EINVAL, "d", "d/inside"),
        (ENOTEMPTY, "d/sub", "d"),
        (ENOTEMPTY, "file", "d"),
    ]
    for number, old, new in table:
        with refused(number, *((EISDIR,) if (old, new) == ("file", "d") else ())):
            os.rename(f"{kv}/{old}", f"{kv}/{new}")
    with refused(EBUSY):
        os.rename(kv / "d", f"{kv}/..")
    with refused(EBUSY, EXDEV):
        os.rename(mounted.path, kv / "mountpoint")
    with refused(EXDEV):
        os.rename(kv / "file", MEMORY_DIRECTORY / "kvfs-test-never-made")
    assert sorted(os.listdir(kv)) == ["d", "file"]
    assert os.listdir(kv / "d") == ["sub"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("file", "file", None),
        ("file", "symlink", None),
        ("symlink", "file", None),
        ("fifo", "file", None),
        ("file", "fifo", None),
        ("empty", "empty", None),
        ("full", "empty", None),
        ("empty", "full", ENOTEMPTY),
        ("full", "full", ENOTEMPTY),
        ("file", "empty", EISDIR),
        ("symlink", "empty", EISDIR),
        ("empty", "file", ENOTDIR),
        ("empty", "symlink", ENOTDIR),
    ],
)
def test_what_replaces_what(
    kv: Path, mounted: Mounted | Reference, old: str, new: str, expected: int | None
) -> None:
    """[rename-replace] Every kind over every kind."""
    make(kv / "old", old, b"old")
    make(kv / "new", new, b"new")
    number = os.lstat(kv / "old").st_ino
    if expected is None:
        os.rename(kv / "old", kv / "new")
        assert os.lstat(kv / "new").st_ino == number
        assert os.listdir(kv) == ["new"]
    else:
        says_exists = expected == ENOTEMPTY and isinstance(mounted, Reference)
        with refused(EEXIST if says_exists else expected):
            os.rename(kv / "old", kv / "new")
        assert os.lstat(kv / "old").st_ino == number
        assert sorted(os.listdir(kv)) == ["new", "old"]


def test_readers_of_the_replaced_keep_its_bytes(kv: Path) -> None:
    """[rename-replace] By descriptor the old file, by name the new one."""
    write_file(kv / "final", b"old" * 10_000)
    with opened(kv / "final", os.O_RDONLY) as reader:
        write_file(kv / "tmp", b"new" * 20_000)
        os.rename(kv / "tmp", kv / "final")
        assert os.pread(reader, 40_000, 0) == b"old" * 10_000
        assert read_file(kv / "final") == b"new" * 20_000
        assert os.fstat(reader).st_size == 30_000


def test_a_name_that_is_replaced_is_always_there_and_whole(kv: Path) -> None:
    """[rename-replace] Readers during 150 replacements see one of the versions, never less."""
    size = 50_000
    write_file(kv / "block", bytes([0]) * size)
    finished = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not finished.is_set():
            try:
                content = read_file(kv / "block")
            except OSError as error:
                wrong.append(str(error))
                return
            if len(content) != size or len(set(content)) != 1:
                wrong.append(f"{len(content)} bytes of {sorted(set(content))}")
                return

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for number in range(150):
            write_file(kv / "block.tmp", bytes([number]) * size)
            os.rename(kv / "block.tmp", kv / "block")
    finally:
        finished.set()
        for reader in readers:
            reader.join()
    assert not wrong


@pytest.mark.parametrize("kind", ["file", "empty", "full", "symlink", "fifo"])
def test_noreplace(kv: Path, kind: str) -> None:
    """[rename-noreplace] EEXIST for any target, an ordinary rename without one."""
    write_file(kv / "old", b"old")
    make(kv / "new", kind)
    number = os.lstat(kv / "new").st_ino
    with refused(EEXIST):
        renameat2(kv / "old", kv / "new", RENAME_NOREPLACE)
    assert os.lstat(kv / "new").st_ino == number
    assert read_file(kv / "old") == b"old"
    renameat2(kv / "old", kv / "free", RENAME_NOREPLACE)
    assert read_file(kv / "free") == b"old"
    with refused(EEXIST):
        renameat2(kv / "free", kv / "free", RENAME_NOREPLACE)


@pytest.mark.parametrize(
    ("one", "two"),
    list(itertools.combinations_with_replacement(["file", "empty", "full", "symlink"], 2)),
)
def test_exchange(kv: Path, one: str, two: str) -> None:
    """[rename-exchange] Any two kinds in two directories change places; link counts follow."""
    for name in ("a", "b"):
        (kv / name).mkdir()
    make(kv / "a" / "one", one, b"one")
    make(kv / "b" / "two", two, b"two")
    numbers = os.lstat(kv / "a" / "one").st_ino, os.lstat(kv / "b" / "two").st_ino
    renameat2(kv / "a" / "one", kv / "b" / "two", RENAME_EXCHANGE)
    swapped = os.lstat(kv / "b" / "two").st_ino, os.lstat(kv / "a" / "one").st_ino
    assert swapped == numbers
    directories = {"empty", "full"}
    assert os.stat(kv / "a").st_nlink == 2 + (two in directories)
    assert os.stat(kv / "b").st_nlink == 2 + (one in directories)
    if one in directories:
        rows = {row.name: row.ino for row in list_directory(kv / "b" / "two")}
        assert rows[b".."] == os.stat(kv / "b").st_ino
    renameat2(kv / "a" / "one", kv / "b" / "two", RENAME_EXCHANGE)
    assert os.lstat(kv / "a" / "one").st_ino == numbers[0]


def test_refused_exchanges(kv: Path) -> None:
    """[rename-exchange] Both must be there, and neither inside the other."""
    (kv / "d" / "sub").mkdir(parents=True)
    write_file(kv / "file", b"")
    for old, new, number in (
        ("file", "absent", ENOENT),
        ("absent", "file", ENOENT),
        ("d", "d/sub", EINVAL),
        ("d/sub", "d", EINVAL),
    ):
        with refused(number, *((ENOTEMPTY,) if new == "d" else ())):
            renameat2(kv / old, kv / new, RENAME_EXCHANGE)
    with refused(EINVAL):
        renameat2(kv / "file", kv / "d", RENAME_EXCHANGE | RENAME_NOREPLACE)


@pytest.mark.usefixtures("kvfs_only")
def test_whiteouts_are_refused(kv: Path) -> None:
    """[rename-whiteout] EINVAL, and the name stays."""
    write_file(kv / "file", b"content")
    with refused(EINVAL):
        renameat2(kv / "file", kv / "new", RENAME_WHITEOUT)
    assert read_file(kv / "file") == b"content"


def test_a_rename_onto_itself(kv: Path) -> None:
    """[rename-same] Succeeds and changes nothing, for files and directories."""
    write_file(kv / "file", b"content")
    (kv / "d").mkdir()
    for name in ("file", "d"):
        number = os.stat(kv / name).st_ino
        os.rename(kv / name, kv / name)
        os.rename(kv / name, f"{kv}/d/../{name}")
        assert os.stat(kv / name).st_ino == number
    assert read_file(kv / "file") == b"content"


def test_one_of_two_racing_renames_wins(kv: Path) -> None:
    """[rename] Two writers with one temporary name, as two LMCache nodes: ENOENT for the second."""
    (kv / "final").mkdir()
    for number in range(50):
        write_file(kv / "tmp", b"content")
        results: list[str] = []
        gate = threading.Barrier(2)

        def move(target: int, results: list[str] = results, gate: threading.Barrier = gate) -> None:
            gate.wait()
            with contextlib.suppress(FileNotFoundError):
                os.rename(kv / "tmp", kv / "final" / f"{target}")
                results.append("moved")

        movers = [threading.Thread(target=move, args=(2 * number + side,)) for side in (0, 1)]
        for mover in movers:
            mover.start()
        for mover in movers:
            mover.join()
        assert results == ["moved"]
    assert len(os.listdir(kv / "final")) == 50
