"""A configuration file that kvfs writes for an NFS server; it never changes files of others."""

import contextlib
import errno
import os
import stat
from typing import Final

from kvfs.core.errors import ConfigForeign, ConfigUnwritable

_MARK: Final = "# kvfs export {}: this file is kvfs's; `kvfs export --remove` takes it back.\n"
_OWN_MAX_BYTES: Final = 64 << 10
_NO_LINK: Final = os.O_NOFOLLOW | os.O_CLOEXEC


def marked(text: str, name: str) -> str:
    """Return *text* below a first line that marks it as kvfs's, of the mount *name*."""
    return _MARK.format(name) + text


def own_text(path: str, name: str) -> str | None:
    """Return what the file *path* of the mount *name* holds; None where there is none.

    Raises ConfigForeign if it is somebody else's, ConfigUnwritable if it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NO_LINK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigForeign(f"{path} is a symlink, which kvfs did not make") from None
        raise _refused(path, error) from None
    with open(fd, "rb") as file:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        text = file.read(_OWN_MAX_BYTES).decode(errors="surrogateescape") if is_file else ""
    if not text.startswith(_MARK.format(name)):
        raise ConfigForeign(f"{path} is not kvfs's: move it away, or keep what it says")
    return text


def write_own(path: str, name: str, text: str) -> bool:
    """Replace *path* by *text*; return whether anything changed. Raises as own_text.

    Its directory is made if only that is missing.
    """
    if own_text(path, name) == text:
        return False
    directory, base = os.path.split(path)
    draft = f"{directory}/.{base}.{os.getpid()}"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o755)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o644)
        try:
            with open(fd, "wb") as file:
                os.fchmod(fd, 0o644)
                file.write(text.encode(errors="surrogateescape"))
                file.flush()
                os.fsync(fd)
            os.rename(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise _refused(path, error) from None
    return True


def remove_own(path: str, name: str) -> bool:
    """Remove *path*; return whether it was there. Raises as own_text."""
    if own_text(path, name) is None:
        return False
    try:
        os.unlink(path)
    except OSError as error:
        raise _refused(path, error) from None
    return True


def _refused(path: str, error: OSError) -> ConfigUnwritable:
    return ConfigUnwritable(f"{path}: {error.strerror or error}")
