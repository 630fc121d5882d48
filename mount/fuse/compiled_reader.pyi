from collections.abc import Callable

from mount.fuse.request_reader import KnownReaders

class CompiledReader:
    left: int
    @property
    def native(self) -> int: ...
    def __init__(
        self,
        device_fd: int,
        buffer: bytearray,
        busy_poll_us: int,
        counted: tuple[list[int], list[int]],
        reply: Callable[[bytes], None],
        readers: KnownReaders | None,
        idle: Callable[[], bool],
        turn_messages: int,
        turn_ns: int,
        clock_ns: Callable[[], int] | None = None,
    ) -> None: ...
    def answer_nothing(self) -> None: ...
    def begin_turn(self) -> None: ...
    def next(self, *, may_wait: bool) -> int: ...
