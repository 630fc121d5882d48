"""What `kvfs status` shows of a running mount, and a day of its counters for `kvfs report`.

docs/status.md explains every key.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

import trio

import kvfs
from kvfs.core.settings import Settings
from kvfs.engine.store import Store
from kvfs.engine.store_figures import store_figures
from kvfs.machine.held_files import HeldFiles
from mount.control.socket import Verb
from mount.files.files import Files
from mount.files.kernel_port import KernelPort
from mount.fuse import errno_map
from mount.fuse.channel import Channel
from mount.fuse.device_number import DeviceNumber
from mount.fuse.wire import Opcode
from mount.supervisor.states import KILLED


class Parts(NamedTuple):
    """The parts of one mount that have figures to show."""

    settings: Settings
    store: Store
    channel: Channel
    files: Files
    port: KernelPort
    number: DeviceNumber
    held: HeldFiles


def describe(mount: Parts) -> dict[str, Any]:
    """Return the figures of one mount, JSON-ready; sizes in bytes."""
    channel, path = mount.channel, mount.port.path
    mount.store.blocks.last_closes.settle()
    mount.files.held.count_anew()
    return {
        "version": kvfs.__version__,
        "mountpoint": mount.settings.mountpoint,
        "source": mount.store.pool.device.sources,
        "encryption": mount.store.pool.device.encryption,
        "name": mount.settings.name,
        "read_only": mount.settings.read_only,
        "idmapped_mounts": mount.port.idmapped,
        "data_path": path.name,
        "data_path_reason": mount.port.choice.reason,
        "request_reader": channel.choice.name,
        "request_reader_reason": channel.choice.reason,
        "server_pid": os.getpid(),
        "supervisor_pid": None if mount.held.lost else mount.held.supervisor_pid,
        "restarts": mount.held.restarts,
        "upgrades": mount.held.upgrades,
        "longest_pause_s": round(mount.held.longest_pause_s, 3),
        "takeover": _takeover(mount),
        "request_wait_max_s": _longest_wait_s(mount.settings),
        "server_cpu_s": round(time.process_time(), 3),
        "server_memory_bytes": _own_memory_bytes(),
        "device_number": mount.number.present,
        "device_number_before": mount.number.before,
        **store_figures(mount.store),
        **path.describe(),
        "space_waits": {
            "count": mount.files.room.stalls,
            "waiting": mount.files.room.waiting,
            "rejected": mount.files.room.shares.turned_away,
            "total_s": round(mount.files.room.stalled_s, 3),
            "longest_s": round(mount.files.room.longest_s, 3),
        },
        "invalidations": {
            "sent": mount.port.invalidations.sent,
            "skipped": mount.port.invalidations.skipped,
            "queued": mount.port.invalidations.backlog,
        },
        "held_refused": mount.files.held.refused,
        "open_handles": len(mount.files.handles),
        "server_read_bytes": mount.files.asked_bytes,
        "request_times": {
            _name_of(code): times.shown() for code, times in channel.times.by_code.items()
        },
        "requests": _by_name(channel.requests),
        "requests_fast_path": _by_name(channel.answered_here),
        "errors": dict(errno_map.counts),
    }


def _takeover(mount: Parts) -> str:
    """Return whether another server could go on with the mount if this one died, or why not."""
    if mount.held.lost or not mount.held.supervisor_pid:
        return "there is no supervisor"
    if not mount.port.resends:
        return "the kernel cannot resend requests; Linux 6.9 and later can"
    return mount.held.next_server or "possible"


def _longest_wait_s(settings: Settings) -> float:
    """Return for how long a request may wait: for room, a device, or a server that follows."""
    waits_s = (settings.room_wait_s, settings.device_deadline_s, settings.silent_max_s)
    return round(max(waits_s) + KILLED.pauses_s, 1)


def _own_memory_bytes() -> int:
    """Return the resident memory of this process, without files' and shared pages.

    proc_pid_statm(5), in pages.
    """
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def describe_lost(settings: Settings, why: str) -> dict[str, Any]:
    """Return what is known of a mount whose device is lost, without using the pool."""
    return {
        "version": kvfs.__version__,
        "mountpoint": settings.mountpoint,
        "source": settings.source,
        "name": settings.name,
        "read_only": settings.read_only,
        "data_path": "none",
        "data_path_reason": "the device is lost",
        "server_pid": os.getpid(),
        "device_lost": why,
        "requests": {},
    }


def _by_name(counts: list[int]) -> dict[str, int]:
    return {_name_of(code): count for code, count in enumerate(counts) if count}


def _name_of(code: int) -> str:
    return Opcode(code).name if code in _CODES else f"UNKNOWN_{code}"


_CODES = frozenset(code.value for code in Opcode)


_log: Final = logging.getLogger(__name__)

#: Of five minutes each they are a day, and some 80 KiB in an answer.
SAMPLES_MAX: Final = 289
#: What a sample takes of `cache` in the status, beside the time and what blocks hold.
_COUNTERS: Final = ("hits", "misses", "loaded_bytes", "stored_bytes")


class History:
    """The samples of one mount, one every few minutes, in memory; none if the step is 0.

    Bounded by the number of samples, and begun anew by each server, as the counters are.
    """

    def __init__(self, step_s: float, status: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """*status* returns what `kvfs status` shows, of which a sample has some counters."""
        self._step_s = step_s
        self._status = status
        self._samples: deque[dict[str, float]] = deque(maxlen=SAMPLES_MAX)

    def table(self) -> dict[str, Verb]:
        """Return the verbs by name."""
        return {"history": self._told}

    async def keep(self) -> None:
        """Take a sample now and after each step, until cancelled."""
        while self._step_s:
            try:
                self._add_sample(await self._status())
            except Exception:
                # The last handler: a bug here must not end the mount.
                _log.exception("no sample for the history")
            await trio.sleep(self._step_s)

    def _add_sample(self, status: Mapping[str, Any]) -> None:
        cache = status.get("cache")
        if cache is None:  # the device is lost
            return
        sample: dict[str, float] = {name: cache[name] for name in _COUNTERS}
        sample["evicted_bytes"] = sum(each["bytes"] for each in cache["evicted"].values())
        sample["used_bytes"] = status["used_bytes"]
        self._samples.append({"time_s": round(time.time(), 1), **sample})

    async def _told(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": self._step_s, "samples": list(self._samples)}
