"""What a server and its supervisor tell each other while the server serves; and upgrades.

The link is that of kvfs/machine/held_files.py; the other end is mount/supervisor/. In an upgrade
the old server ends only if the new version knows the formats of what it wrote, and of what it
agreed on with the kernel. They may be any two versions, so formats are numbers, compared by name.
"""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any, Final

import trio

from kvfs.core.errors import FormatUnknown, ServeFailed, UsageError
from kvfs.core.records import INDEX_FORMAT
from kvfs.devices import Device
from kvfs.devices.pool_files import FORMAT_VERSION
from kvfs.engine.store import Store
from kvfs.machine.held_files import HeldFiles
from kvfs.storage.journal import JOURNAL_VERSION
from kvfs.storage.outliving import NOTES_VERSION
from mount.control.drive_verbs import DriveVerbs
from mount.control.socket import Verb
from mount.files.handles import HANDLES_VERSION
from mount.fuse.init_reply import agree
from mount.process.succession import Succession

_log: Final = logging.getLogger(__name__)


#: All that a kernel may offer at INIT.
_ALL_FLAGS: Final = (1 << 64) - 1

FORMATS: Final = {
    "format of the pool": FORMAT_VERSION,
    "format of the index": INDEX_FORMAT,
    "table of open files": HANDLES_VERSION,
    "journal": JOURNAL_VERSION,
    "notes": NOTES_VERSION,
    # The kernel has had its INIT reply, so a server cannot tell it that it wants other features.
    "features agreed with the kernel": agree(_ALL_FLAGS, passthrough=True).flags,
}


#: What a server of several drives writes beside those: an older one knows one drive alone.
_FORMATS_OF_SEVERAL: Final = {"list of drives": 1}
#: And one that goes on without the first drive: an older one needs that.
_FORMATS_WITHOUT_FIRST: Final = {"list of drives without the first": 1}


def formats_of(device: Device) -> Mapping[str, int]:
    """Return the formats that a server of the pool on *device* writes."""
    if not device.more:
        return FORMATS
    several = FORMATS | _FORMATS_OF_SEVERAL
    return several | _FORMATS_WITHOUT_FIRST if device.why_missing else several


def require_formats(theirs: Mapping[str, int]) -> None:
    """Raise FormatUnknown unless this version can take over from a server that uses *theirs*."""
    known = FORMATS | _FORMATS_OF_SEVERAL | _FORMATS_WITHOUT_FIRST
    for name in FORMATS.keys() | theirs.keys():
        if theirs.get(name) != known.get(name):
            raise FormatUnknown(
                f"the {name} is {theirs.get(name)}, and the new version has {known.get(name)}: "
                "unmount, and mount with the new version"
            )


def let_end_calls(held: HeldFiles, abort_fd: int) -> None:
    """Give the supervisor the mount's abort file, to end all calls if no server can be started.

    Without it (-1) a killed server's callers may wait until ``kvfs umount``.
    """
    if abort_fd < 0 or not held.hold("abort", abort_fd):
        _log.warning("calls on the mount will hang if its server is killed")


async def say_alive(held: HeldFiles) -> None:
    """Tell the supervisor at intervals that the event loop runs, from a task of that loop.

    A loop that hangs says nothing, so the supervisor kills this server and starts another.
    """
    while held.alive_every_s:
        held.say_alive()
        await trio.sleep(held.alive_every_s)


class Supervision:
    """Takes what the supervisor says, and asks it for an upgrade."""

    def __init__(self, held: HeldFiles, store: Store, of: Succession) -> None:
        self._held = held
        self._drives = DriveVerbs(store, held, of, self._upgrade)
        #: Why the upgrade that was asked for last has failed.
        self._failures: trio.MemorySendChannel[str] | None = None

    async def listen(self) -> None:
        """Take its messages. Return, and log it, when it is gone: the server goes on without it."""
        while (said := self._held.receive()) is not None:
            if "upgrade_failed" in said and self._failures is not None:
                with contextlib.suppress(trio.WouldBlock):  # a signal asked for one, too
                    self._failures.send_nowait(str(said["upgrade_failed"]))
            if "next_server" in said:
                self._held.next_server = str(said["next_server"])
            if not said:
                await trio.lowlevel.wait_readable(self._held)
        _log.error(
            "the supervisor has died: this server serves on, but if it dies as well nobody takes "
            "its place and calls may wait until `kvfs umount`; a new mount has a supervisor again"
        )

    def table(self) -> dict[str, Verb]:
        """Return its verbs by name, and those that end with another server."""
        return {"upgrade": self._upgrade, **self._drives.table()}

    async def _upgrade(self, args: dict[str, Any]) -> dict[str, Any]:
        """Have a server of ``program``, a command line, take over: the verb of `kvfs upgrade`.

        On success this server is killed, and the client's connection ends. Else raises ServeFailed.
        """
        program, python_path = args.get("program"), args.get("python_path", "")
        if not isinstance(program, list) or not program or not isinstance(python_path, str):
            raise UsageError("program: must be a command line, and python_path a text")
        if self._failures is not None:
            raise ServeFailed("an upgrade has begun already")
        self._failures, failures = trio.open_memory_channel[str](1)
        try:
            if not self._held.ask_for_upgrade([str(word) for word in program], python_path):
                raise ServeFailed("there is no supervisor any more: mount again")
            raise ServeFailed(f"no upgrade: {await failures.receive()}")
        finally:
            self._failures = None
