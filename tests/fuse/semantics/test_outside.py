"""What those see who look at a mount from outside: watchers, bind mounts, layers, id maps."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EINVAL, ESTALE
from pathlib import Path
from typing import Final

import pytest

from tests.support.kernel.calls import write_file
from tests.support.kernel.id_maps import id_mapped, user_namespace
from tests.support.mounts.mounting import Mounted, run_kvfs

pytestmark = pytest.mark.needs_fuse

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
#: linux/inotify.h.
_IN_DELETE: Final = 0x200


def store(directory: Path, name: str) -> Path:
    write_file(directory / f"{name}.tmp", b"content")
    (directory / f"{name}.tmp").rename(directory / name)
    return directory / name


@contextmanager
def watching(directory: Path) -> Iterator[int]:
    """Watch what is deleted in *directory*, at a descriptor that never waits."""
    fd = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        assert _LIBC.inotify_add_watch(fd, bytes(directory), _IN_DELETE) > 0
        yield fd
    finally:
        os.close(fd)


def test_no_watcher_hears_of_an_eviction(kv: Path, mount: Mounted) -> None:
    """[seen-from-outside] It does of a removal."""
    evicted, removed = store(kv, "evicted"), store(kv, "removed")
    with watching(kv) as watch:
        run_kvfs("evict", str(evicted))
        assert not evicted.exists()
        with pytest.raises(BlockingIOError):
            os.read(watch, 4096)
        removed.unlink()
        assert b"removed" in os.read(watch, 4096)


def test_a_bind_mount_of_an_evicted_block_is_stale(
    kv: Path, mount: Mounted, tmp_path: Path
) -> None:
    """[seen-from-outside] One of its directory finds that the name is gone."""
    block, target, directory = store(kv, "block"), tmp_path / "file", tmp_path / "directory"
    target.touch()
    directory.mkdir()
    script = (
        'mount --bind "$1" "$3" && mount --bind "$2" "$4" && head -c1 "$3" >&2 && echo bound'
        ' && read -r _ && { head -c1 "$3"; ls "$4"; }'
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    with subprocess.Popen(
        [*command, str(block), str(kv), str(target), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    ) as inside:
        assert inside.stdin is not None
        assert inside.stdout is not None
        assert inside.stdout.readline() == "bound\n"
        run_kvfs("evict", str(block))
        told, errors = inside.communicate("go on\n")
    assert told == ""
    assert os.strerror(ESTALE) in errors


def test_no_upper_layer_lies_on_it(kv: Path, mount: Mounted, tmp_path: Path) -> None:
    """[seen-from-outside] A lower one does."""
    (kv / "lower").mkdir()
    store(kv / "lower", "block")
    for name in ("upper", "work"):
        (kv / name).mkdir()
        (tmp_path / name).mkdir()
    script = 'mount -t overlay none -o "lowerdir=$1,upperdir=$2,workdir=$3" "$4" && cat "$4/block"'

    def overlaid(place: Path) -> subprocess.CompletedProcess[str]:
        layers = (kv / "lower", place / "upper", place / "work")
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", *layers, tmp_path],
            capture_output=True,
            text=True,
            check=False,
        )

    assert overlaid(kv).returncode != 0
    assert overlaid(tmp_path).stdout == "content"


def test_its_ids_are_not_mapped(kv: Path, mount: Mounted, tmp_path: Path) -> None:
    """[seen-from-outside] The kernel refuses it, and does it for other file systems."""
    with user_namespace() as namespace_fd:
        assert id_mapped(kv, namespace_fd) == EINVAL
        assert id_mapped(Path("/dev/shm"), namespace_fd) == 0
