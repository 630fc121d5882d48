"""The ends of each of three that serve a block over nfsd: the kvfs daemon, nfsd, a client host.

Whatever dies in the middle of a store, a name is whole for all, or it is not there. What a restart
keeps, and which error a client gets until then, is in docs/nfs.md.
"""

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.guest.conftest import Rack, rack
from tests.support.clients.stamped import seed_of, stamped
from tests.support.clients.stepping import Stepping, until
from tests.support.kernel.calls import read_file, refused, write_file
from tests.support.mounts.mounting import run_kvfs

BLOCK_BYTES: Final = 8 << 20
#: What a client gets from a server whose mount is dead.
DEAD: Final = (errno.EIO, errno.ESTALE)
#: nfsd waits for its clients to come back, and they for it, longer each time.
BACK_WAIT_S: Final = 180.0


@pytest.fixture(scope="module")
def served(drive: Path) -> Iterator[Rack]:
    with rack("deaths", "--capacity=512MiB") as made:
        yield made


@pytest.fixture
def one(served: Rack, version: str) -> Iterator[Path]:
    """The pool as the first host sees it, freshly mounted: what died took a mount with it."""
    with mounted_on(served, 0, version) as path:
        yield path


@pytest.fixture
def two(served: Rack, version: str) -> Iterator[Path]:
    """The pool as another host sees it."""
    with mounted_on(served, 1, version) as path:
        yield path


@contextlib.contextmanager
def mounted_on(served: Rack, host: int, version: str) -> Iterator[Path]:
    path = served.mount(host, version)
    yield path
    served.hosts[host].umount(path, "-f", "-l")


def stores_at(path: Path, seed: int = 0) -> Stepping:
    """Return a process that stores the block *path*, to be entered."""
    return Stepping("tests.support.nfs.block_writer", path, str(BLOCK_BYTES), str(seed))


def found(path: Path, what: str | None = None) -> int | None:
    """Return the seed of what has the name *path*, which must be whole; None for a miss."""
    try:
        data = read_file(path)
    except FileNotFoundError:
        return None
    return seed_of(data, what or path.name, BLOCK_BYTES)


def is_missing(name: str, *roots: Path) -> bool:
    """Whether none of *roots* has *name*; who has it has it whole."""
    return [found(root / name) for root in roots] == [None] * len(roots)


def stores_anew(name: str, by: Path, *others: Path) -> None:
    """Store *name* again; all find it whole."""
    with stores_at(by / name, 1) as writer:
        assert writer.at() == "half"
        writer.to("stored")
    for root in (by, *others):
        until(lambda root=root: found(root / name) == 1, f"{name} at {root}")  # type: ignore[misc]


def test_a_client_process_that_is_killed_in_the_middle(
    served: Rack, one: Path, two: Path, name: str
) -> None:
    """The connector renames: a miss, and the next store of it is whole."""
    with stores_at(one / name) as writer:
        assert writer.at() == "half"
        writer.kill()
    assert is_missing(name, one, two, served.path)
    stores_anew(name, two, served.path, one)


def test_a_client_host_that_is_gone_in_the_middle(
    served: Rack, one: Path, two: Path, name: str
) -> None:
    """Its cable is pulled: nothing that it has still to say arrives."""
    with stores_at(one / name) as writer:
        assert writer.at() == "half"
        served.hosts[0].unplug()
        try:
            writer.go()
            assert is_missing(name, two, served.path)
            stores_anew(name, two, served.path)
        finally:
            os.kill(writer.pid, signal.SIGKILL)  # it ends once its cable is back
            served.hosts[0].plug()
    assert found(served.path / name) == 1


def test_nfsd_that_ends_in_the_middle(served: Rack, one: Path, two: Path, name: str) -> None:
    """The client waits for it, and its store goes on where it was."""
    with stores_at(one / name) as writer:
        assert writer.at() == "half"
        served.server.stop()
        writer.go()
        assert found(served.path / name) is None
        served.server.start()
        until(lambda: found(served.path / name) == 0, "the end of the store", BACK_WAIT_S)
        assert writer.at() == "stored"
    for root in (one, two):
        until(lambda root=root: found(root / name) == 0, f"{name} at {root}")  # type: ignore[misc]


def test_a_daemon_that_is_killed_in_the_middle(
    served: Rack, one: Path, two: Path, name: str
) -> None:
    """What was renamed before is kept; of what is being written the client hears an error."""
    stores_anew(f"{name}-before", one, two)
    with stores_at(one / name) as writer:
        assert writer.at() == "half"
        served.mounted.kill_daemon()
        writer.go()
        said = writer.at()
        assert said in {f"failed {errno.errorcode[number]}" for number in DEAD}, said
    served.restart_mount()
    until(lambda: found(two / f"{name}-before", f"{name}-before") == 1, "the block", BACK_WAIT_S)
    assert is_missing(name, one, two, served.path)
    stores_anew(name, one, two, served.path)


def test_a_clean_restart_with_nfsd_stopped(served: Rack, one: Path, two: Path, name: str) -> None:
    """Clients wait, and go on with what they have open."""
    stores_anew(name, one, two)
    fd = os.open(two / name, os.O_RDONLY | os.O_DIRECT)
    try:
        served.server.stop()
        served.mounted.remount()
        served.server.start()
        buffer = bytearray(65536)
        assert os.preadv(fd, [buffer], 0) == len(buffer)
        assert buffer == stamped(name, BLOCK_BYTES, 1)[: len(buffer)]
    finally:
        os.close(fd)
    assert found(one / name) == 1
    stores_anew(f"{name}-next", one, two, served.path)


def test_a_pool_made_anew_opens_nothing_of_the_one_before(
    served: Rack, version: str, name: str
) -> None:
    """In the same place and with the same fsid: a handle of the old one leads nowhere."""
    with served.another_pool(name) as mounted:
        path = served.hosts[0].mount(mounted.path, version)
        stores_anew(name, path, mounted.path)
        assert is_missing(name, served.path)
        fd = os.open(path / name, os.O_RDONLY | os.O_DIRECT)
        try:
            served.server.stop()
            mounted.stop()
            run_kvfs("destroy", "--yes", mounted.source)
            mounted.start()
            served.server.start()
            write_file(mounted.path / name, stamped(name, BLOCK_BYTES, 7))
            # Of v4: EIO, as it cannot reopen it, or EBADF, as the reopening was given up.
            with refused(errno.ESTALE, errno.EIO, errno.EBADF):
                os.preadv(fd, [bytearray(65536)], 0)
        finally:
            os.close(fd)
        until(lambda: found(path / name) == 7, "what the new pool has", BACK_WAIT_S)
        served.hosts[0].umount(path)
