"""``kvfs umount``: unmount, and wait until the server has released the source."""

import argparse
import contextlib
import errno
import glob
import os
import shlex
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kvfs.cli.arguments import seconds_to
from kvfs.cli.dead_place import free_place, note_of_servers
from kvfs.cli.failures import need_root
from kvfs.cli.mount import read_settings_file
from kvfs.cli.parser import add_verb
from kvfs.client.dead_mount import (
    SOURCE_WAIT_S,
    dead_mount_at,
    open_process,
    take_away,
    wait_for_end,
)
from kvfs.client.late_answer import device_answers
from kvfs.client.liveness import was_killed
from kvfs.client.nfs.nfsd import taken_exports, way_out
from kvfs.client.servers import remove_dead_sockets, server_of
from kvfs.client.subprocesses import seen_in_time
from kvfs.core.errors import (
    CommandError,
    MountpointUnusable,
    NotMounted,
    ServeFailed,
    SourceBusy,
    UsageError,
)
from kvfs.core.mount_name import config_path, name_of
from kvfs.core.settings import Settings
from kvfs.core.source_list import sources_of
from kvfs.machine.mount_table import (
    FS_TYPE,
    Mount,
    mount_at,
    note_of,
    resolve_mountpoint,
    unmount,
    where_in_use,
)
from kvfs.machine.mountpoint_guard import unguard
from kvfs.machine.process_ends import device_wait

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

_WAIT_MAX_S: Final[float] = Settings.__dataclass_fields__["stop_timeout_s"].metadata["high"]
#: How long to wait for a server before looking for other users of its mount, and between looks.
_LOOK_S: Final = 0.5
_LOOK_AGAIN_S: Final = 2.0
#: Behind the command that ends a holder; without one --lazy is the way.
_ENDS: Final = "ends that"
#: With --lazy: a server whose mount nobody uses ends sooner.
_LAZY_WAIT_S: Final = 2.0
#: Clients of a dead mount may hold it for longer, which does not keep the next server out.
_DEAD_WAIT_S: Final = 2.0


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "umount",
        run,
        description="Unmount MOUNTPOINT and wait until its server has stopped, so that the source "
        "is free.\nA mount whose server is dead is detached as well, in use or not. With --unguard "
        "files may be stored in MOUNTPOINT\nagain, mounted or not: it undoes kvfs mount --guard.",
        example="kvfs umount /kv",
    )
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", nargs="?")
    parser.add_argument("--config", metavar="FILE", help="settings file; it may name MOUNTPOINT")
    parser.add_argument(
        "--lazy",
        action="store_true",
        help="detach it now, even in use; the server stops after the last user",
    )
    parser.add_argument(
        "--unguard",
        action="store_true",
        help="take the guard away, too: files may be stored there while nothing is mounted",
    )
    parser.add_argument(
        "--wait-s",
        type=seconds_to(_WAIT_MAX_S),
        metavar="SECONDS",
        help="seconds to wait for the server to stop (default: stop_timeout_s of the settings, "
        f"else {Settings().stop_timeout_s:g})",
    )


def run(args: argparse.Namespace) -> int:
    """Unmount and wait."""
    need_root("kvfs umount")
    settings = _settings(args.mountpoint, args.config)
    mountpoint = resolve_mountpoint(args.mountpoint or settings.mountpoint)
    if args.wait_s is None:
        args.wait_s = settings.stop_timeout_s
    if not args.unguard:
        return _end(mountpoint, args)
    if mount_at(mountpoint) is None and _unguarded(mountpoint):
        return 0
    exit_code = _end(mountpoint, args)
    _unguarded(mountpoint)
    return exit_code


def _unguarded(mountpoint: str) -> bool:
    """Remove the guard of kvfs; False if there was none. Raises MountpointUnusable."""
    try:
        return unguard(mountpoint)
    except OSError as error:
        raise MountpointUnusable(f"{mountpoint} stays guarded: {error.strerror}") from None


def _end(mountpoint: str, args: argparse.Namespace) -> int:
    present = mount_at(mountpoint)
    if present is None:
        note = note_of(lambda mount: mount.mountpoint == mountpoint)
        raise NotMounted(f"nothing is mounted at {mountpoint}{f' here{note}' if note else ''}")
    if present.fs_type != FS_TYPE:
        raise NotMounted(f"{mountpoint} is a mount of type {present.fs_type}, not a kvfs mount")
    # Before the umount, because afterwards the server does not answer.
    server_pid = server_of(mountpoint)
    lives = server_pid > 0 and not was_killed(server_pid)
    dead = None if lives else dead_mount_at(mountpoint)
    pidfd = open_process(server_pid)
    try:
        if dead is None:
            _unmount(mountpoint, lazy=args.lazy)
        else:
            served = note_of_servers(mountpoint)  # now, while the open files still have this path
            take_away(dead)
            if served:
                print(f"kvfs: {mountpoint} was a dead mount{served}", file=sys.stderr)
        free_place(mountpoint)  # it may have been put over a dead one
        wait_s = min(args.wait_s, _LAZY_WAIT_S) if args.lazy else args.wait_s
        ended, note = _wait_for_server(server_pid, pidfd, present, wait_s)
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    if ended:
        remove_dead_sockets()
        _wait_for_source(present.source, SOURCE_WAIT_S if server_pid > 0 else _DEAD_WAIT_S)
        return 0
    if args.lazy:
        last = f"kvfs: server {server_pid} runs until its last user ends{note}"
        print(last, file=sys.stderr)
        return 0
    if note:
        raise ServeFailed(f"{mountpoint} is unmounted here, but server {server_pid} runs on{note}")
    raise ServeFailed(
        f"{mountpoint} is unmounted, but server {server_pid} still runs after {args.wait_s:g} s"
    )


def _settings(mountpoint: str | None, config: str | None) -> Settings:
    """Return the settings in the file *config*, or else in the usual one of *mountpoint*.

    Raises UsageError, but not for the usual one: whatever it says, the mount can be ended.
    """
    if config:
        settings = Settings.from_toml(read_settings_file(config, must_exist=True), origin=config)
        if not mountpoint and not settings.mountpoint:
            raise UsageError(f"{config} does not set mountpoint")
        return settings
    if not mountpoint:
        raise UsageError("give MOUNTPOINT, or --config with a file that names it")
    path = config_path(name_of(resolve_mountpoint(mountpoint)))
    try:
        return Settings.from_toml(read_settings_file(path, must_exist=False), origin=path)
    except UsageError:
        return Settings()


def _wait_for_server(server_pid: int, pidfd: int, mount: Mount, wait_s: float) -> tuple[bool, str]:
    """Wait for the server's end; return whether it has ended, or else a note on what keeps it.

    A device that does not answer at two looks is not waited for.

    If another mount namespace has a copy of the mount, the server may run on for any time, so the
    wait ends. A new namespace copies all mounts, also while we wait. One that is gone at the next
    look was made just for a moment, as by mkfs.xfs, and does not count.
    """
    until_s, pause_s, before = time.monotonic() + wait_s, _LOOK_S, ""
    while not wait_for_end(pidfd, min(pause_s, max(0.0, until_s - time.monotonic()))):
        if device_wait(server_pid) is not None and not _answer(mount.source):
            note = f": it waits for {mount.source}, which does not answer, and ends when that does"
        else:
            note = note_of(lambda other: other.device == mount.device)
        if (note and note == before) or time.monotonic() >= until_s:
            return False, note
        before, pause_s = note, _LOOK_AGAIN_S
    return True, ""


def _answer(source: str) -> bool:
    """Whether all drives of the pool in *source* answer."""
    return all(map(device_answers, sources_of(source)))


def _wait_for_source(source: str, wait_s: float) -> None:
    """Wait until the kernel has released a drive or image, perhaps after the server's end.

    Copies of the mount in other namespaces may hold it for any time: then it prints where they are.
    """
    from kvfs.devices import wait_released

    with contextlib.suppress(CommandError):  # it is gone, or somebody else uses it: not our concern
        try:
            wait_released(source, min(wait_s, _LOOK_S))
        except SourceBusy:
            if where := where_in_use(source):
                print(f"kvfs: {source} stays in use: the pool is mounted {where}", file=sys.stderr)
            else:
                wait_released(source, wait_s - _LOOK_S)


def _unmount(mountpoint: str, *, lazy: bool) -> None:
    os.chdir("/")  # we may have been called from a directory on it
    try:
        unmount(mountpoint, lazy=lazy)
    except OSError as error:
        if error.errno == errno.EINVAL and mount_at(mountpoint) is None:  # unmounted meanwhile
            raise NotMounted(f"nothing is mounted at {mountpoint} any more") from None
        if error.errno != errno.EBUSY:
            raise MountpointUnusable(f"{mountpoint}: {error.strerror}") from None
        raise MountpointUnusable(f"{mountpoint} is busy{_held_by(mountpoint)}") from None


def _held_by(mountpoint: str) -> str:
    """Return which processes hold the mount, as far as can be found out in bounded time."""
    seen = seen_in_time("kvfs.client.processes_on_mount", mountpoint)
    holders = [line.decode(errors="backslashreplace") for line in seen]
    holders += _held_by_kernel(mountpoint)
    used = f": used by {', '.join(holders)}" if holders else ""
    if _ENDS in used:
        return used
    first = "end what uses it, or " if holders else ""
    return f"{used}; {first}`kvfs umount --lazy {shlex.quote(mountpoint)}` detaches it now"


def _held_by_kernel(mountpoint: str) -> Iterator[str]:
    """Yield a clause for each holder of *mountpoint*, with the command that ends it."""
    if taken := taken_exports(mountpoint):
        yield f"the NFS server (nfsd, which is no process): {way_out(mountpoint, taken)}"
    for path in sorted(glob.glob("/sys/block/loop*/loop/backing_file")):
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            backing = file.read().removesuffix("\n")
        if backing.startswith(f"{mountpoint}/"):
            device = f"/dev/{path.split('/')[3]}"
            yield f"loop device {device}: `losetup --detach {device}` {_ENDS}"
