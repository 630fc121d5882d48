"""How many messages the kernel sends for an operation, exactly: the budget of the hot path."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvfs.client.control_socket import ask
from kvfs.core.mount_name import name_of, socket_path
from tests.support.mounts.mounting import Mounted, workplace

#: Sent by the kernel when it likes, and answered by nobody.
_UNCOUNTED: Final = ("FORGET", "BATCH_FORGET", "INTERRUPT")
_BARRIER: Final = "STATFS"


class Messages(NamedTuple):
    """What came by name, and which of it the channel answered without libfuse."""

    asked: Counter[str]
    in_channel: Counter[str]

    @property
    def by_libfuse(self) -> Counter[str]:
        """Messages that took the whole stack of libfuse and pyfuse3."""
        return self.asked - self.in_channel


def so_far(mount: Mounted) -> Messages:
    """Return all counts since the mount began.

    A RELEASE comes after close(2) has returned, but the kernel's queue is in order: whatever came
    before the answered STATFS is counted.
    """
    os.statvfs(mount.path)
    status = ask_status(mount)
    found = Messages(Counter(status["requests"]), Counter(status["requests_fast_path"]))
    for counts in found:
        for name in (*_UNCOUNTED, _BARRIER):
            del counts[name]
    return found


def ask_status(mount: Mounted) -> dict[str, Any]:
    """Return the status without a process in between: ``kvfs status`` itself takes 200 ms."""
    return ask(socket_path(name_of(str(mount.path))), "status")


@contextlib.contextmanager
def counted(mount: Mounted) -> Iterator[Messages]:
    """Count the messages of the body; the result is filled when the body ends."""
    found = Messages(Counter(), Counter())
    before = so_far(mount)
    yield found
    after = so_far(mount)
    for counts, old, new in zip(found, before, after, strict=True):
        counts.update(new - old)


def message_counter(text: str) -> Counter[str]:
    """Return "2 LOOKUP, CREATE" as counts."""
    counts: Counter[str] = Counter()
    for part in filter(None, text.split(", ")):
        number, _, name = part.rpartition(" ")
        counts[name] += int(number or 1)
    return counts


@contextlib.contextmanager
def mounted_with(settings: Mapping[str, object], *flags: str) -> Iterator[Mounted]:
    """Yield a mount of a fresh pool in memory with *settings* read from a TOML file.

    Fails when the server logged an error.
    """
    with workplace("disk") as directory, workplace() as memory:
        (memory / "pool").mkdir()
        config = directory / "kv.toml"
        config.write_text("".join(f"{name} = {_toml(value)}\n" for name, value in settings.items()))
        with Mounted(memory / "pool", directory / "kv", "--config", str(config), *flags) as mount:
            yield mount
            mount.stop()
            assert not mount.errors()


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str | Path) else str(value)
