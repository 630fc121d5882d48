"""Bad input: one clear line, an exit code of its own, and a source that is exactly as before."""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvfs.core import errors
from kvfs.core.sizes import format_size
from tests.support.mounts.mounting import (
    COMMAND_WAIT_S,
    KVFS,
    ROOT,
    Mounted,
    loop_device,
    run_kvfs,
    workplace,
)

pytestmark = pytest.mark.needs_fuse

IMAGE_BYTES = 320 << 20
SMALL_DISK_BYTES = 16 << 20


class Place(NamedTuple):
    """A place for one test: a source to be and a mountpoint."""

    directory: Path
    source: Path
    mountpoint: Path


@pytest.fixture
def place() -> Iterator[Place]:
    with workplace() as directory:
        place = Place(directory, directory / "pool", directory / "kv")
        place.source.mkdir()
        place.mountpoint.mkdir()
        yield place


@pytest.fixture
def pool(place: Place) -> Place:
    """A place whose source is a pool."""
    run_kvfs("mkfs", str(place.source))
    return place


def snapshot(path: Path) -> object:
    """Return all that is under *path*: names, modes, sizes, times and contents."""
    if path.is_dir():
        return {str(child.relative_to(path)): _node(child) for child in sorted(path.rglob("*"))}
    return _node(path)


def _node(path: Path) -> tuple[int, int, int, str]:
    found = path.lstat()
    content = ""
    if stat.S_ISREG(found.st_mode) or stat.S_ISBLK(found.st_mode):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    return found.st_mode, found.st_size, found.st_mtime_ns, content


def refused(*arguments: object) -> tuple[int, str]:
    """Run a command that must fail; return its exit code and its one line."""
    no_log = ("--log-file", os.devnull) if arguments[0] == "mount" else ()
    result = run_kvfs(*map(str, arguments[:1]), *no_log, *map(str, arguments[1:]), check=False)
    assert result.returncode != 0, result
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return result.returncode, lines[0].removeprefix("kvfs: ")


def mount_refused(place: Place, *flags: str, source: Path | None = None) -> tuple[int, str]:
    """Mount, which must fail and leave source and mountpoint as they were; see ``refused``."""
    source = source or place.source
    before = snapshot(source)
    answer = refused("mount", source, place.mountpoint, *flags)
    assert snapshot(source) == before
    assert not os.path.ismount(place.mountpoint)
    return answer


def test_a_source_that_does_not_exist(place: Place) -> None:
    place.source.rmdir()
    exit_code, line = refused("mount", place.source, place.mountpoint)
    assert exit_code == errors.SourceMissing.exit_code
    assert str(place.source) in line
    assert not place.source.exists()


def test_a_foreign_directory(place: Place) -> None:
    (place.source / "thesis.tex").write_text("years of work")
    exit_code, line = mount_refused(place)
    assert exit_code == errors.SourceForeign.exit_code
    assert "thesis.tex" in line
    # Nothing overrides it: a directory's other files are never kvfs's to remove.
    assert refused("mkfs", place.source, "--force")[0] == errors.SourceForeign.exit_code
    assert (place.source / "thesis.tex").read_text() == "years of work"


def test_a_foreign_file_system_in_an_image(place: Place) -> None:
    image = place.directory / "image"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    for verb in ("mkfs", "fsck", "destroy"):
        before = snapshot(image)
        flags = ("--yes",) if verb == "destroy" else ()
        exit_code, line = refused(verb, image, *flags)
        assert exit_code == errors.SourceForeign.exit_code
        assert "ext4" in line
        assert snapshot(image) == before
    exit_code, line = mount_refused(place, source=image)
    assert exit_code == errors.SourceForeign.exit_code
    assert "ext4" in line
    assert "kvfs mkfs --force" in line


def test_bytes_that_nobody_knows(place: Place) -> None:
    image = place.directory / "image"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
        file.seek(IMAGE_BYTES - 1000)  # the last 4 MiB count as well
        file.write(b"precious")
    exit_code, _line = mount_refused(place, source=image)
    assert exit_code == errors.SourceForeign.exit_code


def test_an_image_that_is_immutable(tmp_path: Path) -> None:
    """The drive is well: it is not told to be replaced, and the line has the way out."""
    image = tmp_path / "it's"  # on the disk: not every tmpfs knows the flag
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["chattr", "+i", image], check=True)
    try:
        for words in (("mkfs",), ("mkfs", "--force"), ("fsck",), ("destroy", "--yes")):
            exit_code, line = refused(*words, image)
            assert exit_code == errors.SourceMissing.exit_code
            assert f"{image} may not be written: it is immutable" in line
    finally:
        subprocess.run(["sh", "-c", line.split("`")[1]], check=True)
    with image.open("r+b"):
        pass


@pytest.mark.needs_loop
def test_an_image_on_a_kvfs_mount(place: Place) -> None:
    """It could be evicted under the pool in it."""
    capacity_bytes = 2 * IMAGE_BYTES
    with Mounted(place.source, place.mountpoint, f"--capacity={capacity_bytes}") as mount:
        new, present = mount.path / "new", mount.path / "present"
        with present.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        (place.directory / "second").mkdir()
        for words in (
            ("mkfs", new, "--capacity", "100M"),
            ("mkfs", present, "--force"),
            ("mount", present, place.directory / "second"),
            ("mount", new, place.directory / "second", "--capacity", "100M"),
        ):
            exit_code, line = refused(*words)
            assert exit_code == errors.SourceMissing.exit_code
            assert f"lies on the kvfs mount {mount.path}, which may evict it" in line
        assert os.listdir(mount.path) == ["present"]


@pytest.mark.needs_loop
def test_a_new_image_says_what_it_takes(place: Place) -> None:
    image = place.directory / "image"
    for capacity, taken, why in (
        ("1M", "300 MiB", "1 MiB of blocks; no XFS is smaller"),
        ("200M", "347 MiB", "200 MiB of blocks with index and file system"),
    ):
        told = f"kvfs: {image} takes {taken} for {why}\n"
        assert run_kvfs("mkfs", str(image), "--capacity", capacity).stderr == told
        assert format_size(image.stat().st_size) == taken
        assert run_kvfs("mkfs", str(image), "--capacity", capacity, "--force").stderr == ""
        image.unlink()
        with Mounted(image, place.mountpoint, f"--capacity={capacity}") as mount:
            assert told.removeprefix("kvfs: ") in mount.log_file.read_text()
        image.unlink()


@pytest.mark.needs_loop
def test_a_busy_device(place: Place) -> None:
    with loop_device(IMAGE_BYTES) as device:
        holder = os.open(device, os.O_RDWR | os.O_EXCL)
        try:
            exit_code, line = mount_refused(place, source=Path(device))
            assert exit_code == errors.SourceBusy.exit_code
            assert device in line
            assert refused("mkfs", device, "--force")[0] == errors.SourceBusy.exit_code
        finally:
            os.close(holder)


def test_a_busy_image(place: Place) -> None:
    image = place.directory / "image"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
        fcntl.flock(file, fcntl.LOCK_EX)
        exit_code, line = mount_refused(place, source=image)
    assert exit_code == errors.SourceBusy.exit_code
    assert str(image) in line


def test_a_missing_mountpoint(pool: Place) -> None:
    before = snapshot(pool.source)
    exit_code, line = refused("mount", pool.source, pool.directory / "none")
    assert exit_code == errors.MountpointUnusable.exit_code
    assert line == f"mountpoint {pool.directory / 'none'} does not exist"
    assert snapshot(pool.source) == before


def test_a_mountpoint_that_is_a_file(pool: Place) -> None:
    file = pool.directory / "file"
    file.touch()
    exit_code, line = refused("mount", pool.source, file)
    assert exit_code == errors.MountpointUnusable.exit_code
    assert line == f"mountpoint {file} is not a directory"


def test_a_source_under_its_mountpoint_and_the_reverse(place: Place) -> None:
    inner = place.source / "kv"
    inner.mkdir()
    for source, mountpoint in ((place.source, inner), (inner, place.source), (inner, inner)):
        exit_code, line = refused("mount", source, mountpoint)
        assert exit_code == errors.MountpointUnusable.exit_code
        assert "inside" in line or "the same" in line
    assert list(place.source.rglob("*")) == [inner]


def test_a_link_does_not_hide_that_source_and_mountpoint_are_one(place: Place) -> None:
    link = place.directory / "link"
    link.symlink_to(place.source)
    exit_code, line = refused("mount", place.source, link)
    assert exit_code == errors.MountpointUnusable.exit_code
    assert "the same" in line


def test_a_pool_that_is_mounted_already(pool: Place) -> None:
    other = pool.directory / "other"
    other.mkdir()
    with Mounted(pool.source, pool.mountpoint) as mounted:
        for arguments in (
            ("mount", pool.source, other),
            ("fsck", pool.source),
            ("mkfs", pool.source, "--force"),
            ("destroy", pool.source, "--yes"),
        ):
            exit_code, line = refused(*arguments)
            assert exit_code == errors.SourceBusy.exit_code, line
            assert line == f"{pool.source} is in use: the pool is mounted at {pool.mountpoint}"
        exit_code, line = refused("mount", pool.source, pool.mountpoint)
        assert exit_code == errors.MountpointUnusable.exit_code
        assert line == f"{pool.mountpoint} is already a kvfs mount of {pool.source}"
        # None of that may have touched the living mount.
        (mounted.path / "block").write_bytes(b"still here")
        assert (mounted.path / "block").read_bytes() == b"still here"
        assert mounted.status()["server_pid"] == mounted.server_pid


@pytest.mark.needs_loop
def test_a_device_and_an_image_that_are_mounted_already(place: Place) -> None:
    image = place.directory / "kv.img"
    run_kvfs("mkfs", str(image), "--capacity", "512M")
    with Mounted(image, place.mountpoint):
        exit_code, line = refused("fsck", image)
        assert exit_code == errors.SourceBusy.exit_code
        assert line == f"{image} is in use: the pool in it is mounted at {place.mountpoint}"
    with loop_device(512 << 20) as device, Mounted(device, place.mountpoint):
        exit_code, line = refused("fsck", device)
        assert exit_code == errors.SourceBusy.exit_code
        assert line == f"{device} is in use: the pool is mounted at {place.mountpoint}"


def test_a_name_that_is_taken(pool: Place) -> None:
    other = Place(pool.directory, pool.directory / "pool2", pool.directory / "kv2")
    other.source.mkdir()
    other.mountpoint.mkdir()
    run_kvfs("mkfs", str(other.source))
    name = f"kvfs-test-taken-{os.getpid()}"  # another run may go on beside this one
    with Mounted(pool.source, pool.mountpoint, f"--name={name}"):
        exit_code, line = refused("mount", other.source, other.mountpoint, "--name", name)
        assert exit_code == errors.SourceBusy.exit_code
        assert "already uses this name" in line
        assert not os.path.ismount(other.mountpoint)


def test_a_corrupt_index(pool: Place) -> None:
    data = pool.source / "index" / "data.mdb"
    with data.open("r+b") as file:
        file.write(os.urandom(64 << 10))
    exit_code, line = mount_refused(pool)
    assert exit_code == errors.IndexDamaged.exit_code
    assert "kvfs fsck" in line


def test_a_short_index(pool: Place) -> None:
    os.truncate(pool.source / "index" / "data.mdb", 100)
    assert mount_refused(pool)[0] == errors.IndexDamaged.exit_code


def test_a_pool_of_another_version(pool: Place) -> None:
    header = json.loads((pool.source / "POOL").read_text())
    header["format"] = 99
    (pool.source / "POOL").write_text(json.dumps(header))
    exit_code, line = mount_refused(pool)
    assert exit_code == errors.FormatUnknown.exit_code
    assert "99" in line


def test_a_header_that_is_none(pool: Place) -> None:
    (pool.source / "POOL").write_text("{")
    assert mount_refused(pool)[0] == errors.SourceForeign.exit_code


@contextlib.contextmanager
def small_disk(path: Path, size_bytes: int = SMALL_DISK_BYTES) -> Iterator[Path]:
    """Mount a small tmpfs at *path*."""
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size_bytes}", "kvfs-test", str(path)]
    subprocess.run(["mount", *options], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False)


def test_a_pool_whose_parent_disk_others_filled(place: Place) -> None:
    with small_disk(place.directory / "disk", 200 << 20) as disk:
        source = disk / "pool"
        source.mkdir()
        run_kvfs("mkfs", str(source))
        with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 65536)
        exit_code, line = refused("mount", source, place.mountpoint)
        assert exit_code == errors.SourceFull.exit_code
        assert str(source) in line


def test_a_parent_disk_too_small_or_full(place: Place) -> None:
    with small_disk(place.directory / "disk") as disk:
        source = disk / "pool"
        source.mkdir()
        assert mount_refused(place, source=source)[0] == errors.SourceFull.exit_code
        with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 65536)
        exit_code, line = mount_refused(place, source=source)
        assert exit_code == errors.SourceFull.exit_code
        assert str(source) in line
        image = disk / "image"
        exit_code, line = refused("mkfs", image, "--capacity", "1G")
        assert exit_code == errors.SourceFull.exit_code
        assert not image.exists()


@pytest.mark.needs_loop
@pytest.mark.parametrize(
    ("ended_by", "said"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")]
)
@pytest.mark.parametrize("verb", ["mkfs", "mount"])
def test_a_format_that_is_ended_leaves_no_image(
    place: Place, verb: str, ended_by: signal.Signals, said: str
) -> None:
    """In the middle of mkfs.xfs: this one opens two pipes, and nobody comes to the second."""
    started, tools, image = place.directory / "started", place.directory / "bin", place.source / "i"
    tools.mkdir()
    for pipe in (started, place.directory / "never"):
        os.mkfifo(pipe)
    (tools / "mkfs.xfs").write_text(f"#!/bin/sh\n: >{started}\nexec cat {place.directory}/never\n")
    (tools / "mkfs.xfs").chmod(0o755)
    places = [image] if verb == "mkfs" else [image, place.mountpoint, "--log-file", os.devnull]
    with subprocess.Popen(
        [*KVFS, verb, "--capacity", "512M", *map(str, places)],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert started.read_bytes() == b""
        command.send_signal(ended_by)
        _, line = command.communicate(timeout=COMMAND_WAIT_S)
    with contextlib.suppress(OSError):  # a tool that outlives who started it ends by itself
        os.close(os.open(place.directory / "never", os.O_WRONLY | os.O_NONBLOCK))
    assert command.returncode == 128 + ended_by
    assert line == f"kvfs: {said}\n"
    assert os.listdir(place.source) == []


def test_a_blank_source_is_not_formatted_read_only(place: Place) -> None:
    exit_code, line = mount_refused(place, "-o", "ro")
    assert exit_code == errors.SourceBlank.exit_code
    assert f"kvfs mkfs {place.source}" in line


def test_more_capacity_than_there_is(place: Place) -> None:
    exit_code, line = mount_refused(place, "--capacity", "900T")
    assert exit_code == errors.SourceFull.exit_code
    assert "900 TiB" in line


def test_too_few_open_files(pool: Place) -> None:
    """The pool is sound: exit code 18 would say that it is not."""
    few = ["prlimit", "--nofile=64:64", "setpriv", "--bounding-set=-sys_resource"]
    for verb in (["fsck", str(pool.source)], ["mount", str(pool.source), str(pool.mountpoint)]):
        command = [*few, "--inh-caps=-sys_resource", *KVFS, *verb]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == errors.ToolMissing.exit_code
        (line,) = done.stderr.splitlines()
        assert "only 64 files may be open at a time" in line


def test_too_little_address_space(pool: Place) -> None:
    """The index is sound: exit code 9 would send the operator to a repair that fails alike."""
    before = snapshot(pool.source)
    little = ["prlimit", f"--as={1 << 30}"]
    for verb in (["mount"], ["fsck"], ["fsck", "--repair"]):
        places = [str(pool.source), *([str(pool.mountpoint)] if verb == ["mount"] else [])]
        command = [*little, *KVFS, *verb, *places]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == errors.ToolMissing.exit_code, done.stderr
        (line,) = done.stderr.splitlines()
        assert "`ulimit -v unlimited` or LimitAS=infinity" in line
        assert "fsck" not in line
        assert snapshot(pool.source) == before


def test_a_log_file_that_cannot_be_written(pool: Place) -> None:
    exit_code, line = mount_refused(pool, "--log-file", str(pool.directory / "none" / "log"))
    assert exit_code == errors.UsageError.exit_code
    assert "No such file" in line
