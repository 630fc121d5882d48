"""Any sequence of calls does on the mount what it does on a tmpfs directory: results and errno.

KVFS_LONG=1 runs more and longer sequences, with fresh seeds that hypothesis prints on failure, and
shrinks what fails.
"""

import contextlib
import mmap
import os
import random
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.kernel.calls import RENAME_EXCHANGE, RENAME_NOREPLACE, read_file, renameat2
from tests.support.mounts.mounting import Mounted, Reference, workplace

LONG: Final = os.environ.get("KVFS_LONG") == "1"
SETTINGS: Final = settings(
    max_examples=600 if LONG else 30,
    stateful_step_count=80 if LONG else 30,
    # Shrinking a failure remounts for minutes: it is for whoever looks into one.
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if LONG else [])],
    database=None,
    suppress_health_check=list(HealthCheck),
)
HANDLES_MAX: Final = 6
Place = bytes | int
REMOUNTS_MAX: Final = 2
#: Times before this one were set by utimens, so both sides must show the same.
SET_TIME_MAX_NS: Final = 10**18

NAMES: Final = st.sampled_from([b"a", b"b", b"c", b"\xff\xfe", b"n" * 255])
#: A path by its names, or (more often) a number that picks one that is there.
PATHS: Final = st.one_of(
    st.lists(NAMES, min_size=1, max_size=3).map(b"/".join), st.integers(0, 30), st.integers(0, 30)
)
SIZES: Final = st.sampled_from([0, 1, 100, 4095, 4096, 5000, 70_000])
OFFSETS: Final = st.sampled_from([0, 1, 4096, 6000, 70_001, 131_072])
SEEDS: Final = st.integers(0, 255)
PICKS: Final = st.integers(0, HANDLES_MAX - 1)
MODES: Final = st.sampled_from([0o000, 0o400, 0o644, 0o755, 0o777, 0o1777])
STAMPS: Final = st.sampled_from([0, 1, -5, 999_999_999, 10**17 + 123_456_789])
ATTRIBUTES: Final = st.sampled_from(["user.a", "user.b", "user." + "n" * 200])
OPEN_FLAGS: Final = st.sampled_from(
    [
        os.O_RDONLY,
        os.O_WRONLY,
        os.O_RDWR,
        os.O_RDWR | os.O_APPEND,
        os.O_RDWR | os.O_TRUNC,
        os.O_RDWR | os.O_CREAT,
        os.O_RDWR | os.O_CREAT | os.O_EXCL,
        os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
        os.O_RDONLY | os.O_NOFOLLOW,
        os.O_RDONLY | os.O_DIRECTORY,
    ]
)


class Outcome(NamedTuple):
    """What came of a call: its result, or its errno."""

    errno: int
    result: object


def outcome_of(call: Callable[[], object]) -> Outcome:
    """Run a call and return what came of it."""
    try:
        return Outcome(0, call())
    except OSError as error:
        return Outcome(error.errno or 0, None)


def content(seed: int, size_bytes: int) -> bytes:
    """Return bytes that tell seeds and offsets apart."""
    return random.Random(seed).randbytes(size_bytes)


def described(path: bytes) -> tuple[object, ...]:
    """Return all of one file that both sides must agree on."""
    info = os.lstat(path)
    held: object = None
    if stat.S_ISREG(info.st_mode):
        held = read_file(path)
    elif stat.S_ISLNK(info.st_mode):
        held = os.readlink(path)
    else:
        held = sorted(os.listdir(path))
    set_time = info.st_mtime_ns if info.st_mtime_ns < SET_TIME_MAX_NS else "now"
    size = None if stat.S_ISDIR(info.st_mode) else info.st_size
    attributes = sorted(os.listxattr(path, follow_symlinks=False))
    values = [os.getxattr(path, name, follow_symlinks=False) for name in attributes]
    return (info.st_mode, info.st_nlink, info.st_uid, size, set_time, held, attributes, values)


def tree_of(root: bytes) -> dict[bytes, tuple[object, ...]]:
    """Describe everything below *root*, by relative path."""
    tree = {b"": described(root)}
    for directory, directories, files in os.walk(root):
        for name in directories + files:
            path = os.path.join(directory, name)
            tree[os.path.relpath(path, root)] = described(path)
    return tree


def truncate_elsewhere(where: bytes | int, size_bytes: int) -> None:
    """Truncate, but never to the present size: whether that sets mtime, file systems disagree."""
    info = os.stat(where)
    if not stat.S_ISREG(info.st_mode) or info.st_size != size_bytes:
        os.truncate(where, size_bytes)


class TreeModel(RuleBasedStateMachine):
    """Two directories, one on the mount and one on tmpfs, that never differ."""

    def __init__(self, mounted: Mounted | Reference, model_parent: Path) -> None:
        super().__init__()
        self.mounted = mounted
        self.kv = os.fsencode(tempfile.mkdtemp(prefix="model-", dir=mounted.path))
        self.model = os.fsencode(tempfile.mkdtemp(prefix="model-", dir=model_parent))
        self.handles: list[tuple[int, int]] = []
        self.remounts = 0
        self.there = [b"a"]

    def teardown(self) -> None:
        self._close_handles()
        shutil.rmtree(self.kv)
        shutil.rmtree(self.model)

    def _close_handles(self) -> None:
        for fd in (fd for pair in self.handles for fd in pair):
            os.close(fd)
        self.handles.clear()

    def _path(self, place: Place) -> bytes:
        """Return a path relative to either root."""
        return place if isinstance(place, bytes) else self.there[place % len(self.there)]

    def _same(self, call: Callable[[bytes], object]) -> Outcome:
        """Run a call on both sides, given each side's root, and compare what came of it."""
        ours, theirs = (outcome_of(lambda r=root: call(r)) for root in (self.kv, self.model))
        assert ours == theirs, f"kvfs {ours}, tmpfs {theirs}"
        return ours

    def _same_handle(self, pick: int, call: Callable[[int], object]) -> None:
        pair = self.handles[pick % len(self.handles)]
        ours, theirs = (outcome_of(lambda f=fd: call(f)) for fd in pair)
        assert ours == theirs, f"kvfs {ours}, tmpfs {theirs}"

    @precondition(lambda self: len(self.handles) < HANDLES_MAX)
    @rule(path=PATHS, flags=OPEN_FLAGS, mode=MODES)
    def open(self, path: Place, flags: int, mode: int) -> None:
        if flags & os.O_TRUNC:  # who has the file open would keep the old bytes: [life-rewrite]
            self._close_handles()
        outcomes = [
            outcome_of(lambda r=root: os.open(r + b"/" + self._path(path), flags, mode))
            for root in (self.kv, self.model)
        ]
        fds = [one.result for one in outcomes if isinstance(one.result, int)]
        if len(fds) == len(outcomes):
            self.handles.append((fds[0], fds[1]))
        else:
            for fd in fds:
                os.close(fd)
            assert outcomes[0] == outcomes[1], f"open {flags:o}: kvfs, tmpfs {outcomes}"

    @precondition(lambda self: self.handles)
    @rule(pick=PICKS)
    def close(self, pick: int) -> None:
        for fd in self.handles.pop(pick % len(self.handles)):
            os.close(fd)

    @precondition(lambda self: self.handles)
    @rule(pick=PICKS, at=OFFSETS, size=SIZES, seed=SEEDS)
    def pwrite(self, pick: int, at: int, size: int, seed: int) -> None:
        self._same_handle(pick, lambda fd: os.pwrite(fd, content(seed, size), at))

    @precondition(lambda self: self.handles)
    @rule(pick=PICKS, size=SIZES, seed=SEEDS)
    def write(self, pick: int, size: int, seed: int) -> None:
        self._same_handle(pick, lambda fd: os.write(fd, content(seed, size)))

    @precondition(lambda self: self.handles)
    @rule(pick=PICKS, at=OFFSETS, size=SIZES)
    def pread(self, pick: int, at: int, size: int) -> None:
        self._same_handle(pick, lambda fd: os.pread(fd, size, at))

    @precondition(lambda self: self.handles)
    @rule(pick=PICKS, size=SIZES)
    def ftruncate(self, pick: int, size: int) -> None:
        self._same_handle(pick, lambda fd: truncate_elsewhere(fd, size))

    @precondition(lambda self: self.handles)
    @rule(pick=PICKS, mode=MODES)
    def fchmod(self, pick: int, mode: int) -> None:
        self._same_handle(pick, lambda fd: os.fchmod(fd, mode))

    @rule(path=PATHS, size=SIZES, seed=SEEDS)
    def store(self, path: Place, size: int, seed: int) -> None:
        def cycle(root: bytes) -> None:
            with open(root + b"/tmp", "wb") as file:
                file.write(content(seed, size))
            try:
                os.rename(root + b"/tmp", root + b"/" + self._path(path))
            except OSError:
                os.unlink(root + b"/tmp")
                raise

        self._same(cycle)

    @rule(path=PATHS, size=SIZES, seed=SEEDS, keeps=st.booleans())
    def store_by_link(self, path: Place, size: int, seed: int, keeps: bool) -> None:
        def cycle(root: bytes) -> None:
            with open(root + b"/first", "xb") as file:
                file.write(content(seed, size))
            try:
                os.link(root + b"/first", root + b"/" + self._path(path))
            except OSError:
                os.unlink(root + b"/first")
                raise
            if not keeps:
                os.unlink(root + b"/first")

        self._same(cycle)

    @rule(path=PATHS, size=SIZES)
    def truncate(self, path: Place, size: int) -> None:
        self._same(lambda root: truncate_elsewhere(root + b"/" + self._path(path), size))

    @rule(old=PATHS, new=PATHS, flags=st.sampled_from([0, RENAME_NOREPLACE, RENAME_EXCHANGE]))
    def rename(self, old: Place, new: Place, flags: int) -> None:
        self._same(
            lambda root: renameat2(
                root + b"/" + self._path(old), root + b"/" + self._path(new), flags
            )
        )

    @rule(path=PATHS)
    def unlink(self, path: Place) -> None:
        self._same(lambda root: os.unlink(root + b"/" + self._path(path)))

    @rule(path=PATHS, mode=MODES)
    def mkdir(self, path: Place, mode: int) -> None:
        self._same(lambda root: os.mkdir(root + b"/" + self._path(path), mode))

    @rule(path=PATHS)
    def rmdir(self, path: Place) -> None:
        self._same(lambda root: os.rmdir(root + b"/" + self._path(path)))

    @rule(path=PATHS, to=PATHS)
    def symlink(self, path: Place, to: Place) -> None:
        self._same(lambda root: os.symlink(self._path(to), root + b"/" + self._path(path)))

    @rule(path=PATHS, mode=MODES)
    def chmod(self, path: Place, mode: int) -> None:
        self._same(lambda root: os.chmod(root + b"/" + self._path(path), mode))

    @rule(path=PATHS, stamp_ns=STAMPS, follow=st.booleans())
    def utimens(self, path: Place, stamp_ns: int, follow: bool) -> None:
        self._same(
            lambda root: os.utime(
                root + b"/" + self._path(path), ns=(stamp_ns, stamp_ns), follow_symlinks=follow
            )
        )

    @rule(path=PATHS, name=ATTRIBUTES, size=st.sampled_from([0, 1, 300]), flags=st.integers(0, 2))
    def setxattr(self, path: Place, name: str, size: int, flags: int) -> None:
        self._same(
            lambda root: os.setxattr(root + b"/" + self._path(path), name, b"v" * size, flags)
        )

    @rule(path=PATHS, name=ATTRIBUTES)
    def removexattr(self, path: Place, name: str) -> None:
        self._same(lambda root: os.removexattr(root + b"/" + self._path(path), name))

    @rule(path=PATHS)
    def look(self, path: Place) -> None:
        self._same(lambda root: described(root + b"/" + self._path(path)))
        self._same(lambda root: os.path.exists(root + b"/" + self._path(path)))

    @rule(path=PATHS, at=OFFSETS, seed=SEEDS)
    def store_in_memory(self, path: Place, at: int, seed: int) -> None:
        def store(root: bytes) -> bytes | None:
            with open(root + b"/" + self._path(path), "r+b", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if at >= size:
                    return None
                with contextlib.closing(mmap.mmap(file.fileno(), 0)) as memory:
                    part = content(seed, min(3000, size - at))
                    memory[at : at + len(part)] = part
                    return memory[:]

        self._same(store)

    @precondition(lambda self: self.remounts < REMOUNTS_MAX)
    @rule(really=st.integers(0, 3))
    def remount(self, really: int) -> None:
        if really == 0:
            self._close_handles()
            self.mounted.remount()
            self.remounts += 1

    @invariant()
    def trees_are_the_same(self) -> None:
        ours, theirs = tree_of(self.kv), tree_of(self.model)
        self.there = sorted(path for path in theirs if path) or [b"a"]
        differing = {path for path in ours | theirs if ours.get(path) != theirs.get(path)}
        assert not differing, [(path, ours.get(path), theirs.get(path)) for path in differing]

    @invariant()
    def open_files_are_the_same(self) -> None:
        for pair in self.handles:
            ours, theirs = map(os.fstat, pair)
            assert (ours.st_mode, ours.st_nlink) == (theirs.st_mode, theirs.st_nlink)
            if stat.S_ISREG(ours.st_mode):
                assert ours.st_size == theirs.st_size


def test_any_sequence_of_calls_does_what_tmpfs_does(mounted: Mounted | Reference) -> None:
    """[threads] One caller: whatever the calls, results, errno and the tree are those of tmpfs."""
    with workplace() as model_parent:
        run_state_machine_as_test(lambda: TreeModel(mounted, model_parent), settings=SETTINGS)
        assert os.listdir(model_parent) == []
