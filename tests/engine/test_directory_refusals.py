"""Directories that kvfs does not take: others' files, other file systems, no room."""

import os
from pathlib import Path

import pytest

from kvfs.devices import directory, format_source, open_source, parent_fs
from kvfs.devices.detached import mount_detached
from kvfs.errors import SourceBusy, SourceForeign, SourceFull, SourceMissing
from tests.support.mounting import workplace
from tests.support.pools import MIB, Source, blank_source, refused, untouched


def test_a_full_parent_file_system_is_refused() -> None:
    mount_fd = mount_detached("tmpfs", "none", {"size": str(256 * MIB)}, (), 0)
    try:
        parent = Path(f"/proc/self/fd/{mount_fd}")
        (parent / "pool").mkdir()
        source = Source(str(parent / "pool"), parent / "pool")
        with untouched(source), refused(SourceFull, source.path, "no room for 1 GiB"):
            format_source(source.path, capacity_bytes=1 << 30)
        (parent / "other").write_bytes(bytes(150 * MIB))
        with untouched(source), refused(SourceFull, source.path, "no room"):
            format_source(source.path)
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
            parent_fs.try_out(fd, "/sys/kernel", parent_fs.fs_type_of(fd, "/sys/kernel"))
        finally:
            os.close(fd)


def test_a_directory_that_another_mkfs_took_meanwhile_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with blank_source("directory") as source:
        original = parent_fs.try_out

        def overtaken(*arguments: object) -> None:
            monkeypatch.setattr(directory, "try_out", original)
            format_source(source.path)

        monkeypatch.setattr(directory, "try_out", overtaken)
        with refused(SourceBusy, source.path):
            format_source(source.path)
        open_source(source.path).close()
