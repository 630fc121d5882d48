"""[killed-daemon] From a server's death to the next mount nothing is stored below the mount."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.core import errors
from kvfs.machine.mount_table import mount_at, mounts
from tests.support.clients.stepping import until
from tests.support.devices.pools import blank_source
from tests.support.machines.old_kernel import WITHOUT_BENEATH
from tests.support.mounts.mounting import KVFS, ROOT, Mounted, run_kvfs, workplace
from tests.support.mounts.places import blank_place, small_mount

pytestmark = pytest.mark.needs_fuse


@pytest.fixture
def place() -> Iterator[Path]:
    with blank_place() as directory:
        yield directory


def times_mounted(path: Path) -> int:
    return [mount.mountpoint for mount in mounts()].count(str(path))


class Writers:
    """Threads that store through the path all the time, whatever becomes of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stop = threading.Event()
        self.stored = [0, 0]
        self._threads = [threading.Thread(target=self._store, args=(n,)) for n in range(2)]

    def _store(self, number: int) -> None:
        tries = 0
        while not self._stop.is_set():
            tries += 1
            with contextlib.suppress(OSError):
                (self._directory / f"{number}-{tries}").write_bytes(b"stored")
                self.stored[number] += 1

    def __enter__(self) -> "Writers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def have_stored_more(self) -> None:
        """Wait until each has stored anew."""
        before = list(self.stored)
        until(
            lambda: all(now > then for now, then in zip(self.stored, before, strict=True)),
            "both store",
        )


@pytest.mark.needs_loop
@pytest.mark.parametrize("kind", ["directory", "block", "image"])
@pytest.mark.parametrize("path", ["daemon", "passthrough"])
def test_nothing_is_stored_below_while_a_mount_takes_a_dead_ones_place(
    kind: str, path: str
) -> None:
    with (
        blank_source(kind) as source,
        workplace("disk") as directory,
        Mounted(source.path, directory / "kv", f"--data-path={path}") as mount,
    ):
        with Writers(mount.path) as writers:
            writers.have_stored_more()
            for _ in range(2):
                mount.kill()
                mount.start()
                writers.have_stored_more()
        assert times_mounted(mount.path) == 1
        mount.stop()
        assert os.listdir(mount.path) == []


def test_nor_by_a_kernel_that_mounts_nothing_beneath(place: Path) -> None:
    """There the dead mount stays below the new one, and goes with it."""
    with small_mount(place) as mount:
        mount.prefix = WITHOUT_BENEATH
        with Writers(mount.path) as writers:
            writers.have_stored_more()
            for _ in range(3):
                mount.kill()
                mount.start()
                writers.have_stored_more()
        assert times_mounted(mount.path) == 2
        mount.stop()
        assert times_mounted(mount.path) == 0
        assert os.listdir(mount.path) == []


def test_a_start_that_fails_leaves_the_place_dead(place: Path) -> None:
    """It is not bare, nor the dead mount's for ever: the next start, or an umount, takes it."""
    with small_mount(place) as mount:
        (mount.path / "tmp").write_bytes(b"kept")
        (mount.path / "tmp").rename(mount.path / "block")
        mount.kill()
        (place / "other").mkdir()
        (place / "other" / "foreign").write_bytes(b"somebody's")
        for _ in range(2):
            done = run_kvfs("mount", str(place / "other"), str(mount.path), check=False)
            assert done.returncode == errors.SourceForeign.exit_code, done.stderr
            with pytest.raises(OSError, match="not connected"):
                (mount.path / "new").write_bytes(b"nowhere")
            assert times_mounted(mount.path) == 1
        said = run_kvfs("status", str(mount.path), check=False).stderr
        assert f"the server of {mount.path} is dead" in said
        mount.start()
        assert (mount.path / "block").read_bytes() == b"kept"
        mount.kill()
        run_kvfs("mount", str(place / "other"), str(mount.path), check=False)
        assert run_kvfs("umount", str(mount.path)).stderr == ""
        assert times_mounted(mount.path) == 0


def test_a_dead_mounts_directory_below_is_guarded_and_looked_at(place: Path) -> None:
    (place / "kv" / "hidden").write_bytes(b"stored before")
    with small_mount(place) as mount:
        mount.kill()
        done = run_kvfs("mount", mount.source, str(mount.path), "--guard")
        assert f"{mount.path} is not empty: 1 file of 4 KiB" in done.stderr
        assert f"{mount.path} is not guarded: it is not empty" in done.stderr
        mount.adopt()


def test_another_mount_namespace_gets_the_new_one_in_the_dead_ones_place(place: Path) -> None:
    """As a container's, which follows what is mounted outside (mount_namespaces(7))."""
    private = ["unshare", "--mount", "--propagation=private"]
    follows = ["unshare", "--mount", "--propagation=slave"]
    look = (
        "import sys\n"
        "for line in sys.stdin:\n"
        "    try: print(open(line.strip()).read(), flush=True)\n"
        "    except OSError as error: print(error.strerror, flush=True)\n"
    )
    script = (
        "set -e\n"
        f"mount --bind --make-shared {place} {place}\n"
        f"exec {sys.executable} {place}/outside.py\n"
    )
    outside = f"""
import subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.support.mounts.places import small_mount
from kvfs.machine.mount_table import mounts
with small_mount(Path({str(place)!r})) as mount:
    (mount.path / "tmp").write_bytes(b"kept")
    (mount.path / "tmp").rename(mount.path / "block")
    command = {follows!r} + [sys.executable, "-c", {look!r}]
    inside = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    def look():
        print(mount.path / "block", file=inside.stdin, flush=True)
        return inside.stdout.readline().strip()
    print(look())
    mount.kill()
    print(look())
    mount.start()
    print(look())
    print([one.mountpoint for one in mounts(inside.pid)].count(str(mount.path)))
    inside.communicate()
"""
    (place / "outside.py").write_text(outside)
    done = subprocess.run(
        [*private, "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = ["kept", os.strerror(107), "kept", "1"]
    assert done.stdout.splitlines() == said


def test_two_pools_do_not_hide_each_other(place: Path) -> None:
    """Both start at a bare mountpoint: one of them serves, the other one is refused."""
    with small_mount(place) as mount:
        mount.stop()
        sources = [place / f"pool{n}" for n in range(2)]
        for source in sources:
            source.mkdir()
        starts = [
            subprocess.Popen(
                [*KVFS, "mount", str(source), str(mount.path), f"--name=test-{os.getpid()}-{n}"],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
            for n, source in enumerate(sources)
        ]
        said = [start.communicate(timeout=60)[1] for start in starts]
        codes = sorted(start.returncode for start in starts)
        assert codes == [0, errors.MountpointUnusable.exit_code], said
        mount.adopt()
        assert times_mounted(mount.path) == 1
        present = mount_at(str(mount.path))
        assert present is not None
        assert f"{mount.path} is already a kvfs mount of {present.source}" in "".join(said)
