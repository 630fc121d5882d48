"""The server process from its first check to its last line."""

import contextlib
import faulthandler
import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from kvfs.cli.failures import explain, stops_raise
from kvfs.cli.mount_background import ReadyPipe
from kvfs.cli.mount_checks import check_place, check_tenants, prepare_mountpoint
from kvfs.cli.standard_streams import say
from kvfs.client.dead_mount import DeadMount
from kvfs.core.encryption import parse_encryption
from kvfs.core.errors import NO_SPACE, KvfsError, ServeFailed, SourceBlank, SourceFull
from kvfs.core.mount_name import dead_path
from kvfs.core.settings import Settings
from kvfs.core.source_list import sources_of
from kvfs.machine.held_files import HeldFiles
from kvfs.machine.process_limits import (
    adopt,
    require_file_size,
    require_open_files,
    settle_memory,
)

if TYPE_CHECKING:
    from kvfs.devices import Device

_log: Final = logging.getLogger(__name__)

#: What is imported inside of functions, so that a command that imports this file starts fast.
_SERVERS: Final = (
    "kvfs.devices",
    "kvfs.engine.recovery.rebuild",
    "kvfs.machine.file_holders",
    "kvfs.storage.index_map",
    "mount.control.supervision",
    "mount.process.logs",
    "mount.serve",
)
#: What Python and lmdb import by themselves when they first need it.
_OTHERS: Final = ("encodings.ascii", "lmdb._envid")


def import_all() -> None:
    """Import all that a server may ever need: later another version may be installed here."""
    for module in _SERVERS:
        importlib.import_module(module)
    for module in _OTHERS:
        with contextlib.suppress(ModuleNotFoundError):  # another version of these has none
            importlib.import_module(module)


def be_template(load: Callable[[], Settings], fd: int) -> tuple[int, int | None]:
    """Fork servers on the supervisor's orders, from the descriptor *fd*; return in each of them.

    Returns the descriptors of its own link to the supervisor, and of the pipe to the command that
    waits for it, if one does. *load* reads the settings. Raises SupervisorGone in the template.
    """
    from mount.process.template import fork_servers

    return fork_servers(fd, import_all, partial(why_not, load))


def serve_for(load: Callable[[], Settings], held_fd: int, ready_fd: int | None) -> None:
    """Serve with the link and the pipe of ``be_template``. Raises CommandError, SupervisorGone."""
    serve_here(load, HeldFiles(held_fd), None if ready_fd is None else ReadyPipe(ready_fd))


def why_not(load: Callable[[], Settings], formats: Mapping[str, int]) -> str:
    """Return why this version cannot take over from a server that uses *formats*, or ""."""
    try:
        load()
        import_all()
        from mount.control.supervision import require_formats

        require_formats(formats)
    except Exception as error:  # whatever it is, the other server serves on
        return explain(error)[0]
    return ""


def serve_here(load: Callable[[], Settings], held: HeldFiles, pipe: ReadyPipe | None) -> None:
    """Check, mount and serve in this process until the mount is gone or SIGTERM comes.

    *load* reads the settings, now and at every SIGHUP. *held* is the link to the supervisor. The
    *pipe* reports to the command that started us how the start went. Raises CommandError.
    """
    try:
        _serve(load, held, pipe)
    except (Exception, KeyboardInterrupt) as error:  # the last handler of the server
        line, exit_code = explain(error)
        held.say_fatal(line, exit_code)
        # The waiting command prints every error; it must not be printed here, too.
        if pipe is None or not pipe.awaited:
            raise
        pipe.say_failed(line, exit_code)
        raise SystemExit(exit_code) from None


def _serve(load: Callable[[], Settings], held: HeldFiles, pipe: ReadyPipe | None) -> None:
    settings = load()
    remarks: Sequence[str] = ()
    if not held.given:  # otherwise the mount is there, and a look at it would wait for us
        check_tenants(settings)
        check_place(settings)
        remarks = prepare_mountpoint(settings.mountpoint, _stand_in, guarded=settings.guard)
    require_file_size()
    require_open_files(settings.open_files_max)
    # A server has imported them already; a command that imports this file does not need them.
    from kvfs.storage.index_map import outlive_bus_errors
    from mount.control.supervision import formats_of
    from mount.process.logs import close_logging, set_up_logging

    # A server whose loop hangs is ended by SIGABRT, and then writes to the journal where it hung.
    # Called before outlive_bus_errors(), which takes SIGBUS for itself.
    faulthandler.enable()

    place = set_up_logging(settings, background=pipe is not None)
    held.say_log(place, settings.name, dead_path(settings.mountpoint))
    outlive_bus_errors()
    os.chdir("/")  # the server must not keep the caller's directory busy
    for refusal in adopt(settings):
        _log.info("process limit not set: %s", refusal)

    def ready(device: "Device") -> None:
        _log.info("serving %s at %s, log to %s", device.sources, settings.mountpoint, place)
        if pipe is not None:
            pipe.say_ready()
        note = f"serving {device.sources} at {settings.mountpoint}"
        held.say_ready(note, formats_of(device), settings.silent_max_s)
        settle_memory()

    def progress(done: int, total: int) -> None:
        """Report how far a rebuild of the index is; systemd waits longer for it then."""
        held.say_alive(done=done, of=total, wait_s=int(settings.start_timeout_s))
        if pipe is not None:
            pipe.say_progress(done, total)

    def remark(line: str) -> None:
        _log.warning("%s", line)
        if pipe is not None:  # the operator does not see the log
            say(f"kvfs: {line}")

    for line in remarks:
        remark(line)
    try:
        _serve_or_format(settings, held, load, ready, remark, progress)
        _log.info("stopped: %s is unmounted", settings.mountpoint)
    except OSError as error:  # mostly a failing drive; the log says where
        _log.exception("stopped")
        if error.errno in NO_SPACE:
            raise SourceFull(
                f"{settings.source}: the file system below is full: {error.strerror}"
            ) from error
        raise ServeFailed(f"{settings.source}: {error.strerror or error}") from error
    except Exception as error:
        _log.error("stopped: %s", error, exc_info=not isinstance(error, KvfsError))
        raise
    finally:
        close_logging()


def _stand_in(dead: DeadMount) -> None:
    # Slow to import, and mostly there is no dead mount.
    from mount.fuse.kernel_mount import stand_in

    stand_in(dead)


def _serve_or_format(
    settings: Settings,
    held: HeldFiles,
    load: Callable[[], Settings],
    ready: Callable[["Device"], None],
    remark: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> None:
    from kvfs.devices import format_source, new_image_notes
    from kvfs.engine.recovery.rebuild import found_pool
    from mount import serve

    try:
        serve.run(settings, held, ready, load, remark, progress)
        return
    except SourceBlank as blank:
        if settings.read_only:
            raise
        found = blank.found
    # Outside of the handler, because later errors have nothing to do with the blank source.
    _log.info("%s: making a pool in %s", found, settings.source)
    encryption = parse_encryption(settings.encrypt)
    sources = sources_of(settings.source)
    notes = list(new_image_notes(sources, settings.capacity_bytes, encryption))
    with stops_raise():
        format_source(
            settings.source,
            capacity_bytes=settings.capacity_bytes,
            force=False,
            fill=found_pool,
            encryption=encryption,
        )
    for note in notes:
        remark(note)
    serve.run(settings, held, ready, load, remark)
