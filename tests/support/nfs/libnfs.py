"""Libnfs 4.0 as Debian ships it, through ctypes: an NFS client without a mount, for v3 and v4.0.

Calls that fail raise OSError with the errno that the server's answer stands for (nfsc/libnfs.h). A
call that gets no answer fails with ETIMEDOUT.
"""

import ctypes
import errno
import os
from typing import Any, Final, NamedTuple, TypeAlias

LIBRARY: Final = "libnfs.so.13"
#: A call with no answer for so long fails: the server is dead, or hangs.
CALL_WAIT_S: Final = 30
#: libnfs 4.0 puts an NFSv4 COMPOUND into 4096 bytes; the names of its path are a part of that.
V4_WRITE_BYTES: Final = 3584
_MIB: Final = 1 << 20

#: What C takes for an argument.
Value: TypeAlias = Any

_POINTER: Final = ctypes.c_void_p
_TEXT: Final = ctypes.c_char_p
_U64: Final = ctypes.c_uint64
_INT: Final = ctypes.c_int


class _Stat64(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("dev", "ino", "mode", "nlink", "uid", "gid", "rdev", "size", "blksize", "blocks"),
            *("atime", "mtime", "ctime", "atime_nsec", "mtime_nsec", "ctime_nsec", "used"),
        )
    ]


class _Dirent(ctypes.Structure):
    """The beginning of struct nfsdirent; the rest is not read."""

    _fields_ = (("next", _POINTER), ("name", _TEXT), ("inode", ctypes.c_uint64))


class _Handle(ctypes.Structure):
    """struct nfs_fh, which libnfs keeps to itself (include/libnfs-private.h)."""

    _fields_ = [("size", _INT), ("bytes", _POINTER)]


class Status(NamedTuple):
    """What GETATTR told."""

    inode: int
    mode: int
    links: int
    size_bytes: int
    mtime_ns: int


#: Functions with the context as first argument that return 0 or more, or -errno.
_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "mount": (_TEXT, _TEXT),
    "umount": (),
    "open2": (_TEXT, _INT, _INT, ctypes.POINTER(_POINTER)),
    "close": (_POINTER,),
    "pread": (_POINTER, _U64, _U64, _POINTER),
    "pwrite": (_POINTER, _U64, _U64, _POINTER),
    "fsync": (_POINTER,),
    "ftruncate": (_POINTER, _U64),
    "truncate": (_TEXT, _U64),
    "stat64": (_TEXT, ctypes.POINTER(_Stat64)),
    "fstat64": (_POINTER, ctypes.POINTER(_Stat64)),
    "rename": (_TEXT, _TEXT),
    "unlink": (_TEXT,),
    "mkdir": (_TEXT,),
    "rmdir": (_TEXT,),
    "opendir": (_TEXT, ctypes.POINTER(_POINTER)),
}


def _library() -> ctypes.CDLL:
    lib = ctypes.CDLL(LIBRARY)
    for name, types in _CALLS.items():
        getattr(lib, f"nfs_{name}").argtypes = [_POINTER, *types]
    lib.nfs_init_context.restype = _POINTER
    lib.nfs_destroy_context.argtypes = [_POINTER]
    lib.nfs_get_error.argtypes = [_POINTER]
    lib.nfs_get_error.restype = _TEXT
    lib.nfs_readdir.argtypes = [_POINTER, _POINTER]
    lib.nfs_readdir.restype = ctypes.POINTER(_Dirent)
    lib.nfs_closedir.argtypes = [_POINTER, _POINTER]
    for name in ("set_version", "set_timeout", "set_autoreconnect", "set_dircache"):
        getattr(lib, f"nfs_{name}").argtypes = [_POINTER, _INT]
    lib.nfs4_set_client_name.argtypes = [_POINTER, _TEXT]
    lib.nfs4_set_verifier.argtypes = [_POINTER, _TEXT]
    lib.nfs_get_fh.argtypes = [_POINTER]
    lib.nfs_get_fh.restype = ctypes.POINTER(_Handle)
    for name in ("get_readmax", "get_writemax"):
        getattr(lib, f"nfs_{name}").argtypes = [_POINTER]
        getattr(lib, f"nfs_{name}").restype = _U64
    return lib


class Nfs:
    """One mounted export. Files are known by small numbers of its own, as in ``os``."""

    def __init__(
        self, version: int, export: str, name: str, *, server: str = "127.0.0.1", retries: int = 0
    ) -> None:
        """Mount *export* as the NFSv4 client *name*, which no other client may have.

        *retries* is how often it connects anew when the connection breaks, -1 for ever.
        """
        self.version = version
        self._lib = _library()
        self._nfs = self._lib.nfs_init_context()
        assert self._nfs, "libnfs has no memory"
        assert self._lib.nfs_set_version(self._nfs, version) == 0
        self._lib.nfs4_set_client_name(self._nfs, name.encode())
        self._lib.nfs4_set_verifier(self._nfs, os.urandom(8).hex().encode()[:8])
        self._lib.nfs_set_timeout(self._nfs, CALL_WAIT_S * 1000)
        self._lib.nfs_set_autoreconnect(self._nfs, retries)
        self._lib.nfs_set_dircache(self._nfs, 0)
        self._files: dict[int, Any] = {}
        self._next = 3
        self._call("mount", server.encode(), export.encode())
        self.write_bytes = V4_WRITE_BYTES if version == 4 else self._lib.nfs_get_writemax(self._nfs)
        self.read_bytes = min(self._lib.nfs_get_readmax(self._nfs) or _MIB, _MIB)

    def open(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
        """Open *path*, which begins with a slash.

        libnfs's v4 creates with GUARDED4 whatever it is told: what is there takes a second.
        """
        handle = _POINTER()
        try:
            self._call("open2", path.encode(), flags, mode, ctypes.byref(handle))
        except FileExistsError:
            if self.version == 3 or flags & os.O_EXCL:
                raise
            self._call("open2", path.encode(), flags & ~os.O_CREAT, mode, ctypes.byref(handle))
        self._next += 1
        self._files[self._next] = handle
        return self._next

    def close(self, file: int) -> None:
        """Close it; of v3 that is no message."""
        self._call("close", self._files.pop(file))

    def pread(self, file: int, size_bytes: int, at: int) -> bytes:
        """Read until *size_bytes* are there or the file ends."""
        buffer = ctypes.create_string_buffer(size_bytes)
        got = self.read_into(file, ctypes.addressof(buffer), size_bytes, at)
        return ctypes.string_at(buffer, got)

    def read_into(self, file: int, address: int, size_bytes: int, at: int) -> int:
        """Read to memory at *address*; returns how much came before the file ended."""
        done = 0
        while done < size_bytes:
            part = min(self.read_bytes, size_bytes - done)
            got = self._read_part(file, address + done, part, at + done)
            if got == 0:
                break
            done += got
        return done

    def pwrite(self, file: int, data: bytes, at: int) -> int:
        """Write all of *data*."""
        address = ctypes.cast(ctypes.c_char_p(data), _POINTER).value or 0
        return self.write_from(file, address, len(data), at)

    def write_from(self, file: int, address: int, size_bytes: int, at: int) -> int:
        """Write all of the memory at *address*."""
        done = 0
        while done < size_bytes:
            part = min(self.write_bytes, size_bytes - done)
            put = self._call("pwrite", self._files[file], at + done, part, address + done)
            if put == 0:
                raise OSError(errno.EIO, "libnfs wrote nothing")
            done += put
        return done

    def fsync(self, file: int) -> None:
        """COMMIT."""
        self._call("fsync", self._files[file])

    def ftruncate(self, file: int, size_bytes: int) -> None:
        """SETATTR of the size."""
        self._call("ftruncate", self._files[file], size_bytes)

    def truncate(self, path: str, size_bytes: int) -> None:
        """SETATTR of the size."""
        self._call("truncate", path.encode(), size_bytes)

    def stat(self, path: str) -> Status:
        """LOOKUP and GETATTR."""
        found = _Stat64()
        self._call("stat64", path.encode(), ctypes.byref(found))
        return _status(found)

    def fstat(self, file: int) -> Status:
        """GETATTR."""
        found = _Stat64()
        self._call("fstat64", self._files[file], ctypes.byref(found))
        return _status(found)

    def handle_of(self, file: int) -> bytes:
        """Return the handle that the server gave it."""
        handle = self._lib.nfs_get_fh(self._files[file]).contents
        return ctypes.string_at(handle.bytes, handle.size)

    def take_handle(self, file: int, handle: bytes) -> None:
        """Use *handle* for it from now on, as anybody may who has seen one of that length."""
        own = self._lib.nfs_get_fh(self._files[file]).contents
        assert own.size == len(handle), f"{own.size} bytes, not {len(handle)}"
        ctypes.memmove(own.bytes, handle, len(handle))

    def rename(self, old: str, new: str) -> None:
        """RENAME."""
        self._call("rename", old.encode(), new.encode())

    def unlink(self, path: str) -> None:
        """REMOVE."""
        self._call("unlink", path.encode())

    def mkdir(self, path: str) -> None:
        """MKDIR."""
        self._call("mkdir", path.encode())

    def rmdir(self, path: str) -> None:
        """RMDIR."""
        self._call("rmdir", path.encode())

    def listdir(self, path: str) -> list[str]:
        """READDIR to the end; "." and ".." are left out."""
        directory = _POINTER()
        self._call("opendir", path.encode(), ctypes.byref(directory))
        names = []
        try:
            while row := self._lib.nfs_readdir(self._nfs, directory):
                names.append(row.contents.name.decode())
        finally:
            self._lib.nfs_closedir(self._nfs, directory)
        return [name for name in names if name not in (".", "..")]

    def write_file(self, path: str, data: bytes, flags: int = os.O_TRUNC) -> None:
        """Create *path* if need be, write *data* and close it."""
        file = self.open(path, os.O_WRONLY | os.O_CREAT | flags)
        try:
            self.pwrite(file, data, 0)
        finally:
            self.close(file)

    def read_file(self, path: str) -> bytes:
        """Read all of *path*, as long as it was when it was opened."""
        file = self.open(path)
        try:
            return self.pread(file, self.fstat(file).size_bytes, 0)
        finally:
            self.close(file)

    def store(self, path: str, data: bytes, own: str = "") -> None:
        """Write *data* under a temporary name and rename it to *path*, as connectors do.

        *own* is in that name, for clients that store under one name at the same time.
        """
        self.write_file(f"{path}{own}.tmp", data)
        self.rename(f"{path}{own}.tmp", path)

    def end(self) -> None:
        """Let go of the server, open files and all."""
        self._lib.nfs_destroy_context(self._nfs)
        self._nfs = None

    def _read_part(self, file: int, address: int, size_bytes: int, at: int) -> int:
        """READ. libnfs calls its every error EFAULT; the file's own is what GETATTR says."""
        try:
            return self._call("pread", self._files[file], at, size_bytes, address)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            self.fstat(file)
            raise OSError(errno.EIO, error.strerror) from error

    def _call(self, name: str, *arguments: Value) -> int:
        done: int = getattr(self._lib, f"nfs_{name}")(self._nfs, *arguments)
        if done < 0:
            told = self._lib.nfs_get_error(self._nfs) or b""
            raise OSError(-done, f"nfs_{name}: {told.decode(errors='replace')}")
        return done


def _status(found: _Stat64) -> Status:
    return Status(
        inode=found.ino,
        mode=found.mode,
        links=found.nlink,
        size_bytes=found.size,
        mtime_ns=found.mtime * 1_000_000_000 + found.mtime_nsec,
    )
