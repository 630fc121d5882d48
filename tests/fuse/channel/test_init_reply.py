"""What is agreed with the kernel at INIT, and where it stands in the reply."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mount.fuse.init_reply import Features, agree, patch_init_reply
from mount.fuse.wire import (
    FUSE_ALLOW_IDMAP,
    FUSE_DIRECT_IO_ALLOW_MMAP,
    FUSE_HANDLE_KILLPRIV_V2,
    FUSE_HAS_RESEND,
    FUSE_INIT_EXT,
    FUSE_PARALLEL_DIROPS,
    FUSE_PASSTHROUGH,
    FUSE_REQUEST_TIMEOUT,
    INIT_OUT_BYTES,
    data_reply,
    error_reply,
)

#: struct fuse_init_out: major, minor, max_readahead, flags, max_background,
#: congestion_threshold, max_write, time_gran, max_pages, map_alignment, flags2,
#: max_stack_depth, request_timeout, 11 unused u16.
INIT_OUT = struct.Struct("<IIIIHHIIHHIIH22s")
assert INIT_OUT.size == INIT_OUT_BYTES
EVERYTHING = (1 << 64) - 1
#: Bits that change the layout of messages under libfuse, or the promise of who caches.
NEVER = {
    "WRITEBACK_CACHE": 16,
    "SETXATTR_EXT": 29,
    "SECURITY_CTX": 32,
    "CREATE_SUPP_GROUP": 34,
    "OVER_IO_URING": 41,
}
ASKED = FUSE_PARALLEL_DIROPS | FUSE_HANDLE_KILLPRIV_V2
EXTENDED = FUSE_INIT_EXT | FUSE_DIRECT_IO_ALLOW_MMAP


def test_a_kernel_with_all_gets_what_is_asked_for() -> None:
    features = agree(EVERYTHING, passthrough=True)
    assert features.flags == ASKED | EXTENDED | FUSE_PASSTHROUGH
    assert features.passthrough
    assert features.resend


def test_passthrough_is_only_agreed_when_wanted_and_offered() -> None:
    assert not agree(EVERYTHING, passthrough=False).passthrough
    assert not agree(EVERYTHING, passthrough=False).flags & FUSE_PASSTHROUGH
    assert not agree(EVERYTHING & ~FUSE_PASSTHROUGH, passthrough=True).passthrough


def test_id_maps_are_only_agreed_when_wanted_and_offered() -> None:
    """[id-mapped] Without them each request names its user."""
    assert not agree(EVERYTHING, passthrough=True).flags & FUSE_ALLOW_IDMAP
    wanted = agree(EVERYTHING, passthrough=True, idmapped=True)
    assert wanted.idmapped
    assert wanted.flags == ASKED | EXTENDED | FUSE_PASSTHROUGH | FUSE_ALLOW_IDMAP
    assert not agree(EVERYTHING & ~FUSE_ALLOW_IDMAP, passthrough=True, idmapped=True).idmapped


def test_a_default_limit_for_requests_is_replaced_by_the_longest() -> None:
    """[request-limit] Without a default there is no limit, and none is asked for."""
    assert not agree(EVERYTHING, passthrough=False).flags & FUSE_REQUEST_TIMEOUT
    features = agree(EVERYTHING, passthrough=False, limited=True)
    reply = INIT_OUT.pack(7, 31, 0, 0, 1, 2, 0, 1, 256, 0, 0, 0, 0, bytes(22))
    patched = INIT_OUT.unpack(patch_init_reply(data_reply(2, reply), features, 64)[16:])
    assert patched[10] == features.flags >> 32
    assert features.flags & FUSE_REQUEST_TIMEOUT
    assert patched[-2:] == (65_535, bytes(22))
    assert not agree(EVERYTHING & ~FUSE_INIT_EXT, passthrough=False, limited=True).flags >> 32


def test_without_the_extension_no_high_bit_is_agreed() -> None:
    """flags2 means nothing to a kernel that did not offer FUSE_INIT_EXT."""
    features = agree(EVERYTHING & ~FUSE_INIT_EXT, passthrough=True)
    assert features.flags == ASKED
    assert not features.passthrough


@given(st.integers(0, EVERYTHING), st.booleans())
def test_nothing_is_agreed_that_was_not_offered(offered: int, passthrough: bool) -> None:
    features = agree(offered, passthrough=passthrough)
    assert features.flags & ~offered == 0
    assert features.resend == bool(offered & FUSE_HAS_RESEND)
    for bit in NEVER.values():
        assert not features.flags >> bit & 1


@given(
    st.tuples(*[st.integers(0, (1 << 32) - 1)] * 4),
    st.integers(0, 65535),
    st.integers(0, EVERYTHING),
    st.booleans(),
)
def test_only_what_is_meant_changes(
    theirs: tuple[int, int, int, int], background: int, flags: int, passthrough: bool
) -> None:
    low, high, readahead, write = theirs
    reply = INIT_OUT.pack(7, 31, readahead, low, 1, 2, write, 1, 256, 0, high, 0, 0, bytes(22))
    patched = patch_init_reply(
        data_reply(2, reply), Features(flags, passthrough, resend=False), background
    )
    assert patched[:16] == data_reply(2, reply)[:16]
    expected = (7, 31, readahead, low | flags & 0xFFFFFFFF, background, background * 3 // 4)
    timeout_s = 65_535 if flags & FUSE_REQUEST_TIMEOUT else 0
    rest = (write, 1, 256, 0, high | flags >> 32, int(passthrough), timeout_s, bytes(22))
    assert INIT_OUT.unpack(patched[16:]) == expected + rest


@pytest.mark.parametrize("reply", [error_reply(2, 71), data_reply(2, bytes(24))])
def test_an_error_or_an_old_protocol_stays_as_it_is(reply: bytes) -> None:
    """Before 7.23 the reply was 24 bytes long; there is no place for more."""
    features = agree(EVERYTHING, passthrough=True)
    assert patch_init_reply(reply, features, 65535) == reply
