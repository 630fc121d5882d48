"""Encrypts a block device below its XFS: cryptsetup(8) and the kernel's dm-crypt.

AES-XTS with sectors of 4 KiB, and without dm-crypt's queues: who asks encrypts, which is faster
on flash (no_read_workqueue in Documentation/admin-guide/device-mapper/dm-crypt.rst). A mapping with
an ephemeral key stays open until it is destroyed or the machine stops. Any other closes itself
after its last user, like a loop device.
"""

import contextlib
import errno
import fcntl
import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from typing import Final

from kvfs.core.encryption import HEADER_BYTES, Encryption, Lock, Way, ephemeral_mark
from kvfs.core.errors import CommandError, KeyUnusable, SourceBusy, SourceDamaged, ToolMissing
from kvfs.core.mount_name import RUN_DIRECTORY
from kvfs.devices import probe, xfs
from kvfs.devices.device import Fill
from kvfs.devices.mapped import Mapping, mapping_over
from kvfs.devices.pool_files import PoolHeader
from kvfs.devices.xfs_tools import find_tool, last_line, run_tool
from kvfs.machine.hardware import SECTOR_BYTES

_CONTROL: Final = "/dev/mapper/control"
_TPM: Final = "/dev/tpmrm0"
#: linux/dm-ioctl.h: struct dm_ioctl up to its name, and in all; _IOWR(0xfd, 0x11, struct dm_ioctl)
#: has the kernel load a target.
_DM_HEAD: Final = struct.Struct("=3I2IIiII4xQ128s")
_DM_BYTES: Final = 312
_DM_GET_TARGET_VERSION: Final = 0xC138FD11
_CIPHER: Final = ("--cipher", "aes-xts-plain64", "--key-size", "512", "--sector-size", "4096")
_UNQUEUED: Final = ("--perf-no_read_workqueue", "--perf-no_write_workqueue")
_OFFSET: Final = ("--offset", f"{HEADER_BYTES // SECTOR_BYTES}")
#: The key is used as it is, and only random ones are long: a slow function would protect nothing.
_QUICK: Final = ("--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000")
_KEY_BYTES: Final = 64
#: Half of AES-XTS's key: below it the file would be the weakest part.
KEY_FILE_MIN_BYTES: Final = 32
#: cryptsetup(8), "RETURN CODES".
_NO_KEY: Final = 2
_EXISTS: Final = 5
#: A TPM takes seconds.
_WAIT_S: Final = 120.0


def require_means(source: str, encryption: Encryption) -> None:
    """Raise ToolMissing or KeyUnusable unless *source* can be encrypted so, and opened, here."""
    find_tool("cryptsetup")
    if encryption.way is Way.TPM:
        find_tool("systemd-cryptenroll")
        if not os.path.exists(_TPM):
            raise ToolMissing(f"{source}: there is no TPM 2.0 here: {_TPM} does not exist")
    if encryption.way is Way.KEY_FILE:
        _require_key(encryption.key_file)
    _require_dm_crypt(source)


def _require_key(path: str) -> None:
    """Raise KeyUnusable unless the key file at *path* is its owner's alone, and long enough."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise KeyUnusable(f"key file {path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise KeyUnusable(f"key file {path} is not a file")
    if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
        mode = stat.S_IMODE(status.st_mode)
        raise KeyUnusable(
            f"key file {path} may be used by others than root (owner {status.st_uid}, mode "
            f"{mode:04o})",
            f"chown root {path}; chmod 600 {path}",
        )
    if status.st_size < KEY_FILE_MIN_BYTES:
        raise KeyUnusable(
            f"key file {path} has {status.st_size} bytes; it needs {KEY_FILE_MIN_BYTES} random",
            f"head -c {_KEY_BYTES} /dev/urandom > {path}",
        )


def _require_dm_crypt(source: str) -> None:
    """Raise ToolMissing unless the kernel has dm-crypt, which it loads if it is a module."""
    asked = _DM_HEAD.pack(4, 0, 0, _DM_BYTES, _DM_BYTES, 0, 0, 0, 0, 0, b"crypt")
    try:
        fd = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _DM_GET_TARGET_VERSION, bytearray(asked.ljust(_DM_BYTES, b"\0")))
        finally:
            os.close(fd)
    except OSError as error:
        raise ToolMissing(
            f"{source} cannot be encrypted here: the kernel has no dm-crypt ({error.strerror}); "
            "try `modprobe dm_crypt`"
        ) from None


def make_pool(
    block_path: str, source: str, fill: Fill, header: PoolHeader, encryption: Encryption
) -> PoolHeader:
    """Make an encrypted pool on *block_path*; raises what xfs.make_pool raises, and KeyUnusable.

    If that fails the device is blank.
    """
    lock = Lock(encryption.way, header.uuid)
    try:
        _blank(block_path, source)
        if lock.way is Way.EPHEMERAL:
            _write(block_path, source, ephemeral_mark(lock.uuid))
            path = _open_ephemeral(block_path, source, lock)
        else:
            _format_luks(block_path, source, lock, encryption)
            path = open_luks(block_path, source, lock, encryption)
        header = xfs.make_pool(path, source, fill, header, discard=False)
        if lock.way is not Way.EPHEMERAL:
            close_after_use(lock.mapping)
        return header
    except BaseException:
        with contextlib.suppress(CommandError):
            close_after_use(lock.mapping)
            _blank(block_path, source)
        raise


def open_luks(block_path: str, source: str, lock: Lock, encryption: Encryption | None) -> str:
    """Open the mapping of *lock* on *block_path*, and return the path of its block device.

    Raises KeyUnusable, SourceBusy, SourceDamaged, ToolMissing.
    """
    if lock.way is Way.TPM:
        key: tuple[str, ...] = ("--token-only", "--token-type", "systemd-tpm2")
    elif encryption is None or not encryption.key_file:
        raise KeyUnusable(f"{source} is encrypted", "give --encrypt=key-file=FILE")
    else:
        key = ("--key-file", encryption.key_file)
    require_means(source, encryption or Encryption(lock.way))
    _cryptsetup(source, "open", "--type", "luks2", *_UNQUEUED, *key, block_path, lock.mapping)
    return _opened(block_path, source)


def require_opens(path: str, encryption: Encryption) -> None:
    """Raise KeyUnusable if the key file of *encryption* does not open the LUKS2 at *path*.

    Another way has no key that could be tried. Only the header is read, whoever uses the drive.
    """
    if encryption.key_file:
        key = ("--key-file", encryption.key_file)
        _cryptsetup(path, "open", "--test-passphrase", "--type", "luks2", *key, path)


def _open_ephemeral(block_path: str, source: str, lock: Lock) -> str:
    os.getrandom(1)  # waits until the kernel's random numbers are such: just after the boot
    key = ("--key-file", "/dev/urandom", "--keyfile-size", f"{_KEY_BYTES}")
    plain = ("--type", "plain", *_CIPHER, *_OFFSET, *_UNQUEUED)
    _cryptsetup(source, "open", *plain, *key, block_path, lock.mapping)
    return _opened(block_path, source)


def _opened(block_path: str, source: str) -> str:
    mapping = mapping_over(block_path)
    if mapping is None:
        raise SourceDamaged(f"{source}: cryptsetup has opened no mapping")
    return mapping.path


def _format_luks(block_path: str, source: str, lock: Lock, encryption: Encryption) -> None:
    names = ("--label", "kvfs", "--subsystem", lock.subsystem, "--uuid", lock.uuid)
    how = ("--type", "luks2", *_CIPHER, *_OFFSET, *_QUICK, *names)
    if lock.way is Way.KEY_FILE:
        _cryptsetup(source, "luksFormat", *how, "--key-file", encryption.key_file, block_path)
        return
    with _passing_key() as key_file:
        _cryptsetup(source, "luksFormat", *how, "--key-file", key_file, block_path)
        # Slot 0 has the passing key; with it gone only this machine's TPM opens the drive.
        enroll = (f"--unlock-key-file={key_file}", "--tpm2-device=auto", "--wipe-slot=0")
        done = run_tool("systemd-cryptenroll", *enroll, block_path, timeout_s=_WAIT_S)
    if done.returncode != 0:
        raise KeyUnusable(f"{source}: systemd-cryptenroll fails: {last_line(done.stderr)}")


@contextlib.contextmanager
def _passing_key() -> Iterator[str]:
    """Yield the path of a random key in memory, which is needed for a moment."""
    os.makedirs(RUN_DIRECTORY, mode=0o755, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".key-", dir=RUN_DIRECTORY) as file:
        file.write(os.getrandom(_KEY_BYTES))
        file.flush()
        yield file.name


def close_after_use(name: str) -> None:
    """Have the mapping *name* closed when its last user is gone, or now."""
    run_tool("cryptsetup", "close", "--deferred", name, timeout_s=_WAIT_S)


def close(source: str, mapping: Mapping) -> None:
    """Close *mapping* of *source* now: what has an ephemeral key is lost. Raises SourceBusy."""
    _cryptsetup(source, "close", mapping.name)


def erase_keys(path: str) -> None:
    """Erase what opens the LUKS2 at *path*, a device or file: nobody can read it again.

    Where its header is damaged luksErase refuses, and the keys lie behind it all the same.
    """
    with contextlib.suppress(SourceDamaged):
        _cryptsetup(path, "luksErase", path)
    _write(path, path, bytes(HEADER_BYTES))


def _cryptsetup(source: str, verb: str, *arguments: str) -> None:
    """Run cryptsetup. Raises KeyUnusable, SourceBusy, SourceDamaged, ToolMissing."""
    done = run_tool("cryptsetup", "--batch-mode", verb, *arguments, timeout_s=_WAIT_S)
    if done.returncode == 0:
        return
    why = last_line(done.stderr)
    if done.returncode == _NO_KEY:
        raise KeyUnusable(f"{source} is encrypted, and this key does not open it")
    if done.returncode == _EXISTS:
        raise SourceBusy(f"{source} is in use, or is a copy of what is: {why}")
    raise SourceDamaged(f"{source}: cryptsetup {verb} fails: {why}")


@contextlib.contextmanager
def _written(block_path: str, source: str) -> Iterator[int]:
    """Yield an fd to write *block_path* by. Raises SourceDamaged."""
    try:
        fd = os.open(block_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        raise SourceDamaged(f"{source}: {error.strerror}") from error


def _blank(block_path: str, source: str) -> None:
    """Zero the ends of *block_path*, so that nothing there is taken for what it was."""
    with _written(block_path, source) as fd:
        probe.zero_edges(fd)


def _write(block_path: str, source: str, data: bytes) -> None:
    """Write *data* in front of *block_path*, durably. Raises SourceDamaged."""
    with _written(block_path, source) as fd:
        if os.pwrite(fd, data, 0) != len(data):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync(fd)
