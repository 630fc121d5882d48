"""Creating and opening files."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from errno import (
    EACCES,
    EBADF,
    EEXIST,
    EISDIR,
    ELOOP,
    ENOENT,
    ENOTDIR,
    EPERM,
)
from pathlib import Path

from tests.support.clients.callers import Caller, callers
from tests.support.kernel.calls import opened, read_file, refused, write_file


def test_a_new_file_is_the_callers(kv: Path) -> None:
    """[create] Owner, group and mode are the caller's, the umask taken off."""
    kv.chmod(0o777)
    before = os.stat(kv)
    with Caller(uid=1234, gid=4321, umask=0o027) as caller:
        fd = caller.os("open", str(kv / "file"), os.O_CREAT | os.O_RDWR, 0o777)
        caller.os("close", fd)
    info = os.stat(kv / "file")
    assert (info.st_uid, info.st_gid) == (1234, 4321)
    assert stat.S_IMODE(info.st_mode) == 0o750
    assert (info.st_size, info.st_blocks, info.st_nlink) == (0, 0, 1)
    after = os.stat(kv)
    assert after.st_mtime_ns > before.st_mtime_ns
    assert after.st_ctime_ns > before.st_ctime_ns


def test_the_creator_may_write_what_the_mode_forbids(kv: Path, nobody: Caller) -> None:
    """[create] The descriptor that creates is as asked, even with mode 0."""
    kv.chmod(0o777)
    path = str(kv / "file")
    fd = nobody.os("open", path, os.O_CREAT | os.O_RDWR, 0)
    assert nobody.os("write", fd, b"content") == 7
    assert nobody.os("pread", fd, 100, 0) == b"content"
    nobody.os("close", fd)
    with refused(EACCES):
        nobody.os("open", path, os.O_RDONLY)


def test_exclusive_create(kv: Path) -> None:
    """[create-exclusive] EEXIST for whatever has the name; without O_EXCL symlinks are followed."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    with opened(kv / "file", flags):
        pass
    (kv / "directory").mkdir()
    os.symlink("made-by-link", kv / "dangling")
    for name in ("file", "directory", "dangling"):
        with refused(EEXIST):
            os.open(kv / name, flags)
    with opened(kv / "dangling", os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"through")
    assert read_file(kv / "made-by-link") == b"through"


def test_one_of_many_exclusive_creators_wins(kv: Path) -> None:
    """[create-exclusive] Of several threads and processes exactly one creates each name."""

    def create_all(caller: Caller) -> int:
        won = 0
        for number in range(60):
            try:
                fd = caller.os(
                    "open", str(kv / f"{number}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600
                )
            except FileExistsError:
                continue
            caller.os("close", fd)
            won += 1
        return won

    with callers(4) as processes, ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(create_all, processes)) == 60


def test_truncating_open(kv: Path) -> None:
    """[open-truncate] Content and blocks go, inode times advance, new content takes the place."""
    write_file(kv / "file", b"x" * 100_000)
    before = os.stat(kv / "file")
    with opened(kv / "file", os.O_WRONLY | os.O_TRUNC) as fd:
        assert os.fstat(fd).st_size == 0
        assert os.stat(kv / "file").st_size == 0
        assert os.stat(kv / "file").st_blocks == 0
        os.write(fd, b"new")
    after = os.stat(kv / "file")
    assert read_file(kv / "file") == b"new"
    assert after.st_mtime_ns > before.st_mtime_ns
    with opened(kv / "file", os.O_RDONLY | os.O_TRUNC) as fd:
        assert os.read(fd, 10) == b""
    assert os.stat(kv / "file").st_size == 0


def test_a_truncating_open_keeps_what_is_not_content(kv: Path) -> None:
    """[open-truncate] Mode, owner and attributes are the file's, not its bytes'."""
    write_file(kv / "tmp", b"content")
    os.rename(kv / "tmp", kv / "file")
    os.chmod(kv / "file", 0o640)
    os.chown(kv / "file", 5, 6)
    os.setxattr(kv / "file", "user.a", b"1")
    with opened(kv / "file", os.O_RDWR | os.O_TRUNC) as fd:
        os.write(fd, b"new")
    info = os.stat(kv / "file")
    assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (0o640, 5, 6)
    assert os.listxattr(kv / "file") == ["user.a"]


def test_a_truncating_open_advances_the_times(kv: Path) -> None:
    """[open-truncate] mtime and ctime, of an empty file too."""
    write_file(kv / "file", b"")
    os.utime(kv / "file", (0, 0))
    before = os.stat(kv / "file")
    with opened(kv / "file", os.O_RDWR | os.O_TRUNC):
        pass
    after = os.stat(kv / "file")
    assert after.st_mtime > 0
    assert after.st_ctime_ns > before.st_ctime_ns


def test_a_truncating_open_without_permission_truncates_nothing(kv: Path, nobody: Caller) -> None:
    """[open-truncate] EACCES comes first."""
    write_file(kv / "file", b"content")
    for flags in (os.O_WRONLY | os.O_TRUNC, os.O_RDONLY | os.O_TRUNC):
        with refused(EACCES):
            nobody.os("open", str(kv / "file"), flags)
    assert read_file(kv / "file") == b"content"


def test_appenders_overwrite_nothing(kv: Path) -> None:
    """[open-append] Four processes with two descriptors each; every line arrives, whole."""
    write_file(kv / "log", b"start\n")
    lines, processes = 100, 4

    def append_lines(numbered: tuple[int, Caller]) -> None:
        who, caller = numbered
        flags = os.O_WRONLY | os.O_APPEND
        fds = [caller.os("open", str(kv / "log"), flags) for _ in range(2)]
        for line in range(lines):
            text = f"{who}:{line}:".encode() + b"x" * (line * 37 % 500) + b"\n"
            assert caller.os("write", fds[line % 2], text) == len(text)
        for fd in fds:  # a writer that is killed takes the name along: [life-torn]
            caller.os("close", fd)

    with callers(processes) as started, ThreadPoolExecutor(processes) as pool:
        list(pool.map(append_lines, enumerate(started)))
    content = read_file(kv / "log").splitlines()
    assert content[0] == b"start"
    heads = [tuple(map(int, line.split(b":")[:2])) for line in content[1:]]
    assert len(heads) == lines * processes
    for who in range(processes):
        assert [line for writer, line in heads if writer == who] == list(range(lines))
    for line in content[1:]:
        assert len(line.split(b":")[2]) == int(line.split(b":")[1]) * 37 % 500


def test_an_append_ignores_the_offset(kv: Path) -> None:
    """[open-append] Also behind a seek, a truncate and another descriptor's write."""
    with (
        opened(kv / "file", os.O_CREAT | os.O_RDWR | os.O_APPEND) as appender,
        opened(kv / "file", os.O_RDWR) as writer,
    ):
        os.write(appender, b"aaaa")
        os.lseek(appender, 0, os.SEEK_SET)
        os.write(appender, b"bb")
        os.pwrite(writer, b"cccc", 10)
        os.write(appender, b"dd")
        assert read_file(kv / "file") == b"aaaabb\0\0\0\0ccccdd"
        os.ftruncate(appender, 2)
        os.write(appender, b"ee")
        assert read_file(kv / "file") == b"aaee"
        assert os.lseek(appender, 0, os.SEEK_CUR) == 4


def test_open_flags(kv: Path) -> None:
    """[open-flags] The refusals and the flags that only the kernel cares for."""
    write_file(kv / "file", b"content")
    (kv / "directory").mkdir()
    os.symlink("file", kv / "link")
    with refused(ELOOP):
        os.open(kv / "link", os.O_RDONLY | os.O_NOFOLLOW)
    with refused(ENOTDIR):
        os.open(kv / "file", os.O_RDONLY | os.O_DIRECTORY)
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        with refused(EISDIR):
            os.open(kv / "directory", flags)
    with refused(EISDIR):
        os.open(kv / "directory", os.O_CREAT | os.O_WRONLY)
    with refused(ENOENT):
        os.open(kv / "absent", os.O_RDWR)
    for flags in (os.O_NONBLOCK, os.O_NOCTTY, os.O_CLOEXEC, os.O_NOFOLLOW):
        with opened(kv / "file", os.O_RDONLY | flags) as fd:
            assert os.read(fd, 100) == b"content"
    with opened(kv / "link", os.O_PATH | os.O_NOFOLLOW) as fd:
        assert stat.S_ISLNK(os.fstat(fd).st_mode)
    with opened(kv / "file", os.O_PATH) as path_fd:
        with refused(EBADF):
            os.read(path_fd, 1)
        with opened(f"/proc/self/fd/{path_fd}", os.O_RDONLY) as fd:
            assert os.read(fd, 100) == b"content"


def test_a_descriptor_does_only_what_it_was_opened_for(kv: Path) -> None:
    """[open-flags] Write-only cannot read, read-only cannot write."""
    write_file(kv / "file", b"content")
    with opened(kv / "file", os.O_WRONLY) as fd:
        with refused(EBADF):
            os.read(fd, 1)
        assert os.pwrite(fd, b"C", 0) == 1
    with opened(kv / "file", os.O_RDONLY) as fd, refused(EBADF):
        os.write(fd, b"x")
    assert read_file(kv / "file") == b"Content"


def test_noatime_is_for_the_owner(kv: Path, nobody: Caller) -> None:
    """[open-noatime] Root and the owner may ask for it, others may not."""
    write_file(kv / "file", b"content")
    with opened(kv / "file", os.O_RDONLY | os.O_NOATIME) as fd:
        assert os.read(fd, 10) == b"content"
    with refused(EPERM):
        nobody.os("open", str(kv / "file"), os.O_RDONLY | os.O_NOATIME)
    os.chown(kv / "file", nobody.uid, nobody.gid)
    nobody.os("close", nobody.os("open", str(kv / "file"), os.O_RDONLY | os.O_NOATIME))


def test_programs_run_from_the_mount(kv: Path) -> None:
    """[exec] A script with an interpreter and a binary run; without the x bit they do not."""
    (kv / "script").write_text("#!/bin/sh\necho from the mount\n")
    with refused(EACCES):
        subprocess.run([kv / "script"], check=False)
    (kv / "script").chmod(0o755)
    done = subprocess.run([kv / "script"], check=True, capture_output=True, text=True)
    assert done.stdout == "from the mount\n"
    (kv / "true").write_bytes(Path("/bin/true").read_bytes())
    (kv / "true").chmod(0o755)
    assert subprocess.run([kv / "true"], check=False).returncode == 0
    (kv / "module.py").write_text("print('imported')")
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(kv)!r}); import module"]
    assert subprocess.run(run, check=True, capture_output=True).stdout == b"imported\n"
