"""``kvfs umount`` of what the kernel itself keeps busy: no process is to blame."""

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.core.errors import MountpointUnusable
from tests.support.mounts.mounting import (
    COMMAND_WAIT_S,
    KVFS,
    ROOT,
    Mounted,
    run_kvfs,
    skip_without_mounts,
)
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop]

#: What the kernel shows (net/sunrpc/cache.c, svc_export_show in fs/nfsd/export.c) and what
#: exportfs has written for it. No kernel here has an NFS server.
TAKEN = """\
#path domain(flags)
{path}\t127.0.0.1(rw,root_squash,async,no_subtree_check,fsid=7,uuid=0:0:0:0,sec=1)
# /elsewhere\t127.0.0.1(rw)
"""
TOLD = "{path}\tlocalhost(rw,async,wdelay,no_subtree_check,fsid=7,sec=sys)\n"


@pytest.fixture
def held() -> Iterator[tuple[Mounted, str]]:
    """A mount with a file of it under a loop device, which holds it as nfsd would."""
    skip_without_mounts()
    with blank_place() as place, small_mount(place) as mount:
        (mount.path / "image").write_bytes(bytes(1 << 20))
        shown = subprocess.run(
            ["losetup", "--find", "--show", mount.path / "image"],
            check=True,
            capture_output=True,
            text=True,
        )
        device = shown.stdout.strip()
        yield mount, device
        subprocess.run(["losetup", "--detach", device], check=False, capture_output=True)


def test_a_loop_device_is_named_and_the_command_ends_it(held: tuple[Mounted, str]) -> None:
    mount, device = held
    done = run_kvfs("umount", str(mount.path), check=False)
    assert done.returncode == MountpointUnusable.exit_code
    said = f"used by loop device {device}: `losetup --detach {device}` ends that"
    assert done.stderr == f"kvfs: {mount.path} is busy: {said}\n"
    assert "--lazy" not in done.stderr
    command = done.stderr.split("`")[1]
    subprocess.run(["sh", "-c", command], check=True)
    mount.stop()


@pytest.mark.parametrize("told", [True, False])
def test_the_nfs_server_is_named(tmp_path: Path, told: bool) -> None:
    """In a mount namespace in which the kernel's table is a file; a loop device holds the mount.

    exportfs knows a client's name as it was told, the kernel only the address.
    """
    skip_without_mounts()
    with blank_place() as place, small_mount(place) as mount:
        (mount.path / "image").write_bytes(bytes(1 << 20))
        (tmp_path / "taken").write_text(TAKEN.format(path=mount.path))
        (tmp_path / "told").write_text(TOLD.format(path=mount.path) if told else "")
        script = f"""
mount -t tmpfs none /var/lib && mkdir /var/lib/nfs && cp {tmp_path}/told /var/lib/nfs/etab
mount -t tmpfs none /proc/fs && mkdir /proc/fs/nfsd && cp {tmp_path}/taken /proc/fs/nfsd/exports
device=$(losetup --find --show {mount.path}/image)
echo $device
{shlex.join(KVFS)} umount --wait-s 1 {mount.path}
code=$?
losetup --detach $device
exit $code
"""
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=COMMAND_WAIT_S,
            check=False,
        )
        client = "localhost" if told else "127.0.0.1"
        export = f"exportfs -u {client}:{mount.path}"
        assert f"nfsd, which is no process): `{export}` ends that" in done.stderr
        assert f"loop device {done.stdout.strip()}" in done.stderr
        assert "--lazy" not in done.stderr
        assert done.returncode == MountpointUnusable.exit_code
