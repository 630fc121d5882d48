"""Policies of directories: inherited, from the settings file and as attributes; pins bounded."""

import dataclasses
import os

import pytest

from kvfs.core.directory_policy import DRAFTS, EVICT, PIN, DirectoryPolicy
from kvfs.core.errors import DeadInode, InvalidRequest, NoSuchAttribute, NotPermitted, UsageError
from kvfs.core.settings import Settings
from kvfs.core.types import PAGE_BYTES, ROOT_INODE, InodeNo
from kvfs.machine.processes import Maker
from tests.support.devices.failing_syscalls import FailingSyscalls
from tests.support.store.driven_faults import set_limit
from tests.support.store.stores import FILE, MIB, Host, make_directory, put, settle, write

OWNER_UID = 1000
OTHER_UID = 1001


def value(running: Host, ino: InodeNo, name: bytes) -> bytes:
    return running.store.xattr(ino, name)


# ---- inheritance ----


def test_without_a_word_everything_is_seen_and_may_go(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x")
    for inode in (ROOT_INODE, ino):
        assert value(running, inode, DRAFTS) == b"all"
        assert value(running, inode, EVICT) == b"auto"
        assert value(running, inode, PIN) == b"0"


def test_a_policy_holds_for_all_below_until_a_deeper_one(running: Host) -> None:
    store = running.store
    top = make_directory(running, b"top")
    middle = make_directory(running, b"middle", top)
    below = make_directory(running, b"below", middle)
    block = put(running.store, below, b"K", b"x")
    store.set_xattr(top, DRAFTS, b"owner")
    store.set_xattr(top, EVICT, b"never")
    assert [value(running, block, name) for name in (DRAFTS, EVICT)] == [b"owner", b"never"]
    store.set_xattr(middle, EVICT, b"first")
    assert [value(running, block, name) for name in (DRAFTS, EVICT)] == [b"owner", b"first"]
    assert value(running, top, EVICT) == b"never"
    store.remove_xattr(middle, EVICT)
    assert value(running, block, EVICT) == b"never"
    assert value(running, ROOT_INODE, DRAFTS) == b"all"


def test_a_moved_directory_inherits_from_where_it_is(running: Host) -> None:
    top, moved = make_directory(running, b"top"), make_directory(running, b"moved")
    running.store.set_xattr(top, EVICT, b"never")
    assert value(running, moved, EVICT) == b"auto"
    running.store.rename(ROOT_INODE, b"moved", top, b"moved")
    assert value(running, moved, EVICT) == b"never"
    elsewhere = make_directory(running, b"elsewhere")
    running.store.exchange(top, b"moved", ROOT_INODE, b"elsewhere")
    assert [value(running, ino, EVICT) for ino in (moved, elsewhere)] == [b"auto", b"never"]


def test_a_tree_deeper_than_a_stack_inherits_too(running: Host) -> None:
    running.store.set_xattr(ROOT_INODE, DRAFTS, b"owner")
    deepest = ROOT_INODE
    for _ in range(1500):
        deepest = make_directory(running, b"d", deepest)
    assert running.store.policy(deepest) == DirectoryPolicy(drafts_of_owner=True)


def test_a_policy_survives_a_restart(running: Host) -> None:
    top = make_directory(running, b"top")
    running.store.set_xattr(top, DRAFTS, b"owner")
    running.stop()
    running.start()
    assert value(running, top, DRAFTS) == b"owner"


# ---- the settings file ----


def test_the_settings_file_speaks_for_paths_and_an_attribute_wins(running: Host) -> None:
    top = make_directory(running, b"lmcache")
    below = make_directory(running, b"model", top)
    running.stop()
    text = '[policies."/lmcache"]\ndrafts = "owner"\nevict = "never"\n[policies."/"]\npin = true\n'
    policies = Settings.from_toml(text).policies
    running.start(settings=dataclasses.replace(running.settings, policies=policies))
    assert running.store.policy(below) == DirectoryPolicy(
        drafts_of_owner=True, evict="never", pin=True
    )
    assert running.store.policy(ROOT_INODE) == DirectoryPolicy(pin=True)
    running.store.set_xattr(top, EVICT, b"auto")
    assert value(running, below, EVICT) == b"auto"
    running.store.rename(ROOT_INODE, b"lmcache", ROOT_INODE, b"else")
    assert running.store.policy(below) == DirectoryPolicy(pin=True)


@pytest.mark.parametrize(
    "text",
    [
        'policies = "owner"',
        '[policies."lmcache"]\ndrafts = "owner"',
        '[policies."/lmcache"]\ndrafts = "nobody"',
        '[policies."/lmcache"]\nevict = true',
        '[policies."/lmcache"]\nkeep = true',
        '[policies."/a/../b"]\npin = true',
        '[policies."/./b"]\npin = true',
        '[policies."/b/"]\npin = true',
        '[policies."//b"]\npin = true',
    ],
)
def test_a_settings_file_that_nobody_understands_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="polic"):
        Settings.from_toml(text)


# ---- as attributes ----


def test_own_attributes_are_answered_and_never_listed(running: Host) -> None:
    store = running.store
    top = make_directory(running, b"top")
    block = put(running.store, top, b"K", b"x")
    for name, word in ((DRAFTS, b"owner"), (EVICT, b"first"), (PIN, b"1")):
        store.set_xattr(top, name, word)
    store.set_xattr(top, b"user.mine", b"1")
    assert store.xattr_names(top) == [b"user.mine"]
    assert store.xattr_names(block) == []
    assert value(running, block, b"user.kvfs.state") == b"leased"
    with pytest.raises(NoSuchAttribute):
        value(running, block, b"user.kvfs.unknown")


@pytest.mark.parametrize("name", [DRAFTS, EVICT, PIN])
def test_only_root_and_the_owner_set_policies(running: Host, name: bytes) -> None:
    store = running.store
    top = make_directory(running, b"top", uid=OWNER_UID)
    word = {DRAFTS: b"owner", EVICT: b"first", PIN: b"1"}[name]
    with pytest.raises(NotPermitted):
        store.set_xattr(top, name, word, OTHER_UID)
    store.set_xattr(top, name, word, OWNER_UID)
    with pytest.raises(NotPermitted):
        store.remove_xattr(top, name, OTHER_UID)
    store.remove_xattr(top, name, 0)
    with pytest.raises(NoSuchAttribute):
        store.remove_xattr(top, name, OWNER_UID)


@pytest.mark.parametrize("name", [b"user.kvfs.state", b"user.kvfs.anything"])
def test_what_kvfs_tells_nobody_sets(running: Host, name: bytes) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x")
    with pytest.raises(NotPermitted):
        running.store.set_xattr(ino, name, b"published")
    with pytest.raises(NotPermitted):
        running.store.remove_xattr(ino, name)


@pytest.mark.parametrize(
    ("name", "word"),
    [(DRAFTS, b"mine"), (DRAFTS, b""), (EVICT, b"always"), (PIN, b"yes"), (PIN, b"")],
)
def test_a_word_that_no_policy_knows_is_refused(running: Host, name: bytes, word: bytes) -> None:
    top = make_directory(running, b"top")
    with pytest.raises(InvalidRequest):
        running.store.set_xattr(top, name, word)
    assert running.store.policy(top) == DirectoryPolicy()


def test_policies_belong_to_directories_and_pins_to_blocks_too(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x")
    for name, word in ((DRAFTS, b"owner"), (EVICT, b"never")):
        with pytest.raises(InvalidRequest):
            running.store.set_xattr(ino, name, word)
    running.store.set_xattr(ino, PIN, b"1")
    assert value(running, ino, PIN) == b"1"


# ---- pins ----


def test_pins_are_bounded_by_half_the_capacity(running: Host) -> None:
    store = running.store
    top = make_directory(running, b"top")
    first = put(running.store, top, b"first", b"x" * (20 * MIB))
    other = put(running.store, ROOT_INODE, b"other", b"x" * (16 * MIB))
    store.set_xattr(top, PIN, b"1")
    assert store.pinned_bytes == 20 * MIB
    with pytest.raises(NotPermitted, match="limit"):
        store.set_xattr(other, PIN, b"1")
    assert value(running, other, PIN) == b"0"
    assert value(running, first, PIN) == b"1"
    store.set_xattr(top, PIN, b"1")
    assert store.pinned_bytes == 20 * MIB
    store.remove_xattr(top, PIN)
    store.set_xattr(other, PIN, b"1")
    assert store.pinned_bytes == 16 * MIB


def test_a_pin_that_the_index_does_not_take_is_none(running: Host) -> None:
    """What is pinned is what the index says, in either direction."""
    running.stop()
    calls = FailingSyscalls(["commit"])
    store = running.start(syscalls=calls)
    ino = put(store, ROOT_INODE, b"a", b"x" * MIB)
    calls.fail_at = calls.calls + 1
    with pytest.raises(OSError, match="Input/output error"):
        store.set_xattr(ino, PIN, b"1")
    assert store.pins() == []
    store.set_xattr(ino, PIN, b"1")
    calls.fail_at = calls.calls + 1
    with pytest.raises(OSError, match="Input/output error"):
        store.remove_xattr(ino, PIN)
    assert store.pins() == [(ino, MIB)]
    assert value(running, ino, PIN) == b"1"
    store.set_xattr(ino, PIN, b"0")
    assert store.pins() == []


def test_a_pin_goes_with_its_name(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x" * MIB)
    running.store.set_xattr(ino, PIN, b"1")
    put(running.store, ROOT_INODE, b"b", b"y")
    running.store.rename(ROOT_INODE, b"b", ROOT_INODE, b"a")
    assert running.store.pinned_bytes == 0


def test_pins_are_known_again_after_a_start(running: Host) -> None:
    ino = put(running.store, ROOT_INODE, b"a", b"x" * MIB)
    running.store.set_xattr(ino, PIN, b"1")
    running.stop()
    running.start()
    settle(running.store)
    assert running.store.pinned_bytes == MIB


def test_a_pinned_directory_that_grew_too_large_to_count_hinders_no_start(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = make_directory(running, b"top")
    running.store.set_xattr(top, PIN, b"1")
    for number in range(5):
        put(running.store, top, b"%d" % number, b"x")
    set_limit(monkeypatch, "pins_counted", 3)
    with pytest.raises(NotPermitted, match="names to count"):
        running.store.set_xattr(top, PIN, b"1")
    running.stop()
    running.start()
    settle(running.store)
    assert running.store.scanned


def test_what_pins_hold_is_counted_in_steps_after_a_start(
    running: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten pinned directories of 99,000 names kept every request waiting for twenty seconds."""
    top = make_directory(running, b"top")
    inner = make_directory(running, b"inner", top)
    for parent in (top, inner):
        for number in range(10):
            put(running.store, parent, b"%d" % number, b"x" * PAGE_BYTES)
        running.store.set_xattr(parent, PIN, b"1")
    running.stop()
    set_limit(monkeypatch, "pins_step", 2)
    store = running.start()
    listed: list[InodeNo] = []
    store.note_calls(monkeypatch, "listing", lambda parent, *_: listed.append(parent))
    most = 0
    while store.run_one():
        most, listed[:] = max(most, len(listed)), []
    assert 1 <= most <= 2  # one step, or the end of a directory and a step of the next
    assert store.pinned_bytes == (20 + 10) * PAGE_BYTES


# ---- who sees a draft ----


def test_a_hidden_draft_is_its_makers_until_it_is_closed(running: Host) -> None:
    store = running.store
    maker, other = Maker(os.getpid(), 1), Maker(os.getpid(), 2)
    top = make_directory(running, b"top")
    store.set_xattr(top, DRAFTS, b"owner")
    opened, record = store.create(top, b"K", FILE, 0, 0, maker)
    write(store, opened, b"x")
    assert store.is_private(record)
    assert not store.trusts_name(record, just_created=True)
    assert store.hidden(opened.ino, record, other)
    assert not store.hidden(opened.ino, record, maker)
    store.close(opened, writer=True)
    record = store.record(opened.ino)
    assert not store.hidden(opened.ino, record, other)
    assert store.trusts_name(record, just_created=False)


def test_a_draft_in_the_open_is_everybodys(running: Host) -> None:
    store = running.store
    opened, record = store.create(ROOT_INODE, b"K", FILE, 0, 0, Maker(1, 1))
    assert not store.hidden(opened.ino, record, Maker(2, 2))
    assert store.trusts_name(record, just_created=True)
    assert not store.trusts_name(record, just_created=False)
    store.close(opened, writer=True)


def test_attributes_and_pins_stay_with_a_name_that_is_emptied(running: Host) -> None:
    store = running.store
    old = put(store, ROOT_INODE, b"K", b"x" * 9000)
    for name in (b"user.a", b"user.b", PIN):
        store.set_xattr(old, name, b"1")
    pinned_bytes = store.pinned_bytes
    assert pinned_bytes > 0
    with pytest.raises(DeadInode):
        store.open(old, writer=True, truncate=True, maker=Maker(1, 1))
    ino = store.lookup(ROOT_INODE, b"K")
    opened = store.open(ino, writer=True, truncate=True, maker=Maker(1, 1))
    assert sorted(store.xattr_names(ino)) == [b"user.a", b"user.b"]
    assert value(running, ino, PIN) == b"1"
    assert store.pinned_bytes == pinned_bytes
    store.close(opened, writer=True)
    assert value(running, ino, PIN) == b"1"
    store.unlink(ROOT_INODE, b"K")
    assert store.pinned_bytes == 0
    assert store.xattr_rows(old) == store.xattr_rows(ino) == []
