"""Which data path a mount takes, what it says about it, and that a refusal is one clear line."""

import errno
import os
import stat
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from kvfs.core.errors import ToolMissing
from mount.files.data_path import NOT_OFFERED, backing_obstacle, choose_path, without_passthrough
from mount.fuse.wire import (
    FOPEN_KEEP_CACHE,
    FOPEN_NOFLUSH,
    FOPEN_PASSTHROUGH,
    FUSE_PASSTHROUGH,
    INIT_FLAGS2_OFFSET,
    INIT_MAX_STACK_DEPTH_OFFSET,
    OPEN_IN,
    OPEN_OUT,
    RELEASE_IN,
    Opcode,
)
from tests.support.kernel.calls import read_file, write_file
from tests.support.kernel.fake_kernel import WAIT_S, FakeKernel, Reply, fake_kernel
from tests.support.kernel.message_counts import mounted_with
from tests.support.mounts.mounting import (
    Mounted,
    kernel_has_passthrough,
    run_kvfs,
    why_no_mounts,
    workplace,
)

pytestmark = pytest.mark.needs_fuse

REASONS: Final = {
    errno.EPERM: "CAP_SYS_ADMIN",
    errno.ELOOP: "overlayfs",
    errno.ENOTTY: "CONFIG_FUSE_PASSTHROUGH",
    errno.EOPNOTSUPP: "CONFIG_FUSE_PASSTHROUGH",
    errno.ENOMEM: "Cannot allocate memory",
}
CREATE: Final = struct.pack("<IIII", os.O_RDWR | os.O_CREAT, stat.S_IFREG | 0o644, 0, 0) + b"f\0"


# ---- by the setting and the kernel's release ----


def release(patch: pytest.MonkeyPatch, text: str) -> None:
    """Let the kernel be of release *text*."""
    patch.setattr(os, "uname", lambda: SimpleNamespace(release=text))


@pytest.mark.parametrize("text", ["6.9.0", "6.18.44-fc", "7.0-rc1", "10.1"])
def test_new_kernels_are_tried(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    release(monkeypatch, text)
    assert choose_path("auto").passthrough
    assert choose_path("passthrough").passthrough
    assert choose_path("daemon") == (False, "asked for by the setting data_path")


@pytest.mark.parametrize("text", ["6.8.12-amd64", "6.1.0-23", "5.10.0", "odd"])
def test_old_kernels_are_not(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    release(monkeypatch, text)
    choice = choose_path("auto")
    assert not choice.passthrough
    assert text in choice.reason
    with pytest.raises(ToolMissing, match=r"--data-path=auto"):
        choose_path("passthrough")


@pytest.mark.parametrize("code", REASONS)
def test_a_refused_id_is_explained(code: int) -> None:
    obstacle = backing_obstacle(OSError(code, os.strerror(code)))
    assert REASONS[code] in obstacle
    choice = without_passthrough("auto", obstacle)
    assert obstacle in choice.reason
    assert "\n" not in choice.reason
    with pytest.raises(ToolMissing, match=REASONS[code]):
        without_passthrough("passthrough", obstacle)


# ---- by trying it, before the first file is opened ----


def stored(kernel: FakeKernel) -> Reply:
    """Create a file, write to it through the daemon, publish it; return the reply to CREATE."""
    made = kernel.call(Opcode.CREATE, 1, CREATE)
    assert made.code == 0
    ino = struct.unpack_from("<Q", made.payload)[0]
    handle = OPEN_OUT.unpack(made.payload[-OPEN_OUT.size :])[0]
    body = struct.pack("<QQIIQII", handle, 0, 5, 0, 0, 0, 0) + b"bytes"
    assert kernel.call(Opcode.WRITE, ino, body).code == 0
    body = struct.pack("<QQIIQII", handle, 0, 100, 0, 0, 0, 0)
    assert kernel.call(Opcode.READ, ino, body).payload == b"bytes"
    assert kernel.call(Opcode.RELEASE, ino, RELEASE_IN.pack(handle, 0, 0, 0)).code == 0
    return made


def test_passthrough_is_agreed_and_granted() -> None:
    """INIT says so with one level of stacking; CREATE and OPEN carry the one id of the inode."""
    with fake_kernel(backing_errno=0) as kernel:
        reply = kernel.init()
        flags2, depth = struct.unpack_from("<II", reply.payload, INIT_FLAGS2_OFFSET)
        assert flags2 & FUSE_PASSTHROUGH >> 32
        assert INIT_MAX_STACK_DEPTH_OFFSET == INIT_FLAGS2_OFFSET + 4
        assert depth == 1
        made = stored(kernel)
        _, open_flags, backing_id = OPEN_OUT.unpack(made.payload[-OPEN_OUT.size :])
        assert open_flags & FOPEN_PASSTHROUGH
        ino = struct.unpack_from("<Q", made.payload)[0]
        for wanted in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY):
            opened = kernel.call(Opcode.OPEN, ino, OPEN_IN.pack(wanted, 0))
            _, open_flags, its = OPEN_OUT.unpack(opened.payload)
            assert its == backing_id > 0
            assert open_flags & FOPEN_PASSTHROUGH
            assert bool(open_flags & FOPEN_NOFLUSH) == (wanted == os.O_RDONLY)
        assert kernel.status()["data_path"] == "passthrough"


@pytest.mark.parametrize("code", REASONS)
def test_a_refused_id_leads_to_the_daemon_path(code: int) -> None:
    """auto serves all the same, and the status says why."""
    with fake_kernel(backing_errno=code) as kernel:
        kernel.init()
        status = kernel.status()
        assert status["data_path"] == "daemon"
        assert REASONS[code] in status["data_path_reason"]
        made = stored(kernel)
        _, open_flags, backing_id = OPEN_OUT.unpack(made.payload[-OPEN_OUT.size :])
        assert backing_id == 0
        assert not open_flags & FOPEN_PASSTHROUGH
        assert open_flags & FOPEN_KEEP_CACHE


def test_a_kernel_that_does_not_offer_it_is_not_asked() -> None:
    with fake_kernel(backing_errno=0) as kernel:
        reply = kernel.init(((1 << 64) - 1) & ~FUSE_PASSTHROUGH)
        flags2, depth = struct.unpack_from("<II", reply.payload, INIT_FLAGS2_OFFSET)
        assert not flags2 & FUSE_PASSTHROUGH >> 32
        assert depth == 0
        status = kernel.status()
        assert (status["data_path"], NOT_OFFERED in status["data_path_reason"]) == ("daemon", True)


def test_the_setting_is_obeyed_where_passthrough_works() -> None:
    with fake_kernel("--data-path=daemon", backing_errno=0) as kernel:
        reply = kernel.init()
        flags2 = struct.unpack_from("<I", reply.payload, INIT_FLAGS2_OFFSET)[0]
        assert not flags2 & FUSE_PASSTHROUGH >> 32
        assert kernel.status()["data_path"] == "daemon"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ELOOP])
def test_passthrough_or_nothing(code: int) -> None:
    """One line, its own exit code, and no traceback in the log: the operator asked for it."""
    with fake_kernel("--data-path=passthrough", backing_errno=code) as kernel:
        assert kernel.init().code == 0
        assert kernel.server.wait(WAIT_S) == ToolMissing.exit_code
        assert kernel.server.stderr is not None
        [line] = kernel.server.stderr.read().decode().splitlines()
        assert REASONS[code] in line
        assert "Traceback" not in kernel.log_file.read_text()


# ---- on real mounts ----


@pytest.fixture(params=["auto", "passthrough", "daemon"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount by each setting."""
    if request.param == "passthrough" and not kernel_has_passthrough():
        pytest.skip("needs Linux 6.9")
    with mounted_with({}, f"--data-path={request.param}") as mount:
        yield mount


def test_each_setting_serves_and_says_so(mount: Mounted, request: pytest.FixtureRequest) -> None:
    wanted = request.node.callspec.params["mount"]
    status = mount.status()
    if wanted != "auto":
        assert status["data_path"] == wanted
    assert status["data_path"] in ("passthrough", "daemon")
    assert status["data_path_reason"]
    shown = run_kvfs("status", str(mount.path)).stdout
    assert status["data_path"] in shown
    assert status["data_path_reason"] in shown
    data = os.urandom(100_000)
    write_file(mount.path / "file", data)
    assert read_file(mount.path / "file") == data
    requests = mount.requests()
    through_daemon = {name for name in ("READ", "WRITE") if name in requests}
    assert through_daemon == ({"READ", "WRITE"} if status["data_path"] == "daemon" else set())


@pytest.fixture
def overlay() -> Iterator[Path]:
    """A directory on an overlayfs, as every container has it."""
    if (why := why_no_mounts()) is not None:
        pytest.skip(why)
    with workplace() as place:
        for name in ("lower", "upper", "work", "merged"):
            (place / name).mkdir()
        layers = ",".join(
            f"{key}dir={place / name}"
            for key, name in (("lower", "lower"), ("upper", "upper"), ("work", "work"))
        )
        command = ["mount", "-t", "overlay", "overlay", "-o", layers, str(place / "merged")]
        if subprocess.run(command, check=False, capture_output=True).returncode != 0:
            pytest.skip("this kernel has no overlayfs")
        try:
            (place / "merged" / "pool").mkdir()
            yield place / "merged" / "pool"
        finally:
            subprocess.run(["umount", str(place / "merged")], check=True)


@pytest.mark.parametrize("wanted", ["auto", "passthrough", "daemon"])
def test_a_directory_on_overlayfs_is_refused(overlay: Path, tmp_path: Path, wanted: str) -> None:
    """In one line that names it, and nothing is left in it."""
    (tmp_path / "kv").mkdir()
    log = str(tmp_path / "kv.log")
    done = run_kvfs(
        "mount",
        str(overlay),
        str(tmp_path / "kv"),
        f"--data-path={wanted}",
        "--log-file",
        log,
        check=False,
    )
    assert done.returncode != 0
    [line] = done.stderr.splitlines()
    assert "overlayfs" in line
    assert os.listdir(overlay) == []
    assert not os.path.ismount(tmp_path / "kv")
