"""A mount of three drives under load, one of which shuts its XFS down: the others go on."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.drives import Numbering
from kvfs.core.source_list import listed
from tests.fuse.conftest import PATHS, require_passthrough
from tests.fuse.devices.conftest import skip_without_server
from tests.support.clients.at_work import Worker, all_go_on, at_work
from tests.support.clients.stamped import seed_of, stamped
from tests.support.mounts.drives import DRIVES, fail_drive
from tests.support.mounts.mounting import Mounted, workplace

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

IMAGE_BYTES: Final = 400 << 20
BLOCKS: Final = 60
SIZE_BYTES: Final = 150_000


@pytest.fixture(params=PATHS)
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount of three new image files."""
    skip_without_server(request.param)
    with workplace("disk") as place:
        images = [place / f"{number}.img" for number in range(DRIVES)]
        for image in images:
            with image.open("xb") as file:
                file.truncate(IMAGE_BYTES)
        flags = (f"--data-path={request.param}",)
        with Mounted(listed(map(str, images)), place / "kv", *flags) as made:
            if request.param == "passthrough":
                require_passthrough(made)
            yield made


def store(path: Path, name: str) -> None:
    """Store as a connector does."""
    temporary = path / f"{name}.tmp"
    temporary.write_bytes(stamped(name, SIZE_BYTES, 1))
    temporary.rename(path / name)


def is_there(path: Path, name: str) -> bool:
    """Whether block *name* is there; then it is whole. Any other error than ENOENT is raised."""
    try:
        data = (path / name).read_bytes()
    except FileNotFoundError:
        return False
    assert seed_of(data, name, SIZE_BYTES) == 1
    return True


class Client(Worker):
    """Loads blocks and stores new ones, again and again; keeps what went wrong.

    While a drive is *failing* its blocks may give errors: of those on others none may.
    """

    def __init__(self, mount: Mounted, number: int, failing: threading.Event) -> None:
        super().__init__(f"client-{number}")
        self._path, self._number, self._failing = mount.path, number, failing
        self.stored = 0

    def work(self) -> None:
        """Load all of the model's blocks, and store one."""
        for number in range(BLOCKS):
            self._try(lambda number=number: is_there(self._path / "model", f"{number}"))
        self._try(self._store)

    def _store(self) -> None:
        store(self._path / "model", f"client {self._number} {self.stored}")
        self.stored += 1

    def _try(self, call: Callable[[], object]) -> None:
        may_fail = self._failing.is_set()
        try:
            call()
        except OSError as error:
            if not (may_fail or self._failing.is_set()) or error.errno not in (
                errno.EIO,
                errno.ENOENT,
                errno.ESTALE,
                errno.EEXIST,
            ):
                raise


@pytest.mark.parametrize("drive", [0, 1])
def test_a_drive_that_shuts_down_costs_its_blocks_alone(mount: Mounted, drive: int) -> None:
    model = mount.path / "model"
    model.mkdir()
    for number in range(BLOCKS):
        store(model, f"{number}")
    drives = {entry.name: Numbering(DRIVES).drive(entry.inode()) for entry in os.scandir(model)}
    failing = threading.Event()
    clients = [Client(mount, number, failing) for number in range(4)]
    with at_work(clients):
        failing.set()
        fail_drive(mount, drive)
        failing.clear()
        all_go_on(clients, lambda client: client.stored, 3)
    found = {name for name in drives if is_there(model, name)}
    assert found == {name for name, at in drives.items() if at != drive}
    (mount.path / "more").mkdir()
    store(mount.path / "more", "block")
    assert is_there(mount.path / "more", "block")
    status = mount.status()
    assert "device_lost" not in status
    assert drive not in status["index_log"]["drives"]
