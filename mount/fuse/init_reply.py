"""What kvfs agrees with the kernel at INIT beyond what libfuse asks for.

libfuse 3 knows nothing of passthrough; its reply is patched on the way. Offsets: struct
fuse_init_out in linux/fuse.h. Never agreed: SETXATTR_EXT, SECURITY_CTX, CREATE_SUPP_GROUP (they
change message layouts under libfuse), a larger max_pages (its buffers), the writeback cache.
"""

import struct
from typing import Final, NamedTuple

from mount.fuse.wire import (
    FUSE_ALLOW_IDMAP,
    FUSE_DIRECT_IO_ALLOW_MMAP,
    FUSE_HANDLE_KILLPRIV_V2,
    FUSE_HAS_RESEND,
    FUSE_INIT_EXT,
    FUSE_PARALLEL_DIROPS,
    FUSE_PASSTHROUGH,
    INIT_FLAGS2_OFFSET,
    INIT_FLAGS_OFFSET,
    INIT_MAX_BACKGROUND_OFFSET,
    INIT_MAX_STACK_DEPTH_OFFSET,
    INIT_OUT_BYTES,
    OUT_HEADER_BYTES,
)

_U32: Final = struct.Struct("<I")
_TWO_U16: Final = struct.Struct("<HH")
_LOW_MASK: Final = 0xFFFFFFFF


class Features(NamedTuple):
    """What was agreed. ``flags`` are the extra bits of flags | flags2 << 32."""

    flags: int
    passthrough: bool
    resend: bool
    idmapped: bool = False


def agree(offered: int, *, passthrough: bool, idmapped: bool = False) -> Features:
    """Choose from the kernel's *offered* flags; *passthrough* and *idmapped*: are they wanted."""
    wanted = FUSE_PARALLEL_DIROPS | FUSE_HANDLE_KILLPRIV_V2
    if offered & FUSE_INIT_EXT:
        wanted |= FUSE_INIT_EXT | FUSE_DIRECT_IO_ALLOW_MMAP
        if passthrough:
            wanted |= FUSE_PASSTHROUGH
        if idmapped:
            wanted |= FUSE_ALLOW_IDMAP
    flags = wanted & offered
    return Features(
        flags,
        bool(flags & FUSE_PASSTHROUGH),
        bool(offered & FUSE_HAS_RESEND),
        bool(flags & FUSE_ALLOW_IDMAP),
    )


def patch_init_reply(reply: bytes, features: Features, max_background: int) -> bytes:
    """Return libfuse's INIT *reply* with *features* added; an error reply stays as it is."""
    if len(reply) < OUT_HEADER_BYTES + INIT_OUT_BYTES:
        return reply
    patched = bytearray(reply)
    start = OUT_HEADER_BYTES
    _or_in(patched, start + INIT_FLAGS_OFFSET, features.flags & _LOW_MASK)
    _or_in(patched, start + INIT_FLAGS2_OFFSET, features.flags >> 32)
    # Congestion at three quarters, the kernel's own ratio (FUSE_DEFAULT_CONGESTION_THRESHOLD).
    _TWO_U16.pack_into(
        patched, start + INIT_MAX_BACKGROUND_OFFSET, max_background, max_background * 3 // 4
    )
    if features.passthrough:
        # One level: the extents' own file system, nothing stacked below it.
        _U32.pack_into(patched, start + INIT_MAX_STACK_DEPTH_OFFSET, 1)
    return bytes(patched)


def _or_in(message: bytearray, offset: int, bits: int) -> None:
    (present,) = _U32.unpack_from(message, offset)
    _U32.pack_into(message, offset, present | bits)
