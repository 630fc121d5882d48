"""What kvfs agrees with the kernel at INIT beyond what libfuse asks for.

libfuse 3 knows nothing of passthrough; its reply is patched on the way. Offsets: struct
fuse_init_out in linux/fuse.h. Never agreed: SETXATTR_EXT, SECURITY_CTX, CREATE_SUPP_GROUP (they
change message layouts under libfuse), a larger max_pages (its buffers), the writeback cache.
"""

import struct
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from mount.fuse.wire import (
    FUSE_ALLOW_IDMAP,
    FUSE_DIRECT_IO_ALLOW_MMAP,
    FUSE_HANDLE_KILLPRIV_V2,
    FUSE_HAS_RESEND,
    FUSE_INIT_EXT,
    FUSE_PARALLEL_DIROPS,
    FUSE_PASSTHROUGH,
    FUSE_REQUEST_TIMEOUT,
    IN_HEADER_BYTES,
    INIT_FLAGS2_OFFSET,
    INIT_FLAGS_OFFSET,
    INIT_IN,
    INIT_MAX_BACKGROUND_OFFSET,
    INIT_MAX_STACK_DEPTH_OFFSET,
    INIT_OUT_BYTES,
    INIT_REQUEST_TIMEOUT_OFFSET,
    OUT_HEADER_BYTES,
    Message,
)

_U32: Final = struct.Struct("<I")
_TWO_U16: Final = struct.Struct("<HH")
_U16: Final = struct.Struct("<H")
_LOW_MASK: Final = 0xFFFFFFFF
#: The longest limit for a request that a reply can name (s): more than 18 hours.
_REQUEST_TIMEOUT_MAX_S: Final = 0xFFFF


class Features(NamedTuple):
    """What was agreed. ``flags`` are the extra bits of flags | flags2 << 32."""

    flags: int
    passthrough: bool
    resend: bool
    idmapped: bool = False


def agree(
    offered: int, *, passthrough: bool, idmapped: bool = False, limited: bool = False
) -> Features:
    """Choose from the kernel's *offered* flags; *passthrough* and *idmapped*: are they wanted.

    *limited*: requests have a time limit by default, over which the kernel aborts the mount. Then
    the longest one is asked for instead; else there is none.
    """
    wanted = FUSE_PARALLEL_DIROPS | FUSE_HANDLE_KILLPRIV_V2
    if offered & FUSE_INIT_EXT:
        wanted |= FUSE_INIT_EXT | FUSE_DIRECT_IO_ALLOW_MMAP
        if passthrough:
            wanted |= FUSE_PASSTHROUGH
        if idmapped:
            wanted |= FUSE_ALLOW_IDMAP
        if limited:
            wanted |= FUSE_REQUEST_TIMEOUT
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
    if features.flags & FUSE_REQUEST_TIMEOUT:
        _U16.pack_into(patched, start + INIT_REQUEST_TIMEOUT_OFFSET, _REQUEST_TIMEOUT_MAX_S)
    return bytes(patched)


def _or_in(message: bytearray, offset: int, bits: int) -> None:
    (present,) = _U32.unpack_from(message, offset)
    _U32.pack_into(message, offset, present | bits)


class Agreement(Protocol):
    """Decides what is agreed with the kernel at INIT."""

    def features(self, offered: int, request: bytes) -> Features:
        """Choose from the flags that the kernel *offered* in its INIT *request*."""

    def begin(self, features: Features) -> None:
        """Called once the kernel has the INIT reply, before any other request is read."""


class InitExchange:
    """The INIT of one mount: the kernel's request, and libfuse's reply on its way to the kernel."""

    def __init__(self, agreement: Agreement, max_background: int) -> None:
        self._agreement: Final = agreement
        self._max_background: Final = max_background
        #: The request that libfuse has not answered yet; -1: none.
        self.unique = -1
        self._request = b""
        #: Whether another server answered the kernel's INIT; ours is then only replayed to libfuse.
        self._replays = False

    def replay(self) -> None:
        """From now on keep libfuse's reply from the kernel, which had that of another server."""
        self._replays = True

    def asked(self, unique: int, message: memoryview) -> None:
        """Keep the whole *message* of request *unique*, which libfuse is handed next."""
        self.unique, self._request = unique, bytes(message)

    def answered(self, reply: memoryview, write: Callable[[int, Message], None]) -> None:
        """Have *write* give libfuse's *reply* to the kernel, with what is agreed; then begin."""
        unique, self.unique = self.unique, -1
        features = self._agreement.features(self._offered(), self._request)
        if not self._replays:
            write(unique, patch_init_reply(bytes(reply), features, self._max_background))
        self._agreement.begin(features)

    def _offered(self) -> int:
        """Return the kernel's flags. Before Linux 5.17 struct fuse_init_in ended before flags2."""
        body = self._request[IN_HEADER_BYTES : IN_HEADER_BYTES + INIT_IN.size]
        _, _, _, flags, flags2 = INIT_IN.unpack(body.ljust(INIT_IN.size, b"\0"))
        offered: int = flags | flags2 << 32
        return offered
