"""A killed server costs a pause: another one goes on with the mount, and no call fails.

Each test kills the real server, at a random moment or at a chosen point of a request, and its
client notices nothing. After each the log must hold no error but that the server was killed.
"""

import contextlib
import fcntl
import itertools
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from mount.fuse.wire import Opcode
from tests.fuse.conftest import PATHS, pool_source, require_passthrough
from tests.support.clients.stepping import Stepping, until
from tests.support.kernel.calls import linkat
from tests.support.kills.killed_inside import KilledInside, killed_inside
from tests.support.mounts.mounting import skip_without_mounts, workplace

BLOCK: Final = bytes(range(256)) * 1024
HALF: Final = len(BLOCK) // 2
#: The second open is mostly answered as that of one who shares a handle.
OPENS_MAX: Final = 100


@pytest.fixture(scope="module", params=PATHS)
def inside(request: pytest.FixtureRequest) -> Iterator[KilledInside]:
    """A mount on each data path, whose servers die where a test says."""
    skip_without_mounts()
    if request.param == "native":
        pytest.skip("a declared difference: there is no server")
    with (
        pytest.MonkeyPatch.context() as patch,
        workplace("disk") as place,
        pool_source("tmpfs") as source,
        killed_inside(source, place, patch, f"--data-path={request.param}") as mount,
    ):
        if request.param == "passthrough":
            require_passthrough(mount.mounted)
        yield mount
        mount.mounted.stop()


@pytest.fixture(autouse=True)
def _quiet(inside: KilledInside) -> Iterator[None]:
    """Whatever happens to a server, it and the next one log nothing else."""
    known = len(inside.mounted.errors())
    yield
    lines = inside.mounted.errors()[known:]
    assert [line for line in lines if "starting it again" not in line] == []


@pytest.fixture
def kv(inside: KilledInside, request: pytest.FixtureRequest) -> Path:
    """A fresh directory on it."""
    path = inside.path / str(request.node.name).replace("/", "-")
    path.mkdir()
    return path


def test_open_files_go_on(inside: KilledInside, kv: Path) -> None:
    """A half written draft, readers, also of removed and mapped blocks, locks, a listing."""
    draft = os.open(kv / "draft.tmp", os.O_CREAT | os.O_EXCL | os.O_RDWR)
    os.write(draft, BLOCK[:HALF])
    fcntl.flock(draft, fcntl.LOCK_EX)
    (kv / "read").write_bytes(BLOCK)
    (kv / "removed").write_bytes(BLOCK)
    os.setxattr(kv / "removed", "user.a", b"b")
    reader, removed = (os.open(kv / name, os.O_RDONLY) for name in ("read", "removed"))
    mapped = mmap.mmap(removed, 0, prot=mmap.PROT_READ)
    rewritten = os.open(kv / "read", os.O_RDWR)
    os.unlink(kv / "removed")
    nameless = os.open(kv / "nameless", os.O_CREAT | os.O_EXCL | os.O_RDWR)
    os.unlink(kv / "nameless")
    os.write(nameless, BLOCK[:HALF])
    listing = os.scandir(kv)
    first = next(listing).name
    for _ in range(2):
        inside.kill()
        assert os.pread(reader, len(BLOCK), 0) == BLOCK
        assert os.pread(removed, len(BLOCK), 0) == mapped[:] == BLOCK
        assert (os.fstat(removed).st_nlink, os.fstat(removed).st_size) == (0, len(BLOCK))
        assert os.getxattr(removed, "user.a") == b"b"
        assert os.fstat(draft).st_size == HALF
        inside.mounted.follow_server()
    assert {first, *(entry.name for entry in listing)} == {"draft.tmp", "read"}
    os.write(nameless, BLOCK[HALF:])
    assert os.pread(nameless, len(BLOCK), 0) == BLOCK
    assert os.fstat(nameless).st_nlink == 0
    os.write(draft, BLOCK[HALF:])
    with (kv / "draft.tmp").open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.pwrite(rewritten, b"new", 0)
    for fd in (draft, nameless, removed, rewritten, reader):
        os.close(fd)
    mapped.close()
    os.rename(kv / "draft.tmp", kv / "draft")
    assert (kv / "draft").read_bytes() == BLOCK
    assert (kv / "read").read_bytes() == b"new" + BLOCK[3:]
    status = inside.mounted.status()
    assert (status["open_handles"], status["open_inodes"]) == (0, 0)
    assert status.get("backing_ids_open", 0) == 0


def test_a_writer_that_dies_meanwhile_leaves_nothing(inside: KilledInside, kv: Path) -> None:
    """The next server is told of the close, and sees that it is a death."""
    with Stepping("tests.support.clients.writers", "waits", kv / "block") as child:
        assert child.at() == "half"
        inside.kill()
        child.kill()
    assert not (kv / "block").exists()
    inside.mounted.follow_server()


def test_a_lease_holds_on(inside: KilledInside, kv: Path) -> None:
    """A block published in place belongs to its writer's process as before."""
    (kv / "block").write_bytes(BLOCK)
    before = inside.mounted.status()["states"]["leased"]
    inside.kill()
    (kv / "block").read_bytes()
    inside.mounted.follow_server()
    assert inside.mounted.status()["states"]["leased"] == before


def create(kv: Path) -> None:
    """Create exclusively: done twice it would fail."""
    fd = os.open(kv / "made", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o640)
    os.write(fd, BLOCK)
    os.close(fd)
    assert stat.S_IMODE((kv / "made").stat().st_mode) == 0o640
    assert (kv / "made").read_bytes() == BLOCK


def mkdir(kv: Path) -> None:
    """Make a directory and a node."""
    (kv / "made").mkdir()
    assert (kv / "made").stat().st_nlink == 2


def mknod(kv: Path) -> None:
    """Make an empty file that nobody opens."""
    os.mknod(kv / "made", stat.S_IFREG | 0o600)
    assert (kv / "made").stat().st_size == 0


def rename(kv: Path) -> None:
    """Publish over a name: done twice the source would be missing."""
    (kv / "old").rename(kv / "new")
    assert os.listdir(kv) == ["new"]
    assert (kv / "new").read_bytes() == BLOCK


def unlink(kv: Path) -> None:
    """Remove a name."""
    (kv / "old").unlink()
    assert "old" not in os.listdir(kv)


def link(kv: Path) -> None:
    """Publish by a link: done twice the name would be there already."""
    os.link(kv / "old", kv / "new")
    assert os.stat(kv / "new").st_nlink == 2
    assert sorted(os.listdir(kv)) == ["new", "old"]
    assert (kv / "new").read_bytes() == (kv / "old").read_bytes() == BLOCK


def tmpfile(kv: Path) -> None:
    """Make a file without a name, and give it one."""
    fd = os.open(kv, os.O_TMPFILE | os.O_RDWR)
    assert os.listdir(kv) == []
    os.write(fd, BLOCK)
    assert os.fstat(fd).st_nlink == 0
    linkat(fd, kv / "new")
    assert os.fstat(fd).st_nlink == 1
    os.close(fd)
    assert os.listdir(kv) == ["new"]
    assert (kv / "new").read_bytes() == BLOCK


def unlink_one_of_two(kv: Path) -> None:
    """Publish by a link, and remove the first name: done twice it would be missing."""
    os.link(kv / "old", kv / "new")
    (kv / "old").unlink()
    assert os.listdir(kv) == ["new"]
    assert os.stat(kv / "new").st_nlink == 1
    assert (kv / "new").read_bytes() == BLOCK


def removexattr(kv: Path) -> None:
    """Remove an attribute: done twice there would be none."""
    os.removexattr(kv / "old", "user.a")
    assert os.listxattr(kv / "old") == []


def open_to_read(kv: Path) -> None:
    """Open and close a block that nobody has open."""
    assert (kv / "old").read_bytes() == BLOCK


def open_to_write(kv: Path) -> None:
    """Rewrite a byte in place."""
    fd = os.open(kv / "old", os.O_RDWR)
    os.pwrite(fd, b"x", 0)
    os.close(fd)
    assert (kv / "old").read_bytes() == b"x" + BLOCK[1:]


def truncate(kv: Path) -> None:
    """Give the name a new version."""
    with (kv / "old").open("wb") as file:
        file.write(BLOCK[:HALF])
    assert (kv / "old").read_bytes() == BLOCK[:HALF]


ACTS: Final[dict[Callable[[Path], None], list[tuple[str, Opcode]]]] = {
    create: [
        *((point, Opcode.CREATE) for point in ("read", "row written", "reply")),
        ("committed", Opcode.RELEASE),
        ("left", Opcode.RELEASE),
    ],
    mkdir: [("reply", Opcode.MKDIR)],
    mknod: [("kept", Opcode.MKNOD)],
    rename: [(point, Opcode.RENAME) for point in ("announced", "committed")],
    unlink: [("committed", Opcode.UNLINK)],
    link: [(point, Opcode.LINK) for point in ("announced", "committed", "reply")],
    unlink_one_of_two: [("committed", Opcode.UNLINK)],
    tmpfile: [
        *((point, Opcode.TMPFILE) for point in ("read", "row written", "committed", "reply")),
        *((point, Opcode.LINK) for point in ("announced", "committed")),
    ],
    removexattr: [("reply", Opcode.REMOVEXATTR)],
    open_to_read: [("row", Opcode.OPEN)],
    open_to_write: [("row written", Opcode.OPEN)],
    truncate: [("reply", Opcode.OPEN), ("committed", Opcode.LOOKUP)],
}
CASES: Final = [(act, *at) for act, places in ACTS.items() for at in places]


@pytest.mark.parametrize(
    ("act", "point", "code"),
    CASES,
    ids=[f"{act.__name__}-{point}-{code.name}" for act, point, code in CASES],
)
def test_what_was_asked_is_done_once(
    inside: KilledInside, kv: Path, act: Callable[[Path], None], point: str, code: Opcode
) -> None:
    """Whether the server was killed before it did that, or before it could say so."""
    if act not in (create, mkdir, mknod, tmpfile):
        (kv / "old").write_bytes(BLOCK)
        os.setxattr(kv / "old", "user.a", b"b")
    inside.kill_at(point, code)
    act(kv)
    inside.assert_killed()
    inside.mounted.status()
    for entry in os.scandir(kv):
        os.rmdir(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
    status = inside.mounted.status()
    assert (status["open_handles"], status["torn_blocks"]) == (0, 0)


def test_a_shared_handle_is_counted_once(inside: KilledInside, kv: Path) -> None:
    """All readers of a block share one handle; the compiled reader counts them and answers."""
    assert inside.mounted.status()["request_reader"] == "compiled"
    (kv / "block").write_bytes(BLOCK)
    with contextlib.ExitStack() as readers:
        readers.enter_context((kv / "block").open("rb"))
        with inside.killed_answering():
            readers.enter_context((kv / "block").open("rb"))
        readers.enter_context((kv / "block").open("rb"))
        assert inside.mounted.status()["open_handles"] == 3
    until(lambda: inside.mounted.status()["open_handles"] == 0, "all closes are counted")


@pytest.fixture(params=PATHS)
def in_python(request: pytest.FixtureRequest) -> Iterator[KilledInside]:
    """The same kind of mount, with the reader in Python."""
    flags = (f"--data-path={request.param}", "--set", "compiled_reader=false")
    with (
        pytest.MonkeyPatch.context() as patch,
        workplace("disk") as place,
        pool_source("tmpfs") as source,
        killed_inside(source, place, patch, *flags) as mount,
    ):
        yield mount
        mount.mounted.stop()


def test_the_reader_in_python_counts_it_once_too(in_python: KilledInside) -> None:
    """The same, but it is killed in a function of Python."""
    inside, kv = in_python, in_python.path
    (kv / "block").write_bytes(BLOCK)
    inside.kill_at("reply")
    with contextlib.ExitStack() as readers:
        # At times the server forgets whose thread this is: it does not answer the next open there.
        # None closes meanwhile, because that is answered there, too.
        for opened in itertools.count(1):
            readers.enter_context((kv / "block").open("rb"))
            if inside.has_come_there() or opened == OPENS_MAX:
                break
        inside.assert_killed()
        readers.enter_context((kv / "block").open("rb"))
        assert inside.mounted.status()["open_handles"] == opened + 1
    until(lambda: inside.mounted.status()["open_handles"] == 0, "all closes are counted")


def test_no_backing_id_is_left(inside: KilledInside, kv: Path) -> None:
    """Ids are the connection's: one that nobody knows would keep its block's space for ever."""
    (kv / "block").write_bytes(BLOCK * 64)
    (kv / "block").read_bytes()
    inside.kill()
    os.unlink(kv / "block")
    inside.mounted.follow_server()
    assert inside.mounted.status().get("backing_ids_open", 0) == 0
