"""Writes the metrics to a file for node_exporter's textfile collector, at an interval.

The file is replaced by a rename, so that a reader finds a whole one. A thread writes it, because
its file system may be slow, hang (NFS), or be this mount, whose requests only this event loop can
answer.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from typing import Final

import trio

from kvfs.core.settings import Settings
from mount.control.metrics.exposition import Exposition

_log: Final = logging.getLogger(__name__)

#: How long a stop waits for the removal, if the file system hangs.
_REMOVAL_MAX_S: Final = 1.0


async def write_textfile(settings: Settings, exposition: Exposition) -> None:
    """Write the file that *settings* name until cancelled, and remove it in the end.

    Otherwise it would go on showing a mount that is gone.
    """
    if not settings.metrics_textfile:
        return
    written = _Textfile(settings.metrics_textfile)
    try:
        while True:
            try:
                text, _ = await exposition.text()
                await _in_thread(functools.partial(written.replace, text))
            except OSError as error:
                _log.warning("metrics not written: %s: %s", written.path, error.strerror)
            except Exception:
                # The last handler: a bug here must not end the mount.
                _log.exception("metrics not written")
            await trio.sleep(settings.metrics_textfile_s)
    finally:
        with trio.move_on_after(_REMOVAL_MAX_S, shield=True):
            await _in_thread(written.remove)


async def _in_thread(work: Callable[[], None]) -> None:
    await trio.to_thread.run_sync(work, abandon_on_cancel=True)


class _Textfile:
    """The file at ``path``, and the one that takes its place next."""

    def __init__(self, path: str) -> None:
        self.path = path
        # node_exporter reads names that end in .prom only.
        self._next = f"{path}.{os.getpid()}.new"

    def replace(self, text: bytes) -> None:
        """Put a file with *text* in its place, readable for all. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._next)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with open(os.open(self._next, flags, 0o644), "wb") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(text)
            os.rename(self._next, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self._next)
            raise

    def remove(self) -> None:
        """Remove the file."""
        for path in (self.path, self._next):
            with contextlib.suppress(OSError):
                os.unlink(path)
