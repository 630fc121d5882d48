"""O_TRUNC of what is being written: where a writer would lose its bytes it is as on XFS.

These run on a native file system, too.
"""

import logging
import mailbox
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.clients.callers import Caller
from tests.support.kernel.calls import opened, read_file, write_file

TRUNCATE = os.O_WRONLY | os.O_TRUNC
APPEND = os.O_WRONLY | os.O_APPEND


def by_open(path: Path) -> None:
    """Empty it as Python's mailbox does."""
    os.close(os.open(path, TRUNCATE))


def for_reading(path: Path) -> None:
    """O_RDONLY with O_TRUNC empties, too."""
    os.close(os.open(path, os.O_RDONLY | os.O_TRUNC))


def by_creating(path: Path) -> None:
    """As open(path, "w")."""
    write_file(path, b"")


EMPTYING = (by_open, for_reading, by_creating)


@pytest.mark.parametrize("empty", EMPTYING)
@pytest.mark.parametrize("name", ["app.txt", "K.tmp"])
@pytest.mark.parametrize("mode", ["r+", "w", "a"])
def test_who_empties_what_he_writes_keeps_what_he_writes_then(
    kv: Path, mode: str, name: str, empty: Callable[[Path], None]
) -> None:
    """[life-truncate] His bytes went to an inode without a name, and no call told him."""
    path = kv / name
    write_file(path, b"old\n")
    with path.open(mode) as file:
        number = os.fstat(file.fileno()).st_ino
        empty(path)
        assert os.stat(path).st_size == 0
        file.write("new\n")
    assert read_file(path) == b"new\n"
    assert os.stat(path).st_ino == number


def test_a_draft_is_emptied_by_its_writer(kv: Path) -> None:
    """[life-truncate] One that was never closed, too: two descriptors of one inode."""
    with opened(kv / "K", os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, b"first bytes")
        with opened(kv / "K", TRUNCATE) as other:
            os.write(other, b"second")
        assert os.pread(fd, 100, 0) == b"second"
        os.pwrite(fd, b"!", 6)
    assert read_file(kv / "K") == b"second!"


def test_a_maildir_of_python_keeps_its_messages(kv: Path) -> None:
    """[life-truncate] mailbox.MH opens r+, empties by a second open, and writes by the first."""
    box = mailbox.MH(kv / "mail")
    keys = [box.add(f"Subject: {number}\n\nold {number}\n") for number in range(3)]
    box[keys[1]] = "Subject: new\n\nnew body\n"
    box.lock()
    box[keys[2]] = "Subject: locked\n\nnew body\n"
    box.unlock()
    message = mailbox.MHMessage("Subject: seen\n\nbody\n")
    message.add_sequence("flagged")
    box[keys[0]] = message
    box.close()
    again = mailbox.MH(kv / "mail", create=False)
    assert [again[key]["subject"] for key in keys] == ["seen", "new", "locked"]
    assert again[keys[1]].get_payload() == "new body\n"
    assert again.get_sequences() == {"flagged": [int(keys[0])]}


def test_a_log_is_emptied_under_its_logger(kv: Path) -> None:
    """[life-truncate] ``: > app.log`` by a shell, while a logger appends to it."""
    path = kv / "app.log"
    handler = logging.FileHandler(path)
    try:
        for number in range(3):
            record = logging.LogRecord("app", logging.INFO, "", 0, f"line {number}", None, None)
            handler.emit(record)
            subprocess.run(["sh", "-c", ": > app.log"], cwd=kv, check=True)
            assert read_file(path) == b""
            handler.emit(record)
            assert read_file(path) == f"line {number}\n".encode()
    finally:
        handler.close()
    assert read_file(path) == b"line 2\n"


def test_a_shell_that_logs_loses_no_line(kv: Path) -> None:
    """[life-truncate] Loggers of several processes, appending to one file that is emptied."""
    script = """
        exec 3>>app.log
        echo one >&3; : > app.log
        (echo two >&3; echo three >>app.log)
        sed -n p app.log > seen
        : > app.log
        echo four >&3
    """
    subprocess.run(["sh", "-ec", script], cwd=kv, check=True)
    assert read_file(kv / "seen") == b"two\nthree\n"
    assert read_file(kv / "app.log") == b"four\n"


def test_a_log_begun_over_a_final_block_is_emptied_for_all(kv: Path) -> None:
    """[life-truncate] Others see the version before until then, and the log from then on."""
    write_file(kv / "app.log", b"yesterday")
    with Caller() as elsewhere:
        with opened(kv / "app.log", APPEND | os.O_TRUNC) as fd:
            os.write(fd, b"one\n")
            elsewhere.os("close", elsewhere.os("open", str(kv / "app.log"), TRUNCATE))
            os.write(fd, b"two\n")
            assert elsewhere.os("stat", str(kv / "app.log")).st_size == 4
        assert read_file(kv / "app.log") == b"two\n"


@pytest.mark.usefixtures("kvfs_only")
@pytest.mark.parametrize("name", ["K", "K.tmp"])
def test_another_process_gets_an_inode_of_its_own(kv: Path, name: str) -> None:
    """[life-truncate] [life-rewrite] Where a writer does not only append, as with two stores."""
    with opened(kv / name, os.O_WRONLY | os.O_CREAT) as fd, Caller() as elsewhere:
        os.write(fd, b"mine")
        other = elsewhere.os("open", str(kv / name), TRUNCATE)
        assert elsewhere.os("fstat", other).st_ino != os.fstat(fd).st_ino
        elsewhere.os("write", other, b"theirs")
        os.write(fd, b" still")
        assert os.fstat(fd).st_size == len(b"mine still")
        elsewhere.os("close", other)
    assert read_file(kv / name) == b"theirs"


@pytest.mark.usefixtures("kvfs_only")
def test_two_appenders_of_one_temporary_name_each_rename_their_own(kv: Path) -> None:
    """[life-rewrite] A temporary name is a store's, whatever its flags."""
    with Caller() as elsewhere:
        with opened(kv / "K.tmp", APPEND | os.O_CREAT) as fd:
            os.write(fd, b"mine")
            other = elsewhere.os("open", str(kv / "K.tmp"), APPEND | os.O_TRUNC)
            elsewhere.os("write", other, b"theirs")
        os.rename(kv / "K.tmp", kv / "K")
        assert read_file(kv / "K") == b"mine"
        elsewhere.os("close", other)
        elsewhere.os("rename", str(kv / "K.tmp"), str(kv / "K"))
        assert read_file(kv / "K") == b"theirs"
