"""`kvfs export`: plan the export of a mount, and write or remove its configuration file.

The file is kvfs's own; files of others are never changed.
"""

import contextlib
import errno
import os
import shlex
import shutil
import stat
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvfs.client.nfs.ganesha import CONFIG, ganeshas, read_configuration, reload_of
from kvfs.client.nfs.nfsd import EXPORTS_DIRECTORY, own_fsid
from kvfs.client.nfs.plan import (
    GANESHA,
    NFSD,
    ExportPlan,
    WantedExport,
    choose_server,
    client_of,
    marked,
    plan_ganesha,
    plan_nfsd,
)
from kvfs.client.nfs.squash import Root, fitting
from kvfs.client.servers import status_of
from kvfs.core.errors import ConfigForeign, ConfigUnwritable, ServeFailed, UsageError
from kvfs.core.mount_name import name_of
from kvfs.machine.mount_table import resolve_mountpoint

_REREAD: Final = "exportfs -ra"
_OWN_MAX_BYTES: Final = 64 << 10
_NO_LINK: Final = os.O_NOFOLLOW | os.O_CLOEXEC


class Removed(NamedTuple):
    """What the removal of an export did, and the commands that must follow."""

    mountpoint: str
    files: tuple[str, ...]
    next: tuple[str, ...]


def plan_of(path: str, clients: Sequence[str], server: str, kind: str, config: str) -> ExportPlan:
    """Return how the mount at *path* is to be exported to *clients*.

    *server*, the *kind* of squash and Ganesha's *config* may be empty, and are then chosen by what
    this machine has. Raises UsageError, NotMounted, and the error of the mount's server.
    """
    status = status_of(path)
    if not clients:
        raise UsageError("say who may mount it, e.g. --client 10.0.0.0/24 ('*' is everybody)")
    root = Root.of_status(status)
    if root is None:
        raise ServeFailed(f"the server of {path} is older than this kvfs: mount it anew")
    squash = fitting(root, kind)
    if kind and squash.kind != kind:
        raise UsageError(
            f"--squash {kind}: only root may write to {path}, so nobody could store; mount it with "
            "-o uid=1000, or use --squash none"
        )
    wanted = WantedExport(
        resolve_mountpoint(path),
        own_fsid(str(status["uuid"]), str(status["source"])),
        tuple(dict.fromkeys(client_of(one) for one in clients)),
        squash,
        not status["read_only"],
    )
    if (server or choose_server(wanted.mountpoint)) == GANESHA:
        return plan_ganesha(wanted, config)
    return plan_nfsd(wanted)


def write(plan: ExportPlan) -> bool:
    """Write the file of *plan*; return if it changed. Raises ConfigForeign, ConfigUnwritable."""
    if plan.taken_by:
        raise ConfigForeign(
            f"{', '.join(plan.taken_by)} exports {plan.mountpoint} already: take it out there first"
        )
    if not plan.is_here:
        raise ConfigForeign(f"{plan.file} lies in the mount namespace of NFS-Ganesha, not in ours")
    return write_own(plan.file, name_of(plan.mountpoint), plan.text)


def remove(path: str, server: str, config: str) -> Removed:
    """Remove what `write` wrote for the mountpoint *path*, for *server* or for both.

    Also works if nothing is mounted there. Raises ConfigForeign, ConfigUnwritable.
    """
    mountpoint = resolve_mountpoint(path)
    name = name_of(mountpoint)
    files, commands = [], []
    exports = f"{EXPORTS_DIRECTORY}/{name}.exports"
    if server in ("", NFSD) and remove_own(exports, name):
        files.append(exports)
        commands += [_REREAD] if shutil.which("exportfs") else []
    if server in ("", GANESHA):
        for one, reload in _of_ganesha(mountpoint, config):
            file = f"{os.path.dirname(one)}/kvfs-{name}.conf"
            if own_text(file, name) is None:
                continue
            if includer := read_configuration(one).includers.get(file):
                line = f'\\|%include *"*{file}"*|d'
                raise ConfigForeign(
                    f"{includer} includes {file}, and NFS-Ganesha does not start without it: take "
                    f"the line out with `sed -i {shlex.quote(line)} {shlex.quote(includer)}` first"
                )
            remove_own(file, name)
            files.append(file)
            commands += [reload] if reload else []
    return Removed(mountpoint, tuple(files), tuple(commands))


def _of_ganesha(mountpoint: str, config: str) -> Iterator[tuple[str, str]]:
    """Yield configurations that may include our file, each with the command to read it again."""
    running = {one.configuration.path: one for one in ganeshas(mountpoint) if one.is_here}
    for path in [config] if config else sorted({CONFIG, *running}):
        server = running.get(path)
        yield path, reload_of(server) if server is not None else ""


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
    if not text.startswith(marked("", name)):
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
