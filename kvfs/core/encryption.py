"""How a pool is encrypted below its file system, and what the drive says of it in the clear.

The first 16 MiB of an encrypted SOURCE are not: they hold the header of LUKS2, or for an ephemeral
key only a mark, since nothing on the drive may help to find that key.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple

from kvfs.core.errors import KeyUnusable, UsageError
from kvfs.core.sizes import MIB

#: Where the encrypted bytes begin: as far as LUKS2 has its header by default.
HEADER_BYTES: Final = 16 * MIB
#: So much of a SOURCE tells how it is encrypted.
MARK_BYTES: Final = 4096
_EPHEMERAL_MAGIC: Final = b"kvfs-ephemeral\n\0"
#: LUKS2 On-Disk Format Specification, 2.1: binary header, its label and UUID and subsystem.
_LUKS2_MAGIC: Final = b"LUKS\xba\xbe\x00\x02"
_LUKS2_UUID: Final = slice(168, 208)
_LUKS2_SUBSYSTEM: Final = slice(208, 256)
_UUID_BYTES: Final = 36


class Way(StrEnum):
    """Where the key is."""

    EPHEMERAL = "ephemeral"
    """In the kernel alone, until the next boot."""
    KEY_FILE = "key-file"
    TPM = "tpm"


class Encryption(NamedTuple):
    """How a pool is to be encrypted or opened; ``key_file`` is an absolute path, or empty."""

    way: Way
    key_file: str = ""

    @property
    def text(self) -> str:
        """What ``parse_encryption`` reads."""
        return f"{self.way}={self.key_file}" if self.key_file else self.way


class Lock(NamedTuple):
    """What an encrypted SOURCE says of itself; ``uuid`` is that of the drive's file system."""

    way: Way
    uuid: str

    @property
    def mapping(self) -> str:
        """What the device mapper calls it."""
        return f"kvfs-{self.way}-{self.uuid}"

    @property
    def subsystem(self) -> str:
        """What the header of LUKS2 says of it."""
        return f"kvfs-{self.way}"


def parse_encryption(text: str) -> Encryption | None:
    """Return what a flag or setting asks for; None for the empty text. Raises ValueError."""
    if not text:
        return None
    name, equals, key_file = text.partition("=")
    if name not in list(Way) or (equals == "=") != (name == Way.KEY_FILE):
        raise ValueError(f"{text!r} is none of {Way.EPHEMERAL}, {Way.KEY_FILE}=FILE, {Way.TPM}")
    if equals and not key_file.startswith("/"):
        raise ValueError(f"key file {key_file!r} is not an absolute path")
    return Encryption(Way(name), key_file)


def encryption_like(ways: Iterable[str], asked: Encryption | None) -> Encryption | None:
    """Return how a drive is to be encrypted that joins others, so that it is as they are.

    *ways* are what encrypts each of the others: a Way, or what is not kvfs's, which asks for
    nothing. *asked* is how their pool was mounted. Raises KeyUnusable without their key file, and
    UsageError if they are not alike.
    """
    found = set(ways)
    own = found.intersection(Way)
    if not own:
        return None
    if len(found) > 1:
        raise UsageError("the drives of this pool are not encrypted alike: none can be added")
    way = Way(own.pop())
    if asked is not None and asked.way is way:
        return asked
    if way is Way.KEY_FILE:
        raise KeyUnusable(
            "the pool is encrypted, and its server was not told the key file",
            "unmount it, and mount it with --encrypt=key-file=FILE",
        )
    return Encryption(way)


def header_bytes(encryption: Encryption | None) -> int:
    """Return the bytes of a SOURCE in front of its file system."""
    return 0 if encryption is None else HEADER_BYTES


def ephemeral_mark(uuid: str) -> bytes:
    """Return the MARK_BYTES in front of a SOURCE whose key is in the kernel alone."""
    return (_EPHEMERAL_MAGIC + uuid.encode("ascii")).ljust(MARK_BYTES, b"\0")


def parse_lock(mark: bytes) -> Lock | None:
    """Return how the SOURCE that begins with *mark* is encrypted; None if kvfs did not do it."""
    if mark.startswith(_EPHEMERAL_MAGIC):
        start = len(_EPHEMERAL_MAGIC)
        return _lock(Way.EPHEMERAL, mark[start : start + _UUID_BYTES])
    if mark.startswith(_LUKS2_MAGIC):
        subsystem = mark[_LUKS2_SUBSYSTEM].rstrip(b"\0")
        for way in (Way.KEY_FILE, Way.TPM):
            if subsystem == Lock(way, "").subsystem.encode():
                return _lock(way, mark[_LUKS2_UUID].rstrip(b"\0"))
    return None


def _lock(way: Way, uuid: bytes) -> Lock | None:
    text = uuid.decode("ascii", "replace")
    good = len(text) == _UUID_BYTES and all(each in "0123456789abcdef-" for each in text)
    return Lock(way, text) if good else None


def way_of_mapping(name: str) -> Way | None:
    """Return the way of the mapping that is called *name*; None if it is not kvfs's."""
    return next((way for way in Way if name.startswith(f"kvfs-{way}-")), None)
