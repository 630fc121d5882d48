"""``--encrypt`` where nothing can be encrypted: one line, the code of its kind, nothing changed.

What needs dm-crypt runs in guests: tests/guest/test_encryption.py.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.core.encryption import ephemeral_mark
from tests.support.mounts.mounting import run_kvfs, skip_without_mounts, workplace

UUID = "0f3c8f64-1a8a-4f5e-9d53-6d0f8c7e2b11"
IMAGE_BYTES = 400 << 20


@pytest.fixture
def place() -> Iterator[Path]:
    skip_without_mounts()
    with workplace() as directory:
        (directory / "kv").mkdir()
        yield directory


@pytest.fixture
def image(place: Path) -> Path:
    path = place / "image"
    with path.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    return path


def refused(*arguments: str, prefix: tuple[str, ...] = ()) -> tuple[int, str]:
    done = run_kvfs(*arguments, prefix=prefix, check=False)
    assert done.stderr.count("\n") == 1, done.stderr
    return done.returncode, done.stderr


def without(place: Path, *missing: str) -> tuple[str, ...]:
    """Return how a command is run that finds no program *missing*: in a /usr/sbin of its own."""
    hidden = place / "hidden"
    hidden.touch()
    binds = " ".join(f"mount --bind {hidden} {path};" for path in missing)
    return ("unshare", "--mount", "sh", "-euc", f'{binds} exec "$@"', "sh")


def has_device_mapper() -> bool:
    return "device-mapper" in Path("/proc/misc").read_text()


def test_without_cryptsetup_nothing_is_made(place: Path) -> None:
    done = subprocess.run(["sh", "-c", "command -v cryptsetup"], capture_output=True, text=True)
    prefix = without(place, done.stdout.strip()) if done.stdout else ()
    for verb in (("mkfs", str(place / "new")), ("mount", str(place / "new"), str(place / "kv"))):
        exit_code, line = refused(*verb, "--capacity=300M", "--encrypt=ephemeral", prefix=prefix)
        assert exit_code == 13
        assert "cryptsetup is not installed; apt install cryptsetup-bin" in line
        assert not (place / "new").exists()


def test_without_dm_crypt_nothing_is_made(place: Path, image: Path) -> None:
    """Whatever cryptsetup is here, the kernel is asked before a byte is written."""
    if has_device_mapper():
        pytest.skip("this kernel may have dm-crypt")
    tools = place / "tools"
    tools.mkdir()
    (tools / "cryptsetup").write_text("#!/bin/sh\nexit 0\n")
    (tools / "cryptsetup").chmod(0o755)
    exit_code, line = refused(
        *("mkfs", str(image), "--encrypt=ephemeral"),
        prefix=("env", f"PATH={tools}:{os.environ['PATH']}"),
    )
    assert exit_code == 13
    assert "the kernel has no dm-crypt" in line
    assert "modprobe dm_crypt" in line
    assert not image.read_bytes().strip(b"\0")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("missing", "No such file"),
        ("empty", "has 0 bytes"),
        ("short", "has 31 bytes"),
        ("read by others", "mode 0644"),
        ("another user's", "owner 1000"),
        ("a directory", "is not a file"),
    ],
)
def test_a_key_file_that_is_no_good(place: Path, image: Path, made: str, says: str) -> None:
    tools = place / "tools"
    tools.mkdir()
    (tools / "cryptsetup").write_text("#!/bin/sh\nexit 0\n")
    (tools / "cryptsetup").chmod(0o755)
    key = place / "key"
    if made == "a directory":
        key.mkdir()
    elif made != "missing":
        key.write_bytes(bytes({"empty": 0, "short": 31}.get(made, 64)))
        key.chmod(0o644 if made == "read by others" else 0o600)
        os.chown(key, 1000 if made == "another user's" else 0, 0)
    prefix = ("env", f"PATH={tools}:{os.environ['PATH']}")
    exit_code, line = refused("mkfs", str(image), f"--encrypt=key-file={key}", prefix=prefix)
    assert exit_code == 29
    assert says in line
    assert not image.read_bytes().strip(b"\0")


def test_a_directory_is_left_to_its_file_system(place: Path) -> None:
    (place / "pool").mkdir()
    for verb in (("mkfs", str(place / "pool")), ("mount", str(place / "pool"), str(place / "kv"))):
        exit_code, line = refused(*verb, "--encrypt=ephemeral")
        assert exit_code == 2
        assert "fscrypt on ext4" in line
    assert list((place / "pool").iterdir()) == []


def test_a_way_that_nobody_knows(image: Path) -> None:
    exit_code, line = refused("mkfs", str(image), "--encrypt=rot13")
    assert exit_code == 2
    assert "ephemeral, key-file=FILE, tpm" in line


def test_a_drive_after_the_boot_says_that_its_key_is_gone(place: Path, image: Path) -> None:
    """Its mark is in the clear, and all behind it is noise."""
    with image.open("r+b") as file:
        file.write(ephemeral_mark(UUID))
        file.seek(IMAGE_BYTES - (4 << 20))
        file.write(os.urandom(4 << 20))
    exit_code, line = refused("mount", str(image), str(place / "kv"))
    assert exit_code == 29
    assert f"the key of the pool in {image} went with the last boot" in line
    assert "--encrypt=ephemeral" in line
    exit_code, line = refused("fsck", str(image))
    assert exit_code == 29
    run_kvfs("mkfs", str(image))  # nothing is lost by it
    run_kvfs("destroy", str(image), "--yes")
    with image.open("r+b") as file:
        file.write(ephemeral_mark(UUID))
    run_kvfs("destroy", str(image), "--yes")
    assert not image.read_bytes()[: 4 << 20].strip(b"\0")


def test_a_pool_that_is_not_encrypted_is_not_opened_as_one_that_is(
    place: Path, image: Path
) -> None:
    run_kvfs("mkfs", str(image))
    exit_code, line = refused("mount", str(image), str(place / "kv"), "--encrypt=ephemeral")
    assert exit_code == 2
    assert "is a pool that is not encrypted" in line
