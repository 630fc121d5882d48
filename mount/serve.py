"""One mount from its first system call to its last: what is started here is stopped here.

There is one nursery and one exit stack. The stack holds device, store, kernel mount and channel, in
this order, so at the end the unmount comes first.
"""

import contextlib
import functools
import logging
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, Final

import pyfuse3
import trio

from kvfs.core.errors import CommandError, ServeFailed
from kvfs.core.mount_name import socket_path
from kvfs.core.settings import Settings
from kvfs.core.sizes import format_size
from kvfs.core.types import ROOT_INODE, InodeRecord
from kvfs.devices import Device
from kvfs.machine.held_files import HeldFiles
from kvfs.machine.process_limits import what_it_cannot_see
from mount.control.events import serve_events
from mount.control.hints import serve_hints
from mount.control.metrics.exposition import Exposition
from mount.control.metrics.scrapes import serve_scrapes, write_textfile
from mount.control.socket import Verb, group_id, serve_control
from mount.control.status import History, Parts, describe, describe_lost
from mount.control.supervision import Supervision, let_end_calls, say_alive
from mount.control.sync_verbs import SyncVerbs
from mount.control.verbs import CommandVerbs
from mount.files.data_path import DaemonPath, read_ahead_far
from mount.files.files import Files
from mount.files.kernel_port import KernelPort, open_port
from mount.fuse import kernel
from mount.fuse.channel import Channel
from mount.fuse.device_number import DeviceNumber, at_number, remember, remembered
from mount.fuse.kernel_mount import OwnMount, place
from mount.fuse.late import Late
from mount.fuse.wire import Opcode
from mount.process import succession
from mount.process.logs import apply_levels
from mount.process.succession import Succession
from mount.requests.answers import Answers, Generations
from mount.requests.changes import PresentTime
from mount.requests.data import DataRequests, Transfers
from mount.requests.fast import FastAnswers
from mount.requests.operations import Operations
from mount.requests.raw import LostDevice, RawRequests
from mount.requests.resent import ResentAnswers

_log: Final = logging.getLogger(__name__)

#: Notes: that each inode has its own generation, while older servers gave all the same; and the
#: ``major:minor`` of the mount.
_GENERATIONS_NOTE: Final = b"generations"
_NUMBER_NOTE: Final = b"number"

#: How often the store's tick runs: a burst of stores empties the ready queue in less time.
_TICK_S: Final = 0.02
#: The same while no request changes anything: only timers are due then.
_IDLE_TICK_S: Final = 0.25
_CHANGING: Final = (Opcode.CREATE, Opcode.RENAME, Opcode.UNLINK, Opcode.SETATTR, Opcode.WRITE)
#: Called with the device once the mount serves.
Ready = Callable[[Device], None]
#: pyfuse3's tasks. Each open or create that waits for space occupies one. None ends before the
#: mount does: a task that ended while it holds the pump's lock would leave the others parked.
_TASKS: Final = 256


def run(
    settings: Settings,
    held: HeldFiles,
    ready: Ready,
    load: Callable[[], Settings] | None = None,
    remark: Callable[[str], None] = _log.warning,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Serve until the mount is gone or SIGTERM comes; *ready* is called once it serves.

    *held* is the link to the supervisor, which is given what must outlive this server. *load* reads
    the settings again at SIGHUP. *remark* takes lines for the operator who mounts. *progress*
    takes, during a rebuild of the index, the files read so far and in all. Raises CommandError.
    """
    group_id(settings.control_group)  # a wrong one fails before anything is touched
    with contextlib.ExitStack() as stack:
        of, device = succession.begin(held, settings, remark)
        stack.enter_context(device)
        port = open_port(device, settings, of, progress)
        store = port.store
        stack.callback(store.close)
        held_bytes = store.pool.space.taken.used_bytes
        if settings.capacity_bytes is not None and held_bytes > device.capacity_bytes:
            excess = format_size(held_bytes - device.capacity_bytes)
            found = format_size(held_bytes)
            remark(f"evicting {excess} of {found}: the capacity is below what the pool holds")
        if blind := what_it_cannot_see(settings):
            remark(blind)
        store.attributes.own_root(settings.uid, settings.gid, settings.mode)
        mount = stack.enter_context(_Mount(device, port, settings, held, of))
        try:
            trio.run(mount.serve, ready, load)
        except BaseException as error:
            mount.let_another_go_on(error)
            foreseen = _foreseen(error)
            if foreseen is None:
                raise
            raise foreseen from None


def _foreseen(error: BaseException) -> CommandError | None:
    """Return the CommandError that nurseries have wrapped, if there is no other error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, CommandError) else None


class _Mount(contextlib.AbstractContextManager["_Mount"]):
    """The kernel's side of a store: /dev/fuse, channel, handlers."""

    def __init__(
        self,
        device: Device,
        port: KernelPort,
        settings: Settings,
        held: HeldFiles,
        of: Succession,
    ) -> None:
        self.settings = settings
        self._held = held
        self._of = of
        self._supervision = Supervision(held, port.store, of)
        self._group = group_id(settings.control_group)
        self.port = port
        self.store = port.store
        self._device = device
        self.channel = Channel(
            port.fuse_fd,
            settings,
            port,
            port.readers if settings.fast_lane else None,
            port.store.pool.background.run_one,
        )
        self.files = Files(port, self.channel)
        # To the kernel an inode whose generation changes is bad (fuse_stale_inode()).
        alike = of.takes_over and of.notes.get(_GENERATIONS_NOTE) is None
        if not alike:
            of.notes.put(_GENERATIONS_NOTE, "by inode")
        self.answers = Answers(
            port.store,
            self.files,
            settings,
            Generations(device.epoch, alike=alike),
            port.unnamed,
        )
        self._own = OwnMount(port.fuse_fd, settings.mountpoint)
        #: Whether another server could go on; and whether none should, as the mount is to end.
        self._left = of.takes_over
        self._ends = False

    def __enter__(self) -> "_Mount":
        if self._of.takes_over:
            self._go_on()
            return self
        settings, device = self.settings, self._device
        pool_fds = [one.pool_fd for one in device.there]
        wanted = remembered(pool_fds)
        try:
            with at_number(wanted):
                root_fd = kernel.detached(
                    self.port.fuse_fd, device.sources, read_only=settings.read_only
                )
            try:
                place(root_fd, settings.mountpoint)
            finally:
                os.close(root_fd)
        except OSError as error:
            os.close(self.port.fuse_fd)
            raise ServeFailed(f"cannot mount at {settings.mountpoint}: {error.strerror}") from error
        except CommandError:
            os.close(self.port.fuse_fd)
            raise
        self._own.begun()
        self._number = remember(
            pool_fds, self._own.device_number, wanted, read_only=settings.read_only
        )
        self._of.notes.put(_NUMBER_NOTE, self._own.number)
        let_end_calls(self._held, self._own.abort_fd)
        return self

    def _go_on(self) -> None:
        """Take over the mount of another server."""
        self._own.go_on(self._of.notes.get(_NUMBER_NOTE) or "", self._of.abort_fd)
        self._number = DeviceNumber(self._own.device_number, None)
        with contextlib.suppress(OSError):  # its last invalidations are lost
            kernel.notify_inc_epoch(self.port.fuse_fd)

    def _take_over_requests(self, late: Late) -> None:
        """Have what the other server was asked, and did not answer, answered first."""
        agreed, recalled = self.port.agreed_before, self.port.recalled
        assert agreed is not None, "another server has agreed"
        assert recalled is not None, "and has left its handles"
        resent = ResentAnswers(self.answers, self.files, self.store.done, recalled, late)
        self.channel.take_over(agreed.request, resent.of)

    def __exit__(self, *_: object) -> None:
        self._own.unmount()
        self.port.path.disconnect()
        os.close(self.port.fuse_fd)
        # Before the pool is closed: what the supervisor holds would keep its file system mounted.
        self._held.say_ended()
        self._own.close()
        self.store.all_closed = self._own.is_unused()

    def let_another_go_on(self, error: BaseException) -> None:
        """End this process at once, as a kill does, if *error* should not end the mount."""
        if self._ends or not self._left or self._held.lost:
            return
        _log.critical("this server fails, another one goes on", exc_info=error)
        self._held.say_fatal(f"internal error: {error!r}", ServeFailed.exit_code)
        logging.shutdown()
        os._exit(ServeFailed.exit_code)

    async def serve(self, ready: Ready, load: Callable[[], Settings] | None) -> None:
        """Run everything until the mount goes away."""
        self.channel.libfuse.install(self.channel)
        operations = Operations(
            self.store,
            self.files,
            self.answers,
            self.channel.libfuse.grants.add,
        )
        pyfuse3.init(operations, self.channel.libfuse.mountpoint, set())
        try:
            async with trio.open_nursery() as nursery:
                reply, aside = self.channel.reply_late, self.channel.owed.stand_aside
                late = Late(nursery, reply, aside, self.files.asks.at_hand, self.channel.asker)
                if self._of.takes_over:
                    self._take_over_requests(late)
                self.channel.serve(RawRequests(self.files, late).answers())
                self.channel.serve(PresentTime(self.store.pool.clock_ns).answers())
                lane = DataRequests(Transfers(self.files), late, at_once=self.settings.fast_lane)
                self.channel.serve(lane.answers())
                if self.settings.fast_lane:
                    self.channel.serve(FastAnswers(self.answers, self.files).answers())
                nursery.start_soon(self._serve_signals, load)
                nursery.start_soon(self.channel.libfuse.flush_late)
                commands = CommandVerbs(self.store, self.port.invalidations.catch_up, nursery)
                history = History(self.settings.history_step_s, functools.partial(self._status, {}))
                own = commands.table() | SyncVerbs(self.store).table() | history.table()
                verbs = self._verbs(own | self._supervision.table())
                control = socket_path(self.settings.name)
                await nursery.start(serve_control, control, verbs, self._group)
                metrics = Exposition(functools.partial(self._status, {}))
                nursery.start_soon(serve_scrapes, self.settings, metrics, self._group)
                nursery.start_soon(write_textfile, self.settings, metrics)
                nursery.start_soon(history.keep)
                events = self.store.pool.figures.events
                nursery.start_soon(serve_events, self.settings, events, self._group)
                nursery.start_soon(serve_hints, self.settings, self.store, self._group)
                nursery.start_soon(self._announce, ready, nursery)
                await pyfuse3.main(min_tasks=_TASKS, max_tasks=_TASKS)
                self._ends = True
                self._own.ended()
                nursery.cancel_scope.cancel()
        finally:
            if self._ends or not self._left:
                self._own.cut_off()
            self.store.end_serving()
            self.port.invalidations.stop()
            pyfuse3.close(unmount=False)
            self.channel.libfuse.close()

    async def _announce(self, ready: Ready, nursery: trio.Nursery) -> None:
        await self.port.agreed.wait()
        if isinstance(self.port.path, DaemonPath):
            read_ahead_far(self.settings.mountpoint)
        # Only now: no backing id is given out before INIT has agreed on passthrough.
        self.store.begin_serving(trio.lowlevel.current_trio_token())
        nursery.start_soon(self._run_due)
        if self.port.resends and not self._of.takes_over:
            succession.leave(self._held, self._of, self._device, self.port.fuse_fd)
            self._left = True
        ready(self._device)
        nursery.start_soon(say_alive, self._held)
        nursery.start_soon(self._supervision.listen)

    async def _run_due(self) -> None:
        root, changed = self.store.namespace.directory(ROOT_INODE), -1
        while True:
            self.store.run_due()
            self.port.held.run_due(self.store.watch)
            if self.store.device_watch.lost:
                self._go_on_without_device(root)
                return
            before, changed = changed, sum(self.channel.requests[code] for code in _CHANGING)
            busy = changed != before or self.store.growing
            await trio.sleep(_TICK_S if busy else _IDLE_TICK_S)

    def _go_on_without_device(self, root: InodeRecord) -> None:
        """From now on answer misses and refusals, and never use the pool again."""
        _log.critical(
            "%s is lost: %s (see dmesg); names are misses and stores are refused until it is "
            "mounted again",
            self.settings.source,
            self.store.device_watch.lost,
        )
        self.channel.serve_only(LostDevice(root).answers())
        self.store.pool.background.discard()
        with contextlib.suppress(OSError):  # without it the kernel finds out at each open
            kernel.notify_inc_epoch(self.port.fuse_fd)

    def _verbs(self, verbs: Mapping[str, Verb]) -> dict[str, Verb]:
        """Return the verbs of the control socket. On a lost pool only status works."""

        def guarded(verb: Verb) -> Verb:
            async def ask(args: dict[str, Any]) -> dict[str, Any]:
                if lost := self.store.device_watch.lost:
                    raise ServeFailed(f"{self.settings.source} is lost: {lost}")
                return await verb(args)

            return ask

        return {"status": self._status, **{do: guarded(verb) for do, verb in verbs.items()}}

    async def _serve_signals(self, load: Callable[[], Settings] | None) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for number in signals:
                if number == signal.SIGHUP:
                    if load is not None:
                        self._reload(load)
                    continue
                _log.info("%s: stopping", signal.Signals(number).name)
                self._ends = True
                # Our own reader sees ENODEV when the last user is gone; a thread may unmount,
                # since umount(2) can send requests that this loop must answer.
                await trio.to_thread.run_sync(self._own.unmount)
                pyfuse3.terminate()
                self.channel.stop()
                return

    def _reload(self, load: Callable[[], Settings]) -> None:
        try:
            fresh, ignored = self.settings.reloaded(load())
            self.store.attributes.entitle(fresh)
        except Exception as error:
            _log.error("settings not reloaded: %s", error)
            return
        self.settings = self.store.pool.settings = fresh
        self.answers.apply(fresh)
        apply_levels(fresh)
        _log.info("settings reloaded%s", f"; need a remount: {ignored}" if ignored else "")

    async def _status(self, _args: dict[str, Any]) -> dict[str, Any]:
        if lost := self.store.device_watch.lost:
            return describe_lost(self.settings, lost)
        parts = (self.settings, self.store, self.channel, self.files, self.port)
        return describe(Parts(*parts, self._number, self._held))
