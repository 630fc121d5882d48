"""A short history that makes every kind of system call, for tests that let each one fail."""

from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.core.errors import KvfsError
from kvfs.core.types import ROOT_INODE, InodeNo
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.store.driven import Driven
from tests.support.store.stores import (
    DIRECTORY,
    SYMLINK,
    Host,
    assert_exact,
    put,
    settle,
    tree,
    write,
)

#: Every call of the seam that the engine makes, but ``close``, which fails on no local disk.
CALLS: Final = (
    "open", "read", "write", "pread", "pwrite", "ftruncate", "fsync", "syncfs", "fstat", "stat",
    "mkdir", "rmdir", "unlink", "rename", "utime", "setxattr", "getxattr", "removexattr",
    "fallocate", "lseek", "listdir", "commit",
)  # fmt: skip
FAILURES: Final = (KvfsError, OSError)

Tree = dict[bytes, object]


class Step(NamedTuple):
    """A request or two, and what they make of the tree."""

    do: Callable[[Driven], object]
    effect: Callable[[Tree], Tree]


def _directory(store: Driven) -> InodeNo:
    return store.lookup(ROOT_INODE, b"dir")


def _put(path: bytes, data: bytes) -> Step:
    def do(store: Driven) -> None:
        parent = _directory(store) if path.startswith(b"/dir/") else ROOT_INODE
        put(store, parent, path.rpartition(b"/")[2], data)

    return Step(do, lambda tree: tree | {path: data})


def _rewrite(store: Driven) -> None:
    ino = store.lookup(ROOT_INODE, b"one")
    opened = store.open(ino, writer=True, truncate=False)
    try:
        write(store, opened, b"ONE", 6000)
    finally:
        store.close(opened, writer=True)


def _remove_while_open(store: Driven) -> None:
    ino = store.lookup(ROOT_INODE, b"gone")
    opened = store.open(ino, writer=True, truncate=False)
    try:
        store.unlink(ROOT_INODE, b"gone")
        write(store, opened, b"more", 9000)
    finally:
        store.close(opened, writer=True)


def _change(store: Driven) -> None:
    ino = store.lookup(ROOT_INODE, b"one")
    store.change(ino, mode=0o600, size_bytes=3, mtime_ns=9)


def _moved(tree: Tree, source: bytes, target: bytes) -> Tree:
    return _without(tree, source) | {target: tree[source]}


def _without(tree: Tree, path: bytes) -> Tree:
    return {name: what for name, what in tree.items() if name != path or tree[path] is None}


def _cut(what: object, size_bytes: int) -> bytes:
    assert isinstance(what, bytes)
    return what[:size_bytes].ljust(size_bytes, b"\0")


def _patched(what: object, data: bytes, offset_bytes: int) -> bytes:
    assert isinstance(what, bytes)
    return _cut(what, offset_bytes) + data + what[offset_bytes + len(data) :]


STEPS: Final = (
    Step(
        lambda store: store.make_node(ROOT_INODE, b"dir", DIRECTORY, 0, 0),
        lambda tree: tree | {b"/dir": "directory"},
    ),
    _put(b"/one", b"x" * 5000),
    _put(b"/dir/tmp", b"y" * 5000),
    Step(
        lambda store: store.rename(_directory(store), b"tmp", _directory(store), b"two"),
        lambda tree: _moved(tree, b"/dir/tmp", b"/dir/two"),
    ),
    Step(_rewrite, lambda tree: tree | {b"/one": _patched(tree[b"/one"], b"ONE", 6000)}),
    Step(
        lambda store: store.make_node(ROOT_INODE, b"link", SYMLINK, 0, 0, b"dir/two"),
        lambda tree: tree | {b"/link": b"dir/two"},
    ),
    _put(b"/new", b"z" * 5000),
    Step(
        lambda store: store.rename(ROOT_INODE, b"new", _directory(store), b"two"),
        lambda tree: _moved(tree, b"/new", b"/dir/two"),
    ),
    Step(
        lambda store: store.exchange(ROOT_INODE, b"one", _directory(store), b"two"),
        lambda tree: tree | {b"/one": tree[b"/dir/two"], b"/dir/two": tree[b"/one"]},
    ),
    Step(_change, lambda tree: tree | {b"/one": _cut(tree[b"/one"], 3)}),
    _put(b"/gone", b"g" * 5000),
    Step(_remove_while_open, lambda tree: _without(tree, b"/gone")),
    Step(
        lambda store: store.unlink(ROOT_INODE, b"link"),
        lambda tree: _without(tree, b"/link"),
    ),
    _put(b"/last", b"l" * 20_000),
)


def work(host: Host, failing: FailingSyscalls) -> Tree:
    """Do all steps that can be done; after each the tree is as before it, or as after it.

    Return the tree that must be there now. A block whose write failed may be there empty.
    """
    expected: Tree = {}
    for step in STEPS:
        try:
            after = step.effect(expected)
        except KeyError:
            continue  # what it works on was lost to a failure
        before = expected
        try:
            step.do(host.store)
            expected = after
        except FAILURES:
            with failing.pause():
                expected = tree(host.store)
            empty = {path: b"" for path in after if path not in before}
            assert expected in (before, after, before | empty)
        settle(host.store)
        with failing.pause():
            assert tree(host.store) == expected
            if not failing.for_good:  # else what an extent holds cannot even be measured
                assert_exact(host)
    return expected
