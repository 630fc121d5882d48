"""Directories that kvfs does not take: others' files, other file systems, no room."""

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.core.errors import NotRoot, SourceBusy, SourceForeign, SourceFull, SourceMissing
from kvfs.devices import destroy_source, directory, open_source
from kvfs.devices.detached import mount_detached
from kvfs.engine.recovery.rebuild import found_pool
from kvfs.storage.syscalls import Syscalls
from tests.support.devices.pools import MIB, Source, blank_source, format_source, refused, untouched
from tests.support.mounts.mounting import workplace


def test_a_full_parent_file_system_is_refused() -> None:
    mount_fd = mount_detached("tmpfs", "none", {"size": str(256 * MIB)}, (), 0)
    try:
        parent = Path(f"/proc/self/fd/{mount_fd}")
        (parent / "pool").mkdir()
        source = Source(str(parent / "pool"), parent / "pool")
        with untouched(source), refused(SourceFull, source.path, "no space for 1 GiB"):
            format_source(source.path, capacity_bytes=1 << 30)
        (parent / "other").write_bytes(bytes(150 * MIB))
        with untouched(source), refused(SourceFull, source.path, "no space"):
            format_source(source.path)
    finally:
        os.close(mount_fd)


def test_a_pool_is_replaced_only_by_one_that_has_room() -> None:
    mount_fd = mount_detached("tmpfs", "none", {"size": str(256 * MIB)}, (), 0)
    try:
        pool = Path(f"/proc/self/fd/{mount_fd}/pool")
        pool.mkdir()
        source = Source(str(pool), pool)
        format_source(source.path)
        (pool / f"extents/00/{99:016x}").write_bytes(bytes(100 * MIB))
        for too_much in (1 << 30, 150 * MIB):
            with untouched(source), refused(SourceFull, source.path, "no space for"):
                format_source(source.path, capacity_bytes=too_much, force=True)
        (pool.parent / "other").write_bytes(bytes(100 * MIB))
        with untouched(source), refused(SourceFull, source.path, "no space for"):
            format_source(source.path, capacity_bytes=100 * MIB, force=True)
        (pool.parent / "other").unlink()
        # What goes with the old pool counts as free.
        assert format_source(source.path, capacity_bytes=130 * MIB, force=True).capacity_bytes == (
            130 * MIB
        )
        assert not (pool / f"extents/00/{99:016x}").exists()
    finally:
        os.close(mount_fd)


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_with_others_files_is_never_taken(force: bool) -> None:
    with blank_source("directory") as source:
        for name in ("a\nb", "c", "d", "e"):
            (source.bytes_at / name).write_text("keep")
        with untouched(source), refused(SourceForeign, r"a\nb, c, d and 1 more"):
            format_source(source.path, force=force)
        with untouched(source), refused(SourceForeign, source.path):
            open_source(source.path)


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("index")],
    ids=["dir", "fifo", "ln"],
)
@pytest.mark.parametrize("name", ["POOL", "LOCK", "RUN", "RUN.new", "INODES", "HEAT", "HEAT.new"])
def test_a_file_of_the_pool_that_is_no_file_is_refused(
    name: str, make: Callable[[Path], None]
) -> None:
    """A fifo's open waits for a writer; a directory failed a start or half of ``mkfs --force``."""
    with blank_source("directory") as source:
        format_source(source.path, fill=found_pool)
        path, kept = source.bytes_at / name, source.bytes_at / "extents" / name
        if path.exists():
            path.rename(kept)
        make(path)
        line = f"its {name} is not a file; remove it"
        with untouched(source):
            for read_only in (False, True):
                with refused(SourceForeign, source.path, line):
                    open_source(source.path, read_only=read_only)
            with refused(SourceForeign, source.path, line):
                destroy_source(source.path)
            for force in (False, True):
                with refused(SourceForeign, source.path, line):
                    format_source(source.path, force=force)
        (path.rmdir if make is Path.mkdir else path.unlink)()
        if kept.exists():
            kept.rename(path)
        open_source(source.path).close()


def test_a_pool_in_the_making_is_in_use() -> None:
    """The second of two that make it is not told to overwrite what the first has begun."""
    with blank_source("directory") as source:
        busy_line = "another process makes"
        (source.bytes_at / "LOCK").touch()
        with open(source.bytes_at / "LOCK") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with untouched(source):
                for attempt in (open_source, format_source):
                    with refused(SourceBusy, source.path, busy_line):
                        attempt(source.path)
        with refused(SourceForeign, source.path, "unfinished"):
            open_source(source.path)


def test_a_directory_on_overlayfs_is_refused() -> None:
    with workplace() as place:
        layers = {"upperdir": "upper", "workdir": "work", "lowerdir": "lower"}
        for name in layers.values():
            (place / name).mkdir()
        options = {layer: str(place / name) for layer, name in layers.items()}
        mount_fd = mount_detached("overlay", "none", options, (), 0)
        try:
            path = f"/proc/self/fd/{mount_fd}/."
            with refused(SourceMissing, path, "overlayfs", "XFS, ext4 or tmpfs"):
                format_source(path)
            assert os.listdir(place / "upper") == []
        finally:
            os.close(mount_fd)


def test_a_file_system_without_the_needed_calls_is_refused() -> None:
    with refused(SourceMissing, "/sys/kernel", "lacks"):
        fd = os.open("/sys/kernel", os.O_RDONLY)
        try:
            directory.try_out(fd, "/sys/kernel", directory.fs_type_of(fd, "/sys/kernel"))
        finally:
            os.close(fd)


def test_without_cap_sys_admin_the_file_system_is_not_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Root of a user namespace gets EPERM for trusted xattrs, on every file system."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Syscalls, "setxattr", refuse)
    with (
        blank_source("directory") as source,
        untouched(source),
        refused(NotRoot, source.path, "CAP_SYS_ADMIN"),
    ):
        format_source(source.path)


def test_a_directory_that_another_mkfs_took_meanwhile_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with blank_source("directory") as source:
        original = directory.try_out

        def overtaken(*arguments: object) -> None:
            monkeypatch.setattr(directory, "try_out", original)
            format_source(source.path)

        monkeypatch.setattr(directory, "try_out", overtaken)
        with refused(SourceBusy, source.path):
            format_source(source.path)
        open_source(source.path).close()
