"""Writers that do odd things with an open draft; each runs as a process, step by step.

``python -m tests.support.clients.writers NAME PATH [SIZE]``: stops at each step (stepping.py).
"""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.support.clients.stamped import stamped
from tests.support.clients.stepping import say

SIZE: Final = 1 << 20
#: Of a block that is rewritten a thousand times.
VERSION_SIZE: Final = 256 << 10
#: What a program started with an open draft, or a write, may take; a deadlock takes for ever.
_CALL_WAIT_S: Final = 30.0
_CREATE: Final = os.O_WRONLY | os.O_CREAT


def _draft(path: str, *, inherited: bool = False) -> int:
    """Create *path*, write half of it, and return the descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    os.set_inheritable(fd, inherited)
    assert os.write(fd, stamped("block", SIZE)[: SIZE // 2]) == SIZE // 2
    return fd


def _finish(path: str, fd: int) -> None:
    """Write the other half and close."""
    assert os.write(fd, stamped("block", SIZE)[SIZE // 2 :]) == SIZE // 2
    say("written")
    os.close(fd)
    say("closed")


def duplicates(path: str) -> None:
    """dup, dup2 over a descriptor of the same file, closes of duplicates."""
    fd = _draft(path)
    os.close(os.dup(fd))
    other = os.dup(fd)
    os.dup2(fd, other)
    os.dup2(other, fd)
    os.close(other)
    say("half")
    _finish(path, fd)


def forks(path: str) -> None:
    """Children that exit with the descriptor open, by _exit and by a signal of their own."""
    fd = _draft(path, inherited=True)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    say("half")
    _finish(path, fd)


def programs(path: str) -> None:
    """subprocess.run with an open draft, inherited or not, in threads too."""
    fd = _draft(path)
    fastest_s = []  # what holds one up holds up all of them; the machine's load does not
    for closes in (True, False):
        took_s = []
        for _ in range(4):
            before_s = time.monotonic()
            subprocess.run(["true"], check=True, close_fds=closes, timeout=_CALL_WAIT_S)
            took_s.append(time.monotonic() - before_s)
        fastest_s.append(min(took_s))
    os.set_inheritable(fd, True)
    subprocess.run(["true"], check=True, close_fds=False, timeout=_CALL_WAIT_S)
    runs = [
        threading.Thread(target=subprocess.run, args=(["true"],), kwargs={"timeout": _CALL_WAIT_S})
        for _ in range(4)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    say(f"half {max(fastest_s):.3f}")
    _finish(path, fd)


def shell(path: str) -> None:
    """A shell that writes through redirections, with programs in between."""
    (Path(path).parent / "part").write_bytes(stamped("block", SIZE))
    script = f"""
        exec 3> {path}
        dd if=part bs={SIZE // 2} count=1 status=none >&3
        (true) ; true 4>&3
        echo half; head -c 1 >/dev/null
        dd if=part bs={SIZE // 2} skip=1 status=none >&3
        echo written; head -c 1 >/dev/null
        exec 3>&-
        echo closed; head -c 1 >/dev/null
    """
    os.chdir(Path(path).parent)
    os.execvp("sh", ["sh", "-c", script])


def execs(path: str) -> None:
    """Replace this program with an inheriting one that goes on writing (execv)."""
    fd = _draft(path, inherited=True)
    module = "tests.support.clients.writers"
    os.execv(sys.executable, [sys.executable, "-m", module, "goes_on", path, str(fd)])


def goes_on(path: str, fd: str) -> None:
    """Take over a descriptor from the program that was here before."""
    say("half")
    _finish(path, int(fd))


def execs_closing(path: str) -> None:
    """Execute a program with an O_CLOEXEC draft open: that closes it, and so publishes it."""
    fd = _draft(path)
    assert os.write(fd, stamped("block", SIZE)[SIZE // 2 :]) == SIZE // 2
    say("written")
    os.execvp("sh", ["sh", "-c", "echo closed; head -c 1 >/dev/null"])


def exits(path: str) -> None:
    """Write all of it and exit without a close."""
    fd = _draft(path)
    os.write(fd, stamped("block", SIZE)[SIZE // 2 :])
    say("written")
    os._exit(7)


def waits(path: str) -> None:
    """Write half of it and wait, to be killed."""
    _draft(path)
    say("half")


def writes_much(path: str, size: str) -> None:
    """One large write, again and again, for a kill to fall into."""
    fd = os.open(path, _CREATE | os.O_EXCL, 0o644)
    data = mmap.mmap(-1, int(size))
    say("ready")
    os.write(1, b"writing\n")
    while True:
        os.pwrite(fd, data, 0)


def writes_in_a_thread(path: str, size: str) -> None:
    """The same in a thread, beside others that do nothing."""
    for _ in range(4):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    threading.Thread(target=writes_much, args=(path, size)).start()


def waits_in_a_thread(path: str) -> None:
    """Write half of it in a thread; the main thread waits for it."""
    for _ in range(4):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    worker = threading.Thread(target=waits, args=(path,))
    worker.start()
    worker.join()


def forked_child_holds(path: str) -> None:
    """A child holds the descriptor too; it outlives this process until a pipe ends."""
    _draft(path, inherited=True)
    child = os.fork()
    if child == 0:
        say("child")
        os._exit(0)
    os.waitpid(child, 0)


def renames_while_a_child_holds(path: str) -> None:
    """Write all of it, rename and close, while a forked child has the descriptor, too."""
    fd = _draft(path + ".tmp", inherited=True)
    os.write(fd, stamped("block", SIZE)[SIZE // 2 :])
    end, other_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(other_end)
        os.read(end, 1)
        os._exit(0)
    os.rename(path + ".tmp", path)
    os.close(fd)
    say("renamed")
    os.close(other_end)
    os.waitpid(child, 0)
    say("released")


def renames_and_waits(path: str) -> None:
    """Write all of it, rename it, and wait with the descriptor open, to be killed."""
    fd = _draft(path + ".tmp")
    os.write(fd, stamped("block", SIZE)[SIZE // 2 :])
    os.rename(path + ".tmp", path)
    say("renamed")


def renames_and_goes_on(path: str) -> None:
    """Write half of it, rename it, write on, and wait to be killed."""
    fd = _draft(path + ".tmp")
    os.rename(path + ".tmp", path)
    say("renamed")
    os.write(fd, stamped("block", SIZE)[SIZE // 2 :])
    say("written")


def maps_and_closes(path: str) -> None:
    """Write through a mapping after the descriptor was closed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.write(fd, bytes(SIZE))
    with mmap.mmap(fd, SIZE) as memory:
        os.close(fd)
        say("unwritten")
        memory[:] = stamped("block", SIZE)
        say("written")
    say("unmapped")


def truncating(path: str, versions: str) -> None:
    """Rewrite a block with O_TRUNC, in several writes each time."""
    for number in range(1, int(versions)):
        _store(path, number)
    say("rewritten")


def renaming(path: str, versions: str) -> None:
    """Rewrite a block by renaming over it."""
    for number in range(1, int(versions)):
        _store(path + ".tmp", number)
        os.rename(path + ".tmp", path)
    say("rewritten")


def _store(path: str, number: int) -> None:
    data = stamped("K", VERSION_SIZE, number)
    fd = os.open(path, _CREATE | os.O_TRUNC, 0o644)
    for at in range(0, VERSION_SIZE, VERSION_SIZE // 4):
        os.write(fd, data[at : at + VERSION_SIZE // 4])
    os.close(fd)


def reads_mapped(path: str) -> None:
    """Map a block, lose the descriptor, and tell at each step whether the bytes are still its."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    fd = os.open(path, os.O_RDONLY)
    size_bytes = os.fstat(fd).st_size
    wanted = os.pread(fd, size_bytes, 0)
    # mmap.mmap would keep a duplicate of the descriptor.
    address = libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    while True:
        say("same" if ctypes.string_at(address, size_bytes) == wanted else "different")


WRITERS: Final[dict[str, Callable[..., None]]] = {
    writer.__name__: writer
    for writer in (
        duplicates,
        forks,
        programs,
        shell,
        execs,
        goes_on,
        execs_closing,
        exits,
        waits,
        writes_much,
        writes_in_a_thread,
        waits_in_a_thread,
        forked_child_holds,
        renames_while_a_child_holds,
        renames_and_waits,
        renames_and_goes_on,
        maps_and_closes,
        truncating,
        renaming,
        reads_mapped,
    )
}

if __name__ == "__main__":
    WRITERS[sys.argv[1]](*sys.argv[2:])
