"""Gathers the facts that the rules of `kvfs doctor` judge; it does not judge them.

No path on a mounted kvfs is ever looked at: if its server hangs, the doctor would hang, too.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvfs.client.nfs.ganesha import ganeshas
from kvfs.client.nfs.nfsd import Export, told_exports
from kvfs.client.servers import status_of
from kvfs.client.subprocesses import seen_in_time
from kvfs.core.errors import CommandError, NotMounted, UsageError
from kvfs.core.types import DeviceState
from kvfs.devices import recognise
from kvfs.doctor.below_mount import below, told
from kvfs.doctor.connector_settings import from_flag, with_given
from kvfs.doctor.facts import (
    BackingFs,
    ConnectorHabit,
    ConnectorLimit,
    Dirty,
    Facts,
    NfsMount,
    Wake,
    Xfs,
)
from kvfs.doctor.gather_connectors import limits_of_file
from kvfs.doctor.gather_machine import Drives, cpus_of, limits_of, xfs_on
from kvfs.machine.hardware import (
    MAX_REQUEST_TIMEOUT,
    available_memory_bytes,
    halt_poll_ns,
    round_trip_us,
    sysctl,
)
from kvfs.machine.mount_table import FS_TYPE, Mount, mount_at, mount_of, resolve_mountpoint


def gather(path: str, flags: Sequence[str] = (), files: Sequence[str] = ()) -> Facts:
    """Return the facts about the mount at *path*.

    *flags* are the user's --connector-limit, *files* the --connector-config. Raises NotMounted,
    UsageError, and the error in the server's answer.
    """
    mountpoint = resolve_mountpoint(path)
    present = mount_at(mountpoint)
    if present is not None and present.fs_type.startswith("nfs"):
        return Facts(mountpoint=mountpoint, nfs=_nfs(present), dirty=_dirty())
    try:
        status = status_of(path)
    except NotMounted as error:
        if present is None and (files := told(below(mountpoint))):
            raise NotMounted(f"{error}; the directory itself holds {files}") from None
        raise
    source = str(status["source"])
    kind = _kind(source)
    backing = _backing(source) if kind in ("directory", "image") else None
    drives = Drives()
    device = _device_of(source, kind, drives)
    server_pid = int(status["server_pid"])
    given = _given(mountpoint, flags, files)
    limits, habits = _of_processes(mountpoint)
    return Facts(
        mountpoint=mountpoint,
        source=source,
        kind=kind,
        server_pid=server_pid,
        status=status,
        limits_of_connectors=with_given(limits, given),
        habits_of_connectors=habits,
        backing=backing,
        below=below(mountpoint),
        disks=drives.under(_home_of(source, kind, device)) if device is not None else None,
        device_read_ahead=drives.read_ahead(device) if device is not None else None,
        fuse_read_ahead=drives.mount_read_ahead(_number(present)) if present else None,
        xfs=_xfs(source, kind) if _may_be_read(status) else None,
        dirty=_dirty(),
        zone_reclaim_mode=sysctl("vm.zone_reclaim_mode"),
        limits=limits_of(server_pid),
        cpus=cpus_of(server_pid),
        wake=_wake(),
        request_timeout_max_s=sysctl(MAX_REQUEST_TIMEOUT),
        exports=_exports(mountpoint),
        ganeshas=ganeshas(mountpoint),
    )


def _may_be_read(status: Mapping[str, Any]) -> bool:
    """Whether the device serves; a read of any other one could wait for ever."""
    state = str(status.get("device_state", DeviceState.SERVING))
    return state == DeviceState.SERVING


def _kind(source: str) -> str:
    try:
        return recognise(source)
    except CommandError:
        return ""  # in another mount namespace, or removed


def _device_of(source: str, kind: str, drives: Drives) -> int | None:
    """Return the number of the device that the pool's file system lies on."""
    try:
        if kind == "block":
            return os.stat(source).st_rdev
        if kind == "image":
            return drives.loop_of(os.path.realpath(source))
        return os.stat(source).st_dev
    except OSError:
        return None


def _home_of(source: str, kind: str, device: int) -> int:
    """Return the device whose drives hold the bytes; for an image, that below the loop device."""
    return os.stat(source).st_dev if kind == "image" else device


def _backing(source: str) -> BackingFs | None:
    path = os.path.realpath(source)
    home = mount_of(path)
    if home is None or home.fs_type == FS_TYPE:
        return None
    space = os.statvfs(path)
    free_bytes = space.f_bavail * space.f_frsize
    options = frozenset(home.options)
    return BackingFs(home.fs_type, options, home.mountpoint, free_bytes, home.source)


def _xfs(source: str, kind: str) -> Xfs | None:
    if kind == "directory":
        home = mount_of(os.path.realpath(source))
        return xfs_on(home.source) if home is not None and home.fs_type == "xfs" else None
    return xfs_on(source) if kind else None


def _number(mount: Mount) -> int:
    major, minor = mount.device.split(":")
    return os.makedev(int(major), int(minor))


def _given(mountpoint: str, flags: Sequence[str], files: Sequence[str]) -> list[ConnectorLimit]:
    found = []
    for flag in flags:
        try:
            found.append(from_flag(flag))
        except ValueError as error:
            raise UsageError(f"--connector-limit: {error}") from None
    for file in files:
        try:
            found += limits_of_file(os.path.abspath(file), mountpoint)
        except OSError as error:
            raise UsageError(f"--connector-config {file}: {error.strerror}") from None
    return found


def _of_processes(
    mountpoint: str,
) -> tuple[tuple[ConnectorLimit, ...], tuple[ConnectorHabit, ...]]:
    lines = seen_in_time("kvfs.doctor.gather_connectors", mountpoint)
    said = [json.loads(line) for line in lines]
    return (
        tuple(ConnectorLimit(**one) for kind, one in said if kind == ConnectorLimit.__name__),
        tuple(ConnectorHabit(**one) for kind, one in said if kind == ConnectorHabit.__name__),
    )


def _dirty() -> Dirty | None:
    # The shares of vm.dirty_*_ratio are of free and reclaimable memory.
    available_bytes = available_memory_bytes()

    def bound(name: str) -> int | None:
        in_bytes = sysctl(f"vm.{name}_bytes")
        share = sysctl(f"vm.{name}_ratio")
        if in_bytes:
            return in_bytes
        if share is None or available_bytes is None:
            return None
        return available_bytes * share // 100

    background_bytes, limit_bytes = bound("dirty_background"), bound("dirty")
    if background_bytes is None or limit_bytes is None:
        return None
    return Dirty(background_bytes, limit_bytes)


def _wake() -> Wake | None:
    trip_us = round_trip_us()
    return None if trip_us is None else Wake(trip_us, halt_poll_ns())


def _exports(mountpoint: str) -> tuple[Export, ...] | None:
    try:
        return told_exports(mountpoint)
    except OSError:
        return None


def _nfs(mount: Mount) -> NfsMount:
    pairs = (option.partition("=") for option in mount.options)
    return NfsMount(mount.source, mount.fs_type, {name: value for name, _, value in pairs})
