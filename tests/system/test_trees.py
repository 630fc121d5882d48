"""Real trees by real tools: cp -a, rsync, git; and more bytes than the server may have memory."""

import hashlib
import os
import random
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.kernel.calls import opened, read_file, write_file
from tests.support.mounts.mounting import Mounted, Reference, skip_without_mounts, workplace

MIB: Final = 1 << 20
#: Every tenth shows what all show; the rest is for `make proof`.
FILES: Final = [1000, pytest.param(10_000, marks=pytest.mark.proof)]
#: The bound that the issue names, for the server's data (heap and private mappings).
MEMORY_LIMIT_BYTES: Final = 512 * MIB
BLOCK_BYTES: Final = 32 * MIB


def make_tree(root: Path, files: int) -> None:
    """Fill *root* with files of many sizes, modes, times and names, links, FIFOs, attributes."""
    chance = random.Random(42)
    directories = [root]
    for number in range(files // 50):
        directory = chance.choice(directories) / f"dir {number}"
        directory.mkdir()
        directories.append(directory)
    for number in range(files):
        parent = os.fsencode(chance.choice(directories))
        name = b"%d-" % number + chance.randbytes(6).replace(b"/", b"_").replace(b"\0", b"-")
        path = parent + b"/" + name
        kind = chance.random()
        if kind < 0.03:
            os.symlink(chance.randbytes(20).replace(b"\0", b"x"), path)
            continue
        if kind < 0.04:
            os.mkfifo(path)
        else:
            size = int(chance.paretovariate(0.7) * 20) % 200_000
            write_file(path, chance.randbytes(size) if kind > 0.2 else b"")
            if kind > 0.98:
                os.truncate(path, size + MIB)
            if kind > 0.95:
                os.setxattr(path, "user.note", b"%d" % number)
        os.chmod(path, chance.choice([0o600, 0o644, 0o755, 0o400]))
        os.chown(path, chance.choice([0, 1000]), chance.choice([0, 1000]))
        os.utime(path, ns=(number, chance.randrange(1 << 60)))


def differences(one: Path, two: Path) -> str:
    """Return what rsync finds different, by checksums, attributes and times included."""
    done = subprocess.run(
        [
            *("rsync", "-aX", "--checksum", "--delete", "--dry-run", "--itemize-changes"),
            *(f"{one}/", f"{two}/"),
        ],
        check=True,
        capture_output=True,
    )
    return os.fsdecode(done.stdout)


@pytest.mark.parametrize("files", FILES)
def test_a_tree_copied_with_all_attributes(
    kv: Path, mounted: Mounted | Reference, files: int
) -> None:
    """[remount] cp -a of 1000 files, or 10,000: rsync -a --checksum finds no difference, twice."""
    with workplace("disk") as outside:
        make_tree(outside, files)
        subprocess.run(["cp", "-a", f"{outside}/.", kv / "copy"], check=True)
        assert differences(outside, kv / "copy") == ""
        mounted.remount()
        assert differences(outside, kv / "copy") == ""
        assert differences(kv / "copy", outside) == ""
        part = "dir 0"  # that the look sees what is there shows by a part as well
        write_file(kv / "copy" / part / "one more", b"x")
        assert "one more" in differences(outside / part, kv / "copy" / part)
        subprocess.run(["rm", "-rf", kv / "copy"], check=True)
    assert os.listdir(kv) == []


def git(*arguments: str | Path, at: Path, text: str = "") -> str:
    """Run git with a settled identity and no configuration of the machine."""
    environment = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@localhost",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@localhost",
    }
    done = subprocess.run(
        ["git", "-C", str(at), *map(str, arguments)],
        input=text,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def make_history(repository: Path, commits: int) -> None:
    """Make a repository whose history has files that come, change and go."""
    chance = random.Random(7)
    git("init", "--quiet", "--initial-branch=main", at=repository)
    stream = []
    for number in range(1, commits + 1):
        stream.append(f"commit refs/heads/main\ncommitter a <a@localhost> {number} +0000\n")
        stream.append("data 7\ncommit\n")
        for _ in range(5):
            name = f"d{chance.randrange(9)}/e{chance.randrange(9)}/f{chance.randrange(40)}"
            content = chance.randbytes(chance.randrange(3000)).hex()
            stream.append(f"M 100644 inline {name}\ndata {len(content)}\n{content}\n")
    git("fast-import", "--quiet", at=repository, text="".join(stream))
    git("checkout", "--quiet", "main", at=repository)


def test_git_works_on_the_mount(kv: Path, mounted: Mounted | Reference) -> None:
    """[rename] git clone, fsck, commit, gc and clone again; a clean tree also after a remount."""
    with workplace("disk") as outside:
        make_history(outside, 200)
        git("clone", "--quiet", "--no-local", f"file://{outside}", kv / "clone", at=outside)
        git("fsck", "--full", "--strict", at=kv / "clone")
        head = git("rev-parse", "HEAD", at=outside)
        assert git("rev-parse", "HEAD", at=kv / "clone") == head
    mounted.remount()
    clone = kv / "clone"
    git("fsck", "--full", at=clone)
    assert git("status", "--porcelain", at=clone) == ""
    for number in range(5):
        write_file(clone / f"new{number}", os.urandom(1000))
        git("add", "-A", at=clone)
        git("commit", "--quiet", "-m", f"{number}", at=clone)
    git("gc", "--quiet", "--prune=now", at=clone)
    git("fsck", "--full", at=clone)
    git("clone", "--quiet", "clone", "second", at=kv)
    assert git("rev-parse", "HEAD", at=kv / "second") == git("rev-parse", "HEAD", at=clone)


@pytest.fixture(params=["daemon", pytest.param("auto", marks=pytest.mark.proof)])
def limited(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A mount, on disk, whose server may not have more data than MEMORY_LIMIT_BYTES."""
    skip_without_mounts()
    with workplace("disk") as directory:
        (directory / "pool").mkdir()
        prefix = ["prlimit", f"--data={MEMORY_LIMIT_BYTES}"]
        flag = f"--data-path={request.param}"
        with Mounted(directory / "pool", directory / "kv", flag, prefix=prefix) as mounted:
            yield mounted


def test_more_data_than_the_server_may_have_memory(limited: Mounted) -> None:
    """[large-data] 640 MiB in blocks and one file of 576 MiB go in and come out, byte for byte."""
    limits = resource.prlimit(limited.server_pid, resource.RLIMIT_DATA)
    assert limits == (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES)
    chance = random.Random(1)
    block = bytearray(chance.randbytes(BLOCK_BYTES))
    sums = []
    for number in range(20):
        block[:8] = number.to_bytes(8, "little")
        write_file(limited.path / f"{number}", bytes(block))
        sums.append(hashlib.sha256(block).digest())
    whole = hashlib.sha256()
    with opened(limited.path / "large", os.O_CREAT | os.O_WRONLY) as fd:
        for number in range(18):
            block[:8] = number.to_bytes(8, "big")
            assert os.write(fd, block) == BLOCK_BYTES
            whole.update(block)
    limited.remount()
    for number, expected in enumerate(sums):
        assert hashlib.sha256(read_file(limited.path / f"{number}")).digest() == expected
    with open(limited.path / "large", "rb") as file:
        assert hashlib.file_digest(file, "sha256").digest() == whole.digest()
    assert not limited.errors()
