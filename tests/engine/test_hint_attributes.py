"""The table of files' own hints, and of sessions, on its own: bounded, and exact as they go."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.core.changed import Changed, Why
from kvfs.core.directory_policy import HINT
from kvfs.core.inode_rules import blank_record
from kvfs.core.types import ROOT_INODE, InodeNo
from kvfs.pool.rules.hints import ATTRIBUTES_MAX, Hints
from kvfs.storage.syscalls import Syscalls
from tests.support.store.heats import opened

FILE: Final = blank_record(ROOT_INODE, b"K", stat.S_IFREG | 0o644, 0, 0, 1)


@pytest.fixture
def hints(tmp_path: Path) -> Iterator[Hints]:
    fd = Syscalls().open(str(tmp_path), 0)
    yield Hints(opened(fd))
    Syscalls().close(fd)


def test_attributes_beyond_the_bound_do_not_count(hints: Hints) -> None:
    for ino in range(ATTRIBUTES_MAX + 2):
        hints.learn(InodeNo(ino), FILE, b"once,session=s")
    assert len(hints.of_session("s")) == ATTRIBUTES_MAX
    assert hints.counts.clipped == 2


def test_a_session_is_what_names_it_now(hints: Hints) -> None:
    for ino, value in ((20, b"session=a"), (21, b"session=a"), (22, b"session=b"), (21, b"once")):
        hints.learn(InodeNo(ino), FILE, value)
    assert (hints.of_session("a"), hints.of_session("b")) == ([20], [22])
    hints.follow(Changed(InodeNo(20), FILE, None, Why.REPLACED, heir=InodeNo(30)))
    hints.follow(Changed(InodeNo(22), FILE, FILE, Why.ATTRIBUTED, lost={HINT: b"session=b"}))
    assert (hints.of_session("a"), hints.of_session("b")) == ([30], [])
    hints.learn(InodeNo(30), FILE, b"damaged")
    assert hints.of_session("a") == []
