"""What the kernel's clients see of a pool behind nfsd: right bytes, or the documented error.

Each test on NFSv3 and v4.2; a kernel with passthrough uses it.
"""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.guest.conftest import Rack, rack
from tests.support.clients.stamped import seed_of, stamped
from tests.support.clients.stepping import until
from tests.support.kernel.calls import read_file, refused, tolerated, write_file
from tests.support.mounts.mounting import kernel_has_passthrough, run_kvfs

MIB: Final = 1 << 20
BLOCK_BYTES: Final = 4 * MIB


@pytest.fixture(scope="module")
def served(drive: Path) -> Iterator[Rack]:
    with rack("data", "--capacity=512MiB") as made:
        wanted = "passthrough" if kernel_has_passthrough() else "daemon"
        assert made.mounted.status()["data_path"] == wanted
        yield made
        assert made.mounted.errors() == []


@pytest.fixture(scope="module")
def one(served: Rack, version: str) -> Path:
    """The pool as the first host sees it."""
    return served.mount(0, version)


@pytest.fixture(scope="module")
def two(served: Rack, version: str) -> Path:
    """The pool as another host sees it."""
    return served.mount(1, version)


def store(root: Path, name: str, data: bytes, own: str = "") -> None:
    """Store as connectors do: under a temporary name, then a rename."""
    write_file(root / f"{name}.tmp{own}", data)
    os.rename(root / f"{name}.tmp{own}", root / name)


def is_found(path: Path, data: bytes) -> bool:
    """Whether *path* leads to *data*; there is nothing, or it is that."""
    try:
        found = read_file(path)
    except FileNotFoundError:
        return False
    assert found == data
    return True


def test_a_store_is_read_back_by_all(served: Rack, one: Path, two: Path, name: str) -> None:
    data = stamped(name, BLOCK_BYTES)
    store(one, name, data)
    for root in (one, two, served.path):
        assert read_file(root / name) == data
        with refused(errno.ENOENT):
            (root / f"{name}.tmp").stat()


def test_what_a_local_process_stored_is_found(served: Rack, one: Path, name: str) -> None:
    """After the time for which the client believes that there is none."""
    with refused(errno.ENOENT):
        (one / name).stat()
    data = stamped(name, BLOCK_BYTES)
    store(served.path, name, data)
    until((one / name).exists, "a name that was not there")
    assert read_file(one / name) == data


def test_a_rename_over_a_name_replaces_it(served: Rack, one: Path, two: Path, name: str) -> None:
    """A reader on another host that has the old one open gets its bytes, or ESTALE."""
    old, new = stamped(name, BLOCK_BYTES), stamped(name, BLOCK_BYTES, 1)
    store(one, name, old)
    fd = os.open(two / name, os.O_RDONLY)
    try:
        store(one, name, new)
        assert read_file(served.path / name) == new
        with tolerated(errno.ESTALE):
            assert os.pread(fd, BLOCK_BYTES, 0) == old
    finally:
        os.close(fd)
    assert read_file(one / name) == new
    until(lambda: read_file(two / name) == new, "the new one at the other host")


def test_a_name_that_is_removed_is_gone_for_all(
    served: Rack, one: Path, two: Path, name: str
) -> None:
    store(one, name, stamped(name, BLOCK_BYTES))
    assert (two / name).exists()
    os.unlink(one / name)
    for root in (one, served.path):
        with refused(errno.ENOENT):
            (root / name).stat()
    until(lambda: not (two / name).exists(), "the removal at the other host")
    with refused(errno.ENOENT):
        os.unlink(two / name)


def test_directories(served: Rack, one: Path, name: str) -> None:
    data = stamped(name, BLOCK_BYTES)
    os.mkdir(one / name)
    store(one / name, "block", data)
    with refused(errno.ENOTEMPTY, errno.EEXIST):
        os.rmdir(one / name)
    os.rename(one / name / "block", one / f"{name}-moved")
    os.rmdir(one / name)
    assert not (served.path / name).exists()
    assert read_file(served.path / f"{name}-moved") == data


def test_a_truncated_block_is_as_long_for_all(
    served: Rack, one: Path, two: Path, name: str
) -> None:
    data = stamped(name, BLOCK_BYTES)
    store(one, name, data)
    os.truncate(one / name, BLOCK_BYTES // 2)
    for root in (one, served.path, two):
        assert read_file(root / name) == data[: BLOCK_BYTES // 2]
    os.truncate(one / name, 0)
    assert read_file(one / name) == b""
    # A draft until the server closes it, or has written nothing to it for a while.
    until(lambda: is_found(served.path / name, b""), "an empty file")


def test_a_rewrite_under_a_reader(served: Rack, one: Path, two: Path, name: str) -> None:
    """[life-server-empties] Who has it open gets the old bytes, the new ones, or ESTALE.

    Its name is a miss for local processes until the server has closed it.
    """
    old, new = stamped(name, BLOCK_BYTES), stamped(name, BLOCK_BYTES, 1)
    store(one, name, old)
    fds = [os.open(root / name, os.O_RDONLY) for root in (served.path, two)]
    try:
        write_file(one / name, new)
        for fd in fds:
            with tolerated(errno.ESTALE):
                assert os.pread(fd, BLOCK_BYTES, 0) in (old, new)
    finally:
        for fd in fds:
            os.close(fd)
    assert read_file(one / name) == new
    until(lambda: is_found(served.path / name, new), "the new one for local processes")
    until(lambda: read_file(two / name) == new, "the new one at the other host")


def test_a_block_under_its_final_name(served: Rack, one: Path, two: Path, name: str) -> None:
    """Closed under the name it was created with: whole for all, and its lease ends by time."""
    data = stamped(name, BLOCK_BYTES)
    write_file(one / name, data)
    for root in (one, two, served.path):
        assert read_file(root / name) == data


def together(*calls: "threading.Thread") -> None:
    """Run them at one time, to their ends."""
    for call in calls:
        call.start()
    for call in calls:
        call.join()


def test_of_two_that_create_one_name_one_does(one: Path, two: Path, name: str) -> None:
    for number in range(10):
        made: list[Path] = []

        def create(root: Path, number: int = number, made: list[Path] = made) -> None:
            with tolerated(errno.EEXIST):
                os.close(os.open(root / f"{name}-{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                made.append(root)

        together(*(threading.Thread(target=create, args=(root,)) for root in (one, two)))
        assert len(made) == 1


def test_of_two_that_store_one_name_one_is_whole(
    served: Rack, one: Path, two: Path, name: str
) -> None:
    """With temporary names of their own."""
    for number in range(5):
        stores = [
            threading.Thread(
                target=store, args=(root, name, stamped(name, BLOCK_BYTES, seed), f"{seed}")
            )
            for seed, root in enumerate((one, two), 2 * number)
        ]
        together(*stores)
        seed = seed_of(read_file(served.path / name), name, BLOCK_BYTES)
        assert seed in (2 * number, 2 * number + 1)
        for root in (one, two):
            until(
                lambda root=root, seed=seed: (  # type: ignore[misc]
                    seed_of(read_file(root / name), name, BLOCK_BYTES) == seed
                ),
                "the same bytes for all",
            )


def test_an_eviction_during_a_read(served: Rack, one: Path, two: Path, name: str) -> None:
    """Who has it open reads its bytes, or ESTALE; its name is a miss."""
    data = stamped(name, BLOCK_BYTES)
    store(one, name, data)
    fd = os.open(two / name, os.O_RDONLY | os.O_DIRECT)
    try:
        buffer = memoryview(bytearray(64 << 10))
        assert os.preadv(fd, [buffer], 0) == len(buffer)
        assert buffer == data[: len(buffer)]
        run_kvfs("evict", str(served.path / name))
        assert not (served.path / name).exists()
        for at in range(len(buffer), BLOCK_BYTES, len(buffer)):
            with tolerated(errno.ESTALE):
                assert os.preadv(fd, [buffer], at) == len(buffer)
                assert buffer == data[at : at + len(buffer)]
    finally:
        os.close(fd)
    for root in (one, two):
        until(lambda root=root: not (root / name).exists(), "the miss")  # type: ignore[misc]
        with refused(errno.ENOENT):
            read_file(root / name)
