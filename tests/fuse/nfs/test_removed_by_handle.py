"""A removed file and its handle (open_by_handle_at(2)), which NFS servers hold."""

import os
from errno import ESTALE
from pathlib import Path

import pytest

from tests.support.kernel.calls import opened, refused
from tests.support.kernel.file_handles import FileHandle


@pytest.mark.parametrize("how", ["unlink", "replace"])
def test_a_removed_file_does_not_open_by_its_handle(kv: Path, how: str) -> None:
    """[unlink] ESTALE at once; who looked its name up just before is another matter."""
    path = kv / "block"
    path.write_bytes(b"old")
    path.rename(kv / "final")
    path = kv / "final"
    handle = FileHandle.of(path)
    with opened(kv, os.O_RDONLY) as root_fd:
        assert handle.read(root_fd) == b"old"
        if how == "unlink":
            path.unlink()
        else:
            (kv / "next").write_bytes(b"new")
            (kv / "next").rename(path)
        for _ in range(3):
            with refused(ESTALE):
                handle.open(root_fd)
