"""Handles SIGBUS on the index's mappings: a page cannot be read, and the server goes on.

LMDB reads its file and writes its table of readers through mappings. If the device fails, the
kernel raises SIGBUS: at a load of a page that is not in memory, and at the first store after a page
was written back (page_mkwrite of a file system that has shut itself down). When the handler
returns, the access is repeated. So the handler first replaces the mapping by memory: a copy for the
lock file, zeros for the index, which LMDB reports as CORRUPTED. Nothing is committed from then on
(``lost``), so none of it reaches the file. A handler in Python would never run, because the failed
access is repeated first; the kernel calls this one through ctypes, in the thread of the access.
"""

import ctypes
import logging
import mmap
import os
import signal
from typing import Final, NamedTuple

from kvfs.core.pool_layout import DATA_NAME, LOCK_NAME
from kvfs.storage.syscalls import LIBC

_log: Final = logging.getLogger(__name__)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
#: From bits/mman.h and bits/sigaction.h of Linux; _SI_ADDR_AT is si_addr's offset in siginfo_t.
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_SA_SIGINFO: Final = 4
_OURS: Final = frozenset({DATA_NAME, LOCK_NAME})
_SI_ADDR_AT: Final = 16
_HANDLER: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """struct sigaction of glibc."""

    _fields_ = (
        ("handler", _HANDLER),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Map(NamedTuple):
    """A part of the address space, and whether its content must be kept."""

    start: int
    end: int
    keeps: bool


class MapState:
    """``lost``: this process's map of the index no longer shows what the file holds."""

    lost = False


STATE: Final = MapState()


def _handle(_signal: int, info: int, _context: int) -> None:
    """Replace a mapping of the index; any other SIGBUS ends the process, as by default."""
    try:
        address = ctypes.c_uint64.from_address(info + _SI_ADDR_AT).value
        found = _map_at(address)
        if found is not None:
            STATE.lost = True
            _replace(found)
            _log.critical("a page of the index cannot be used (SIGBUS): the device below fails")
            return
        _log.critical("SIGBUS at %#x, which is no page of the index: the server ends", address)
    except BaseException:
        _log.critical("SIGBUS, and nothing could be done about it: the server ends", exc_info=True)
    LIBC.signal(signal.SIGBUS, None)  # SIG_DFL; the repeated access raises it again at once


def _map_at(address: int) -> _Map | None:
    """Return the mapping of an index file that contains *address*, None if there is none."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            span, *_ = line.split(maxsplit=1)
            start, end = (int(bound, 16) for bound in span.split("-"))
            if start <= address < end:
                name = os.path.basename(line.rstrip("\n").removesuffix(" (deleted)"))
                return _Map(start, end, name == LOCK_NAME) if name in _OURS else None
    return None


def _replace(part: _Map) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    access = mmap.PROT_READ | (mmap.PROT_WRITE if part.keeps else 0)
    size_bytes = part.end - part.start
    content = _content_of(part) if part.keeps else b""
    placed = LIBC.mmap(part.start, size_bytes, access, flags, -1, 0)
    if placed != part.start:
        raise OSError(ctypes.get_errno(), "mmap")
    ctypes.memmove(part.start, content, len(content))


def _content_of(part: _Map) -> bytes:
    """Return the content, by a read(2) that fails where a load would raise SIGBUS."""
    fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, part.end - part.start, part.start)
    finally:
        os.close(fd)


#: Kept for ever, because the kernel may call it as long as the process lives.
_ACTION: Final = _Action(_HANDLER(_handle), (ctypes.c_ulong * 16)(), _SA_SIGINFO, None)


def outlive_bus_errors() -> None:
    """Install the handler: this process goes on when a page of its index cannot be read."""
    LIBC.sigaction(signal.SIGBUS, ctypes.byref(_ACTION), None)
