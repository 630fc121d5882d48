"""Which mount a path lies on."""

import pytest

from kvfs.bench.places import Mount, find_mount

MOUNTINFO = """\
1 0 254:0 / / rw,noatime shared:1 - ext4 /dev/root rw
2 1 0:20 / /kv rw - tmpfs tmpfs rw
3 1 0:21 / /kv rw,nosuid - fuse.kvfs /dev/nvme0n1 rw
4 1 0:22 / /with\\040blank rw - xfs /dev/loop0 rw
5 1 0:23 / /k rw - xfs /dev/loop1 rw
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/kv", Mount("/kv", "fuse.kvfs")),
        ("/kv/model/a", Mount("/kv", "fuse.kvfs")),
        ("/kvx", Mount("/", "ext4")),
        ("/with blank/a", Mount("/with blank", "xfs")),
        ("/", Mount("/", "ext4")),
    ],
)
def test_the_deepest_and_latest_mount_counts(path: str, mount: Mount) -> None:
    assert find_mount(path, MOUNTINFO) == mount


def test_without_any_line_the_type_is_unknown() -> None:
    assert find_mount("/kv", "") == Mount("/", "unknown")
