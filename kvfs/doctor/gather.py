"""Gathers the facts that the rules of `kvfs doctor` judge; it does not judge them.

No path on a mounted kvfs is ever looked at: if its server hangs, the doctor would hang, too.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvfs.client.nfs.ganesha import ganeshas
from kvfs.client.nfs.nfsd import Export, told_exports
from kvfs.client.servers import status_of
from kvfs.client.subprocesses import seen_in_time
from kvfs.core.errors import CommandError, NotMounted, UsageError
from kvfs.core.source_list import sources_of
from kvfs.core.types import DeviceState
from kvfs.devices import recognise
from kvfs.doctor.below_mount import below, told
from kvfs.doctor.connector_settings import from_flag, with_given
from kvfs.doctor.facts import (
    BackingFs,
    ConnectorHabit,
    ConnectorLimit,
    Dirty,
    Disk,
    DriveBelow,
    Facts,
    NfsMount,
    ReadAheadSetting,
    Wake,
    Xfs,
)
from kvfs.doctor.gather_connectors import limits_of_file
from kvfs.doctor.gather_drives import Drives
from kvfs.doctor.gather_machine import cpus_of, limits_of, xfs_on
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
    machine, kinds = Drives(), {each: _kind(each) for each in sources_of(source)}
    kind = kinds[source] if source in kinds else _one_of(kinds.values())
    backing = _backing(source) if kind in ("directory", "image") and source in kinds else None
    drives = _drives(status, kinds, machine)
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
        disks=None if drives is None else _disks(drives),
        drives=drives,
        gpus=machine.gpus(),
        device_read_ahead=_shortest(drives or ()),
        fuse_read_ahead=machine.mount_read_ahead(_number(present)) if present else None,
        xfs=_xfs(source, kind) if source in kinds and _may_be_read(status) else None,
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


def _one_of(kinds: Iterable[str]) -> str:
    """Return the kind that all drives have; empty if they are of several."""
    found = set(kinds)
    return found.pop() if len(found) == 1 else ""


def _drives(
    status: Mapping[str, Any], kinds: Mapping[str, str], machine: Drives
) -> tuple[DriveBelow, ...] | None:
    """Return what each drive lies on; *kinds* has the kind of each source."""
    rows: Mapping[str, Mapping[str, Any]] = status.get("drives", {})
    numbers = {str(row["source"]): int(number) for number, row in rows.items()}
    found = [
        machine.below(numbers.get(source, at), source, kind)
        for at, (source, kind) in enumerate(kinds.items())
    ]
    seen = tuple(one for one in found if one is not None)
    return seen if len(seen) == len(found) else None


def _disks(drives: Sequence[DriveBelow]) -> tuple[Disk, ...]:
    return tuple({disk.name: disk for drive in drives for disk in drive.disks}.values())


def _shortest(drives: Sequence[DriveBelow]) -> ReadAheadSetting | None:
    known = [drive.read_ahead for drive in drives if drive.read_ahead is not None]
    return min(known, default=None)


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
