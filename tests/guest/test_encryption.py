"""Encrypted pools on real dm-crypt, in a guest: ``tests/system/test_encryption.py`` boots it.

The end of a boot is played by closing the mapping: that is all that the kernel knows of the key.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.client.servers import status_of
from tests.guest.conftest import OUT
from tests.support.mounts.mounting import KVFS, Mounted, kernel_has_passthrough, run_kvfs
from tests.support.nfs.nfsd import sh
from tests.support.rules.documented import of, statements

#: Drives of the guest, blank when it starts.
DRIVES: Final = ("/dev/vdb", "/dev/vdc")
TEXT: Final = b"what a user has said to a model. "
BLOCK: Final = TEXT * (4 << 20 >> 5)
KEY_UNUSABLE: Final = 29
SOURCE_BLANK: Final = 17
SOURCE_BUSY: Final = 6
USAGE: Final = 2
EPHEMERAL: Final = "--encrypt=ephemeral"


@pytest.fixture(autouse=True)
def _blank_drives() -> Iterator[None]:
    """Whatever a test that failed has left."""
    yield
    lose_the_keys()
    for path in DRIVES:
        with open(path, "r+b") as file:
            for offset, whence in ((0, os.SEEK_SET), (-4 << 20, os.SEEK_END)):
                file.seek(offset, whence)
                file.write(bytes(4 << 20))


@pytest.fixture(scope="module")
def place() -> Path:
    path = Path("/run/encrypted")
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def key(place: Path) -> Path:
    path = place / "key"
    path.write_bytes(os.urandom(64))
    path.chmod(0o600)
    return path


@pytest.fixture(params=["drive", "image", "two drives"])
def source(request: pytest.FixtureRequest, place: Path) -> Iterator[str]:
    """A blank SOURCE of each kind, and nothing of it is left."""
    image = place / "image"
    found = {"drive": DRIVES[0], "image": str(image), "two drives": ",".join(DRIVES)}
    if request.param == "image":
        with image.open("wb") as file:
            file.truncate(400 << 20)
    yield found[request.param]
    image.unlink(missing_ok=True)


def mappings() -> list[str]:
    """Return the names of kvfs's mappings, however many sources they belong to."""
    names = []
    for path in Path("/sys/block").glob("dm-*/dm/name"):
        with contextlib.suppress(OSError):  # it is being removed
            names.append(path.read_text().strip())
    return sorted(name for name in names if name.startswith("kvfs-"))


def lose_the_keys() -> None:
    for name in mappings():
        sh("cryptsetup", "close", name)


def mount(source: str, place: Path, *flags: str) -> Mounted:
    one = Mounted(source, place / "kv", "--log-file", str(OUT / "kvfs.log"), *flags)
    one.log_file = OUT / "kvfs.log"
    return one


def parts(source: str) -> list[str]:
    return source.split(",")


def raw_bytes(source: str) -> Iterator[bytes]:
    """Yield what whoever takes the drives out of the machine can read."""
    os.sync()
    for path in parts(source):
        with open(path, "rb") as file:
            while chunk := file.read(8 << 20):
                yield chunk


def refusal(source: str, place: Path, *flags: str) -> tuple[int, str]:
    done = run_kvfs("mount", *parts(source), str(place / "kv"), *flags, check=False)
    assert done.stderr.count("\n") == 1, done.stderr
    return done.returncode, done.stderr


def test_an_ephemeral_pool_lasts_until_the_key_is_gone(source: str, place: Path) -> None:
    with mount(source, place, EPHEMERAL) as mounted:
        (mounted.path / "block").write_bytes(BLOCK)
        assert mounted.status()["encryption"] == "ephemeral"
        run_kvfs("sync", str(mounted.path))
    assert len(mappings()) == len(parts(source))
    assert not any(TEXT in chunk for chunk in raw_bytes(source))
    with mount(source, place) as mounted:  # whoever has not said how it is encrypted
        assert (mounted.path / "block").read_bytes() == BLOCK
    run_kvfs("fsck", *parts(source))
    lose_the_keys()
    exit_code, line = refusal(source, place)
    assert exit_code == KEY_UNUSABLE
    assert re.search("the key of the pool in .* went with the last boot", line), line
    before = [os.stat(part).st_size for part in parts(source)]
    with mount(source, place, EPHEMERAL) as mounted:
        assert list(mounted.path.iterdir()) == []
        (mounted.path / "block").write_bytes(BLOCK)
    assert before == [os.stat(part).st_size for part in parts(source)]
    names = mappings()
    run_kvfs("mkfs", *parts(source), EPHEMERAL, "--force")
    assert not set(names) & set(mappings())
    run_kvfs("destroy", *parts(source), "--yes")
    assert mappings() == []
    assert refusal(source, place, "-o", "ro")[0] == SOURCE_BLANK


def test_a_killed_server_keeps_the_key(place: Path) -> None:
    with mount(DRIVES[0], place, EPHEMERAL) as mounted:
        (mounted.path / "block").write_bytes(BLOCK)
        second = place / "second"
        second.mkdir()
        for verb in (("mount", DRIVES[0], str(second)), ("mkfs", DRIVES[0], EPHEMERAL)):
            done = run_kvfs(*verb, check=False)
            assert (done.returncode, done.stderr.count("\n")) == (SOURCE_BUSY, 1), done.stderr
            said = f"{DRIVES[0]} is in use: the pool (in it )?is mounted at {mounted.path}"
            assert re.search(said, done.stderr), done.stderr
        second.rmdir()
        if kernel_has_passthrough():  # another server goes on
            os.kill(mounted.status()["server_pid"], signal.SIGKILL)
            assert (mounted.path / "block").read_bytes() == BLOCK
            assert mounted.status()["encryption"] == "ephemeral"
    with mount(DRIVES[0], place) as mounted:
        assert (mounted.path / "block").read_bytes() == BLOCK
    run_kvfs("destroy", DRIVES[0], "--yes")


def test_a_key_file_keeps_the_pool_until_the_key_is_erased(
    source: str, place: Path, key: Path
) -> None:
    keyed = f"--encrypt=key-file={key}"
    run_kvfs("mkfs", *parts(source), keyed)
    assert refusal(source, place)[0] == KEY_UNUSABLE
    with mount(source, place, keyed) as mounted:
        (mounted.path / "block").write_bytes(BLOCK)
        assert mounted.status()["encryption"] == "key-file"
        run_kvfs("sync", str(mounted.path))
    assert mappings() == []  # closed with the mount
    assert not any(TEXT in chunk for chunk in raw_bytes(source))
    other = place / "other"
    other.write_bytes(os.urandom(64))
    other.chmod(0o600)
    assert refusal(source, place, f"--encrypt=key-file={other}")[0] == KEY_UNUSABLE
    assert refusal(source, place, EPHEMERAL)[0] == USAGE
    assert mappings() == []
    with mount(source, place, keyed) as mounted:
        assert (mounted.path / "block").read_bytes() == BLOCK
        if kernel_has_passthrough():
            os.kill(mounted.status()["server_pid"], signal.SIGKILL)
            assert (mounted.path / "block").read_bytes() == BLOCK
    run_kvfs("fsck", *parts(source), keyed)
    run_kvfs("destroy", *parts(source), "--yes")  # whoever destroys it needs no key
    for part in parts(source):
        opened = ["cryptsetup", "open", "--test-passphrase", "--key-file", str(key), part]
        assert subprocess.run(opened, check=False, capture_output=True).returncode != 0
    assert refusal(source, place, "-o", "ro")[0] == SOURCE_BLANK


@pytest.mark.parametrize("way", ["ephemeral", "key-file"])
def test_a_drive_that_is_added_has_the_key_of_the_pool(way: str, place: Path, key: Path) -> None:
    """And none is written to without it. Only a server that can be followed adds one."""
    if not kernel_has_passthrough():
        pytest.skip("no server takes over here")
    first, second = DRIVES
    own = place / "own"
    own.write_bytes(key.read_bytes())
    own.chmod(0o600)
    how = EPHEMERAL if way == "ephemeral" else f"--encrypt=key-file={own}"
    uuid = json.loads(run_kvfs("mkfs", first, how, "--json").stdout)["uuid"]
    with mount(f"UUID={uuid}", place, how) as mounted:
        assert mounted.status()["source"] == first
        (mounted.path / "block").write_bytes(BLOCK)
        if way == "key-file":
            for content in (os.urandom(64), None):
                own.unlink()
                if content is not None:
                    own.write_bytes(content)
                    own.chmod(0o600)
                done = run_kvfs("drive", "add", str(mounted.path), second, check=False)
                assert (done.returncode, done.stderr.count("\n")) == (KEY_UNUSABLE, 1), done.stderr
                assert not any(any(chunk) for chunk in raw_bytes(second))
            own.write_bytes(key.read_bytes())
            own.chmod(0o600)
        run_kvfs("drive", "add", str(mounted.path), second)
        assert (mounted.status()["encryption"], len(mappings())) == (way, 2)
        for number in range(8):
            (mounted.path / f"{number}.tmp").write_bytes(BLOCK)
            (mounted.path / f"{number}.tmp").rename(mounted.path / f"{number}")
        assert mounted.status()["drives"]["1"]["blocks"] > 0
        run_kvfs("sync", str(mounted.path))
    assert not any(TEXT in chunk for chunk in raw_bytes(second))
    with mount(f"UUID={uuid}", place, how) as mounted:
        assert mounted.status()["source"] == f"{first},{second}"
        assert all((mounted.path / f"{number}").read_bytes() == BLOCK for number in range(8))
    opens = (how,) * (way == "key-file")
    assert "9 blocks" in run_kvfs("fsck", f"UUID={uuid}", *opens).stdout
    if way == "key-file":  # nothing there tells which drives it has
        done = run_kvfs("destroy", f"UUID={uuid}", "--yes", check=False)
        assert (done.returncode, done.stderr.count("\n")) == (USAGE, 1), done.stderr
        run_kvfs("destroy", first, second, "--yes")
    else:
        run_kvfs("destroy", f"UUID={uuid}", "--yes")
    assert mappings() == []


def test_whoever_has_a_file_open_keeps_the_mapping(place: Path, key: Path) -> None:
    """As a dead mount's clients keep its file system."""
    keyed = f"--encrypt=key-file={key}"
    with mount(DRIVES[0], place, keyed) as mounted:
        (mounted.path / "block").write_bytes(BLOCK)
    with mount(DRIVES[0], place, keyed) as mounted:
        run_kvfs("umount", "--lazy", str(mounted.path))
        mounted.start()
        assert (mounted.path / "block").read_bytes() == BLOCK
    assert mappings() == []
    run_kvfs("destroy", DRIVES[0], "--yes")


def test_a_plain_pool_is_not_taken_for_an_encrypted_one(place: Path, key: Path) -> None:
    run_kvfs("mkfs", DRIVES[0])
    for how in (EPHEMERAL, f"--encrypt=key-file={key}"):
        exit_code, line = refusal(DRIVES[0], place, how)
        assert exit_code == USAGE
        assert "not encrypted" in line
    with mount(DRIVES[0], place) as mounted:
        assert mounted.status()["encryption"] == ""
    run_kvfs("mkfs", DRIVES[0], f"--encrypt=key-file={key}", "--force")
    run_kvfs("mkfs", DRIVES[0], "--force")
    with mount(DRIVES[0], place):
        pass
    run_kvfs("destroy", DRIVES[0], "--yes")


def test_a_pool_that_is_cut_short_leaves_a_blank_drive(place: Path, key: Path) -> None:
    """Here its XFS cannot be made: the drive is written to by nobody, and is blank again."""
    tools = place / "tools"
    tools.mkdir()
    (tools / "mkfs.xfs").write_text("#!/bin/sh\necho no luck >&2\nexit 1\n")
    (tools / "mkfs.xfs").chmod(0o755)
    path = ["env", f"PATH={tools}:{os.environ['PATH']}"]
    for how in ("ephemeral", f"key-file={key}"):
        done = run_kvfs("mkfs", DRIVES[0], "--encrypt", how, prefix=path, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (18, 1), done.stderr
        assert mappings() == []
        assert refusal(DRIVES[0], place, "-o", "ro")[0] == SOURCE_BLANK


def test_a_damaged_header_is_one_line(place: Path, key: Path) -> None:
    keyed = f"--encrypt=key-file={key}"
    run_kvfs("mkfs", DRIVES[0], keyed)
    with open(DRIVES[0], "r+b") as file:
        file.seek(512)
        file.write(bytes(4 << 20))
    exit_code, line = refusal(DRIVES[0], place, keyed)
    assert exit_code == 18, line
    run_kvfs("mkfs", DRIVES[0], keyed, "--force")
    run_kvfs("destroy", DRIVES[0], "--yes")


def test_the_commands_of_the_pages(place: Path) -> None:
    """docs/security.md in its order, then what docs/install.md puts into the settings."""
    settings, mountpoint = Path("/etc/kvfs"), place / "kv"
    settings.mkdir(exist_ok=True)
    mountpoint.mkdir(exist_ok=True)

    def run(text: str) -> None:
        said = text.replace("/dev/nvme0n1", DRIVES[0]).replace(" /kv", f" {mountpoint}")
        script = said.replace("kvfs ", f"{shlex.join(KVFS)} ", 1 if said.startswith("kvfs ") else 0)
        sh("sh", "-euc", script)

    for text in [one.text for one in statements() if one.document == "docs/security.md"]:
        if text.startswith("head ") and mountpoint.is_mount():
            run("kvfs umount /kv")  # of the key that the page tells of before
        run(text)
    assert mappings() == []
    (settings / "kv.toml").write_text(f'source = "{DRIVES[0]}"\nmountpoint = "{mountpoint}"\n')
    run(*of("docs/install.md", "echo 'encrypt = "))
    for _ in range(2):  # as after two boots
        run("kvfs mount --config /etc/kvfs/kv.toml")
        assert status_of(str(mountpoint))["encryption"] == "ephemeral"
        assert list(mountpoint.iterdir()) == []
        (mountpoint / "block").write_bytes(BLOCK)
        run("kvfs umount /kv")
        lose_the_keys()
